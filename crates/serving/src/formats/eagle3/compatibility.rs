//! What of an EAGLE-3 draft each profile's engines compute: the table of features.

use longdraft_models::draft::eagle3::Eagle3Config;

use crate::Profile;
use crate::formats::{Fit, gguf};
use crate::target::TargetFacts;

pub(super) fn fit(profile: Profile, config: &Eagle3Config, target: &TargetFacts) -> Fit {
    let mut fit = Fit::default();
    fit.check_parts(&target.config().parts, None);
    let n = target.config().num_hidden_layers;
    let layers = config.target_layers;
    fit.refuse(
        layers.windows(2).all(|pair| pair[0] < pair[1]),
        "tapped layers do not ascend: engines hand features out in the order of the layers",
    );
    fit.refuse(
        layers.iter().all(|layer| layer.0 + 1 < n),
        "it taps the target's last layer, whose output engines and Hugging Face norm differently: \
         train on layers below it",
    );
    fit.refuse(
        config.dynamic_ntk.is_none(),
        "dynamic RoPE scaling: engines apply it by other rules (train with yarn or linear)",
    );
    fit.refuse(
        config.rope.divisors.is_none() || profile == Profile::Llamacpp,
        "RoPE divisors of a GGUF target have no key in config.json: give the target's Hugging Face \
         folder when training, or export to llamacpp",
    );
    let windowed = config.attention_window.is_some();
    let new_only = "only new versions of the engine compute it, older ones do so without a message";
    match profile {
        Profile::Vllm | Profile::Speculators | Profile::Hf => {
            fit.warn(!config.fc_norm, &format!("fc_norm: {new_only}"));
            fit.warn(!config.norm_output, &format!("norm_output: {new_only}"));
            fit.warn(!windowed, &format!("attention_window: {new_only}"));
            fit.refuse(
                profile != Profile::Speculators || config.hidden_size == config.target_hidden_size,
                "the speculators library builds `fc` from the draft's own width: a draft of another \
                 width than its target does not load there (vllm and sglang take it)",
            );
        }
        Profile::Sglang => {
            fit.refuse(
                !config.norm_before_residual,
                "norm_before_residual: SGLang computes another network without a message",
            );
            fit.warn(!config.fc_norm, &format!("fc_norm: {new_only}"));
            fit.warn(!config.norm_output, &format!("norm_output: {new_only}"));
            fit.refuse(!windowed, "attention_window: SGLang runs full attention");
        }
        Profile::Llamacpp | Profile::LlamacppHf => {
            fit.refuse(!config.fc_norm, "fc_norm: llama.cpp has no place for it");
            fit.refuse(!config.norm_output, "norm_output: llama.cpp has no place for it");
            fit.refuse(!windowed, "attention_window: llama.cpp runs full attention");
            fit.refuse(
                profile != Profile::Llamacpp || gguf::holds(config.rope.scaling),
                "llama.cpp scales the rotary embedding by yarn's usual rule alone: its files have no key for \
                 `attention_factor` and `truncate`",
            );
            fit.refuse(
                profile == Profile::Llamacpp
                    || Eagle3Config::published_layers(n).is_ok_and(|published| published == layers),
                "llama.cpp's converter takes the layers [2, n/2, n-3] whatever the folder says: \
                 export to llamacpp, which writes your layers",
            );
        }
        Profile::Longspec => {
            fit.refuse(false, "an EAGLE-3 draft is no GLIDE layer");
        }
    }
    if profile == Profile::Hf {
        fit.refuse(
            !config.norm_before_residual,
            "norm_before_residual: half of this profile's readers compute another network without a \
             message (export to vllm or llamacpp)",
        );
    }
    fit
}
