//! Short causal convolutions along the slots of blocks, with kernels that follow the input.
//!
//! ```text
//! kernel_j[t, c] = base[side, t, c] + δ_j[side, t, ⌊c/g⌋]
//! out_j          = Σ_t kernel_j[t] ∘ y_{j−t}             y before the first slot of a block is 0
//! ```
//!
//! Backward: `dy_j = Σ_t kernel_{j+t}[t] ∘ g_{j+t}`, `dbase[t] = Σ_j g_j ∘ y_{j−t}`, and `dδ_j` sums the
//! same products over the channels of a group. Only the inputs are kept, also where tensor ops form both passes. On a
//! CPU sums over rows are formed of chunks of blocks in a fixed order.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::dispatch::fused;
use crate::graph::{differentiable, differentiable_new};
use crate::storage::with_each_f32;

/// Blocks of a parallel task, whose gradients of `base` are summed together.
const BLOCKS_PER_CHUNK: usize = 16;

/// Tensors of the size of `y` that the backward pass holds at most where tensor ops form it, with the gradient of `y` and
/// without that of the result.
pub const COMPOSED_GRADIENTS: usize = 3;

/// `out` for one of the sides, 0 or 1, of blocks of `slots` rows each.
///
/// # Shapes
/// - `y`: `[R, H]`, `base`: `[2, K, H]`, `delta`: `[R, 2·K·(H/g)]`, side first, then tap, then group
///   → `[R, H]`
///
/// # Errors
/// - shapes do not fit, or rows are no whole blocks
pub fn block_convolution(
    y: &Tensor,
    base: &Tensor,
    delta: &Tensor,
    (slots, side): (usize, usize),
) -> Result<Tensor> {
    let sizes = Sizes::new(y, base, delta, (slots, side))?;
    if !fused(&[y, base, delta]) {
        let inputs = [y.detach(), base.detach(), delta.detach()];
        let out = sizes.composed(&inputs[0], &inputs[1], &inputs[2])?;
        return differentiable_new("block_convolution", [y, base, delta], out, move |gradient| {
            sizes.composed_gradients(&inputs, gradient)
        });
    }
    let (y, base, delta) = (y.contiguous()?, base.contiguous()?, delta.contiguous()?);
    let detached = [y.detach(), base.detach(), delta.detach()];
    let mut out = vec![0.0_f32; y.elem_count()];
    with_each_f32(detached.each_ref(), |inputs| {
        let of_block = slots * sizes.width;
        out.par_chunks_mut(of_block).enumerate().for_each(|(block, out)| {
            sizes.forward(inputs, block, out);
        });
        Ok(())
    })?;
    let out = Tensor::from_vec(out, y.shape(), y.device())?;
    differentiable("block_convolution", [&y, &base, &delta], out, move |gradient| {
        sizes.backward(&detached, &gradient.contiguous()?)
    })
}

/// [`block_convolution`] from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`block_convolution`]
pub fn reference(
    y: &Tensor,
    base: &Tensor,
    delta: &Tensor,
    (slots, side): (usize, usize),
) -> Result<Tensor> {
    Sizes::new(y, base, delta, (slots, side))?.composed(y, base, delta)
}

#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    width: usize,
    taps: usize,
    groups: usize,
    slots: usize,
    side: usize,
}

impl Sizes {
    fn new(
        y: &Tensor,
        base: &Tensor,
        delta: &Tensor,
        (slots, side): (usize, usize),
    ) -> Result<Self> {
        let ((rows, width), (sides, taps, channels)) = (y.dims2()?, base.dims3()?);
        let (delta_rows, kernels) = delta.dims2()?;
        let groups = kernels / (2 * taps).max(1);
        let fits = sides == 2 && side < 2 && channels == width && delta_rows == rows;
        let grouped = groups > 0 && groups * 2 * taps == kernels && width.is_multiple_of(groups);
        if !fits || !grouped || slots == 0 || !rows.is_multiple_of(slots) {
            bail!(
                "block convolution: side {side} of {:?} and {:?} for {:?} in blocks of {slots}",
                base.shape(),
                delta.shape(),
                y.shape()
            );
        }
        Ok(Self { rows, width, taps, groups, slots, side })
    }

