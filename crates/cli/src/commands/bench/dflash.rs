//! DFlash steps from given features, or with the target online: hard labels at the slots of drawn
//! blocks, whose weights decay, over one document that is supervised everywhere.

use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{BlockConfig, BlockDraft, LayerKind, tensor_specs};
use longdraft_models::target_model::Target;
use longdraft_models::weights::memory::MemorySource;
use longdraft_train::method::block::{BlockBudget, BlockDraws, BlockLoss, BlockObjective};
use longdraft_train::objective::Objective;
use longdraft_train::optim::AdamWConfig;
use serde_json::json;

use super::clock::Timed;
use super::{Cases, Place, drafting, shape};
use crate::cli::benchmarking::DflashBenchArguments;
use crate::failure::{Failure, Result};

const LEARNING_RATE: f64 = 6e-4;

/// Tokens for every block where no number of blocks is given.
const TOKENS_PER_BLOCK: usize = 8;

/// Every length over one draft's sizes and one target.
pub(super) fn run(arguments: &DflashBenchArguments, cases: &mut Cases) -> Result<()> {
    let place = Place::open(&arguments.bench)?;
    let config = shape::config(&arguments.shape.shape, arguments.shape.layers)?;
    let sizes = sizes(&config, arguments)?;
    let online = arguments.online.then(|| shape::target(&arguments.shape, &place));
    let target = online.transpose()?;
    let tables = shape::Tables::of(&config, target.as_ref(), &place)?;
    for &tokens in &arguments.tokens {
        let draws = draws(arguments);
        let blocks = draws.of(&shape::batch(tokens, 0, config.vocab_size)).len();
        let own = json!({
            "shape": arguments.shape.shape, "layers": config.num_hidden_layers,
            "online": arguments.online, "draft_layers": sizes.layers.len(),
            "taps": sizes.target_layers.len(), "block": sizes.block_size, "blocks": blocks,
        });
        let about = place.describe("dflash", own);
        cases.steps(about, tokens, || {
            let objective = objective(&sizes, &tables, (arguments, draws), &place)?;
            steps(arguments, &place, (&config, target.as_ref()), &objective, tokens)
        });
    }
    Ok(())
}

/// A draft's sizes.
///
/// # Errors
/// - they do not fit the target
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

fn steps(
    arguments: &DflashBenchArguments,
    place: &Place,
    (config, target): (&TargetConfig, Option<&Target>),
    objective: &BlockObjective,
    tokens: usize,
) -> Result<Timed> {
    let clipped = AdamWConfig { clip_norm: 1.0, weight_decay: 0.0, ..Default::default() };
    let taps = objective.draft().taps().len();
    drafting::steps(
        (place, &arguments.bench),
        objective,
        (clipped, LEARNING_RATE),
        (config, target, tokens),
        || shape::tapped(tokens, taps, config, place),
    )
}
