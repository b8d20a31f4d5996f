//! An EAGLE-3 step from given features, or with the target online: seven test-time steps, draft
//! vocabulary 8192 with a head of its own, every row learned that has a token to learn.

use std::time::Instant;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, VocabularyMap};
use longdraft_models::target::Target;
use longdraft_train::features::{BatchFeatures, TeacherFeatures, run_target};
use longdraft_train::objective::{Eagle3Objective, Eagle3ObjectiveConfig, Objective, OovRows};
use longdraft_train::optim::{AdamW, AdamWConfig, Gradients};
use serde_json::json;

use super::{Place, glide, median};

const HIDDEN: usize = 576;
const VOCABULARY: usize = 49_152;
const DRAFT_VOCABULARY: usize = 8192;
/// Layers of the target whose shape this is.
const TARGET_LAYERS: usize = 30;

fn random(deviation: f64, shape: &[usize]) -> Tensor {
    Tensor::randn(0.0_f32, deviation as f32, shape, &Place::get().device).expect("random")
}

/// For a target of this shape, whose head and embeddings are `table`.
fn objective(table: &Tensor) -> Eagle3Objective {
    let config = json!({
        "hidden_size": HIDDEN, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0
    });
    let config = Eagle3Config::from_json(&config, Some(TARGET_LAYERS)).expect("configuration");
    let kept = (0..DRAFT_VOCABULARY as u32).map(TargetTokenId).collect();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
    let draft = Eagle3Draft::initialise(&config, map, table, 1).expect("draft");
    // A random teacher's most likely token is rarely one that the draft can propose.
    let config = Eagle3ObjectiveConfig { oov_rows: OovRows::Keep, ..Default::default() };
    Eagle3Objective::new(draft, table, config).expect("objective")
}

fn batch(tokens: usize, step: usize) -> Batch {
    Batch {
        ids: (0..tokens).map(|t| ((t * 7919 + step * 104_729) % VOCABULARY) as u32).collect(),
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
        loss_mask: vec![true; tokens],
        ..Batch::default()
    }
}

fn given_features(tokens: usize) -> BatchFeatures {
    BatchFeatures {
        part: None,
        last_kv: None,
        aux_hidden: Some(random(1.0, &[tokens, 3 * HIDDEN])),
        teacher: TeacherFeatures::EveryToken { hidden: random(1.0, &[tokens, HIDDEN]) },
    }
}

/// Seconds of a step, the median of `steps` after one warm-up; the target's part is counted.
pub(super) fn step(tokens: usize, steps: usize, flags: &[&str]) -> f64 {
    let target = flags.contains(&"--online").then(glide::target);
    let table = |target: &Target| target.embedding().expect("table");
    let dtype = Place::target().dtype;
    let drawn = || random(0.02, &[VOCABULARY, HIDDEN]).to_dtype(dtype).expect("a type");
    let table = target.as_deref().map_or_else(drawn, table);
    let objective = objective(&table);
    let parameters = objective.eagle3().parameters();
    let config = AdamWConfig { clip_norm: 0.5, ..Default::default() };
    let mut optimizer = AdamW::new(config, parameters);
    let mut times = Vec::new();
    for step in 0..=steps {
        let batch = batch(tokens, step);
        let given = target.is_none().then(|| given_features(tokens));
        let started = Instant::now();
        let online = |target: &Target| {
            run_target(target, &batch, None, &objective.needs()).expect("features")
        };
        let features = given.unwrap_or_else(|| online(target.as_deref().expect("a target")));
        let plan = objective.plan(&batch, &features).expect("plan");
        let denominators = objective.denominators(&plan);
        let outcome = objective.evaluate(&batch, &features, &plan, &denominators, true);
        let loss = outcome.expect("evaluation").loss.expect("learned rows");
        let mut gradients = Gradients::new(parameters);
        gradients.add(parameters, &loss.backward().expect("backward")).expect("gradients");
        optimizer.step(parameters, &gradients, 1e-4).expect("step");
        if step > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
    }
    median(&mut times)
}
