//! What the layers of a family do, part by part, where they differ from a plain Llama's.

use longdraft_kernels::attention::Reach;
use longdraft_kernels::experts::SigmoidChoice;
use longdraft_kernels::rope::Rope;
use longdraft_kernels::swiglu::Clamped;

use super::experts::ExpertsConfig;
use super::latent::LatentConfig;
use super::limits;
use super::mixers::{DeltaNetConfig, Mixer, ShortConvolutionConfig};
use super::rope::RopeParameters;
use super::shared_keys::LayerHeads;
use crate::error::{Problems, Result};

/// Where a layer's norms stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormPlaces {
    /// Before attention and before the feed-forward part.
    #[default]
    Before,
    /// Before and after each of the two (Gemma).
    BeforeAndAfter,
    /// The same places under other names (GLM-4).
    BeforeAndAfterOfGlm,
    /// After each of the two alone (OLMo 2).
    After,
}

/// Norms of queries and keys before rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QkNorm {
    /// None.
    #[default]
    None,
    /// Over each head, with weights `[D]`.
    PerHead,
    /// Over all heads together, with weights `[N·D]` and `[K·D]` (OLMo 2).
    Whole,
    /// Over each head without weights, in layers with rotary embedding (Llama 4, which norms after it: turning
    /// changes no length).
    Unweighted,
}

/// Frequencies for two lengths of a sequence (Ding et al. 2024, <https://arxiv.org/abs/2402.13753>): those of a
/// long one are the plain ones divided by `long`, those of a short one by `short`. Which of them hold is decided
/// once a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// `[R/2]`
    pub short: Vec<f32>,
    /// `[R/2]`
    pub long: Vec<f32>,
    /// Longest sequence that is short, in tokens.
    pub original_context: usize,
    /// Multiplies cos and sin of both.
    pub attention_factor: f64,
}

/// What of a head turns, and in which layers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rotary {
    /// `R`, the first dimensions of a head, which turn; all without it.
    pub dimensions: Option<usize>,
    /// Whether neighbours turn together, not halves.
    pub neighbours: bool,
    /// Layers without rotary embedding; empty: none is.
    pub still: Vec<bool>,
    /// Frequencies by the sequence's length.
    pub by_length: Option<LongRope>,
}

/// What routers of a mixture do otherwise than softmax over all experts.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Router {
    /// Nothing.
    #[default]
    Softmax,
    /// A bias on the logits; the softmax of those chosen weighs (gpt-oss).
    Biased,
    /// Scores by sigmoid, a correction of the choice, groups of experts (DeepSeek-V3, GLM-4.5).
    Sigmoid {
        /// Groups of neighbouring experts.
        groups: usize,
        /// How many of them count for a token.
        kept_groups: usize,
        /// Factor of the weights.
        scale: f64,
    },
    /// `σ` of a chosen logit multiplies the expert's input (Llama 4).
    SigmoidOnInput,
    /// Softmax over all experts, weights times a factor; the expert that every token visits has no gate
    /// (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>).
    ScaledSoftmax {
        /// Factor of the weights.
        scale: f64,
    },
}

impl Router {
    /// The numbers of a choice with a correction `bias`, `[E]`, if the router has any.
    pub fn sigmoid(&self, bias: Vec<f32>) -> Option<SigmoidChoice> {
        match *self {
            Self::Sigmoid { groups, kept_groups, scale } => {
                Some(SigmoidChoice { bias, groups, kept_groups, scale: scale as f32 })
            }
            _ => None,
        }
    }

    /// Whether the expert that every token visits has a gate.
    pub fn gates_shared_expert(&self) -> bool {
        *self == Self::Softmax
    }
}

/// What the gate of an MLP goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// `z σ(z)`
    #[default]
    Silu,
    /// GELU, approximated by tanh.
    GeluTanh,
}

/// Queries that grow with their position: `q ← q (1 + β ln(1 + ⌊(t + t₀) / o⌋))` after rotary embedding
/// (Ministral 3; Llama 4 in layers without one, with `t₀ = 1`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// `β`
    pub beta: f64,
    /// `o`, in tokens.
    pub original_context: f64,
    /// `t₀`
    pub offset: u32,
    /// Whether only queries without rotary embedding grow.
    pub only_still: bool,
}

impl QueryGrowth {
    /// The factor at a position.
    pub fn at(&self, position: u32) -> f32 {
        let place = f64::from(position) + f64::from(self.offset);
        let steps = (place / self.original_context).floor();
        (1.0 + self.beta * steps.ln_1p()) as f32
    }
}

