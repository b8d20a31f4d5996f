//! Inputs that every token brings to every layer (Gemma 4): a table of them beside the embeddings, and what a layer
//! does with its own at its end.
//!
//! ```text
//! e = √P E_pl[token],  p = norm(W_pl x₀ / √H)  [L, P] each        x₀: the embedding as the first layer reads it
//! s = (e + p) / √2
//! x ← x + norm(W_proj (gelu(W_gate x) ∘ s_i)),  x ← a_i x         at the end of layer i
//! ```

use candle_core::Tensor;
use longdraft_kernels::geglu::geglu;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rms_norm::rms_norm;

use super::feed_forward::Projection;
use crate::error::Result;

/// What makes the inputs of a pass's tokens.
pub(super) struct PerLayerInputs {
    /// `[V, L P]`
    pub(super) table: Matrix,
    /// `[L P, H]`
    pub(super) projection: Matrix,
    /// `[P]`
    pub(super) norm: Tensor,
    pub(super) eps: f64,
}

impl PerLayerInputs {
    /// The inputs of tokens with embeddings `[T, H]`, `[T, L, P]`.
    pub(super) fn of(&self, ids: &[u32], embedded: &Tensor) -> Result<Tensor> {
        let (tokens, hidden) = embedded.dims2()?;
        let width = self.norm.dim(0)?;
        let of_table = self.table.rows(ids)?;
        let shape = (tokens, of_table.dim(1)? / width, width);
        let of_table = (of_table.reshape(shape)? * (width as f64).sqrt())?;
        let projected = self.projection.linear(embedded, None)?;
        let projected = (projected.reshape(shape)? * (hidden as f64).powf(-0.5))?;
        let normed = rms_norm(&projected, &self.norm, self.eps)?;
        Ok(((of_table + normed)? * 0.5_f64.sqrt())?)
    }
}

/// The end of a layer.
#[derive(Default)]
pub(super) struct LayerEnd {
    /// What it does with its inputs.
    pub(super) inputs: Option<InputGate>,
    /// `a`
    pub(super) scalar: Option<f64>,
}

/// Projections of a layer's inputs.
pub(super) struct InputGate {
    /// `[P, H]`
    pub(super) gate: Projection,
    /// `[H, P]`
    pub(super) projection: Projection,
    /// `[H]`
    pub(super) norm: Tensor,
    pub(super) eps: f64,
}

impl LayerEnd {
    /// What a layer puts out of its hidden states `[T, H]`; `inputs` are those of its tokens, `[T, P]`.
    pub(super) fn apply(&self, hidden: Tensor, inputs: Option<&Tensor>) -> Result<Tensor> {
        let mut hidden = hidden;
        if let (Some(own), Some(inputs)) = (&self.inputs, inputs) {
            let (weight, bias) = own.gate.map();
            let gated = geglu(&weight.linear(&hidden, bias)?, inputs)?;
            let (weight, bias) = own.projection.map();
            let added = rms_norm(&weight.linear(&gated, bias)?, &own.norm, own.eps)?;
            hidden = (hidden + added)?;
        }
        match self.scalar {
            Some(scalar) => Ok((hidden * scalar)?),
            None => Ok(hidden),
        }
    }
}
