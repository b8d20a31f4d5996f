//! Sizes and modes of a GLIDE layer, as written in the draft's `config.json`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::{TargetConfig, limits};
use crate::error::Problems;

/// Which published behaviour to reproduce number for number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Compat {
    /// The released LongSpec training: 20 tensors of which 4 are dead, one delay per forward.
    Longspec,
}

/// What stands between the layer and the target's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FinalNorm {
    /// Nothing, as published.
    #[default]
    None,
    /// The target's frozen final norm.
    Target,
    /// An own norm that starts as a copy of the target's.
    Trained,
}

/// A GLIDE layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GlideConfig {
    /// `H`
    pub hidden_size: usize,
    /// `I`
    pub intermediate_size: usize,
    /// `N`
    pub num_attention_heads: usize,
    /// `K`
    pub num_key_value_heads: usize,
    /// `D`
    pub head_dim: usize,
    /// `V`, of the target: a draft proposes target tokens.
    pub vocab_size: usize,
    /// Added under the root of every norm.
    pub rms_norm_eps: f64,
    /// Bias on the three MLP projections.
    pub mlp_bias: bool,
    /// Self-attention reach `W`: `W + 1` keys are visible.
    pub self_window: usize,
    /// Draft length `G` that delays are trained for.
    pub gamma: usize,
    /// Final norm.
    pub final_norm: FinalNorm,
    /// `None` is the default mode.
    pub compat: Option<Compat>,
    /// Deviation of freshly drawn matrices.
    pub initializer_range: f64,
    /// Tokens that it learned to propose, the most frequent ones of its text; all of the target's if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_vocab_size: Option<usize>,
}

impl GlideConfig {
    /// Published reach of the self-attention.
    pub const SELF_WINDOW: usize = 512;

    /// The layer that fits a target. Compat takes `D = H/N`, trains delays to 4 and has no final
    /// norm; the default mode takes the target's own head dim and delays to 5.
    pub fn for_target(target: &TargetConfig, compat: Option<Compat>) -> Self {
        let head_dim = match compat {
            Some(Compat::Longspec) => target.hidden_size / target.num_attention_heads,
            None => target.last_heads().head_dim,
        };
        Self {
            hidden_size: target.hidden_size,
            intermediate_size: target.intermediate_size,
            num_attention_heads: target.num_attention_heads,
            num_key_value_heads: target.last_heads().kv_heads,
            head_dim,
            vocab_size: target.vocab_size,
            rms_norm_eps: target.rms_norm_eps,
            mlp_bias: target.mlp_bias,
            self_window: Self::SELF_WINDOW,
            gamma: if compat.is_some() { 4 } else { 5 },
            final_norm: FinalNorm::None,
            compat,
            initializer_range: target.initializer_range,
            draft_vocab_size: None,
        }
    }

    /// `N·D`
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// `K·D`
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// What keeps any such layer from a target: it has no keys and values to attend to.
    pub fn problems_of(target: &TargetConfig) -> Problems {
        let mut problems = Problems::default();
        if target.parts.latent.is_some() {
            problems.push(
                "the layer attends to the target's keys and values: those of latent attention \
                 (`kv_lora_rank`) are not cached",
            );
        }
        if target.last_attention_layer().is_none() {
            problems.push("the layer attends to the target's keys and values: no layer has any");
        }
        problems
    }

    /// What does not fit the target, or itself.
    pub fn problems_with(&self, target: &TargetConfig) -> Problems {
        let mut problems = Self::problems_of(target);
        problems.push_unlike_target(&[
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("num_key_value_heads", self.num_key_value_heads, target.last_heads().kv_heads),
            ("head_dim", self.head_dim, target.last_heads().head_dim),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ]);
        if self.num_key_value_heads == 0
            || !self.num_attention_heads.is_multiple_of(self.num_key_value_heads)
        {
            problems.push(format!(
                "`num_key_value_heads` = {} does not divide `num_attention_heads` = {}",
                self.num_key_value_heads, self.num_attention_heads
            ));
        }
        limits::check(
            &mut problems,
            &[
                ("intermediate_size", self.intermediate_size, limits::INNER),
                ("num_attention_heads", self.num_attention_heads, limits::HEADS),
                ("self_window", self.self_window, limits::WINDOW),
                ("gamma", self.gamma, limits::DRAFT_LENGTH),
                ("draft_vocab_size", self.draft_vocab_size.unwrap_or(1), limits::VOCABULARY),
            ],
        );
        limits::norm_eps(&mut problems, self.rms_norm_eps);
        if self.compat.is_some() && self.final_norm != FinalNorm::None {
            problems.push("`compat: longspec` has no final norm: set `final_norm: none`");
        }
        problems
    }
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
    fn an_epsilon_that_norms_cannot_add_is_refused() {
        let target = target();
        for rms_norm_eps in [0.0, -1e-6, 1.0, f64::NAN] {
            let config = GlideConfig { rms_norm_eps, ..GlideConfig::for_target(&target, None) };
            let text = config.problems_with(&target).to_string();
            assert!(text.contains(&format!("`rms_norm_eps` = {rms_norm_eps} is not")), "{text}");
        }
    }

    #[test]
    fn absurd_sizes_are_refused_before_anything_is_made_of_them() {
        let target = target();
        let fitting = GlideConfig::for_target(&target, None);
        assert_eq!(fitting.problems_with(&target), Problems::default());
        for (name, config) in [
            ("self_window", GlideConfig { self_window: 1 << 24, ..fitting.clone() }),
            ("self_window", GlideConfig { self_window: 0, ..fitting.clone() }),
            ("gamma", GlideConfig { gamma: 1 << 40, ..fitting.clone() }),
            ("draft_vocab_size", GlideConfig { draft_vocab_size: Some(0), ..fitting.clone() }),
            ("intermediate_size", GlideConfig { intermediate_size: 1 << 60, ..fitting.clone() }),
            (
                "num_attention_heads",
                GlideConfig { num_attention_heads: 1 << 60, ..fitting.clone() },
            ),
        ] {
            let text = config.problems_with(&target).to_string();
            assert!(
                text.contains(&format!("`{name}` = ")) && text.contains("between 1 and"),
                "{text}"
            );
        }
    }
}
