//! DFlash steps from given features, or with the target online: hard labels at the slots of drawn
//! blocks, whose weights decay, over one document that is supervised everywhere.

use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{BlockConfig, BlockDraft, LayerKind, tensor_specs};
use longdraft_models::weights::memory::MemorySource;
use longdraft_train::method::block::{BlockBudget, BlockDraws, BlockLoss, BlockObjective};
use longdraft_train::objective::Objective;
use longdraft_train::optim::AdamWConfig;
use serde_json::json;

use super::drafting::Setting;
use super::{Cases, Place, shape};
use crate::cli::benchmarking::DflashBenchArguments;
use crate::failure::{Failure, Result};

const LEARNING_RATE: f64 = 6e-4;

/// Tokens for every block where no number of blocks is given.
const TOKENS_PER_BLOCK: usize = 8;

/// Every length over one draft's sizes and one target.
pub(super) fn run(arguments: &DflashBenchArguments, cases: &mut Cases) -> Result<()> {
    let rows = &arguments.rows;
    let setting = Setting::open(rows, arguments.online, |target| sizes(target, arguments))?;
    let Setting { place, config, sizes, tables, .. } = &setting;
    for &tokens in &rows.tokens {
        let draws = draws(arguments);
        let blocks = draws.of(&shape::batch(tokens, 0, config.vocab_size)).len();
        let own = json!({
            "shape": rows.shape.shape, "layers": config.num_hidden_layers,
            "online": arguments.online, "draft_layers": sizes.layers.len(),
            "taps": sizes.target_layers.len(), "block": sizes.block_size, "blocks": blocks,
        });
        cases.steps(place.describe("dflash", own), tokens, || {
            let objective = objective(sizes, tables, (arguments, draws), place)?;
            let clipped = AdamWConfig { clip_norm: 1.0, weight_decay: 0.0, ..Default::default() };
            let taps = objective.draft().taps().len();
            let draw = || shape::tapped(tokens, taps, config, place);
            setting.steps(&objective, (clipped, LEARNING_RATE), tokens, draw)
        });
    }
    Ok(())
}

/// A draft's sizes. It fails where they do not fit the target.
fn sizes(target: &TargetConfig, arguments: &DflashBenchArguments) -> Result<BlockConfig> {
    let mask_token_id = (target.vocab_size as u32).saturating_sub(1);
    let sizes = BlockConfig {
        layers: vec![LayerKind::Full; arguments.draft_layers],
        is_causal: Some(false),
        ..BlockConfig::for_target(target, arguments.taps, arguments.block_size, mask_token_id)
    };
    let problems = sizes.problems_with(target);
    if problems.0.is_empty() { Ok(sizes) } else { Err(Failure::usage(problems.to_string())) }
}

fn draws(arguments: &DflashBenchArguments) -> BlockDraws {
    let of_tokens = BlockBudget::PerTokens(TOKENS_PER_BLOCK);
    BlockDraws { seed: 0, budget: arguments.blocks.map_or(of_tokens, BlockBudget::PerRow) }
}

fn objective(
    sizes: &BlockConfig,
    tables: &shape::Tables,
    (arguments, draws): (&DflashBenchArguments, BlockDraws),
    place: &Place,
) -> Result<BlockObjective> {
    let tensors = shape::draw(&tensor_specs(sizes), sizes.initializer_range, place)?;
    let draft = BlockDraft::from_source(&MemorySource::new(tensors), sizes, &tables.embedding)?;
    let loss = BlockLoss { decay: arguments.slot_decay, ..BlockLoss::default() };
    Ok(BlockObjective::new(draft, &tables.head, loss, draws))
}
