//! GLIDE steps: online, with the target's own loss, and from cached features.

use std::sync::Arc;
use std::time::Instant;

use longdraft_data::Batch;
use longdraft_kernels::linear_cross_entropy::{Inputs, SoftTargets, linear_cross_entropy};
use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::{Compat, GlideConfig, GlideDraft, Init};
use longdraft_models::target::{Tap, Taps, Target};
use longdraft_train::features::{BatchFeatures, TeacherFeatures, sequence_of};
use longdraft_train::objective::{GlideObjective, GlideObjectiveConfig, Objective};
use longdraft_train::optim::{AdamW, AdamWConfig, Gradients};
use serde_json::json;

use super::{Place, median};

const DELAY: u32 = 2;

/// SmolLM2-135M's shape with random weights.
pub(super) fn target() -> Arc<Target> {
    let config = json!({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
        "max_position_embeddings": 32768, "tie_word_embeddings": true
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Arc::new(Target::random(config, 0, &Place::target()).expect("target"))
}

fn batch(tokens: usize, step: usize) -> Batch {
    let id = |t: usize| ((t * 7919 + step * 104_729) % 49_152) as u32;
    Batch {
        ids: (0..tokens).map(id).collect(),
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
        delays: vec![DELAY; tokens],
        learned: (0..tokens as u32 - 1).collect(),
        ..Batch::default()
    }
}

/// Seconds of a step, the median of `steps` after one warm-up.
pub(super) fn step(tokens: usize, steps: usize, flags: &[&str]) -> f64 {
    let (cached, llm_loss) = (flags.contains(&"--cached"), flags.contains(&"--llm-loss"));
    let target = target();
    let glide = GlideConfig::for_target(target.config(), Some(Compat::Longspec));
    let draft = GlideDraft::initialise(&glide, &target, Init::Random, 1).expect("draft");
    let config = GlideObjectiveConfig { soft_weight: 0.0, ..Default::default() };
    let objective = GlideObjective::new(Arc::clone(&target), draft, config);
    let parameters = objective.draft().parameters().to_vec();
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters);
    let mut kept: Option<BatchFeatures> = None;
    let mut times = Vec::new();
    for step in 0..=steps {
        let batch = batch(tokens, step);
        let started = Instant::now();
        let features = match kept.take().filter(|_| cached) {
            Some(features) => features,
            None => features(&target, &batch, llm_loss),
        };
        let loss = objective.loss(&batch, &features, true).expect("loss");
        let numerator = loss.numerator.expect("learned");
        let mean = (numerator / loss.denominator as f64).expect("mean");
        let mut gradients = Gradients::new(&parameters);
        gradients.add(&parameters, &mean.backward().expect("backward")).expect("gradients");
        optimizer.step(&parameters, &gradients, 5e-4).expect("step");
        if step > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
        kept = Some(features);
    }
    median(&mut times)
}

fn features(target: &Target, batch: &Batch, llm_loss: bool) -> BatchFeatures {
    let sequence = sequence_of(batch);
    let taps: &[Tap] = if llm_loss { &[Tap::LastKv, Tap::FinalHidden] } else { &[Tap::LastKv] };
    let features = target.forward(&sequence, &Taps::of(taps)).expect("forward");
    if llm_loss {
        let hidden = features.final_hidden().expect("tapped");
        let inputs = Inputs {
            hidden: &hidden.narrow(0, 0, batch.learned.len()).expect("rows"),
            head: &target.head().expect("head"),
            labels: &batch.labels(),
            soft: SoftTargets::None,
            soft_weight: 0.0,
            teacher: None,
        };
        linear_cross_entropy(&inputs).expect("the target's own loss");
    }
    let last_kv = Some(features.last_kv().expect("tapped").clone());
    BatchFeatures { last_kv, aux_hidden: None, teacher: TeacherFeatures::None, part: None }
}
