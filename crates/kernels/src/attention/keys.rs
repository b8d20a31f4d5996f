//! How keys and values of a call lie in memory: as floats, or as blocks of 8 bits.
//!
//! A block is GGML's Q8_0: 32 values, an f16 scale before their signed bytes. A token's head is whole
//! blocks, so that what is written for a token depends on nothing else.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use half::f16;

use super::Dims;
use crate::gemm::{BlockFormat, Element, Mat};
use crate::simd::vectorised;
use crate::storage::with_f32;

/// Values of a block.
const BLOCK: usize = BlockFormat::Q8_0.values();
/// Bytes of a block.
const BYTES: usize = BlockFormat::Q8_0.bytes();
/// The largest code.
const LARGEST: f32 = 127.0;

/// Keys or values `[T, K, D]` of one call.
pub(super) trait Keys: Copy + Send + Sync {
    /// What a product reads.
    type Value: Element;

    /// Those of one head for a range of tokens, `[range, D]`; `wide` is for those that are not floats.
    fn tile<'s>(
        self,
        dims: Dims,
        range: &Range<usize>,
        kv_head: usize,
        wide: &'s mut Vec<f32>,
    ) -> Mat<'s, Self::Value>
    where
        Self: 's;

    /// One token's of one head as f32, `[D]`.
    fn row<'s>(self, dims: Dims, token: usize, kv_head: usize, wide: &'s mut Vec<f32>) -> &'s [f32]
    where
        Self: 's;
}

impl<T: Element> Keys for &[T] {
    type Value = T;

    fn tile<'s>(
        self,
        dims: Dims,
        range: &Range<usize>,
        kv_head: usize,
        _wide: &'s mut Vec<f32>,
    ) -> Mat<'s, T>
    where
        Self: 's,
    {
        super::tiled::key_tile(self, dims, range, kv_head)
    }

    fn row<'s>(self, dims: Dims, token: usize, kv_head: usize, wide: &'s mut Vec<f32>) -> &'s [f32]
    where
        Self: 's,
    {
        let values = &self[token * dims.kv_stride() + kv_head * dims.head_dim..][..dims.head_dim];
        if let Some(values) = T::as_f32(values) {
            return values;
        }
        wide.resize(values.len(), 0.0);
        T::widen(values, wide);
        wide
    }
}

/// Blocks of 8 bits, as [`quantised_keys`] leaves them.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a>(pub(super) &'a [u8]);

impl Blocks<'_> {
    /// One head of a token, widened into `wide`.
    fn widen(self, dims: Dims, token: usize, kv_head: usize, wide: &mut [f32]) {
        let width = packed_dim(dims.head_dim);
        let first = (token * dims.kv_heads + kv_head) * width;
        widen(&self.0[first..first + width], wide);
    }
}

impl Keys for Blocks<'_> {
    type Value = f32;

    fn tile<'s>(
        self,
        dims: Dims,
        range: &Range<usize>,
        kv_head: usize,
        wide: &'s mut Vec<f32>,
    ) -> Mat<'s, f32>
    where
        Self: 's,
    {
        wide.resize(range.len() * dims.head_dim, 0.0);
        for (token, wide) in range.clone().zip(wide.chunks_exact_mut(dims.head_dim)) {
            self.widen(dims, token, kv_head, wide);
        }
        Mat::rows(wide, range.len(), dims.head_dim, dims.head_dim)
    }

    fn row<'s>(self, dims: Dims, token: usize, kv_head: usize, wide: &'s mut Vec<f32>) -> &'s [f32]
    where
        Self: 's,
    {
        wide.resize(dims.head_dim, 0.0);
        self.widen(dims, token, kv_head, wide);
        wide
    }
}

/// Bytes of a head of `head_dim` values.
fn packed_dim(head_dim: usize) -> usize {
    head_dim / BLOCK * BYTES
}

/// Whether a head of `head_dim` values consists of blocks.
pub fn is_quantisable(head_dim: usize) -> bool {
    head_dim > 0 && head_dim.is_multiple_of(BLOCK)
}

/// Bytes or values of one head as a cache holds it, by its type.
pub(super) fn held_dim(dtype: DType, head_dim: usize) -> usize {
    if dtype == DType::U8 { packed_dim(head_dim) } else { head_dim }
}

/// Keys or values as blocks of 8 bits, which [`super::attention`] reads: an f16 scale and a byte for each of
/// 32 values, each value rounded to 1/254 of the largest of its block. A block with a value that is not
/// finite is not a number as a whole.
///
/// # Shapes
/// - `x`: `[T, K, D]`, f32 → `[T, K, D / 32 · 34]`, u8
///
/// # Errors
/// - `D` does not consist of blocks, or `x` is not f32 on the CPU
pub fn quantised_keys(x: &Tensor) -> Result<Tensor> {
    let (tokens, heads, head_dim) = x.dims3()?;
    if !is_quantisable(head_dim) {
        bail!(
            "a cache of 8 bits needs heads of a multiple of {BLOCK} values, these have {head_dim}"
        );
    }
    let width = packed_dim(head_dim);
    let mut bytes = vec![0; tokens * heads * width];
    with_f32(x, |values| {
        let blocks = bytes.chunks_exact_mut(BYTES).zip(values.as_chunks::<BLOCK>().0);
        blocks.for_each(|(out, values)| quantise(values, out));
        Ok(())
    })?;
    Tensor::from_vec(bytes, (tokens, heads, width), x.device())
}

