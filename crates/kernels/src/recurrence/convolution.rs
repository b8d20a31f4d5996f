//! A short causal convolution of every channel: `y_t = b + Σ_{j<n} w_j ∘ x_{t−n+1+j}`, zeros before the text.

use candle_core::{Result, bail};
use rayon::prelude::*;

use super::Walk;
use crate::simd::{exp, vectorised};

/// Rows of a parallel task at least.
const ROWS: usize = 4;

/// Weights of a convolution, `n` taps of `C` channels.
#[derive(Debug, Clone)]
pub struct Convolution {
    /// `[n, C]`, the newest token's tap last.
    taps: Vec<f32>,
    /// `[C]`
    bias: Option<Vec<f32>>,
    channels: usize,
    /// Whether outputs go through `z / (1 + e^−z)`.
    silu: bool,
}

impl Convolution {
    /// From weights as files hold them, a channel's taps side by side.
    ///
    /// # Shapes
    /// - `weight`: `[C, n]`, `bias`: `[C]`
    ///
    /// # Errors
    /// - there is no channel or no whole number of taps, or the bias has another length
    pub fn new(
        weight: &[f32],
        bias: Option<Vec<f32>>,
        channels: usize,
        silu: bool,
    ) -> Result<Self> {
        let kernel = weight.len() / channels.max(1);
        if kernel == 0 || kernel * channels != weight.len() {
            bail!("convolution: {} weights for {channels} channels", weight.len());
        }
        if bias.as_ref().is_some_and(|bias| bias.len() != channels) {
            bail!("convolution: a bias of {channels} values expected");
        }
        let tap = |j: usize| (0..channels).map(move |c| weight[c * kernel + j]);
        Ok(Self { taps: (0..kernel).flat_map(tap).collect(), bias, channels, silu })
    }

    /// `C`
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Earlier tokens that an output reads, `n − 1`.
    pub fn reach(&self) -> usize {
        self.taps.len() / self.channels - 1
    }

    /// The inputs that the next tokens read after those of `path`, `[n − 1, C]`, the newest last.
    ///
    /// # Shapes
    /// - `before`: `[n − 1, C]`, `inputs`: `[T, C]`, `path`: rows of `inputs` one after the other
    pub fn window_after(&self, before: &[f32], inputs: &[f32], path: &[usize]) -> Vec<f32> {
        let (channels, reach) = (self.channels, self.reach());
        let mut window = Vec::with_capacity(reach * channels);
        let kept = reach.saturating_sub(path.len());
        window.extend_from_slice(&before[(reach - kept) * channels..]);
        for row in &path[path.len().saturating_sub(reach)..] {
            window.extend_from_slice(&inputs[row * channels..][..channels]);
        }
        window
    }
}

/// Outputs of every row, `[T, C]`. Nothing of a row depends on the rows beside its ancestors.
///
/// # Shapes
/// - `inputs`: `[T, C]`, `before`: `[n − 1, C]` → `[T, C]`
///
/// # Errors
/// - lengths do not fit
pub fn causal_convolution(
    convolution: &Convolution,
    inputs: &[f32],
    walk: &Walk,
    before: &[f32],
) -> Result<Vec<f32>> {
    let (channels, reach) = (convolution.channels, convolution.reach());
    if inputs.len() != walk.rows() * channels || before.len() != reach * channels {
        bail!(
            "convolution: {} inputs and {} earlier ones for {} rows of {channels} channels",
            inputs.len(),
            before.len(),
            walk.rows()
        );
    }
    let mut out = vec![0.0; inputs.len()];
    out.par_chunks_mut(channels).with_min_len(ROWS).enumerate().for_each(|(row, out)| {
        if let Some(bias) = &convolution.bias {
            out.copy_from_slice(bias);
        }
        // The inputs from the newest back; those before the rows stand in `before`.
        let mut sources = Vec::with_capacity(reach + 1);
        let mut next = Some(row);
        let mut earlier = reach;
        while sources.len() <= reach {
            if let Some(row) = next {
                sources.push(&inputs[row * channels..][..channels]);
                next = walk.parent(row);
            } else {
                earlier -= 1;
                sources.push(&before[earlier * channels..][..channels]);
            }
        }
        for (source, tap) in sources.iter().rev().zip(convolution.taps.chunks_exact(channels)) {
            add_products(out, source, tap);
        }
        if convolution.silu {
            silu(out);
        }
    });
    Ok(out)
}

vectorised! {
    /// `acc += a ∘ b`
    fn add_products(acc: &mut [f32], a: &[f32], b: &[f32]) {
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            *acc = a.mul_add(*b, *acc);
        }
    }

    /// `z ← z / (1 + e^−z)`
    fn silu(values: &mut [f32]) {
        for z in values {
            *z /= 1.0 + exp(-*z);
        }
    }
}