/// A table of parts, which a family's file fills in. The default is the plain Llama layer.
#[derive(Debug, Clone, PartialEq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of families")]
pub struct Parts {
    /// Where norms stand.
    pub norms: NormPlaces,
    /// Whether the files hold the weights of norms less 1.
    pub norms_less_one: bool,
    /// Tokens that the layers of [`Self::sliding`] see at most, the token itself among them.
    pub window: Option<usize>,
    /// Whether the window is a chunk: a token sees those of its own since the last multiple of it.
    pub chunked: bool,
    /// Whether a layer sees its window only; empty: none does.
    pub sliding: Vec<bool>,
    /// Rotary embedding of sliding layers, where it is another than that of full ones.
    pub sliding_rope: Option<RopeParameters>,
    /// `c` of attention scores `c tanh(s / c)`.
    pub attention_softcap: Option<f64>,
    /// `c` of logits `c tanh(z / c)`.
    pub logits_softcap: Option<f64>,
    /// Factor of embeddings.
    pub embedding_scale: Option<f64>,
    /// Factor of what attention and the feed-forward part add to the stream.
    pub residual_scale: Option<f64>,
    /// Divisor of logits.
    pub logits_divisor: Option<f64>,
    /// `a` of scores `q · k / √a`, where it is not the head dim.
    pub query_scalar: Option<f64>,
    /// How queries grow with their position.
    pub query_growth: Option<QueryGrowth>,
    /// What the gate of the MLP goes through.
    pub activation: Activation,
    /// Norms of queries and keys; the Qwen3 and Gemma 3 families have theirs by name.
    pub qk_norm: QkNorm,
    /// What of a head turns.
    pub rotary: Rotary,
    /// Whether each head's softmax has a logit without a value.
    pub sinks: bool,
    /// How experts are chosen.
    pub router: Router,
    /// Whether experts have biases.
    pub expert_biases: bool,
    /// Bounds of the experts' gates.
    pub clamped: Option<Clamped>,
    /// What mixes the tokens of each layer; empty: all attend.
    pub mixers: Vec<Mixer>,
    /// Of layers of [`Mixer::DeltaNet`].
    pub delta_net: Option<DeltaNetConfig>,
    /// Of layers of [`Mixer::Convolution`].
    pub convolution: Option<ShortConvolutionConfig>,
    /// Whether what heads attended to is multiplied by `σ` of a gate, whose rows stand after each head's of the
    /// query projection.
    pub output_gate: bool,
    /// Attention over latent rows, in layers that attend.
    pub latent: Option<LatentConfig>,
    /// Heads of every layer, where they differ; empty: they do not.
    pub heads: Vec<LayerHeads>,
    /// Layers from which on keys and values are those of the last earlier layer of the same kind.
    pub shared_keys_from: Option<usize>,
    /// Whether the MLPs of these layers are twice as wide.
    pub wide_after_sharing: bool,
    /// Whether values of full layers are their keys before norm and rotary embedding.
    pub values_are_keys: bool,
    /// Whether every head's values are divided by their root mean square.
    pub value_norm: bool,
    /// Values that a table holds of every token for every layer; 0: there is none.
    pub per_layer_input: usize,
    /// Tokens of that table.
    pub per_layer_vocabulary: usize,
    /// Whether a layer's output is multiplied by a number of its own.
    pub layer_scalars: bool,
}

impl Parts {
    /// Names what does not fit together.
    pub(super) fn check(&self, experts: Option<&ExpertsConfig>, problems: &mut Problems) {
        if let Some(rope) = &self.sliding_rope {
            rope.check(problems);
        }
        let (Router::Sigmoid { groups, kept_groups, .. }, Some(experts)) = (&self.router, experts)
        else {
            return;
        };
        let (count, each) = (experts.num_experts, experts.num_experts_per_tok);
        if *groups == 0 || !count.is_multiple_of(*groups) || !(1..=*groups).contains(kept_groups) {
            problems.push(format!(
                "{kept_groups} of {groups} groups of {count} experts (`topk_group`, `n_group`)"
            ));
        } else if count / groups * kept_groups < each {
            problems.push(format!(
                "`num_experts_per_tok` = {each}, but {kept_groups} of {groups} groups hold fewer of {count}"
            ));
        }
    }

    /// Whether layer `index` has no rotary embedding.
    pub fn is_still(&self, index: usize) -> bool {
        self.rotary.still.get(index).copied().unwrap_or(false)
    }

    /// How far back tokens see in layers with a window or chunk.
    pub fn reach(&self) -> Option<Reach> {
        self.window.map(|w| if self.chunked { Reach::Chunk(w) } else { Reach::Window(w) })
    }

    /// Dimensions of a head that turn.
    pub fn turning(&self, head_dim: usize) -> usize {
        self.rotary.dimensions.unwrap_or(head_dim)
    }

