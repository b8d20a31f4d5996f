//! Rotary position embedding (Su et al. 2021), half-split: dimension `i` pairs with `i + R/2`, or interleaved:
//! `2i` pairs with `2i + 1`. The first `R` dimensions of a head turn, mostly all `D`; the rest pass.
//!
//! With `x = [a | b]`: `y = [a cos − b sin | b cos + a sin]`; backward turns the other way.
//! Angles are `f32(position) · inv_freq_i` rounded to f32, their cosine and sine taken with full
//! range reduction. `inv_freq_i = 1 / theta^(2i/D)`, the exponent an f32 quotient, the power
//! rounded to f32, then an f32 reciprocal: at positions near 10⁴ the last bit of `inv_freq`
//! moves gradients by 2e-4, so this rounding is part of the definition.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::composed::differentiable;
use crate::cuda;
use crate::dispatch::fused;
use crate::storage::{f32_slice, with_f32};

/// How the base frequencies are stretched for contexts beyond the pretraining length.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RopeScaling {
    /// No change.
    #[default]
    None,
    /// Every frequency divided by `factor` (position interpolation).
    Linear {
        /// Context extension factor, above 0.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Pretraining context in tokens.
        original_context: f64,
    },
    /// YaRN (Peng et al. 2023): interpolation by dimension, and a factor on cos and sin.
    Yarn {
        /// Context extension factor.
        factor: f64,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated.
        beta_slow: f64,
        /// Pretraining context in tokens.
        original_context: f64,
        /// Multiplies cos and sin; `0.1 ln(factor) + 1` unless the model says otherwise.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
    },
}

/// Frequencies of one model: what turns position ids into cos/sin tables.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f32>,
    amplitude: f32,
    interleaved: bool,
    /// `D`, of which `R` is twice the number of frequencies.
    head_dim: usize,
}

impl Rope {
    /// The widest head that frequencies are made for: a limit on what a wrong file can ask for.
    const WIDEST: usize = 1 << 16;

    /// Frequencies for `head_dim` (even) with base `theta`.
    ///
    /// # Errors
    /// - `head_dim` is odd, 0 or above 65 536, `theta` not positive and finite
    pub fn new(head_dim: usize, theta: f64, scaling: RopeScaling) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!("rope: even head_dim expected, found {head_dim}");
        }
        if head_dim > Self::WIDEST {
            bail!("rope: head_dim up to {} expected, found {head_dim}", Self::WIDEST);
        }
        if !theta.is_finite() || theta <= 0.0 {
            bail!("rope: positive theta expected, found {theta}");
        }
        let power = |i: usize| theta.powf(f64::from((2 * i) as f32 / head_dim as f32)) as f32;
        let base: Vec<f32> = (0..head_dim / 2).map(|i| 1.0 / power(i)).collect();
        let (inv_freq, amplitude) = match scaling {
            RopeScaling::None => (base, 1.0),
            RopeScaling::Linear { factor } => {
                (base.iter().map(|f| f / factor as f32).collect(), 1.0)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let bounds = (low_freq_factor, high_freq_factor);
                let scale = |f: &f32| llama3(*f, factor, bounds, original_context);
                (base.iter().map(scale).collect(), 1.0)
            }
            RopeScaling::Yarn { attention_factor, .. } => {
                (yarn(&base, head_dim, theta, scaling), attention_factor as f32)
            }
        };
        Ok(Self { inv_freq, amplitude, interleaved: false, head_dim })
    }

    /// The same with frequency `i` divided by `divisors[i]`.
    ///
    /// # Errors
    /// - not one finite, positive divisor per frequency
    pub fn divided_by(mut self, divisors: &[f32]) -> Result<Self> {
        let usable = divisors.iter().all(|d| d.is_finite() && *d > 0.0);
        if divisors.len() != self.inv_freq.len() || !usable {
            bail!("rope: {} positive divisors expected", self.inv_freq.len());
        }
        for (frequency, divisor) in self.inv_freq.iter_mut().zip(divisors) {
            *frequency /= divisor;
        }
        Ok(self)
    }

    /// The same for the first dimensions of wider heads.
    ///
    /// # Errors
    /// - the heads are narrower than what turns
    pub fn within(mut self, head_dim: usize) -> Result<Self> {
        if head_dim < 2 * self.inv_freq.len() {
            bail!("rope: {} dimensions do not fit a head of {head_dim}", 2 * self.inv_freq.len());
        }
        self.head_dim = head_dim;
        Ok(self)
    }

    /// No dimension of a head turns.
    pub fn still(head_dim: usize) -> Self {
        Self { inv_freq: Vec::new(), amplitude: 1.0, interleaved: false, head_dim }
    }

    /// The same for pairs of neighbours, `2i` and `2i + 1`.
    #[must_use]
    pub fn of_neighbours(self) -> Self {
        Self { interleaved: true, ..self }
    }

    /// The same with cos and sin multiplied by a factor.
    #[must_use]
    pub fn amplified(self, factor: f64) -> Self {
        Self { amplitude: self.amplitude * factor as f32, ..self }
    }

    /// Width of the heads.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Cos and sin of every position.
    ///
    /// # Errors
    /// - the tensors cannot be made on `device`
    pub fn table(&self, position_ids: &[u32], device: &Device) -> Result<RopeTable> {
        let half = self.inv_freq.len();
        let mut cos = Vec::with_capacity(position_ids.len() * half);
        let mut sin = Vec::with_capacity(position_ids.len() * half);
        for &position in position_ids {
            for &frequency in &self.inv_freq {
                let angle = f64::from(position as f32 * frequency);
                cos.push(angle.cos() as f32 * self.amplitude);
                sin.push(angle.sin() as f32 * self.amplitude);
            }
        }
        let shape = (position_ids.len(), half);
        Ok(RopeTable {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
            interleaved: self.interleaved,
        })
    }
}

