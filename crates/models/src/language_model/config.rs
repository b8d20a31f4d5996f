//! Sizes and switches of the decoder.

use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What stretches RoPE's base when a sequence is longer than the reference length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RopeRule {
    /// `base (T/R)^(hd/(hd−2))` for `T > R`, in training as well.
    #[default]
    Ntk,
    /// The base always.
    None,
}

/// Rotary embedding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub rope_theta: f64,
    /// Longest sequence (R) that the base is meant for.
    pub reference_length: usize,
    /// What happens beyond it.
    pub rule: RopeRule,
    /// Leading dimensions of a head that turn (default: all).
    pub dimensions: Option<usize>,
}

impl Default for RopeConfig {
    fn default() -> Self {
        let rule = RopeRule::Ntk;
        Self { rope_theta: 10_000.0, reference_length: 1024, rule, dimensions: None }
    }
}

/// Between the two products of the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `max(x, 0)²`
    #[default]
    ReluSquared,
    /// `max(x, x/2)²`
    LeakyReluSquared,
}

impl Activation {
    /// Slope left of zero, before squaring.
    pub fn slope(self) -> f64 {
        match self {
            Self::ReluSquared => 0.0,
            Self::LeakyReluSquared => 0.5,
        }
    }
}

/// Which decoder is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DecoderArchitecture {
    /// The published baseline's: skips, mixes, gains, ReLU², soft-capped logits.
    #[default]
    Baseline,
    /// Llama's: norms with weights, SwiGLU, plain logits. A checkpoint is a Hugging Face folder.
    Llama,
}

/// The decoder; defaults are the published baseline's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub struct LanguageModelConfig {
    /// Layers and names of the tensors.
    pub architecture: DecoderArchitecture,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads; they share the width evenly.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Width of the MLP in widths of the model.
    pub mlp_mult: usize,
    /// Width of the MLP instead of `mlp_mult`.
    pub intermediate_size: Option<usize>,
    /// Between the MLP's products.
    pub activation: Activation,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Deviation of a tied embedding at the start.
    pub tied_embed_init_std: f64,
    /// Largest size of a logit (c).
    pub final_logit_softcapping: f64,
    /// Added to the mean square of every norm. Runs with different values are not comparable.
    pub rms_norm_eps: f64,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Gain of the queries at the start.
    pub qk_gain_init: f64,
    /// Start matrices of the blocks orthogonal instead of uniform.
    pub orthogonal_init: bool,
    /// Divide the normed input of block i by `sqrt(i + 1)`.
    pub depth_scaled_norm: bool,
    /// Take the part along a token's own value out of its attention output.
    pub exclusive_attention: bool,
}

impl Default for LanguageModelConfig {
    fn default() -> Self {
        Self {
            architecture: DecoderArchitecture::Baseline,
            vocab_size: 1024,
            num_hidden_layers: 9,
            hidden_size: 512,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            mlp_mult: 2,
            intermediate_size: None,
            activation: Activation::ReluSquared,
            tie_word_embeddings: true,
            tied_embed_init_std: 0.005,
            final_logit_softcapping: 30.0,
            rms_norm_eps: 1e-6,
            rope: RopeConfig::default(),
            qk_gain_init: 1.5,
            orthogonal_init: false,
            depth_scaled_norm: false,
            exclusive_attention: false,
        }
    }
}

impl LanguageModelConfig {
    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// Width of the MLP.
    pub fn mlp_width(&self) -> usize {
        self.intermediate_size.unwrap_or(self.mlp_mult.saturating_mul(self.hidden_size))
    }

    /// Whether it is a Llama.
    pub fn is_llama(&self) -> bool {
        self.architecture == DecoderArchitecture::Llama
    }

    /// Blocks whose output is kept for a later one.
    pub fn encoder_layers(&self) -> usize {
        if self.is_llama() { 0 } else { self.num_hidden_layers / 2 }
    }

