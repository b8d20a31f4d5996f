//! What of a draft each profile's engines compute: the table of features.

use longdraft_models::config::TargetConfig;
use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::glide::{FinalNorm, GlideConfig};
use longdraft_models::error::Problems;

use crate::Profile;
use crate::target::TargetFacts;

/// What stands in the way, and what depends on the engine's version.
#[derive(Debug, Default)]
pub struct Fit {
    /// Features that the engines compute otherwise or refuse.
    pub refusals: Problems,
    /// Features that only some versions compute.
    pub warnings: Vec<String>,
}

impl Fit {
    fn refuse(&mut self, holds: bool, reason: &str) {
        if !holds {
            self.refusals.push(reason);
        }
    }

    fn warn(&mut self, holds: bool, reason: &str) {
        if !holds {
            self.warnings.push(reason.to_owned());
        }
    }
}

/// Whether an EAGLE-3 draft fits a profile.
pub fn eagle3(profile: Profile, config: &Eagle3Config, target: &TargetFacts) -> Fit {
    let mut fit = Fit::default();
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
                profile == Profile::Llamacpp || target.are_published(&layers),
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

/// Whether a GLIDE layer fits a profile.
pub fn glide(profile: Profile, config: &GlideConfig, target: &TargetConfig) -> Fit {
    let mut fit = Fit::default();
    fit.refuse(
        matches!(profile, Profile::Longspec | Profile::Hf),
        "no such engine runs a GLIDE layer: export to longspec (or hf), or decode with `longdraft \
         generate`",
    );
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
    fit.refuse(
        config.hidden_size == target.hidden_size
            && config.num_key_value_heads == target.num_key_value_heads,
        "the layer's sizes are not the target's",
    );
    fit
}
