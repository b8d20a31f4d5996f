//! Small random targets, drafts and drafters.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_decode::DraftShape;
use longdraft_decode::drafter::{
    BlockDraftModel, Combination, CombinedDrafter, Datastore, Drafter, Eagle3Model, GlideModel,
    LookupDrafter, ModelDrafter, MtpModel, ReducedHead,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::Init;
use longdraft_models::draft::block::{
    BlockConfig, BlockDraft, ChainKind, ChainSizes, ConvolutionSizes, LayerKind, SelectorSizes,
};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{
    Extension, Features, KvCache, MtpBlock, Tap, Taps, Target, TargetOptions,
};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{TensorSpec, WeightSource};
use longdraft_models::{LayerId, TargetConfig, TargetTokenId};
use serde_json::{Value, json};

pub(crate) const VOCABULARY: usize = 61;

/// Families with recurrent layers.
pub(crate) const RECURRENT: [&str; 4] = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2"];

/// Appends the nodes of a token tree.
pub(crate) fn extend_tree(
    target: &Target,
    (ids, position_ids): (&[u32], &[u32]),
    parents: &[Option<usize>],
    cache: &mut KvCache,
) -> longdraft_models::Result<Features> {
    let tree = Extension { ids, position_ids, parents: Some(parents), is_text: false, cache };
    target.extend_each(&mut [tree], &Taps::of(&[Tap::FinalHidden]))
}

/// A random target; a large deviation makes its choices vary.
pub(crate) fn target(kind: &str, head_dim: usize, kv: (usize, usize), seed: u64) -> Target {
    target_with(kind, head_dim, kv, seed, &TargetOptions::default())
}

/// The same, held otherwise.
pub(crate) fn target_with(
    kind: &str,
    head_dim: usize,
    (kv_heads, group): (usize, usize),
    seed: u64,
    options: &TargetOptions,
) -> Target {
    let (windowed, kind) = match kind.strip_suffix("_window") {
        Some(family) => (true, family),
        None => (false, kind),
    };
    let mut config = json!({
        "model_type": kind, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1400, "tie_word_embeddings": seed.is_multiple_of(2),
        "initializer_range": 0.3, "num_local_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]
    });
    if windowed || kind.starts_with("gemma") || kind.contains("mistral") {
        // Some end within what is drafted, and all within a prompt.
        config["sliding_window"] = [1, 3, 6, 40][seed as usize % 4].into();
        config["use_sliding_window"] = true.into();
        config["max_window_layers"] = 1.into();
        config["sliding_window_pattern"] = 3.into();
        config["attn_logit_softcapping"] = 2.0.into();
        config["query_pre_attn_scalar"] = 20.into();
        config["rope_parameters"] = json!({
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 16
        });
    }
    if RECURRENT.contains(&kind) {
        // The last layer attends, or has a state.
        config["full_attention_interval"] = [2, 3][seed as usize % 2].into();
        config["full_attn_idxs"] = [json!([1]), json!([0, 2])][seed as usize % 2].clone();
        config["conv_L_cache"] = [1, 3, 4][seed as usize % 3].into();
        config["conv_bias"] = seed.is_multiple_of(5).into();
        config["block_auto_adjust_ff_dim"] = false.into();
        for (key, sizes) in [
            ("linear_num_key_heads", [1, 2, 3]),
            ("linear_num_value_heads", [2, 2, 6]),
            ("linear_key_head_dim", [8, 5, 16]),
            ("linear_value_head_dim", [12, 8, 4]),
            ("linear_conv_kernel_dim", [4, 2, 3]),
        ] {
            config[key] = sizes[seed as usize % 3].into();
        }
    }
    add_parts(&mut config, kind, head_dim, seed);
    let config = TargetConfig::from_json(&config).expect("valid configuration");
    Target::random(config, seed, options).expect("random target")
}

/// Families whose layers have parts of their own, beside Gemma's and Mistral's.
pub(crate) const FAMILIES: [&str; 10] = [
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
];

/// Keys of those families, with numbers that are felt within a prompt.
fn add_parts(config: &mut Value, kind: &str, head_dim: usize, seed: u64) {
    let reach = [1, 3, 6, 40][seed as usize % 4];
    let divisors = |step: f64| -> Vec<f64> {
        let turning = head_dim / 2 / 2 * 2;
        (0..turning / 2).map(|i| 1.0 + step * i as f64).collect()
    };
    let keys = match kind {
        "smollm3" => {
            json!({"no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": reach})
        }
        "granite" => json!({
            "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
            "logits_scaling": 0.7
        }),
        "olmo3" => json!({
            "sliding_window": reach,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        }),
        "phi3" => json!({
            "sliding_window": reach, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 60,
            "rope_scaling": {
                "type": "longrope", "short_factor": divisors(0.1), "long_factor": divisors(0.7)
            }
        }),
        "glm4_moe" => json!({
            "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "use_qk_norm": true, "attention_bias": true,
            "routed_scaling_factor": 1.5
        }),
        "gpt_oss" => json!({"sliding_window": reach, "swiglu_limit": 1.0}),
        "llama4_text" => json!({
            "attention_chunk_size": reach, "no_rope_layer_interval": 3, "floor_scale": 4, "attn_scale": 0.4,
            "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2
        }),
        _ => json!({}),
    };
    for (key, value) in keys.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
}

pub(crate) fn glide(target: &Target, seed: u64) -> GlideDraft {
    let mut config = GlideConfig::for_target(target.config(), None);
    config.initializer_range = 0.3;
    config.final_norm = if seed.is_multiple_of(3) { FinalNorm::Target } else { FinalNorm::None };
    // Some windows end within what is drafted.
    config.self_window = if seed.is_multiple_of(5) { 3 } else { config.self_window };
    let init = if seed.is_multiple_of(2) { Init::LastLayer } else { Init::Random };
    GlideDraft::initialise(&config, target, init, seed).expect("random draft")
}

pub(crate) fn eagle3(target: &Target, seed: u64) -> Eagle3Draft {
    let kept: Vec<TargetTokenId> = (0..VOCABULARY as u32)
        .filter(|id| !(u64::from(*id) + seed).is_multiple_of(3))
        .map(TargetTokenId)
        .collect();
    let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
    let mut wide = target.config().clone();
    wide.num_hidden_layers = 32;
    let mut config = Eagle3Config::for_target(&wide, map.draft_size()).expect("layers");
    config.target_layers = [LayerId(0), LayerId(1), LayerId(2)];
    config.initializer_range = 0.3;
    (config.fc_norm, config.norm_output) = (seed.is_multiple_of(2), seed.is_multiple_of(2));
    config.attention_window = seed.is_multiple_of(3).then_some(5);
    let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
    Eagle3Draft::initialise(&config, map, &table, seed).expect("random draft")
}

/// A block draft with windows that end within a block, in some layers or all.
pub(crate) fn dflash(target: &Target, seed: u64) -> BlockDraft {
    let mask = VOCABULARY as u32 - 1;
    let mut config = BlockConfig::for_target(target.config(), 2, 6, mask);
    config.target_layers = vec![LayerId(0), LayerId(2)];
    config.initializer_range = 0.3;
    if seed.is_multiple_of(3) {
        config.layers[0] = LayerKind::Sliding;
        config.sliding_window = Some(4);
    }
    config.is_causal = seed.is_multiple_of(5).then_some(true);
    let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
    BlockDraft::initialise(&config, &table, seed).expect("random draft")
}

/// The same with convolutions and a selector that prefers some of few candidates.
pub(crate) fn dflash2(target: &Target, seed: u64) -> BlockDraft {
    let config = BlockConfig {
        convolution: Some(ConvolutionSizes { kernel_size: 2, group_size: 8 }),
        selector: Some(SelectorSizes { rank: 4, top_k: 3 }),
        ..dflash(target, seed).config().clone()
    };
    randomised(&config, target, seed)
}

/// A block draft whose heads say much, unlike fresh ones.
pub(crate) fn randomised(config: &BlockConfig, target: &Target, seed: u64) -> BlockDraft {
    let embedding = target.hold_ends().expect("ends").embedding().expect("table");
    let mut draft = BlockDraft::initialise(config, &embedding, seed).expect("random draft");
    for parameter in draft.parameters_mut() {
        let specs = [TensorSpec::new(parameter.name.as_str(), parameter.var.dims())];
        let heads = ["candidate_selector", "kernel_projection", "markov_head", "confidence_head"];
        if heads.iter().any(|name| parameter.name.contains(name)) {
            let deviation = if parameter.name.contains("markov_w") { 1.0 } else { 0.4 };
            let values = MemorySource::random(&specs, deviation, seed).expect("values");
            let values = values.load(&parameter.name, DType::F32).expect("values");
            parameter.var.set(&values).expect("set");
        }
    }
    draft
}

/// A block draft with sequential heads of every kind, by the seed.
pub(crate) fn dspark(target: &Target, seed: u64) -> BlockDraft {
    let kinds = [ChainKind::Vanilla, ChainKind::Gated, ChainKind::Rnn];
    let config = BlockConfig {
        chain: Some(ChainSizes { rank: 4, kind: kinds[seed as usize % 3], confidence: Some(true) }),
        ..dflash(target, seed).config().clone()
    };
    randomised(&config, target, seed)
}

/// The same draft with a head of its own: the target's rows for some tokens.
pub(crate) fn with_own_head(
    draft: &BlockDraft,
    target: &Target,
    vocabulary: &VocabularyMap,
) -> BlockDraft {
    let kept: Vec<u32> = vocabulary.kept().iter().map(|token| token.0).collect();
    let rows = |tensor: &Tensor| select_rows(&tensor.detach(), &kept).expect("rows");
    let ends = target.hold_ends().expect("ends");
    let mut tensors = draft.weights().named().expect("tensors");
    for (_, output) in tensors.iter_mut().filter(|(name, _)| name.contains("markov_w2")) {
        *output = rows(output);
    }
    tensors.push(("lm_head.weight".to_owned(), rows(&ends.head().expect("head"))));
    tensors.extend(vocabulary.tensors().expect("a map"));
    let config = BlockConfig { draft_vocab_size: kept.len(), ..draft.config().clone() };
    let table = ends.embedding().expect("table");
    BlockDraft::from_source(&MemorySource::new(tensors), &config, &table).expect("a draft")
}

/// The drafts that drafters of one target read.
pub(crate) struct Drafts {
    pub(crate) glide: GlideDraft,
    pub(crate) eagle3: Eagle3Draft,
    pub(crate) dflash: BlockDraft,
    dflash2: BlockDraft,
    dspark: BlockDraft,
    own_heads: [BlockDraft; 2],
    mtp: MtpBlock,
    head: Arc<ReducedHead>,
}

impl Drafts {
    pub(crate) fn new(target: &Target, seed: u64) -> Self {
        let frequent = (0..20).map(|i| TargetTokenId(i * 3)).collect();
        let map = VocabularyMap::new(frequent, VOCABULARY).expect("map");
        let own_heads = [dflash(target, seed), dspark(target, seed)]
            .map(|draft| with_own_head(&draft, target, &map));
        let head = Arc::new(ReducedHead::new(target, map).expect("head"));
        Self {
            own_heads,
            glide: glide(target, seed),
            eagle3: eagle3(target, seed),
            dflash: dflash(target, seed),
            dflash2: dflash2(target, seed),
            dspark: dspark(target, seed),
            mtp: MtpBlock::random(target.config(), seed, &TargetOptions::default())
                .expect("random block"),
            head,
        }
    }
}

/// A random target, and the drafts that its drafters read.
pub(crate) fn with_drafts(
    kind: &str,
    head_dim: usize,
    kv: (usize, usize),
    seed: u64,
) -> (Target, Drafts) {
    let target = target(kind, head_dim, kv, seed);
    let drafts = Drafts::new(&target, seed);
    (target, drafts)
}

/// Every kind of drafter.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Glide,
    GlideReduced,
    Eagle3,
    Dflash,
    DflashReduced,
    Dflash2,
    Dflash2Reduced,
    Dspark,
    DsparkReduced,
    Mtp,
    MtpReduced,
    Lookup,
    Datastore,
    Merged,
    MergedEagle3,
    MergedDflash,
    MergedDflash2,
    MergedDspark,
    MergedMtp,
    Switched,
    DflashOwnHead,
    DsparkOwnHead,
}