/// The band between `original/high` and `original/low` blends kept and divided frequencies.
fn llama3(inv_freq: f32, factor: f64, (low, high): (f64, f64), original: f64) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / inv_freq;
    let (original, factor) = (original as f32, factor as f32);
    let (low, high) = (low as f32, high as f32);
    if wavelength < original / high {
        inv_freq
    } else if wavelength > original / low {
        inv_freq / factor
    } else {
        let s = (original / wavelength - low) / (high - low);
        (1.0 - s) * inv_freq / factor + s * inv_freq
    }
}

fn yarn(base: &[f32], head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f32> {
    let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncate, .. } =
        scaling
    else {
        return base.to_vec();
    };
    let dim = head_dim as f64;
    let dimension = |rotations: f64| {
        dim * (original_context / (rotations * 2.0 * std::f64::consts::PI)).ln()
            / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min(dim - 1.0);
    if (high - low).abs() < f64::EPSILON {
        high += 0.001;
    }
    base.iter()
        .enumerate()
        .map(|(i, &kept)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
            let divided = kept / factor as f32;
            divided * ramp + kept * (1.0 - ramp)
        })
        .collect()
}

/// Cos and sin for the tokens of one sequence, each `[T, R/2]` in f32.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
    /// Whether neighbours turn together.
    interleaved: bool,
}

impl RopeTable {
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
        let interleaved = tables.first().is_some_and(|table| table.interleaved);
        Ok(Self { cos: part(Self::cos)?, sin: part(Self::sin)?, interleaved })
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
        x.contiguous()?.apply_op3(&table.cos, &table.sin, op)
    } else if plain && cuda::takes(&[x, &table.cos]) {
        cuda::rows::rope(x, &table.cos, &table.sin)
    } else {
        composed(x, table)
    }
}

/// The same on any device; the gradient is turned back, nothing is kept.
///
/// # Errors
/// - as [`rope`]
pub fn composed(x: &Tensor, table: &RopeTable) -> Result<Tensor> {
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

struct Rotate {
    /// 1 forward, −1 for the inverse rotation of the backward pass.
    sign: f32,
    interleaved: bool,
}

impl Rotate {
    fn run(
        &self,
        x: &[f32],
        cos: &[f32],
        sin: &[f32],
        shape: &Shape,
        half: usize,
    ) -> Result<Vec<f32>> {
        let (_, count, head_dim) = shape.dims3()?;
        Ok(rotate(x, [cos, sin], Heads { count, head_dim, half }, self))
    }
}

/// Sizes of a token's heads; the first `2 · half` dimensions turn.
#[derive(Clone, Copy)]
struct Heads {
    count: usize,
    head_dim: usize,
    half: usize,
}

impl CustomOp3 for Rotate {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = f32_slice(s1, l1, "rope")?;
        let cos = f32_slice(s2, l2, "rope")?;
        let sin = f32_slice(s3, l3, "rope")?;
        let (_, half) = l2.shape().dims2()?;
        Ok((CpuStorage::F32(self.run(x, cos, sin, l1.shape(), half)?), l1.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let half = cos.dim(1)?;
        let back = Self { sign: -self.sign, ..*self };
        let dx = with_f32(grad, |g| {
            with_f32(cos, |c| with_f32(sin, |s| back.run(g, c, s, x.shape(), half)))
        })?;
        Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), None, None))
    }
}

