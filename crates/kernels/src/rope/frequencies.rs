//! Frequencies of a model, and how they are stretched.

use candle_core::{Device, Result, Tensor, bail};
use rayon::prelude::*;

use super::RopeTable;
use crate::cuda::rows::rope_table;
use crate::cuda::runs_on;

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
    pub(super) inv_freq: Vec<f32>,
    pub(super) amplitude: f32,
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
        let values = position_ids.len() * half;
        // Uploading a table made here would wait for all that the device was given before.
        if values > 0 && runs_on(device) {
            let [cos, sin] = rope_table(position_ids, &self.inv_freq, self.amplitude, device)?;
            return Ok(RopeTable { cos, sin, interleaved: self.interleaved, attended: false });
        }
        let (mut cos, mut sin) = (vec![0.0; values], vec![0.0; values]);
        let rows = cos.par_chunks_mut(half.max(1)).zip(sin.par_chunks_mut(half.max(1)));
        rows.zip(position_ids).for_each(|((cos, sin), &position)| {
            for ((cos, sin), &frequency) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                let angle = f64::from(position as f32 * frequency);
                *cos = angle.cos() as f32 * self.amplitude;
                *sin = angle.sin() as f32 * self.amplitude;
            }
        });
        let shape = (position_ids.len(), half);
        Ok(RopeTable {
            cos: Tensor::from_vec(cos, shape, device)?,
            sin: Tensor::from_vec(sin, shape, device)?,
            interleaved: self.interleaved,
            attended: false,
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
