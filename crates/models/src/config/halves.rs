//! Which parts of a layer compute in bf16 where a target that does not train multiplies in it, on NVIDIA GPUs.

use super::{Activation, Mixer, TargetConfig};

impl TargetConfig {
    /// Whether kernels attend to bf16 keys and values as they lie: scores are neither bent nor share their softmax, and
    /// rows are not latent.
    pub fn reads_half_keys(&self) -> bool {
        let parts = &self.parts;
        parts.latent.is_none() && parts.attention_softcap.is_none() && !parts.sinks
    }

    /// Whether the heads of layer `index` are bf16: nothing is done with them but what kernels do.
    pub fn has_half_heads(&self, index: usize) -> bool {
        let parts = &self.parts;
        let grows =
            parts.query_growth.is_some_and(|growth| !growth.only_still || parts.is_still(index));
        let scales = parts.query_factor(self.heads_of(index).head_dim).is_some();
        let attends = self.mixer_of(index) == Mixer::Attention && self.reads_half_keys();
        attends && !grows && !scales && !parts.output_gate
    }

    /// Whether the feed-forward part of layer `index` takes bf16 states: a router reads f32.
    pub fn has_half_mlp(&self, index: usize) -> bool {
        self.experts_in(index).is_none() && self.parts.activation == Activation::Silu
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(family: &str, more: &Value) -> TargetConfig {
        let mut config = json!({
            "model_type": family, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "tie_word_embeddings": true,
        });
        let more = more.as_object().cloned().unwrap_or_default();
        config.as_object_mut().expect("an object").extend(more);
        TargetConfig::from_json(&config).expect("a configuration")
    }

    #[test]
    fn plain_layers_are_bf16_and_routers_read_f32() {
        for family in ["llama", "qwen2", "qwen3"] {
            let plain = config(family, &json!({}));
            assert!(plain.has_half_heads(1) && plain.has_half_mlp(1), "{family}");
        }
        let mixture = config(
            "qwen3_moe",
            &json!({
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "norm_topk_prob": true, "decoder_sparse_step": 1,
            }),
        );
        assert!(mixture.has_half_heads(0) && !mixture.has_half_mlp(0));
    }

    #[test]
    fn what_kernels_do_not_do_with_heads_is_done_in_f32() {
        let plain = config("llama", &json!({}));
        let with = |change: fn(&mut TargetConfig)| {
            let mut config = plain.clone();
            change(&mut config);
            (config.reads_half_keys(), config.has_half_heads(0))
        };
        assert_eq!(with(|config| config.parts.attention_softcap = Some(50.0)), (false, false));
        assert_eq!(with(|config| config.parts.sinks = true), (false, false));
        // These change queries, or what is attended to, but not how keys are read.
        assert_eq!(with(|config| config.parts.query_scalar = Some(4.0)), (true, false));
        assert_eq!(with(|config| config.parts.query_scalar = Some(16.0)), (true, true));
        assert_eq!(with(|config| config.parts.output_gate = true), (true, false));
    }
}
