//! What the layers of a family do, part by part, where they differ from a plain Llama's.

use longdraft_kernels::rope::Rope;

use super::experts::ScoredRouter;
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

/// Queries that grow with their position: `q ← q (1 + β ln(1 + ⌊t / o⌋))` after rotary embedding
/// (Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// `β`
    pub beta: f64,
    /// `o`, in tokens.
    pub original_context: f64,
}

impl QueryGrowth {
    /// The factor at a position.
    pub fn at(&self, position: u32) -> f32 {
        let steps = (f64::from(position) / self.original_context).floor();
        (1.0 + self.beta * steps.ln_1p()) as f32
    }
}

/// A table of parts, which a family's file fills in. The default is the plain Llama layer.
#[derive(Debug, Clone, PartialEq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of the families")]
pub struct Parts {
    /// Where norms stand.
    pub norms: NormPlaces,
    /// Whether the files hold the weights of norms less 1.
    pub norms_less_one: bool,
    /// Tokens that the layers of [`Self::sliding`] see at most, the token itself among them.
    pub window: Option<usize>,
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
    /// `a` of scores `q · k / √a`, where it is not the head dim.
    pub query_scalar: Option<f64>,
    /// How queries grow with their position.
    pub query_growth: Option<QueryGrowth>,
    /// What the gate of the MLP goes through.
    pub activation: Activation,
    /// What mixes the tokens of each layer; empty: all attend.
    pub mixers: Vec<Mixer>,
    /// Of layers of [`Mixer::DeltaNet`].
    pub delta_net: Option<DeltaNetConfig>,
    /// Of layers of [`Mixer::Convolution`].
    pub convolution: Option<ShortConvolutionConfig>,
    /// Whether what heads attended to is multiplied by `σ` of a gate, whose rows stand after each head's of the
    /// query projection.
    pub output_gate: bool,
    /// Values of a head that are turned, the first ones; without it all.
    pub rotary_dim: Option<usize>,
    /// Attention over latent rows, in layers that attend.
    pub latent: Option<LatentConfig>,
    /// Routers whose scores are logistic, in groups.
    pub scored: Option<ScoredRouter>,
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
    /// What mixes the tokens of layer `index`.
    pub fn mixer_of(&self, index: usize) -> Mixer {
        self.mixers.get(index).copied().unwrap_or_default()
    }

    /// The window of layer `index`, if it slides.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.sliding.get(index).copied().unwrap_or(false))
    }

    /// Rotary embedding of sliding layers, where it is another one.
    ///
    /// # Errors
    /// - as [`RopeParameters::build`]
    pub fn build_sliding_rope(&self, head_dim: usize) -> Result<Option<Rope>> {
        Ok(self.sliding_rope.as_ref().map(|rope| rope.build(head_dim)).transpose()?)
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
    use super::*;

    #[test]
    fn queries_grow_by_steps_of_the_original_context() {
        let growth = QueryGrowth { beta: 0.5, original_context: 10.0 };
        assert!((growth.at(9) - 1.0).abs() < 1e-7);
        assert!((growth.at(10) - (1.0 + 0.5 * 2.0_f32.ln())).abs() < 1e-6);
        assert!((growth.at(39) - (1.0 + 0.5 * 4.0_f32.ln())).abs() < 1e-6);
    }

    #[test]
    fn a_query_scalar_that_is_the_head_dim_changes_nothing() {
        let parts = |scalar| Parts { query_scalar: Some(scalar), ..Parts::default() };
        assert_eq!(parts(16.0).query_factor(16), None);
        assert_eq!(parts(4.0).query_factor(16), Some(2.0));
        assert_eq!(Parts::default().query_factor(16), None);
    }
}
