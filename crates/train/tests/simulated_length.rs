//! On text that the target wrote, training knows what decoding will do: the agreement of its
//! test-time steps tells every round, and the simulated acceptance length is the decoded one but
//! for what a product of means leaves out: rounds begin after a rejection, and texts end.

use longdraft_kernels::graph::Backward;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::DType;
use longdraft_data::Batch;
use longdraft_decode::acceptance::AcceptanceMetrics;
use longdraft_decode::drafter::{Drafter, Eagle3Model, ModelDrafter};
use longdraft_decode::{DecodeOptions, DraftShape, SpeculativeDecoder};
use longdraft_features::{BatchFeatures, run_target};
use longdraft_kernels::random::CounterRng;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Target, TargetOptions, tensor_specs};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::{LayerId, TargetConfig, TargetTokenId};
use longdraft_parallel::Gradients;
use longdraft_train::method::eagle3::{Eagle3Objective, Eagle3ObjectiveConfig, OovRows};
use longdraft_train::metrics::{DraftMetrics, Rate};
use longdraft_train::objective::Objective;
use longdraft_train::optim::{AdamW, AdamWConfig};
use serde_json::json;

const VOCABULARY: usize = 48;
const DRAFT_LEN: usize = 4;
const PROMPT: usize = 6;
const ANSWER: usize = 160;
const DOCUMENTS: usize = 6;
const STEPS: usize = 100;
const SHARPNESS: f64 = 12.0;

/// A small mixture of experts.
fn target() -> Arc<Target> {
    let config = json!({
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
        "initializer_range": 0.2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    let random = MemorySource::random(&tensor_specs(&config), config.initializer_range, 11);
    let random = random.expect("tensors");
    // A sharp distribution: the text follows from what was said, and can be learned.
    let tensors = random.names().into_iter().map(|name| {
        let tensor = random.load(&name, DType::F32).expect("tensor");
        let scale = if name == "lm_head.weight" { SHARPNESS } else { 1.0 };
        (name, (tensor * scale).expect("scaled"))
    });
    let source = MemorySource::new(tensors);
    let options = TargetOptions::default();
    Arc::new(Target::from_source(config, &source, &options).expect("target"))
}

fn prompt(document: usize) -> Vec<TargetTokenId> {
    let mut rng = CounterRng::new(7, "prompt", &[document as u64]);
    (0..PROMPT).map(|_| TargetTokenId(rng.below(VOCABULARY as u64) as u32)).collect()
}

/// What the target writes after a prompt, and how the rounds went.
fn generate(
    target: &Target,
    drafter: Option<Box<dyn Drafter + '_>>,
    prompt: &[TargetTokenId],
) -> (Vec<TargetTokenId>, AcceptanceMetrics) {
    let options = DecodeOptions {
        max_new_tokens: ANSWER,
        shape: DraftShape::Chain { length: DRAFT_LEN },
        ..DecodeOptions::default()
    };
    let generation = SpeculativeDecoder::new(target, drafter)
        .generate(prompt, &options, &mut |_| ControlFlow::Continue(()))
        .expect("decoding");
    (generation.tokens, generation.metrics)
}

/// Documents as one packed row, answers learned.
fn batch(texts: &[Vec<u32>]) -> Batch {
    let mut batch = Batch::default();
    for (document, ids) in texts.iter().enumerate() {
        batch.ids.extend(ids);
        batch.position_ids.extend(0..ids.len() as u32);
        batch.document_ids.extend(std::iter::repeat_n(document as i32, ids.len()));
        batch.loss_mask.extend((0..ids.len()).map(|t| t >= PROMPT));
    }
    batch
}

fn objective(target: &Target) -> Eagle3Objective {
    let kept = (0..VOCABULARY as u32).map(TargetTokenId).collect();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
    let layers = [0, 1, 2].map(LayerId);
    let mut config = Eagle3Config::for_target_layers(target.config(), VOCABULARY, layers);
    config.initializer_range = 0.1;
    let ends = target.hold_ends().expect("ends");
    let table = ends.embedding().expect("table");
    let draft = Eagle3Draft::initialise(&config, map, &table, 3);
    let objective = Eagle3ObjectiveConfig {
        ttt_steps: DRAFT_LEN,
        oov_rows: OovRows::Keep,
        ..Eagle3ObjectiveConfig::default()
    };
    let head = ends.head().expect("head");
    Eagle3Objective::new(draft.expect("draft"), &head, objective).expect("objective")
}

fn train(objective: &Eagle3Objective, batch: &Batch, features: &BatchFeatures) {
    let parameters = objective.eagle3().parameters();
    let config = AdamWConfig { clip_norm: 1.0, ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(config, parameters);
    for _ in 0..STEPS {
        let plan = objective.plan(batch, features).expect("plan");
        let denominators = objective.denominators(&plan);
        let outcome = objective.evaluate(batch, features, &plan, &denominators, true);
        let loss = outcome.expect("evaluation").loss.expect("learned rows");
        let mut gradients = Gradients::new(parameters);
        gradients.add(parameters, loss.gradients().expect("backward")).expect("gradients");
        optimizer.step(parameters, &gradients, 4e-3).expect("step");
    }
}

#[test]
fn training_tells_the_acceptance_length_of_decoding() {
    let target = target();
    let texts: Vec<Vec<u32>> = (0..DOCUMENTS)
        .map(|document| {
            let prompt = prompt(document);
            let (answer, _) = generate(&target, None, &prompt);
            prompt.iter().chain(&answer).map(|token| token.0).collect()
        })
        .collect();
    let objective = objective(&target);
    let batch = batch(&texts);
    let features = run_target(&target, &batch, None, &objective.needs()).expect("features");
    train(&objective, &batch, &features);

    let mut decoded = AcceptanceMetrics::default();
    for (document, text) in texts.iter().enumerate() {
        let model = Eagle3Model::new(objective.eagle3(), &target).expect("model");
        let drafter = Box::new(ModelDrafter::new(model));
        let (answer, metrics) = generate(&target, Some(drafter), &prompt(document));
        let ids: Vec<u32> = answer.iter().map(|token| token.0).collect();
        assert_eq!(ids, text[PROMPT..], "drafting changed the text");
        decoded.merge(&metrics);
    }
    let metrics: DraftMetrics = objective.measure(&batch, &features).expect("metrics");
    let expected = metrics.replayed.rounds;
    let difference = expected.abs_diff(decoded.rounds);
    // Rounding may turn a choice between two equally likely tokens.
    assert!(difference * 100 <= expected, "{} rounds, {expected} expected", decoded.rounds);

    let simulated = metrics.simulated_acceptance_length(Rate::Top1, DRAFT_LEN);
    let length = decoded.acceptance_length();
    assert!(simulated > 2.0, "the draft learned nothing: {simulated}");
    let error = (simulated / length - 1.0).abs();
    assert!(error < 0.05, "simulated {simulated}, decoded {length}");
}
