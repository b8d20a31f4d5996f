//! Floating-point operations of a step.
//!
//! A product `[r, i] · [i, o]` is `2 r i o` operations; a backward pass that reaches weights and inputs
//! is two more products, one that stops at the weights one more.

use longdraft_models::TargetConfig;
use longdraft_models::config::Mixer;
use longdraft_models::weights::TensorSpec;

/// Operations of the target's forward pass over a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct OfTarget {
    /// `2` for every value of the matrices that the token visits, and `6` for every value of recurrent states.
    pub(crate) products: f64,
    /// Two products over the keys that it sees on average.
    pub(crate) attention: f64,
}

impl OfTarget {
    /// In a document of so many tokens a token sees half of them, in a layer with a window at most the window.
    pub(crate) fn new(config: &TargetConfig, specs: &[TensorSpec], document_tokens: u64) -> Self {
        let experts = config.experts.as_ref();
        let share = experts.map_or(1.0, |e| e.num_experts_per_tok as f64 / e.num_experts as f64);
        let of_spec = |spec: &TensorSpec| {
            let values: f64 = spec.shape.iter().map(|size| *size as f64).product();
            if spec.name.contains(".experts.") { share * values } else { values }
        };
        let layers =
            specs.iter().filter(|spec| spec.name.contains(".layers.") && spec.shape.len() == 2);
        // The delta rule reads and corrects its state: three products of a row with it.
        let states = 6.0 * config.state_values() as f64;
        let half = document_tokens as f64 / 2.0;
        let seen = |layer: usize| match config.window_of(layer) {
            _ if config.mixer_of(layer) != Mixer::Attention => 0.0,
            Some(window) => half.min(window as f64),
            None => half,
        };
        let seen: f64 = (0..config.num_hidden_layers).map(seen).sum();
        Self {
            products: 2.0 * layers.map(of_spec).sum::<f64>() + states,
            attention: 4.0 * seen * config.query_size() as f64,
        }
    }

    pub(crate) fn total(&self) -> f64 {
        self.products + self.attention
    }
}
