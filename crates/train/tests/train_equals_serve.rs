//! What the draft computes in training at delay d is what the decoder computes at level d.

use std::sync::Arc;

use candle_core::D;
use longdraft_data::Batch;
use longdraft_decode::drafter::{DraftContext, Drafter, GlideModel, ModelDrafter, Plan};
use longdraft_decode::draws::CounterDraws;
use longdraft_decode::{DraftShape, Sampling};
use longdraft_features::run_target;
use longdraft_models::draft::Init;
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::target_model::{Taps, Target, TargetOptions};
use longdraft_models::{TargetConfig, TargetTokenId};
use longdraft_train::method::glide::{GlideObjective, GlideObjectiveConfig};
use longdraft_train::objective::Objective;
use serde_json::json;

const DRAFT_LEN: usize = 5;

fn target(seed: u64) -> Arc<Target> {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "initializer_range": 0.3
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Arc::new(Target::random(config, seed, &TargetOptions::default()).expect("target"))
}

/// Proposals of the decoder after `tokens`, of which the last is the root.
fn proposals(target: &Target, draft: &GlideDraft, tokens: &[u32]) -> Vec<u32> {
    let mut cache = target.new_cache().expect("cache");
    let prompt = &tokens[..tokens.len() - 1];
    let positions: Vec<u32> = (0..prompt.len() as u32).collect();
    target.extend(prompt, &positions, &mut cache, &Taps::of(&[])).expect("prefill");
    let tokens: Vec<TargetTokenId> = tokens.iter().map(|id| TargetTokenId(*id)).collect();
    let context = DraftContext { target, cache: &cache, tokens: &tokens };
    let mut drafter = ModelDrafter::new(GlideModel::new(draft, target).expect("model"));
    drafter.begin(0).expect("begin");
    let (shape, sampling) = (DraftShape::Chain { length: DRAFT_LEN }, Sampling::default());
    let mut draws = CounterDraws::new(0, &[]);
    let mut plan = Plan::filling(&shape, &sampling, &mut draws);
    let proposed = drafter.propose(context, &mut plan).expect("proposals");
    proposed.nodes().iter().map(|node| node.token.0).collect()
}

/// Most likely tokens of the training pass over `tokens` and the proposals, the row of level d
/// at delay d.
fn trained(target: &Arc<Target>, draft: GlideDraft, tokens: &[u32], proposed: &[u32]) -> Vec<u32> {
    let root = tokens.len() - 1;
    let ids: Vec<u32> = tokens.iter().chain(&proposed[..DRAFT_LEN - 1]).copied().collect();
    let count = ids.len();
    let batch = Batch {
        position_ids: (0..count as u32).collect(),
        document_ids: vec![0; count],
        learned: vec![0],
        ids,
        ..Batch::default()
    };
    let config = GlideObjectiveConfig { soft_weight: 0.0, ..Default::default() };
    let objective = GlideObjective::new(Arc::clone(target), draft, config);
    let features = run_target(target, &batch, None, &objective.needs()).expect("features");
    let delays: Vec<u32> =
        (0..count).map(|t| if t < root { 1 } else { (t - root + 1) as u32 }).collect();
    let hidden = objective.hidden((&batch, &delays), &features, &mut Vec::new()).expect("hidden");
    let rows = hidden.narrow(0, root, DRAFT_LEN).expect("rows");
    let logits = target.hold_ends().expect("ends").logits(&rows).expect("logits");
    logits.argmax(D::Minus1).and_then(|best| best.to_vec1()).expect("tokens")
}

#[test]
fn levels_of_the_decoder_are_delays_of_the_training() {
    for (seed, length, window) in
        [(1, 1, 512), (2, 9, 512), (3, 60, 512), (4, 60, 7), (5, 700, 512)]
    {
        let target = target(seed);
        let mut config = GlideConfig::for_target(target.config(), None);
        config.initializer_range = 0.3;
        config.self_window = window;
        let draft = || GlideDraft::initialise(&config, &target, Init::Random, seed).expect("draft");
        let tokens: Vec<u32> = (0..length).map(|t| (t * 31 + seed as u32 * 7) % 97).collect();
        let proposed = proposals(&target, &draft(), &tokens);
        assert_eq!(trained(&target, draft(), &tokens, &proposed), proposed, "{length} tokens");
    }
}
