//! EAGLE-3 steps from given features, or with the target online: seven test-time steps, a head over
//! the draft's own vocabulary, every row learned that has a token to learn.

use candle_core::{Device, Tensor};
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, TAPPED_LAYERS, tensor_specs};
use longdraft_models::target_model::Target;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::{TargetConfig, TargetTokenId};
use longdraft_train::method::eagle3::{Eagle3Objective, Eagle3ObjectiveConfig, OovRows};
use longdraft_train::optim::AdamWConfig;
use serde_json::json;

use super::clock::Timed;
use super::{Cases, Place, drafting, shape};
use crate::cli::benchmarking::Eagle3BenchArguments;
use crate::failure::{Failure, Result};

const LEARNING_RATE: f64 = 1e-4;

/// Every length over one draft's sizes and one target.
pub(super) fn run(arguments: &Eagle3BenchArguments, cases: &mut Cases) -> Result<()> {
    let place = Place::open(&arguments.bench)?;
    let config = shape::config(&arguments.shape.shape, arguments.shape.layers)?;
    let size = arguments.draft_vocab_size.unwrap_or_else(|| draft_vocabulary(&config));
    let sizes = sizes(&config, size)?;
    let online = arguments.online.then(|| shape::target(&arguments.shape, &place));
    let target = online.transpose()?;
    let tables = shape::Tables::of(&config, target.as_ref(), &place)?;
    for &tokens in &arguments.tokens {
        let own = json!({
            "shape": arguments.shape.shape, "layers": config.num_hidden_layers,
            "online": arguments.online, "draft_vocab_size": size,
        });
        let about = place.describe("eagle3", own);
        cases.steps(about, tokens, || {
            let objective = objective(&sizes, &tables, &place)?;
            steps(arguments, &place, (&config, target.as_ref()), &objective, tokens)
        });
    }
    Ok(())
}

/// Tokens that drafts of published targets propose: 32000, a quarter of small vocabularies.
fn draft_vocabulary(target: &TargetConfig) -> usize {
    if target.vocab_size > 100_000 { 32_000 } else { (target.vocab_size / 4).clamp(1, 8192) }
}

/// A draft's sizes.
///
/// # Errors
/// - the target has too few layers to tap
fn sizes(target: &TargetConfig, draft_vocabulary: usize) -> Result<Eagle3Config> {
    Eagle3Config::for_target(target, draft_vocabulary).map_err(|problems| {
        Failure::usage(problems.to_string()).hint("take at least 8 layers: --layers 8")
    })
}

/// A fresh draft that proposes the first tokens of the target's vocabulary.
fn objective(
    sizes: &Eagle3Config,
    tables: &shape::Tables,
    place: &Place,
) -> Result<Eagle3Objective> {
    let kept = (0..sizes.draft_vocab_size as u32).map(TargetTokenId).collect();
    let map = VocabularyMap::new(kept, sizes.vocab_size)?;
    let mut tensors = shape::draw(&tensor_specs(sizes), sizes.initializer_range, place)?;
    if !map.is_identity() {
        let flags: Vec<u8> = map.membership().into_iter().map(u8::from).collect();
        let offsets = Tensor::new(map.offsets(), &Device::Cpu)?;
        tensors.push(("d2t".to_owned(), offsets));
        tensors.push(("t2d".to_owned(), Tensor::new(flags, &Device::Cpu)?));
    }
    let draft = Eagle3Draft::from_source(&MemorySource::new(tensors), sizes, &tables.embedding)?;
    // A random teacher's most likely token is rarely one that the draft can propose.
    let config = Eagle3ObjectiveConfig { oov_rows: OovRows::Keep, ..Default::default() };
    Ok(Eagle3Objective::new(draft, &tables.head, config)?)
}

/// Features as a store would give them.
fn drawn_features(tokens: usize, config: &TargetConfig, place: &Place) -> Result<BatchFeatures> {
    let teacher = shape::states(tokens, 1, config, place)?;
    Ok(BatchFeatures {
        teacher: TeacherFeatures::EveryToken { hidden: teacher },
        ..shape::tapped(tokens, TAPPED_LAYERS, config, place)?
    })
}

fn steps(
    arguments: &Eagle3BenchArguments,
    place: &Place,
    (config, target): (&TargetConfig, Option<&Target>),
    objective: &Eagle3Objective,
    tokens: usize,
) -> Result<Timed> {
    let clipped = AdamWConfig { clip_norm: 0.5, ..Default::default() };
    drafting::steps(
        (place, &arguments.bench),
        objective,
        (clipped, LEARNING_RATE),
        (config, target, tokens),
        || drawn_features(tokens, config, place),
    )
}