    /// Frequencies of heads of `head_dim`, of which some dimensions turn.
    pub(crate) fn build_rope(&self, rope: &RopeParameters, head_dim: usize) -> Result<Rope> {
        // Unweighted norms stand after the embedding and take a factor on cos and sin away.
        let rope = match self.qk_norm {
            QkNorm::Unweighted => &rope.of_unit_length(),
            _ => rope,
        };
        let rope = rope.build(self.turning(head_dim))?.within(head_dim)?;
        Ok(if self.rotary.neighbours { rope.of_neighbours() } else { rope })
    }

    /// Those of short and of long sequences, where they differ.
    pub(crate) fn build_by_length(
        &self,
        rope: &RopeParameters,
        head_dim: usize,
    ) -> Result<Option<[Rope; 2]>> {
        let Some(by_length) = &self.rotary.by_length else { return Ok(None) };
        // As in `build_rope`.
        let factor = match self.qk_norm {
            QkNorm::Unweighted => 1.0,
            _ => by_length.attention_factor,
        };
        let plain = self.build_rope(rope, head_dim)?.amplified(factor);
        let [short, long] =
            [&by_length.short, &by_length.long].map(|divisors| plain.clone().divided_by(divisors));
        Ok(Some([short?, long?]))
    }

    /// What mixes the tokens of layer `index`.
    pub fn mixer_of(&self, index: usize) -> Mixer {
        self.mixers.get(index).copied().unwrap_or_default()
    }

    /// The window of layer `index`, if it slides.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.sliding.get(index).copied().unwrap_or(false))
    }

    /// Rotary embedding of sliding layers, where it is another one.
    pub(crate) fn build_sliding_rope(&self, head_dim: usize) -> Result<Option<Rope>> {
        self.sliding_rope.as_ref().map(|rope| self.build_rope(rope, head_dim)).transpose()
    }

    /// Factor of queries that turns scores `q · k / √D` into those that are wanted, if they differ.
    pub fn query_factor(&self, head_dim: usize) -> Option<f64> {
        let factor = self.query_scalar.map(|scalar| (head_dim as f64 / scalar).sqrt());
        factor.filter(|factor| (factor - 1.0).abs() > f64::EPSILON)
    }

    /// Windows for the layers of which `slides` says so. None at all is the plain table: a window that no
    /// layer has is dropped.
    pub(super) fn set_windows(
        &mut self,
        window: Option<usize>,
        sliding: Vec<bool>,
        problems: &mut Problems,
    ) {
        if !sliding.contains(&true) {
            return;
        }
        match window {
            None => problems.push("layers have a sliding window, but `sliding_window` is null"),
            Some(window) => limits::check(problems, &[("sliding_window", window, limits::CONTEXT)]),
        }
        (self.window, self.sliding) = (window, sliding);
    }
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::rope::RopeScaling;

    use super::*;

    #[test]
    fn queries_grow_by_steps_of_the_original_context() {
        let growth =
            QueryGrowth { beta: 0.5, original_context: 10.0, offset: 0, only_still: false };
        assert!((growth.at(9) - 1.0).abs() < 1e-7);
        assert!((growth.at(10) - (1.0 + 0.5 * 2.0_f32.ln())).abs() < 1e-6);
        assert!((growth.at(39) - (1.0 + 0.5 * 4.0_f32.ln())).abs() < 1e-6);
        let later = QueryGrowth { offset: 1, ..growth };
        assert!((later.at(9) - growth.at(10)).abs() < 1e-7);
    }

    #[test]
    fn norms_after_the_embedding_take_its_factor_away() {
        let scaling = |attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: 64.0,
            attention_factor,
            truncate: true,
        };
        let rope = |qk_norm, factor| {
            let stretched =
                RopeParameters { scaling: scaling(factor), ..RopeParameters::plain(1e4) };
            let parts = Parts { qk_norm, ..Parts::default() };
            parts.build_rope(&stretched, 16).expect("frequencies")
        };
        assert_eq!(rope(QkNorm::Unweighted, 1.5), rope(QkNorm::None, 1.0));
        assert_ne!(rope(QkNorm::PerHead, 1.5), rope(QkNorm::PerHead, 1.0));
    }

    #[test]
    fn a_query_scalar_that_is_the_head_dim_changes_nothing() {
        let parts = |scalar| Parts { query_scalar: Some(scalar), ..Parts::default() };
        assert_eq!(parts(16.0).query_factor(16), None);
        assert_eq!(parts(4.0).query_factor(16), Some(2.0));
        assert_eq!(Parts::default().query_factor(16), None);
    }
}
