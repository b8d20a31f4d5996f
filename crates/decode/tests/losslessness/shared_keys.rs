//! Caches of latent rows, and of keys that late layers share: whatever drafts, tokens are those of plain decoding.

use longdraft_decode::drafter::{
    BlockDraftModel, Drafter, Eagle3Model, LookupDrafter, ModelDrafter, MtpModel,
};
use longdraft_decode::{BatchEngine, DecodeOptions, DraftShape, Sampling, VerifyRule};
use longdraft_models::TargetConfig;
use longdraft_models::draft::block::BlockDraft;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::target_model::{MtpBlock, Target, TargetOptions};
use serde_json::{Value, json};

use crate::answers::{converse, generate, options, prompt};
use crate::batch::jobs;
use crate::engine::finish;
use crate::models::{VOCABULARY, dspark, eagle3, shapes};

/// What the caches of a target hold.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Held {
    /// A row for all heads (DeepSeek-V3).
    Latent,
    /// Keys of the first layers (Gemma 4), with tables of inputs.
    Shared,
    /// Wider keys in full layers, whose values they are too (Gemma 4), beside experts.
    Wide,
}

const ALL: [Held; 3] = [Held::Latent, Held::Shared, Held::Wide];

fn keys(held: Held) -> Value {
    if held == Held::Latent {
        return json!({
            "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_key_value_heads": 4,
            "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
            "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1
        });
    }
    let (full, sliding, shared) = ("full_attention", "sliding_attention", held == Held::Shared);
    json!({
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8,
        "layer_types": [sliding, full, sliding, full, sliding, full], "sliding_window": 6,
        "num_kv_shared_layers": if shared { 3 } else { 0 }, "use_double_wide_mlp": shared,
        "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": !shared,
        "enable_moe_block": !shared, "num_experts": 5, "top_k_experts": 2,
        "hidden_size_per_layer_input": if shared { 4 } else { 0 },
        "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 4.0
    })
}

fn target(held: Held) -> Target {
    let mut config = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_position_embeddings": 1400,
        "initializer_range": 0.3, "num_experts_per_tok": 2, "moe_intermediate_size": 24
    });
    for (key, value) in keys(held).as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let config = TargetConfig::from_json(&config).expect("valid configuration");
    Target::random(config, 4, &TargetOptions::default()).expect("random target")
}

/// The drafts of a target.
struct Drafts {
    eagle3: Eagle3Draft,
    dspark: BlockDraft,
    mtp: Option<MtpBlock>,
}

impl Drafts {
    fn new(held: Held, target: &Target) -> Self {
        let block = || MtpBlock::random(target.config(), 4, &TargetOptions::default());
        let mtp = (held == Held::Latent).then(|| block().expect("random block"));
        Self { eagle3: eagle3(target, 4), dspark: dspark(target, 4), mtp }
    }

    /// A drafter of every kind.
    fn drafters<'a>(&'a self, target: &'a Target) -> Vec<Box<dyn Drafter + 'a>> {
        let eagle3 = Eagle3Model::new(&self.eagle3, target).expect("model");
        let dspark = BlockDraftModel::new(&self.dspark, target).expect("model");
        let mut all: Vec<Box<dyn Drafter + 'a>> = vec![
            Box::new(LookupDrafter::new()),
            Box::new(ModelDrafter::new(eagle3)),
            Box::new(ModelDrafter::new(dspark)),
        ];
        if let Some(mtp) = &self.mtp {
            let mtp = MtpModel::new(mtp, target, None).expect("model");
            all.push(Box::new(ModelDrafter::new(mtp)));
        }
        all
    }
}

#[test]
fn no_draft_changes_a_token_of_latent_rows_or_shared_keys() {
    for held in ALL {
        let target = target(held);
        let drafts = Drafts::new(held, &target);
        for (seed, shape) in (0_u64..).zip(shapes()) {
            let prompt = prompt(if seed.is_multiple_of(2) { 7 } else { 64 }, seed);
            let mut options = options(32);
            (options.seed, options.rule) = (seed, VerifyRule::Match);
            options.sampling = Sampling::at(if seed % 4 == 3 { 0.8 } else { 0.0 });
            let plain = generate(&target, None, &prompt, &options);
            options.shape = shape;
            for (kind, drafter) in drafts.drafters(&target).into_iter().enumerate() {
                let drafted = generate(&target, Some(drafter), &prompt, &options);
                assert_eq!(plain.tokens, drafted.tokens, "{held:?} {kind} {seed}");
            }
        }
    }
}

#[test]
fn requests_of_a_batch_over_latent_rows_or_shared_keys_are_as_alone() {
    let jobs = jobs();
    for held in ALL {
        let target = target(held);
        let drafts = Drafts::new(held, &target);
        for kind in 0..drafts.drafters(&target).len() {
            let drafter = || Some(drafts.drafters(&target).swap_remove(kind));
            let places = jobs.iter().map(|_| drafter()).collect();
            let mut engine = BatchEngine::new(&target, places);
            for (key, job) in jobs.iter().enumerate() {
                engine.join(key, &job.prompt, &job.options).expect("joined");
            }
            for (key, found) in finish(&mut engine) {
                let job = &jobs[key];
                let alone = generate(&target, drafter(), &job.prompt, &job.options);
                assert_eq!(found.tokens, alone.tokens, "{held:?} {kind} {key}");
            }
        }
    }
}

#[test]
fn a_kept_prefix_of_latent_rows_or_shared_keys_changes_nothing_but_time() {
    for held in ALL {
        let target = target(held);
        let drafts = Drafts::new(held, &target);
        for (kind, drafter) in drafts.drafters(&target).into_iter().enumerate() {
            let shape = DraftShape::Static { widths: vec![3, 4] };
            let options = DecodeOptions { shape, ..options(24) };
            let what = format!("{held:?} {kind}");
            let reused = converse(&what, (&target, drafter), prompt(20, 31), options, (4, Some(2)));
            assert_eq!(reused[0], 0, "{what}");
            assert!(reused[1..].iter().all(|count| *count > 0), "{what}: {reused:?}");
        }
    }
}