fn rotate(x: &[f32], [cos, sin]: [&[f32]; 2], sizes: Heads, how: &Rotate) -> Vec<f32> {
    let Heads { count, head_dim, half } = sizes;
    let mut out = vec![0.0; x.len()];
    let token = (count * head_dim).max(1);
    let angles = cos.par_chunks(half).zip(sin.par_chunks(half));
    out.par_chunks_mut(token).zip(x.par_chunks(token)).zip(angles).with_min_len(32).for_each(
        |((out, x), (cos, sin))| {
            for (out, x) in out.chunks_mut(head_dim).zip(x.chunks(head_dim)) {
                let (out, out_rest) = out.split_at_mut(2 * half);
                let (x, x_rest) = x.split_at(2 * half);
                out_rest.copy_from_slice(x_rest);
                if how.interleaved {
                    let pairs = out.chunks_exact_mut(2).zip(x.chunks_exact(2));
                    for ((out, x), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
                        let s = how.sign * sin;
                        out[0] = x[0] * cos - x[1] * s;
                        out[1] = x[1] * cos + x[0] * s;
                    }
                    continue;
                }
                let (first, second) = out.split_at_mut(half);
                let (a, b) = x.split_at(half);
                for i in 0..half {
                    let s = how.sign * sin[i];
                    first[i] = a[i] * cos[i] - b[i] * s;
                    second[i] = b[i] * cos[i] + a[i] * s;
                }
            }
        },
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close, gradcheck};

    #[test]
    fn fused_matches_reference_forward_and_backward() -> Result<()> {
        for (seed, tokens, heads, head_dim) in [(1, 1, 1, 2), (2, 33, 3, 16), (3, 70, 1, 80)] {
            let rope_of = Rope::new(head_dim, 10_000.0, RopeScaling::None)?;
            let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 37).collect();
            let table = rope_of.table(&positions, &Device::Cpu)?;
            let mut noise = Noise::new(seed);
            let x = noise.var(&[tokens, heads, head_dim]);
            let direction = noise.tensor(&[tokens, heads, head_dim]);
            let (fused, plain) = (rope(&x, &table)?, reference(&x, &table)?);
            assert_close("forward", &fused, &plain, 1e-6);
            let own = composed(&x, &table)?;
            assert_close("composed", &own, &fused, 1e-6);
            let own = (own * &direction)?.sum_all()?.backward()?;
            let fused = (fused * &direction)?.sum_all()?.backward()?;
            let plain = (plain * &direction)?.sum_all()?.backward()?;
            assert_close("x", fused.get(&x).expect("fused"), plain.get(&x).expect("plain"), 1e-6);
            assert_close("own", own.get(&x).expect("own"), plain.get(&x).expect("plain"), 1e-6);
        }
        Ok(())
    }

    #[test]
    fn neighbours_and_parts_of_a_head_turn_alike_in_every_version() -> Result<()> {
        let positions = [0, 5, 41, 1000];
        for (turning, head_dim, neighbours) in
            [(8, 8, true), (6, 10, false), (4, 12, true), (2, 3, true)]
        {
            let of = Rope::new(turning, 1e4, RopeScaling::None)?.within(head_dim)?;
            let of = if neighbours { of.of_neighbours() } else { of };
            assert_eq!(of.head_dim(), head_dim);
            let table = of.table(&positions, &Device::Cpu)?;
            let mut noise = Noise::new(9);
            let x = noise.var(&[4, 3, head_dim]);
            let direction = noise.tensor(&[4, 3, head_dim]);
            let (fused, plain) = (rope(&x, &table)?, reference(&x, &table)?);
            assert_close("forward", &fused, &plain, 1e-6);
            // The half-split version of re-ordered dimensions is the same rotation.
            let place = |i: usize| match i {
                i if i >= turning || !neighbours => i,
                i => 2 * (i % (turning / 2)) + i / (turning / 2),
            };
            let order: Vec<u32> = (0..head_dim).map(|i| place(i) as u32).collect();
            let order = Tensor::new(order, &Device::Cpu)?;
            let split = RopeTable { interleaved: false, ..table.clone() };
            let turned = reference(&x.index_select(&order, 2)?, &split)?;
            assert_close("re-ordered", &fused.index_select(&order, 2)?, &turned, 1e-6);
            let back = rope(&fused.detach(), &table.reversed()?)?;
            assert_close("back", &back, &x, 1e-5);
            let fused = (fused * &direction)?.sum_all()?.backward()?;
            let plain = (plain * &direction)?.sum_all()?.backward()?;
            assert_close("x", fused.get(&x).expect("fused"), plain.get(&x).expect("plain"), 1e-6);
        }
        let still = Rope::still(6).table(&positions, &Device::Cpu)?;
        let x = Noise::new(4).tensor(&[4, 2, 6]);
        assert_close("still", &rope(&x, &still)?, &x, 0.0);
        let wide = Rope::new(8, 1e4, RopeScaling::None)?;
        assert!(wide.clone().within(6).is_err());
        assert!(rope(&x, &wide.table(&positions, &Device::Cpu)?).is_err());
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() -> Result<()> {
        let table = Rope::new(4, 100.0, RopeScaling::None)?.table(&[0, 3, 9], &Device::Cpu)?;
        gradcheck(&[Noise::new(5).tensor(&[3, 2, 4])], |t| reference(&t[0], &table));
        Ok(())
    }

    #[test]
    fn the_reversed_table_undoes_the_rotation() -> Result<()> {
        let table = Rope::new(8, 1e4, RopeScaling::None)?.table(&[1, 7], &Device::Cpu)?;
        let x = Noise::new(8).tensor(&[2, 3, 8]);
        assert_close("back", &rope(&rope(&x, &table)?, &table.reversed()?)?, &x, 1e-6);
        Ok(())
    }

    #[test]
    fn position_zero_is_the_identity() -> Result<()> {
        let table = Rope::new(8, 1e6, RopeScaling::None)?.table(&[0], &Device::Cpu)?;
        let x = Noise::new(6).tensor(&[1, 2, 8]);
        assert_close("identity", &rope(&x, &table)?, &x, 0.0);
        Ok(())
    }

    #[test]
    fn linear_scaling_equals_positions_divided() -> Result<()> {
        let plain = Rope::new(8, 1e4, RopeScaling::None)?.table(&[5], &Device::Cpu)?;
        let scaled =
            Rope::new(8, 1e4, RopeScaling::Linear { factor: 4.0 })?.table(&[20], &Device::Cpu)?;
        assert_close("cos", scaled.cos(), plain.cos(), 1e-6);
        Ok(())
    }

    #[test]
    fn llama3_keeps_short_and_divides_long_wavelengths() -> Result<()> {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let base = Rope::new(128, 500_000.0, RopeScaling::None)?.inv_freq;
        let scaled = Rope::new(128, 500_000.0, scaling)?.inv_freq;
        assert_eq!(base[0].to_bits(), scaled[0].to_bits());
        assert!((base[63] / scaled[63] - 8.0).abs() < 1e-5);
        // Wavelength 2π·500000^(2·32/128) ≈ 4443 lies in the band: hand-computed blend.
        let s = (8192.0 * base[32] / (2.0 * std::f32::consts::PI) - 1.0) / 3.0;
        let want = (1.0 - s) * base[32] / 8.0 + s * base[32];
        assert!((scaled[32] - want).abs() < 1e-9);
        Ok(())
    }

    #[test]
    fn yarn_keeps_fast_dimensions_divides_slow_and_scales_amplitude() -> Result<()> {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: 32768.0,
            attention_factor: 0.1 * 4.0_f64.ln() + 1.0,
            truncate: true,
        };
        let base = Rope::new(128, 1e6, RopeScaling::None)?.inv_freq;
        let rope_of = Rope::new(128, 1e6, scaling)?;
        assert_eq!(base[0].to_bits(), rope_of.inv_freq[0].to_bits());
        assert!((base[63] / rope_of.inv_freq[63] - 4.0).abs() < 1e-5);
        assert!((rope_of.amplitude - 1.138_629).abs() < 1e-5);
        Ok(())
    }

    #[test]
    fn a_narrower_table_turns_the_first_values_of_a_head() -> Result<()> {
        let table = Rope::new(4, 1e4, RopeScaling::None)?.table(&[3, 8], &Device::Cpu)?;
        let x = Noise::new(9).tensor(&[2, 3, 10]);
        let (some, rest) = (rope(&x, &table)?, x.narrow(2, 4, 6)?);
        let first = rope(&x.narrow(2, 0, 4)?.contiguous()?, &table)?;
        assert_close("turned", &some.narrow(2, 0, 4)?, &first, 0.0);
        assert_close("kept", &some.narrow(2, 4, 6)?, &rest, 0.0);
        assert!(rope(&x.narrow(2, 0, 2)?, &table).is_err());
        assert!(rope(&x.narrow(0, 0, 1)?, &table).is_err());
        Ok(())
    }

    #[test]
    fn odd_head_dim_is_an_error() {
        assert!(Rope::new(7, 1e4, RopeScaling::None).is_err());
    }
}
