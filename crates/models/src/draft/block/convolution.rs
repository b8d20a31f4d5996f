//! Short causal convolutions along the slots of a block, with kernels that follow the input.
//!
//! ```text
//! δ       = kernel_projection(z)                   [2 sides, K taps, H/g groups] of every row
//! conv(y) = Σ_t (base[side, t] + δ[side, t, ⌊c/g⌋]) · y_{j−t,c}        y before slot 0 is 0
//! ```
//!
//! Side 0 stands before a sublayer, side 1 after it, both with the kernels of the sublayer's input.

use candle_core::Tensor;

use super::config::ConvolutionSizes;
use crate::draft::DraftWeights;
use crate::error::Result;

/// The convolutions of one sublayer for some rows.
pub(super) struct Convolution<'a> {
    /// `[2, K, H]`
    base: &'a Tensor,
    /// `[R, 2·K·H/g]`
    delta: Tensor,
    sizes: ConvolutionSizes,
    slots: usize,
}

impl<'a> Convolution<'a> {
    /// The kernels that rows `z` `[R, H]` of blocks of `slots` slots ask for.
    pub(super) fn new(
        weights: &'a DraftWeights,
        module: &str,
        sizes: ConvolutionSizes,
        (z, slots): (&Tensor, usize),
    ) -> Result<Self> {
        let base = weights.tensor(&format!("{module}.base_kernel"))?;
        let delta = weights.project(z, &format!("{module}.kernel_projection"))?;
        Ok(Self { base, delta, sizes, slots })
    }

    /// `conv(y, side)`.
    ///
    /// # Shapes
    /// - `y`: `[R, H]` → `[R, H]`
    pub(super) fn apply(&self, y: &Tensor, side: usize) -> Result<Tensor> {
        let (rows, width) = y.dims2()?;
        let (taps, group) = (self.sizes.kernel_size, self.sizes.group_size);
        let groups = width / group;
        let term = |tap: usize| -> Result<Tensor> {
            let shifted = self.shifted(y, tap)?;
            let base = self.base.narrow(0, side, 1)?.narrow(1, tap, 1)?.reshape(width)?;
            let delta = self.delta.narrow(1, (side * taps + tap) * groups, groups)?;
            let grouped = shifted.reshape((rows, groups, group))?;
            let computed = grouped.broadcast_mul(&delta.reshape((rows, groups, 1))?)?;
            Ok((shifted.broadcast_mul(&base)? + computed.reshape((rows, width))?)?)
        };
        (1..taps.min(self.slots)).try_fold(term(0)?, |sum, tap| Ok((sum + term(tap)?)?))
    }

    /// Row `j − tap` of the same block in place of row `j`.
    fn shifted(&self, y: &Tensor, tap: usize) -> Result<Tensor> {
        if tap == 0 {
            return Ok(y.clone());
        }
        let (rows, width) = y.dims2()?;
        let blocks = rows / self.slots;
        let y = y.reshape((blocks, self.slots, width))?;
        let before = Tensor::zeros((blocks, tap, width), y.dtype(), y.device())?;
        let kept = y.narrow(1, 0, self.slots - tap)?;
        Ok(Tensor::cat(&[&before, &kept], 1)?.reshape((rows, width))?)
    }
}