    /// Rows of a block.
    fn block(&self, block: usize) -> Range<usize> {
        block * self.slots..(block + 1) * self.slots
    }

    /// Where the row's computed kernels of a tap begin.
    fn delta_at(&self, row: usize, tap: usize) -> usize {
        ((row * 2 + self.side) * self.taps + tap) * self.groups
    }

    fn base_of<'a>(&self, base: &'a [f32], tap: usize) -> &'a [f32] {
        &base[(self.side * self.taps + tap) * self.width..][..self.width]
    }

    /// Calls `f` with row, tap and the row that the tap reads, for all of a block that exist.
    fn each_term(&self, block: usize, mut f: impl FnMut(usize, usize, usize)) {
        let rows = self.block(block);
        for row in rows.clone() {
            for tap in 0..self.taps.min(row - rows.start + 1) {
                f(row, tap, row - tap);
            }
        }
    }

    fn forward(&self, [y, base, delta]: [&[f32]; 3], block: usize, out: &mut [f32]) {
        let (width, group, first) = (self.width, self.width / self.groups, block * self.slots);
        self.each_term(block, |row, tap, read| {
            let out = &mut out[(row - first) * width..][..width];
            let (y, base) = (&y[read * width..][..width], self.base_of(base, tap));
            let delta = &delta[self.delta_at(row, tap)..][..self.groups];
            for (channel, ((out, y), base)) in out.iter_mut().zip(y).zip(base).enumerate() {
                *out += (base + delta[channel / group]) * y;
            }
        });
    }

    fn backward(&self, inputs: &[Tensor; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let (width, of_delta) = (self.width, 2 * self.taps * self.groups);
        let (mut dy, mut d_delta) = (vec![0.0; self.rows * width], vec![0.0; self.rows * of_delta]);
        let rows = BLOCKS_PER_CHUNK * self.slots;
        let [y, base, delta] = inputs;
        let parts: Vec<Vec<f32>> = with_each_f32([y, base, delta, gradient], |values| {
            let [y, base, delta, gradient] = values;
            let chunks = dy.par_chunks_mut(rows * width);
            let chunks = chunks.zip(d_delta.par_chunks_mut(rows * of_delta)).enumerate();
            let part = |(chunk, (dy, d_delta)): (usize, (&mut [f32], &mut [f32]))| {
                self.chunk_gradients([y, base, delta], gradient, chunk, (dy, d_delta))
            };
            Ok(chunks.map(part).collect())
        })?;
        let mut d_base = vec![0.0_f32; 2 * self.taps * width];
        let own = &mut d_base[self.side * self.taps * width..][..self.taps * width];
        for part in &parts {
            own.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        }
        let device = gradient.device();
        Ok([
            Some(Tensor::from_vec(dy, (self.rows, width), device)?),
            Some(Tensor::from_vec(d_base, (2, self.taps, width), device)?),
            Some(Tensor::from_vec(d_delta, (self.rows, of_delta), device)?),
        ])
    }

    /// Gradients of a chunk of blocks; those of `base` come back, `[K, H]`.
    fn chunk_gradients(
        &self,
        [y, base, delta]: [&[f32]; 3],
        gradient: &[f32],
        chunk: usize,
        (dy, d_delta): (&mut [f32], &mut [f32]),
    ) -> Vec<f32> {
        let (width, group) = (self.width, self.width / self.groups);
        let first = chunk * BLOCKS_PER_CHUNK;
        let origin = first * self.slots;
        let mut d_base = vec![0.0_f32; self.taps * width];
        for block in first..first + dy.len() / (self.slots * width) {
            self.each_term(block, |row, tap, read| {
                let g = &gradient[row * width..][..width];
                let (y, base) = (&y[read * width..][..width], self.base_of(base, tap));
                let at = self.delta_at(row, tap);
                let delta = &delta[at..][..self.groups];
                let dy = &mut dy[(read - origin) * width..][..width];
                let d_base = &mut d_base[tap * width..][..width];
                let d_delta =
                    &mut d_delta[at - origin * 2 * self.taps * self.groups..][..self.groups];
                for channel in 0..width {
                    let product = g[channel] * y[channel];
                    dy[channel] += (base[channel] + delta[channel / group]) * g[channel];
                    d_base[channel] += product;
                    d_delta[channel / group] += product;
                }
            });
        }
        d_base
    }

    fn composed(&self, y: &Tensor, base: &Tensor, delta: &Tensor) -> Result<Tensor> {
        let term = |tap| self.moved(y, tap, Way::Down)? * self.kernel(base, delta, tap)?;
        let sum = (1..self.reached()).try_fold(term(0)?, |sum, tap| sum + term(tap)?)?;
        sum.reshape((self.rows, self.width))
    }

    /// The gradients of [`Self::composed`], tap by tap.
    fn composed_gradients(
        &self,
        [y, base, delta]: &[Tensor; 3],
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let Self { rows, width, taps, groups, side, .. } = *self;
        let by_blocks = self.moved(gradient, 0, Way::Up)?;
        let of_input = |tap| {
            let read = (&by_blocks * self.kernel(base, delta, tap)?)?;
            self.moved(&read, tap, Way::Up)
        };
        let (mut dy, mut d_base, mut d_delta) = (of_input(0)?, Vec::new(), Vec::new());
        for tap in 0..self.reached() {
            if tap > 0 {
                dy = (dy + of_input(tap)?)?;
            }
            let products = (&by_blocks * self.moved(y, tap, Way::Down)?)?;
            d_base.push(products.reshape((rows, width))?.sum_keepdim(0)?);
            d_delta.push(products.reshape((rows, groups, width / groups))?.sum(2)?);
        }
        // The other side and taps that reach beyond a block have no gradient.
        let (before, after) = (side * taps, (2 - side) * taps - self.reached());
        let d_base = Tensor::cat(&d_base, 0)?.pad_with_zeros(0, before, after)?;
        let d_delta = Tensor::cat(&d_delta, 1)?;
        let d_delta = d_delta.pad_with_zeros(1, before * groups, after * groups)?;
        let d_base = d_base.reshape((2, taps, width))?;
        Ok([Some(dy.reshape((rows, width))?), Some(d_base), Some(d_delta)])
    }

    /// Taps that read a slot of a block.
    fn reached(&self) -> usize {
        self.taps.min(self.slots)
    }

    /// Rows moved by `tap` slots of their blocks, `[blocks, slots, H]`; zeros stand where none come from.
    fn moved(&self, rows: &Tensor, tap: usize, way: Way) -> Result<Tensor> {
        let blocks = rows.reshape((self.rows / self.slots, self.slots, self.width))?;
        let kept = self.slots - tap;
        match (tap, way) {
            (0, _) => Ok(blocks),
            (_, Way::Down) => blocks.narrow(1, 0, kept)?.pad_with_zeros(1, tap, 0),
            (_, Way::Up) => blocks.narrow(1, tap, kept)?.pad_with_zeros(1, 0, tap),
        }
    }

    /// The kernels of a tap, `[blocks, slots, H]`.
    fn kernel(&self, base: &Tensor, delta: &Tensor, tap: usize) -> Result<Tensor> {
        let Self { rows, width, taps, groups, slots, side } = *self;
        let base = base.narrow(0, side, 1)?.narrow(1, tap, 1)?;
        let delta = delta.narrow(1, (side * taps + tap) * groups, groups)?;
        let base = base.reshape((1, groups, width / groups))?;
        let kernel = base.broadcast_add(&delta.reshape((rows, groups, 1))?)?;
        kernel.reshape((rows / slots, slots, width))
    }
}

