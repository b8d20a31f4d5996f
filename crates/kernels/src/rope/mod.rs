//! Rotary position embedding (Su et al. 2021), half-split: dimension `i` pairs with `i + R/2`, or interleaved:
//! `2i` pairs with `2i + 1`. The first `R` dimensions of a head turn, mostly all `D`; the rest pass.
//!
//! With `x = [a | b]`: `y = [a cos − b sin | b cos + a sin]`; backward turns the other way.
//! Angles are `f32(position) · inv_freq_i` rounded to f32, their cosine and sine taken with full
//! range reduction. `inv_freq_i = 1 / theta^(2i/D)`, the exponent an f32 quotient, the power
//! rounded to f32, then an f32 reciprocal: at positions near 10⁴ the last bit of `inv_freq`
//! moves gradients by 2e-4, so this rounding is part of the definition.

mod frequencies;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use crate::attention::keeps_halves;
use crate::cuda;
use crate::dispatch::{Products, fused, products_of};
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::graph::{Gradients, differentiable};
use crate::simd::by_chunk;
use crate::storage::{values_like, with_each_f32};

pub use frequencies::{Rope, RopeScaling};

/// Cos and sin for the tokens of one sequence, each `[T, R/2]` in f32.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
    /// Whether neighbours turn together.
    interleaved: bool,
    /// Whether attention alone reads what it turns.
    attended: bool,
}

impl RopeTable {
    /// The same table for heads that attention alone reads. Where an NVIDIA GPU rounds queries and keys that
    /// train to bf16 for attention's products, they are rounded while they are turned, and have the gradients that they
    /// would have in f32.
    #[must_use]
    pub fn attended(self) -> Self {
        Self { attended: true, ..self }
    }

    /// Cos `[T, R/2]`.
    pub fn cos(&self) -> &Tensor {
        &self.cos
    }

    /// Sin `[T, R/2]`.
    pub fn sin(&self) -> &Tensor {
        &self.sin
    }

    /// The table that turns the other way: `y = [a cos + b sin | b cos − a sin]`.
    ///
    /// # Errors
    /// - the tensor cannot be made
    pub fn reversed(&self) -> Result<Self> {
        Ok(Self { cos: self.cos.clone(), sin: self.sin.neg()?, ..*self })
    }

    /// The table on another device.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self { cos: self.cos.to_device(device)?, sin: self.sin.to_device(device)?, ..*self })
    }

    /// The table of the first tokens.
    ///
    /// # Errors
    /// - there are fewer
    pub fn first(&self, tokens: usize) -> Result<Self> {
        let part = |table: &Tensor| table.narrow(0, 0, tokens);
        Ok(Self { cos: part(&self.cos)?, sin: part(&self.sin)?, ..*self })
    }

    /// Tables of successive tokens, laid end to end.
    ///
    /// # Errors
    /// - there is none, or head dims differ
    pub fn concatenated(tables: &[Self]) -> Result<Self> {
        let part =
            |of: fn(&Self) -> &Tensor| Tensor::cat(&tables.iter().map(of).collect::<Vec<_>>(), 0);
        let of_first = |is: fn(&Self) -> bool| tables.first().is_some_and(is);
        let interleaved = of_first(|table| table.interleaved);
        let attended = of_first(|table| table.attended);
        Ok(Self { cos: part(Self::cos)?, sin: part(Self::sin)?, interleaved, attended })
    }
}

/// Rotates every head of `x` by its token's angles. Where the table turns `R < D` values, those are the first of
/// a head and the others stay as they are.
///
/// # Shapes
/// - `x`: `[T, N, D]`, table over the same `T`, of at most `D` dimensions → `[T, N, D]`
///
/// # Errors
/// - `x` is not `[T, N, D]` with the table's `T`, or the table turns more than `D` dimensions
pub fn rope(x: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let (tokens, _, head_dim) = x.dims3()?;
    let (listed, pairs) = table.cos.dims2()?;
    if listed != tokens || 2 * pairs > head_dim {
        bail!("rope: table {:?} does not fit x {:?}", table.cos.shape(), x.shape());
    }
    if pairs == 0 || tokens == 0 {
        return Ok(x.clone());
    }
    let plain = 2 * pairs == head_dim && !table.interleaved;
    if fused(&[x, &table.cos]) {
        let op = Rotate { sign: 1.0, interleaved: table.interleaved };
        fuse(op, [x, &table.cos, &table.sin])
    } else if plain && cuda::takes(&[x, &table.cos]) {
        let is_rounded = table.attended && x.track_op() && keeps_halves(head_dim);
        if is_rounded && products_of(x) == Products::Half {
            return cuda::rows::rope_to_halves(x, &table.cos, &table.sin);
        }
        cuda::rows::rope(x, &table.cos, &table.sin)
    } else if plain
        && cuda::halves::turns(head_dim)
        && cuda::takes_halves(&[x])
        && cuda::takes(&[&table.cos])
    {
        cuda::halves::rope(x, &table.cos, &table.sin)
    } else {
        composed(x, table)
    }
}

