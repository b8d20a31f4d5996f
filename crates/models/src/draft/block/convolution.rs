//! Short causal convolutions along the slots of a block, with kernels that follow the input.
//!
//! ```text
//! δ       = kernel_projection(z)                   [2 sides, K taps, H/g groups] of every row
//! conv(y) = Σ_t (base[side, t] + δ[side, t, ⌊c/g⌋]) · y_{j−t,c}        y before slot 0 is 0
//! ```
//!
//! Side 0 stands before a sublayer, side 1 after it, both with the kernels of the sublayer's input.

use candle_core::Tensor;
use longdraft_kernels::block_convolution::block_convolution;

use crate::draft::DraftWeights;
use crate::error::Result;

/// The convolutions of one sublayer for some rows.
pub(super) struct Convolution<'a> {
    /// `[2, K, H]`
    base: &'a Tensor,
    /// `[R, 2·K·H/g]`
    delta: Tensor,
    slots: usize,
}

impl<'a> Convolution<'a> {
    /// The kernels that rows `z` `[R, H]` of blocks of `slots` slots ask for.
    pub(super) fn new(
        weights: &'a DraftWeights,
        module: &str,
        (z, slots): (&Tensor, usize),
    ) -> Result<Self> {
        let base = weights.tensor(&format!("{module}.base_kernel"))?;
        let delta = weights.project(z, &format!("{module}.kernel_projection"))?;
        Ok(Self { base, delta, slots })
    }

    /// `conv(y, side)`.
    ///
    /// # Shapes
    /// - `y`: `[R, H]` → `[R, H]`
    pub(super) fn apply(&self, y: &Tensor, side: usize) -> Result<Tensor> {
        Ok(block_convolution(y, self.base, &self.delta, (self.slots, side))?)
    }
}