/// Where the rows of a block are moved.
#[derive(Clone, Copy)]
enum Way {
    /// To later slots.
    Down,
    /// To earlier slots.
    Up,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::graph::Backward;
    use crate::memory::Budget;
    use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

    #[test]
    fn values_and_gradients_are_those_of_plain_tensor_ops() -> Result<()> {
        for (seed, blocks, slots, taps, groups, group) in
            [(1, 1, 1, 1, 1, 1), (2, 3, 4, 2, 3, 5), (3, 40, 8, 2, 4, 16), (4, 2, 2, 5, 2, 8)]
        {
            let mut noise = Noise::new(seed);
            let (rows, width) = (blocks * slots, groups * group);
            let y = noise.var(&[rows, width]);
            let (base, delta) =
                (noise.var(&[2, taps, width]), noise.var(&[rows, 2 * taps * groups]));
            for side in 0..2 {
                let direction = noise.tensor(&[rows, width]);
                let fast = block_convolution(&y, &base, &delta, (slots, side))?;
                let plain = reference(&y, &base, &delta, (slots, side))?;
                let variables = [("y", &y), ("base", &base), ("delta", &delta)];
                assert_alike(&variables, &direction, [&fast, &plain], (1e-6, 1e-5));
                let on_gpu = emulated(|| block_convolution(&y, &base, &delta, (slots, side)))?;
                assert_alike(&variables, &direction, [&on_gpu, &plain], (1e-6, 1e-5));
            }
        }
        Ok(())
    }