/// The same on any device; the gradient is turned back, nothing is kept.
fn composed(x: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let back = table.reversed()?;
    let out = reference(&x.detach(), table)?;
    differentiable("rope", [x; 3], out, move |g| Ok([Some(reference(g, &back)?), None, None]))
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`rope`]
pub fn reference(x: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let (tokens, heads, head_dim) = x.dims3()?;
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let (cos, sin) =
        (table.cos.to_dtype(wide)?.unsqueeze(1)?, table.sin.to_dtype(wide)?.unsqueeze(1)?);
    let wide_x = x.to_dtype(wide)?;
    let half = table.cos.dim(1)?;
    let turning = wide_x.narrow(2, 0, 2 * half)?;
    let (a, b) = if table.interleaved {
        let pairs = turning.reshape((tokens, heads, half, 2))?;
        (pairs.narrow(3, 0, 1)?.squeeze(3)?, pairs.narrow(3, 1, 1)?.squeeze(3)?)
    } else {
        (turning.narrow(2, 0, half)?, turning.narrow(2, half, half)?)
    };
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    let turned = if table.interleaved {
        Tensor::stack(&[first, second], 3)?.reshape((tokens, heads, 2 * half))?
    } else {
        Tensor::cat(&[first, second], 2)?
    };
    let rest = head_dim - 2 * half;
    let whole = match rest {
        0 => turned,
        _ => Tensor::cat(&[turned, wide_x.narrow(2, 2 * half, rest)?], 2)?,
    };
    whole.to_dtype(x.dtype())
}

/// Tokens that a thread turns at a time.
const TOKENS: usize = 32;

struct Rotate {
    /// 1 forward, −1 for the inverse rotation of the backward pass.
    sign: f32,
    interleaved: bool,
}

impl Rotate {
    /// The first `2 · half` dimensions of every head turn.
    fn run(
        &self,
        x: &[f32],
        [cos, sin]: [&[f32]; 2],
        shape: &Shape,
        half: usize,
    ) -> Result<Vec<f32>> {
        let (_, heads, head_dim) = shape.dims3()?;
        let token = (heads * head_dim).max(1);
        let (out, _) = by_chunk(x.len(), TOKENS * token, |index, out| {
            for (row, out) in out.chunks_mut(token).enumerate() {
                let at = index * TOKENS + row;
                let x = &x[at * token..][..token];
                let angles = (&cos[at * half..][..half], &sin[at * half..][..half]);
                for (out, x) in out.chunks_mut(head_dim).zip(x.chunks(head_dim)) {
                    let (out, out_rest) = out.split_at_mut(2 * half);
                    let (x, x_rest) = x.split_at(2 * half);
                    out_rest.copy_from_slice(x_rest);
                    self.turn(x, out, angles);
                }
            }
        });
        Ok(out)
    }

    /// The dimensions of a head that turn.
    fn turn(&self, x: &[f32], out: &mut [f32], (cos, sin): (&[f32], &[f32])) {
        if self.interleaved {
            let pairs = out.chunks_exact_mut(2).zip(x.chunks_exact(2));
            for ((out, x), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
                let s = self.sign * sin;
                out[0] = x[0] * cos - x[1] * s;
                out[1] = x[1] * cos + x[0] * s;
            }
            return;
        }
        let half = cos.len();
        let (first, second) = out.split_at_mut(half);
        let (a, b) = x.split_at(half);
        for i in 0..half {
            let s = self.sign * sin[i];
            first[i] = a[i] * cos[i] - b[i] * s;
            second[i] = b[i] * cos[i] + a[i] * s;
        }
    }
}

impl FusedOp<3> for Rotate {
    const NAME: &'static str = "rope";
    const READS: [bool; 3] = [false, true, true];

    fn forward(&self, [x, cos, sin]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let (_, half) = cos.shape().dims2()?;
        let turned = self.run(x.f32()?, [cos.f32()?, sin.f32()?], x.shape(), half)?;
        Ok((turned, x.shape().clone()))
    }

    fn backward(&self, inputs: [&Input; 3], _: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let [x, cos, sin] = inputs.map(|input| &input.tensor);
        let half = cos.dim(1)?;
        let back = Self { sign: -self.sign, ..*self };
        let dx = with_each_f32([grad, cos, sin], |[g, c, s]| back.run(g, [c, s], x.shape(), half))?;
        Ok([Some(values_like(x, dx)?), None, None])
    }
}