    /// Dimensions of a head that RoPE turns.
    pub fn rope_dimensions(&self) -> usize {
        self.rope.dimensions.unwrap_or(self.head_dim())
    }

    /// RoPE's base for sequences or windows of a configured length, never that of a short last one.
    pub fn effective_rope_base(&self, length: usize) -> f64 {
        let RopeConfig { rope_theta: base, reference_length, rule, .. } = self.rope;
        let dimensions = self.rope_dimensions() as f64;
        if rule == RopeRule::None || length <= reference_length || dimensions <= 2.0 {
            return base;
        }
        let stretch = length as f64 / reference_length as f64;
        base * stretch.powf(dimensions / (dimensions - 2.0))
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> usize {
        let size = |spec: &crate::weights::TensorSpec| spec.shape.iter().product::<usize>();
        super::tensor_specs(self).iter().map(size).sum()
    }

    /// Multiplications and additions of forward and backward pass a token, at a sequence length:
    /// six a matrix entry, and the causal half of attention.
    pub fn training_operations_per_token(&self, sequence: usize) -> f64 {
        let head = self.vocab_size * self.hidden_size;
        let mlp_matrices = if self.is_llama() { 3 } else { 2 };
        let block = self.hidden_size * (2 * self.hidden_size + mlp_matrices * self.mlp_width())
            + 2 * self.hidden_size * self.num_key_value_heads * self.head_dim();
        let matrices = (head + self.num_hidden_layers * block) as f64;
        6.0 * matrices + 6.0 * (self.num_hidden_layers * sequence * self.hidden_size) as f64
    }

    /// Everything that makes no sense, by key of this section.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        // Token files hold 16 bits a token.
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 16),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("hidden_size", self.hidden_size, 1 << 16),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 12),
            ("mlp_mult", self.mlp_mult, 1 << 8),
            ("intermediate_size", self.mlp_width(), 1 << 20),
            ("rope.reference_length", self.rope.reference_length, 1 << 30),
        ];
        for (key, value, most) in sizes {
            rules.require((1..=most).contains(&value), key, format!("must be in 1 to {most}"));
        }
        let heads = self.num_attention_heads.max(1);
        rules.require(
            self.hidden_size.is_multiple_of(heads),
            "num_attention_heads",
            "must divide `hidden_size`",
        );
        let kv_heads = self.num_key_value_heads.max(1);
        rules.require(
            heads.is_multiple_of(kv_heads),
            "num_key_value_heads",
            "must divide `num_attention_heads`",
        );
        rules.require(
            self.head_dim().is_multiple_of(2),
            "num_attention_heads",
            "must leave heads of even width",
        );
        let turned = self.rope_dimensions();
        rules.require(
            turned >= 2 && turned.is_multiple_of(2) && turned <= self.head_dim(),
            "rope.dimensions",
            "must be even, at least 2 and at most the width of a head",
        );
        let positive = [
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope.rope_theta", self.rope.rope_theta),
        ];
        for (key, value) in positive {
            rules.require(value > 0.0 && value.is_finite(), key, "must be positive");
        }
        for (key, value) in
            [("tied_embed_init_std", self.tied_embed_init_std), ("qk_gain_init", self.qk_gain_init)]
        {
            rules.require(value.is_finite(), key, "must be a finite number");
        }
        if self.is_llama() {
            let default = Self::default();
            let nothing = "has no effect on `architecture: llama`: leave it out";
            rules.require(self.activation == default.activation, "activation", nothing);
            rules.require(!self.depth_scaled_norm, "depth_scaled_norm", nothing);
            rules.require(!self.exclusive_attention, "exclusive_attention", nothing);
            rules.require(self.rope.dimensions.is_none(), "rope.dimensions", nothing);
            let rule = "must be `none` for `architecture: llama`, whose base is the same at every \
                        length";
            rules.require(self.rope.rule == RopeRule::None, "rope.rule", rule);
        }
        rules.into_problems()
    }
}
