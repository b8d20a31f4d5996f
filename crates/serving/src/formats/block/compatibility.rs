//! What of a block draft each profile's engines compute: the table of features.

use longdraft_models::draft::block::{BlockConfig, ChainKind, LayerKind};

use crate::Profile;
use crate::formats::Fit;
use crate::target::TargetFacts;

/// Whether a block draft fits a profile.
pub(super) fn fit(profile: Profile, config: &BlockConfig, target: &TargetFacts) -> Fit {
    let mut fit = Fit::default();
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
    let slides = config.layers.contains(&LayerKind::Sliding);
    let full = config.layers.contains(&LayerKind::Full);
    let vanilla = config.chain.is_none_or(|chain| chain.kind == ChainKind::Vanilla);
    match profile {
        Profile::Vllm | Profile::Hf => {
            fit.warn(
                !(slides && full),
                "full beside sliding layers: vLLM runs them with its newer runner only",
            );
            fit.refuse(
                vanilla,
                "vLLM serves the vanilla head alone: train with `markov_head: vanilla`",
            );
            fit.warn(
                config.chain.is_none() && config.selector.is_none(),
                "vLLM serves a selector or a chain with its newer runner only, which needs a GPU",
            );
        }
        Profile::Sglang => {
            fit.warn(vanilla, "it is not known which versions of SGLang serve this head");
        }
        Profile::LlamacppHf => {
            fit.refuse(vanilla, "llama.cpp serves the vanilla head alone");
            let fits = |k: usize| config.hidden_size >= k * (k + 1);
            fit.refuse(
                config.selector.is_none_or(|selector| fits(selector.top_k)),
                "llama.cpp needs a width of K (K + 1) for K candidates: train with a smaller \
                 `selector_top_k`",
            );
        }
        Profile::Llamacpp => {
            fit.refuse(
                false,
                "GGUF files of block drafts are not written yet: export to llamacpp-hf and convert",
            );
        }
        Profile::Speculators => {
            fit.refuse(false, "folders of speculators for block drafts are not written yet");
        }
        Profile::Longspec => fit.refuse(false, "LongSpec's scripts run no block drafts"),
    }
    fit
}
