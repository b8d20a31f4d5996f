//! One row of the weighted (LK) loss: cross-entropy and likelihood of acceptance with factors.

use super::row::{Softmax, overlap};
use super::{Rejection, Weighted};
use crate::simd::vectorised;

/// What a row's loss and gradient are made of. `e` and `p` hold `e^{z − max}` of draft and teacher.
pub(super) struct Acceptance {
    /// `α = Σ min(p̄, q)`
    pub(super) alpha: f64,
    /// `Σ q 1[q < p̄]`
    below: f64,
    cross_entropy: f64,
    rejection: f64,
    form: Rejection,
    /// `q = e · q_scale`
    q_scale: f64,
    /// `p = p · p_scale`
    p_scale: f64,
    /// `p̄ = p · true_scale`
    true_scale: f64,
}

impl Rejection {
    /// `1 − α` or `−log α`.
    pub(super) fn value(self, alpha: f64) -> f64 {
        match self {
            Self::Linear => 1.0 - alpha,
            Self::Log if alpha > 0.0 => -alpha.ln(),
            Self::Log => 0.0,
        }
    }

    /// Its derivative by `−α`.
    pub(super) fn slope(self, alpha: f64) -> f64 {
        match self {
            Self::Linear => 1.0,
            Self::Log if alpha > 0.0 => 1.0 / alpha,
            Self::Log => 0.0,
        }
    }
}

impl Acceptance {
    pub(super) fn new(
        factors: &Weighted<'_>,
        row: usize,
        e: &[f32],
        q: &Softmax,
        p: &[f32],
        teacher: &Softmax,
    ) -> Self {
        let (q_scale, p_scale) = (1.0 / q.total, 1.0 / teacher.total);
        let true_scale = match factors.log_sum_exp {
            Some(log_sum_exp) => (f64::from(teacher.max) - log_sum_exp[row]).exp(),
            None => p_scale,
        };
        let alpha = f64::from(overlap(e, q_scale as f32, p, true_scale as f32));
        let rejection = f64::from(factors.rejection[row]);
        let below = if rejection == 0.0 {
            0.0
        } else {
            f64::from(mass_below(e, q_scale as f32, p, true_scale as f32))
        };
        Self {
            alpha,
            below,
            cross_entropy: f64::from(factors.cross_entropy[row]),
            rejection,
            form: factors.form,
            q_scale,
            p_scale,
            true_scale,
        }
    }

    /// The row's loss; `cross_entropy` is `−Σ p log q`.
    pub(super) fn loss(&self, cross_entropy: f64) -> f64 {
        self.cross_entropy * cross_entropy + self.rejection * self.form.value(self.alpha)
    }

    /// Turns `z`, which holds `e`, into `weight · ∂ℓ/∂z + of_label · q`.
    pub(super) fn gradient(&self, (of_label, weight): (f64, f64), z: &mut [f32], p: &[f32]) {
        // ∂ℓ/∂α = −slope
        let slope = self.rejection * self.form.slope(self.alpha);
        let everywhere = of_label + weight * (self.cross_entropy + slope * self.below);
        let scales = (self.q_scale as f32, self.true_scale as f32);
        let of_q = (everywhere as f32, (everywhere - weight * slope) as f32);
        weighted_difference(
            z,
            p,
            scales,
            of_q,
            (weight * self.cross_entropy * self.p_scale) as f32,
        );
    }
}

vectorised! {
    /// `Σ q` over the entries whose `q` lies below `p`, both scaled.
    fn mass_below(q: &[f32], q_scale: f32, p: &[f32], p_scale: f32) -> f32 {
        let mut lanes = [0.0_f32; 16];
        let ((q_chunks, q_tail), (p_chunks, p_tail)) =
            (q.as_chunks::<16>(), p.as_chunks::<16>());
        for (q, p) in q_chunks.iter().zip(p_chunks) {
            for i in 0..16 {
                let (q, p) = (q[i] * q_scale, p[i] * p_scale);
                lanes[i] += if q < p { q } else { 0.0 };
            }
        }
        let mut tail = 0.0;
        for (q, p) in q_tail.iter().zip(p_tail) {
            let (q, p) = (q * q_scale, p * p_scale);
            tail += if q < p { q } else { 0.0 };
        }
        lanes.iter().sum::<f32>() + tail
    }

    /// `z ← q · (below if q < p̄ else above) − p · p_factor`, `q = z · scales.0`, `p̄ = p · scales.1`,
    /// `(above, below) = of_q`.
    fn weighted_difference(
        z: &mut [f32],
        p: &[f32],
        scales: (f32, f32),
        of_q: (f32, f32),
        p_factor: f32,
    ) {
        for (z, p) in z.iter_mut().zip(p) {
            let q = *z * scales.0;
            let factor = if q < p * scales.1 { of_q.1 } else { of_q.0 };
            *z = q * factor - p * p_factor;
        }
    }
}