/// The values of [`quantised_keys`]' blocks, `[T, K, D]`, f32.
/// It fails where the blocks are not on the CPU, or they are none.
pub(super) fn widened_keys(blocks: &Tensor) -> Result<Tensor> {
    let (tokens, heads, width) = blocks.dims3()?;
    let mut values = vec![0.0; tokens * heads * width / BYTES * BLOCK];
    widen(&blocks.flatten_all()?.to_vec1::<u8>()?, &mut values);
    Tensor::from_vec(values, (tokens, heads, width / BYTES * BLOCK), &Device::Cpu)
}

/// Keys or values as f16, which [`super::attention`] reads. Finite values beyond its range become the largest of their
/// sign: an infinite one would also reach the rows of its tile that do not see it.
///
/// # Errors
/// - `x` is not f32 on the CPU
pub fn half_keys(x: &Tensor) -> Result<Tensor> {
    let halves =
        with_f32(x, |values| Ok(values.iter().copied().map(half_of).collect::<Vec<f16>>()))?;
    Tensor::from_vec(halves, x.shape(), x.device())
}

fn half_of(value: f32) -> f16 {
    let half = f16::from_f32(value);
    if half.is_infinite() && value.is_finite() { f16::MAX.copysign(half) } else { half }
}

fn quantise(values: &[f32; BLOCK], out: &mut [u8]) {
    let is_finite = values.iter().all(|value| value.is_finite());
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    // Values beyond the largest scale are held as the largest that it gives.
    let scale = if is_finite { f16::from_f32(largest / LARGEST).min(f16::MAX) } else { f16::NAN };
    let (scale_bytes, codes) = out.split_at_mut(BYTES - BLOCK);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    let scale = scale.to_f32();
    for (code, value) in codes.iter_mut().zip(values) {
        let rounded = if scale > 0.0 { (value / scale).round_ties_even() } else { 0.0 };
        *code = (rounded.clamp(-LARGEST, LARGEST) as i8).cast_unsigned();
    }
}

vectorised! {
    /// Whole blocks.
    fn widen(blocks: &[u8], out: &mut [f32]) {
        for (block, out) in blocks.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
            let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
            for (out, code) in out.iter_mut().zip(&block[BYTES - BLOCK..]) {
                *out = f32::from(code.cast_signed()) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::Noise;

    #[test]
    fn values_of_a_block_are_near_and_those_of_others_do_not_matter() -> Result<()> {
        let mut noise = Noise::new(7);
        let x = noise.tensor(&[5, 3, 64]);
        let blocks = quantised_keys(&x)?;
        assert_eq!(blocks.dims(), &[5, 3, 68]);
        let near = widened_keys(&blocks)?;
        let (x_rows, near_rows) =
            (x.flatten_to(1)?.to_vec2::<f32>()?, near.flatten_to(1)?.to_vec2::<f32>()?);
        for (x, near) in x_rows.iter().zip(&near_rows) {
            for (x, near) in x.chunks(BLOCK).zip(near.chunks(BLOCK)) {
                let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                for (x, near) in x.iter().zip(near) {
                    // Half a step, and what f16 leaves of the scale.
                    assert!((x - near).abs() <= largest * (0.5 / 127.0 + 1e-3), "{x} {near}");
                }
            }
        }
        let one = widened_keys(&quantised_keys(&x.narrow(0, 3, 1)?)?)?;
        assert_eq!(one.flatten_to(1)?.to_vec2::<f32>()?, near_rows[9..12]);
        Ok(())
    }

    #[test]
    fn finite_values_stay_finite_in_16_bits_and_faults_stay_faults() -> Result<()> {
        let x = [0.1, 65_519.0, 65_520.0, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let x = Tensor::new(&x, &Device::Cpu)?.reshape((7, 1, 1))?;
        let halves: Vec<f16> = half_keys(&x)?.flatten_all()?.to_vec1()?;
        let (most, infinity) = (f16::MAX, f16::INFINITY);
        assert_eq!(halves[..6], [f16::from_f32(0.1), most, most, -most, infinity, -infinity]);
        assert!(halves[6].is_nan());
        Ok(())
    }

    #[test]
    fn odd_blocks_do_no_harm() -> Result<()> {
        let of = |values: [f32; BLOCK]| -> Result<Vec<f32>> {
            let x = Tensor::from_slice(&values, (1, 1, BLOCK), &Device::Cpu)?;
            widened_keys(&quantised_keys(&x)?)?.flatten_all()?.to_vec1()
        };
        assert_eq!(of([0.0; BLOCK])?, [0.0; BLOCK]);
        assert_eq!(of([1e-30; BLOCK])?, [0.0; BLOCK]);
        let mut values = [1.0; BLOCK];
        values[3] = f32::NAN;
        assert!(of(values)?.iter().all(|value| value.is_nan()));
        values[3] = f32::INFINITY;
        assert!(of(values)?.iter().all(|value| value.is_nan()));
        // Beyond what a scale can say, a value is the largest that it can.
        let largest = 127.0 * f16::MAX.to_f32();
        assert_eq!(of([1e7; BLOCK])?, [largest; BLOCK]);
        assert!(quantised_keys(&Tensor::zeros((1, 1, 40), DType::F32, &Device::Cpu)?).is_err());
        Ok(())
    }
}
