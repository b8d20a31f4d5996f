//! The speculators library's loader: names as they are, what is left over is dropped with a warning,
//! what is missing is drawn at random with a warning.

use serde_json::Value;

use super::{Fate, is_parameter};

/// What becomes of a tensor.
pub(crate) fn fate(name: &str, config: &Value) -> Fate {
    if matches!(name, "d2t" | "t2d") || is_parameter(&super::fused(name), config, "layers.0.") {
        return Fate::Loaded(name.to_owned());
    }
    if name.starts_with("verifier_") {
        return Fate::Ignored("read anew from the verifier");
    }
    Fate::Ignored("reported as unexpected and dropped")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_its_own_names_are_loaded() {
        let loaded = |name: &str| matches!(fate(name, &json!({})), Fate::Loaded(_));
        for name in ["layers.0.mlp.up_proj.weight", "fc.weight", "lm_head.weight", "d2t", "t2d"] {
            assert!(loaded(name), "{name}");
        }
        for name in ["midlayer.mlp.up_proj.weight", "verifier_lm_head.weight", "model.fc.weight"] {
            assert!(!loaded(name), "{name}");
        }
    }
}
