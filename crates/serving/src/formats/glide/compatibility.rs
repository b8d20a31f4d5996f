//! What of a GLIDE layer the published scripts compute.

use longdraft_models::config::{Architecture, Parts, TargetConfig};
use longdraft_models::draft::glide::{FinalNorm, GlideConfig};

use crate::Profile;
use crate::formats::Fit;

pub(super) fn fit(profile: Profile, config: &GlideConfig, target: &TargetConfig) -> Fit {
    let mut fit = Fit::default();
    if !matches!(profile, Profile::Longspec | Profile::Hf) {
        // What the published layer lacks is no remedy here.
        fit.refuse(
            false,
            "no such engine runs a GLIDE layer, but `longdraft generate` and `longdraft serve` do",
        );
        return fit;
    }
    fit.refuse(
        config.final_norm == FinalNorm::None,
        "the published layer has no final norm: train with `draft.final_norm: none`",
    );
    fit.refuse(
        config.self_window == GlideConfig::SELF_WINDOW,
        "the published layer looks back 512 tokens: another window is not read",
    );
    fit.refuse(
        config.head_dim * config.num_attention_heads == config.hidden_size,
        "the published layer has head_dim = hidden_size / num_attention_heads",
    );
    fit.warn(
        config.draft_vocab_size.is_none(),
        "`draft_vocab_size`: the published scripts propose from the whole vocabulary, of which the draft learned a \
         part: acceptance may be lower there",
    );
    fit.refuse(
        config.hidden_size == target.hidden_size
            && config.num_key_value_heads == target.num_key_value_heads,
        "the layer's sizes are not the target's",
    );
    fit.refuse(
        target.parts == Parts::default()
            && !matches!(target.architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
        "the published layer is for targets whose layers are those of a Llama or a Qwen2 without windows, \
         scales and further norms: decode with `longdraft generate`",
    );
    fit.refuse(
        target.rope.divisors.is_none(),
        "RoPE divisors of a GGUF target have no key in config.json: train with the target's Hugging Face folder",
    );
    fit
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn target() -> TargetConfig {
        TargetConfig::from_json(&json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "vocab_size": 320,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2
        }))
        .expect("configuration")
    }

    #[test]
    fn an_engine_without_such_layers_asks_for_no_change_of_them() {
        let target = target();
        let own = GlideConfig::for_target(&target, None);
        let normed = GlideConfig { final_norm: FinalNorm::Target, ..own };
        let refusals = |profile| fit(profile, &normed, &target).refusals.0.join("; ");
        let told = refusals(Profile::Vllm);
        assert!(told.contains("no such engine") && !told.contains("final_norm"), "{told}");
        assert!(refusals(Profile::Longspec).contains("draft.final_norm: none"));
    }

    #[test]
    fn a_draft_of_fewer_tokens_is_warned_of() {
        let target = target();
        let whole = GlideConfig::for_target(&target, None);
        let part = GlideConfig { draft_vocab_size: Some(40), ..whole.clone() };
        let warnings = |config: &GlideConfig| fit(Profile::Longspec, config, &target).warnings;
        assert!(warnings(&whole).is_empty());
        let told = warnings(&part).join("; ");
        assert!(told.contains("`draft_vocab_size`"), "{told}");
    }
}
