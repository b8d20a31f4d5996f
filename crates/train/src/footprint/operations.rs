//! Operations of training on a token, by the kernels that make them.

/// Floating-point operations of training on a token, and what else tells how long a GPU takes for them. A product
/// `[r, i] · [i, o]` is `2 r i o`; attention counts the keys that a query sees on average, two products forward and five
/// backward.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Operations {
    /// Products with the draft's matrices, but for heads.
    pub forward: f64,
    /// Those of their gradients.
    pub backward: f64,
    /// Products with heads: logits of draft and teacher, and gradients.
    pub loss: f64,
    /// Attention.
    pub attention: f64,
    /// Its gradients.
    pub attention_backward: f64,
    /// Logits that the loss forms.
    pub logits: f64,
    /// Rows of a chunk of the loss; 0: the loss is not cut.
    pub chunk: u64,
    /// How often a row goes through the draft's weights.
    pub passes: f64,
}

impl Operations {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.forward + self.backward + self.loss + self.attention + self.attention_backward
    }
}
