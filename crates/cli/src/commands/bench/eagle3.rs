//! EAGLE-3 steps from given features, or with the target online: seven test-time steps, a head over
//! the draft's own vocabulary, every row learned that has a token to learn.

use candle_core::{Device, Tensor};
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, TAPPED_LAYERS, tensor_specs};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::{TargetConfig, TargetTokenId};
use longdraft_train::method::eagle3::{Eagle3Objective, Eagle3ObjectiveConfig, OovRows};
use longdraft_train::optim::AdamWConfig;
use serde_json::json;

use super::drafting::Setting;
use super::{Cases, Place, shape};
use crate::cli::benchmarking::Eagle3BenchArguments;
use crate::failure::{Failure, Result};

const LEARNING_RATE: f64 = 1e-4;

/// Every length over one draft's sizes and one target.
pub(super) fn run(arguments: &Eagle3BenchArguments, cases: &mut Cases) -> Result<()> {
    let Eagle3BenchArguments { rows, online, draft_vocab_size: given } = arguments;
    let setting = Setting::open(rows, *online, |target| {
        sizes(target, given.unwrap_or_else(|| draft_vocabulary(target)))
    })?;
    let Setting { place, config, sizes, tables, .. } = &setting;
    for &tokens in &rows.tokens {
        let own = json!({
            "shape": rows.shape.shape, "layers": config.num_hidden_layers,
            "online": online, "draft_vocab_size": sizes.draft_vocab_size,
        });
        cases.steps(place.describe("eagle3", own), tokens, || {
            let objective = objective(sizes, tables, place)?;
            let clipped = AdamWConfig { clip_norm: 0.5, ..Default::default() };
            let draw = || drawn_features(tokens, config, place);
            setting.steps(&objective, (clipped, LEARNING_RATE), tokens, draw)
        });
    }
    Ok(())
}

/// Tokens that drafts of published targets propose: 32000, a quarter of small vocabularies.
fn draft_vocabulary(target: &TargetConfig) -> usize {
    if target.vocab_size > 100_000 { 32_000 } else { (target.vocab_size / 4).clamp(1, 8192) }
}

/// A draft's sizes. It fails where the target has too few layers to tap.
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
