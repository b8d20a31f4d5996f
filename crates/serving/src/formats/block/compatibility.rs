//! What of a block draft each profile's engines compute: the table of features.

use longdraft_kernels::rope::RopeScaling;
use longdraft_models::draft::block::{BlockConfig, ChainKind, LayerKind};

use crate::Profile;
use crate::formats::Fit;
use crate::formats::gguf::holds;
use crate::target::TargetFacts;

pub(super) fn fit(profile: Profile, config: &BlockConfig, target: &TargetFacts) -> Fit {
    let mut fit = of_draft(profile, config);
    fit.check_parts(&target.config().parts, config.embedding_scale);
    if !target.config().bend().is_plain() {
        bent(&mut fit, profile, config);
    }
    let layers = target.config().num_hidden_layers;
    fit.refuse(
        config.target_layers.iter().all(|layer| layer.0 + 1 < layers),
        "it taps the target's last layer, whose output engines and Hugging Face norm differently: \
         train on layers below it",
    );
    fit.refuse(
        config.rope.divisors.is_none(),
        "RoPE divisors of a GGUF target have no key in config.json: give the target's Hugging Face \
         folder when training",
    );
    fit
}

/// Whether engines of a profile compute a block draft, whatever its target is.
pub(super) fn of_draft(profile: Profile, config: &BlockConfig) -> Fit {
    let mut fit = Fit::default();
    let slides = config.layers.contains(&LayerKind::Sliding);
    let full = config.layers.contains(&LayerKind::Full);
    let vanilla = config.chain.is_none_or(|chain| chain.kind == ChainKind::Vanilla);
    match profile {
        Profile::Vllm | Profile::Hf => {
            fit.warn(!(slides && full), MIXED);
            fit.refuse(
                vanilla,
                "vLLM serves the vanilla head alone: train with `markov_head: vanilla`",
            );
            fit.warn(config.chain.is_none() && config.selector.is_none(), NEWER_RUNNER);
            fit.refuse(
                config.convolution.is_some() == config.selector.is_some(),
                &format!("vLLM: {BOTH}"),
            );
            fit.warn(
                profile == Profile::Vllm || !config.has_own_head(),
                "a head of the draft's own: SGLang leaves it out without a message, and the tokens of its draft \
                 are others",
            );
        }
        Profile::Sglang => sglang(&mut fit, config, vanilla),
        Profile::LlamacppHf => {
            lattice(&mut fit, config, vanilla);
            gguf(&mut fit, config);
            fit.refuse(
                !config.has_own_head(),
                "llama.cpp's converter takes folders with `draft_vocab_size` for EAGLE-3: export to llamacpp",
            );
        }
        Profile::Llamacpp => {
            lattice(&mut fit, config, vanilla);
            gguf(&mut fit, config);
        }
        Profile::Speculators => {
            speculators(&mut fit, config);
            fit.warn(!(slides && full), MIXED);
            fit.warn(vanilla, "vLLM serves the vanilla head alone, the library loads all of them");
            fit.warn(config.chain.is_none() && config.selector.is_none(), NEWER_RUNNER);
        }
        Profile::Longspec => fit.refuse(false, "LongSpec's scripts run no block drafts"),
    }
    if config.embedding_scale.is_some() {
        scaled(&mut fit, profile, config);
    }
    fit
}

/// A draft that multiplies embeddings. Plain folders alone have a key for it.
fn scaled(fit: &mut Fit, profile: Profile, config: &BlockConfig) {
    fit.refuse(
        matches!(profile, Profile::Vllm | Profile::Hf | Profile::Sglang),
        "the draft multiplies embeddings (`input_embedding_scale`), and these files have no key that readers know: \
         export to hf, vllm or sglang",
    );
    fit.refuse(
        config.chain.is_none(),
        "the draft multiplies embeddings (`input_embedding_scale`), and it is not known whether engines do so for \
         drafts with a Markov head",
    );
    fit.warn(
        false,
        "the draft multiplies embeddings: `input_embedding_scale` says so, and it is not known which versions of \
         engines read it",
    );
}