impl Kind {
    /// Whether it looks up what the text repeats, alone or beside a model.
    pub(crate) fn looks_up(self) -> bool {
        matches!(
            self,
            Self::Lookup
                | Self::Datastore
                | Self::Merged
                | Self::MergedEagle3
                | Self::MergedDflash
                | Self::MergedDflash2
                | Self::MergedDspark
                | Self::MergedMtp
                | Self::Switched
        )
    }
}

pub(crate) const KINDS: [Kind; 22] = [
    Kind::Glide,
    Kind::GlideReduced,
    Kind::Eagle3,
    Kind::Dflash,
    Kind::DflashReduced,
    Kind::Dflash2,
    Kind::Dflash2Reduced,
    Kind::Dspark,
    Kind::DsparkReduced,
    Kind::Mtp,
    Kind::MtpReduced,
    Kind::Lookup,
    Kind::Datastore,
    Kind::Merged,
    Kind::MergedEagle3,
    Kind::MergedDflash,
    Kind::MergedDflash2,
    Kind::MergedDspark,
    Kind::MergedMtp,
    Kind::Switched,
    Kind::DflashOwnHead,
    Kind::DsparkOwnHead,
];

pub(crate) fn drafter<'a>(
    kind: Kind,
    target: &'a Target,
    drafts: &'a Drafts,
) -> Box<dyn Drafter + 'a> {
    let glide = || GlideModel::new(&drafts.glide, target).expect("model");
    let mtp = |head| ModelDrafter::new(MtpModel::new(&drafts.mtp, target, head).expect("model"));
    let block = |draft: &'a BlockDraft| BlockDraftModel::new(draft, target).expect("model");
    let whole = |draft| Box::new(ModelDrafter::new(block(draft)));
    let reduced = |draft| {
        let head = Arc::clone(&drafts.head);
        Box::new(ModelDrafter::new(block(draft).with_head(head).expect("head")))
    };
    // Other texts in which tokens follow one another at random.
    let text = |i: u32| (0..60).map(|j| (i * j * j + j) % VOCABULARY as u32).collect();
    let texts: Vec<Vec<u32>> = (0..60).map(text).collect();
    let store = || Some(Arc::new(Datastore::new(texts.iter().map(Vec::as_slice))));
    let lookup = || LookupDrafter::new().with_datastore(store());
    let model: Box<dyn Drafter + 'a> = match kind {
        Kind::Lookup => return Box::new(LookupDrafter::new()),
        Kind::Datastore => return Box::new(lookup()),
        Kind::Glide | Kind::Merged | Kind::Switched => Box::new(ModelDrafter::new(glide())),
        Kind::GlideReduced => {
            Box::new(ModelDrafter::new(glide().with_head(Arc::clone(&drafts.head))))
        }
        Kind::Eagle3 | Kind::MergedEagle3 => {
            let eagle3 = Eagle3Model::new(&drafts.eagle3, target).expect("model");
            Box::new(ModelDrafter::new(eagle3))
        }
        Kind::Dflash | Kind::MergedDflash => whole(&drafts.dflash),
        Kind::DflashReduced => reduced(&drafts.dflash),
        Kind::Dflash2 | Kind::MergedDflash2 => whole(&drafts.dflash2),
        Kind::Dflash2Reduced => reduced(&drafts.dflash2),
        Kind::Dspark | Kind::MergedDspark => whole(&drafts.dspark),
        Kind::DsparkReduced => reduced(&drafts.dspark),
        Kind::DflashOwnHead => whole(&drafts.own_heads[0]),
        Kind::DsparkOwnHead => whole(&drafts.own_heads[1]),
        Kind::Mtp | Kind::MergedMtp => Box::new(mtp(None)),
        Kind::MtpReduced => Box::new(mtp(Some(&drafts.head))),
    };
    if !kind.looks_up() {
        return model;
    }
    let is_switched = matches!(kind, Kind::Switched);
    let combination = if is_switched { Combination::Switch } else { Combination::Merge };
    Box::new(CombinedDrafter::new(model, lookup(), combination))
}

/// Chains and trees of every rule.
pub(crate) fn shapes() -> Vec<DraftShape> {
    vec![
        DraftShape::Chain { length: 1 },
        DraftShape::Chain { length: 4 },
        DraftShape::Chain { length: 8 },
        DraftShape::Static { widths: vec![4, 8, 8] },
        DraftShape::Static { widths: DraftShape::STATIC.to_vec() },
        DraftShape::Dynamic { width: 4, depth: 5, budget: 20 },
        DraftShape::Dynamic { width: 1, depth: 3, budget: 2 },
        DraftShape::Dynamic { width: 10, depth: 6, budget: 60 },
        DraftShape::Sampled { children: vec![3, 2, 1] },
        DraftShape::Sampled { children: vec![1, 1] },
    ]
}