    #[test]
    fn a_gpu_keeps_inputs_alone_and_its_backward_pass_holds_few_tensors() -> Result<()> {
        let (rows, width, taps, groups) = (40 * 8, 64, 2, 2);
        let mut noise = Noise::new(9);
        let (y, base) = (noise.var(&[rows, width]), noise.var(&[2, taps, width]));
        let delta = noise.var(&[rows, 2 * taps * groups]);
        let direction = noise.tensor(&[rows, width]);
        let of_result = 4 * rows * width;
        let budget = Budget::new(1 << 30);
        let own = budget.within(|| {
            let own = emulated(|| block_convolution(&y, &base, &delta, (8, 1)))?;
            let held = budget.held();
            assert!((of_result..of_result * 21 / 20).contains(&held), "{held} of {of_result}");
            Ok::<_, candle_core::Error>(own)
        })?;
        let inputs = [y.detach(), base.detach(), delta.detach()];
        let sizes = Sizes::new(&y, &base, &delta, (8, 1))?;
        let budget = Budget::new(1 << 30);
        let gradients = budget.within(|| sizes.composed_gradients(&inputs, &direction))?;
        let (most, planned) = (budget.most_held(), COMPOSED_GRADIENTS * of_result);
        assert!((planned * 97 / 100..planned * 11 / 10).contains(&most), "{most} of {planned}");
        // The graph's pass forms these.
        let of_graph = (own * &direction)?.sum_all()?.gradients()?;
        for (variable, gradient) in [&y, &base, &delta].into_iter().zip(gradients) {
            let own = of_graph.get(variable).expect("a gradient");
            assert_close("gradient", own, &gradient.expect("one"), 0.0);
        }
        Ok(())
    }

    #[test]
    fn reference_gradients_match_differences() {
        let mut noise = Noise::new(5);
        let inputs = [noise.tensor(&[6, 4]), noise.tensor(&[2, 2, 4]), noise.tensor(&[6, 8])];
        gradcheck(&inputs, |t| reference(&t[0], &t[1], &t[2], (3, 1)));
    }

    #[test]
    fn a_row_sees_no_row_of_another_block() -> Result<()> {
        let mut noise = Noise::new(6);
        let (y, base) = (noise.tensor(&[6, 4]), noise.tensor(&[2, 3, 4]));
        let delta = noise.tensor(&[6, 12]);
        let whole = block_convolution(&y, &base, &delta, (3, 0))?;
        let (own, of_delta) = (y.narrow(0, 3, 3)?, delta.narrow(0, 3, 3)?);
        let alone = block_convolution(&own, &base, &of_delta, (3, 0))?;
        assert_close("block", &whole.narrow(0, 3, 3)?, &alone, 0.0);
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let mut noise = Noise::new(7);
        let (y, base) = (noise.tensor(&[6, 4]), noise.tensor(&[2, 2, 4]));
        let fits = |delta: &[usize], blocks| {
            block_convolution(&y, &base, &Noise::new(8).tensor(delta), blocks).is_ok()
        };
        assert!(fits(&[6, 8], (3, 1)));
        assert!(!fits(&[6, 8], (4, 1)), "no whole blocks");
        assert!(!fits(&[6, 8], (3, 2)), "no such side");
        assert!(!fits(&[6, 12], (3, 0)), "groups of uneven size");
        assert!(!fits(&[5, 8], (3, 0)) && !fits(&[6, 2], (3, 0)) && !fits(&[6, 8], (0, 0)));
    }
}