/// What becomes of a draft's logits where the target scales or soft-caps its own. Plain folders and GGUF files
/// have keys for it.
fn bent(fit: &mut Fit, profile: Profile, config: &BlockConfig) {
    let is_written = profile != Profile::Speculators;
    fit.refuse(
        config.chain.is_none(),
        "the target scales or soft-caps its logits, and a Markov head adds to the draft's: it is not known \
         whether engines do so in this order",
    );
    fit.refuse(
        is_written || config.selector.is_none(),
        "the target scales or soft-caps its logits, and a selector adds to the draft's: folders of speculators \
         have no key that says so",
    );
    fit.warn(
        is_written,
        "the target scales or soft-caps its logits, and folders of speculators have no key that says so: a \
         draft's most likely tokens are the same, its probabilities are not",
    );
    fit.warn(
        !is_written,
        "the target scales or soft-caps its logits: `output_multiplier` and `final_logit_softcapping` say so, \
         and it is not known which versions of engines read them",
    );
}

const MIXED: &str = "full beside sliding layers: vLLM runs them with its newer runner only";
const NEWER_RUNNER: &str = "vLLM serves a selector or a Markov head with its newer runner only: on a CPU that \
                            needs a Triton for CPUs";
/// What readers with one class for convolutions and selector ask of a draft.
const BOTH: &str =
    "convolutions and a selector go together there: train with both, or with neither";

/// SGLang's heads.
fn sglang(fit: &mut Fit, config: &BlockConfig, vanilla: bool) {
    fit.warn(vanilla, "SGLang 0.5.23 has this head; it is not known which older versions have");
    fit.refuse(
        config.chain.is_none_or(|chain| chain.rank > 0),
        "SGLang serves no Markov head of rank 0: train with a larger `markov_rank`",
    );
    fit.refuse(
        config.convolution.is_none() || config.selector.is_some(),
        "SGLang serves convolutions beside a selector alone: train with both",
    );
    fit.refuse(
        !config.has_own_head(),
        "SGLang drafts through the target's head alone, and leaves a head of the draft's own out without a \
         message: export to vllm, speculators or llamacpp",
    );
}

/// llama.cpp's heads.
fn lattice(fit: &mut Fit, config: &BlockConfig, vanilla: bool) {
    fit.refuse(vanilla, "llama.cpp serves the vanilla head alone");
    fit.refuse(
        config.convolution.is_some() == config.selector.is_some(),
        &format!("llama.cpp: {BOTH}"),
    );
    let fits = |k: usize| config.hidden_size >= k.saturating_mul(k + 1);
    fit.refuse(
        config.selector.is_none_or(|selector| fits(selector.top_k)),
        "llama.cpp needs a width of K (K + 1) for K candidates: train with a smaller \
         `selector_top_k`",
    );
}

/// What llama.cpp has tensors and keys for. Its converter has no others.
fn gguf(fit: &mut Fit, config: &BlockConfig) {
    fit.refuse(!config.attention_bias, "attention_bias: llama.cpp has no place for it");
    let mut causal = config.layers.iter().map(|kind| config.is_causal_in(*kind));
    let first = causal.next();
    fit.refuse(
        causal.all(|causal| Some(causal) == first),
        "llama.cpp has one switch for whether blocks are causal, and the layers differ: train \
         layers of one kind",
    );
    let scaling = config.rope.scaling;
    fit.refuse(
        holds(scaling) && !matches!(scaling, RopeScaling::Llama3 { .. }),
        "llama.cpp scales the rotary embedding of block drafts linearly or by yarn's usual rule alone",
    );
    if let Some(chain) = config.chain {
        fit.refuse(
            chain.rank > 0,
            "llama.cpp proposes from slot 0 on with a head alone, and rank 0 has none",
        );
        fit.refuse(
            chain.confidence != Some(false),
            "llama.cpp's confidence reads the token before: train with `confidence_reads_token`",
        );
    }
}

/// What the library computes, and vLLM with its folders.
fn speculators(fit: &mut Fit, config: &BlockConfig) {
    let has = |kind| config.layers.contains(&kind);
    let causal = |kind| has(kind) && config.is_causal_in(kind);
    fit.refuse(
        !causal(LayerKind::Full),
        "full layers see the whole block in folders of speculators: train with `causal: false`",
    );
    fit.refuse(
        !(has(LayerKind::Full) && causal(LayerKind::Sliding)) || config.chain.is_some(),
        "vLLM takes `sliding_window_non_causal` of such folders for all layers, full ones as well: export \
         to vllm, or train with `causal: false`",
    );
    fit.warn(
        !has(LayerKind::Sliding),
        "the speculators library counts a window from the anchor, engines from the slot: its own loss is not \
         that of the served draft",
    );
    fit.refuse(config.convolution.is_some() == config.selector.is_some(), BOTH);
    fit.refuse(
        config.convolution.is_none_or(|sizes| sizes.kernel_size <= config.block_size),
        "the speculators library takes no kernel that is longer than a block",
    );
}
