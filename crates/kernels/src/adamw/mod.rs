//! One AdamW step on slices, or where tensors lie (Loshchilov and Hutter 2019), decoupled decay applied first.
//!
//! ```text
//! θ ← θ (1 − lr·wd);  m ← β1 m + (1−β1) g;  v ← β2 v + (1−β2) g²
//! θ ← θ − lr · (m / (1−β1ⁿ)) / (sqrt(v / (1−β2ⁿ)) + eps)
//! ```

mod device;

use rayon::prelude::*;

use crate::simd::vectorised;

#[cfg(all(test, feature = "cuda"))]
pub(crate) use device::compiled;
pub use device::{
    AdamWState, adamw_on_device, adamw_with_halves, square_sum_on_device, square_sums_on_device,
    stays_on_device,
};

/// Values that a sum of squares is cut into, and that a thread updates at once.
pub const BLOCK: usize = 16_384;

/// The numbers of one step that all values of a tensor share.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Step number n, from 1.
    pub step: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}

/// Updates `theta`, `m` and `v` in place with the gradient `g`.
///
/// # Panics
/// - the slices differ in length
pub fn adamw(step: &AdamWStep, theta: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
    assert!(theta.len() == g.len() && m.len() == g.len() && v.len() == g.len());
    let factors = Factors::of(step);
    theta
        .par_chunks_mut(BLOCK)
        .zip(m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK)))
        .zip(g.par_chunks(BLOCK))
        .for_each(|((theta, (m, v)), g)| update(&factors, theta, m, v, g));
}

/// [`AdamWStep`] as the loop needs it.
struct Factors {
    beta1: f32,
    beta2: f32,
    keep1: f32,
    keep2: f32,
    correct1: f32,
    correct2: f32,
    shrink: f32,
    rate: f32,
    eps: f32,
    grad_scale: f32,
}

impl Factors {
    fn of(step: &AdamWStep) -> Self {
        let n = step.step as i32;
        Self {
            beta1: step.betas.0 as f32,
            beta2: step.betas.1 as f32,
            keep1: (1.0 - step.betas.0) as f32,
            keep2: (1.0 - step.betas.1) as f32,
            correct1: (1.0 / (1.0 - step.betas.0.powi(n))) as f32,
            correct2: (1.0 / (1.0 - step.betas.1.powi(n))) as f32,
            shrink: (1.0 - step.learning_rate * step.weight_decay) as f32,
            rate: step.learning_rate as f32,
            eps: step.eps as f32,
            grad_scale: step.grad_scale as f32,
        }
    }
}

vectorised! {
    fn update(f: &Factors, theta: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
        let values = theta.iter_mut().zip(m.iter_mut().zip(v)).zip(g);
        for ((theta, (m, v)), g) in values {
            let g = g * f.grad_scale;
            *m = f.beta1 * *m + f.keep1 * g;
            *v = f.beta2 * *v + f.keep2 * g * g;
            let root = (*v * f.correct2).sqrt() + f.eps;
            *theta = *theta * f.shrink - f.rate * (*m * f.correct1) / root;
        }
    }
}

/// `Σ g²` in f64, in an order that does not depend on the number of threads: the sum of
/// [`square_sums`].
pub fn square_sum(g: &[f32]) -> f64 {
    square_sums(g).iter().sum()
}

/// `Σ g²` of every [`BLOCK`] values in f64: whoever holds whole blocks gets the same bits.
pub fn square_sums(g: &[f32]) -> Vec<f64> {
    let square_sum = |block: &[f32]| block.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    g.par_chunks(BLOCK).map(square_sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_match_hand_computed_values() {
        let (mut theta, mut m, mut v) = (vec![1.0_f32, -2.0], vec![0.0; 2], vec![0.0; 2]);
        let mut step = AdamWStep {
            learning_rate: 0.1,
            betas: (0.9, 0.95),
            eps: 1e-6,
            weight_decay: 0.1,
            step: 1,
            grad_scale: 0.5,
        };
        adamw(&step, &mut theta, &mut m, &mut v, &[0.4, -0.8]);
        // First step: m/(1-β1) = g, sqrt(v/(1-β2)) = |g|, so θ·0.99 ∓ 0.1.
        assert!((theta[0] - 0.89).abs() < 1e-5 && (theta[1] + 1.88).abs() < 1e-5);
        step.step = 2;
        adamw(&step, &mut theta, &mut m, &mut v, &[0.0, 0.0]);
        // m = .9·.1·.2 = .018, /(1-.81); v = .95·.05·.04 = .0019, /(1-.9025).
        let want = 0.89 * 0.99 - 0.1 * (0.018 / 0.19) / ((0.0019_f64 / 0.0975).sqrt() + 1e-6);
        assert!((f64::from(theta[0]) - want).abs() < 1e-5);
    }

    #[test]
    fn square_sum_of_long_slice() {
        assert!((square_sum(&vec![0.5; 50_000]) - 12_500.0).abs() < 1e-9);
    }
}
