//! Loss, statistics and gradient of one row of logits.

use super::likelihood_loss::Acceptance;
use super::top_k::{TailTerm, TopK};
use super::{Inputs, SoftTargets, sparse};
use crate::simd::{dot, exp_in_place, max_of, scale, vectorised};

/// Loss and statistics, as in [`super::RowStatistics`].
#[derive(Debug, Clone, Default)]
pub(super) struct Row {
    pub(super) loss: f64,
    pub(super) hard: f64,
    pub(super) soft: f64,
    pub(super) agrees: bool,
    pub(super) acceptance: f64,
}

/// The teacher's row of probabilities, `e^(z − max)`.
pub(super) type TeacherRow<'a> = (&'a [f32], &'a Softmax);

/// A row of logits turned into unnormalised probabilities `e^(z − max)`.
pub(super) struct Softmax {
    pub(super) max: f32,
    pub(super) argmax: u32,
    pub(super) total: f64,
}

impl Softmax {
    pub(super) fn of(z: &mut [f32]) -> Self {
        let max = max_of(z);
        // The first of the largest; NaN is never larger.
        let argmax = z.iter().position(|&x| x >= max).unwrap_or(0) as u32;
        // Blocks are summed in f32, and added in f64.
        let total = z.chunks_mut(4096).map(|block| f64::from(exp_in_place(block, max))).sum();
        Self { max, argmax, total }
    }

    pub(super) fn log_sum_exp(&self) -> f64 {
        f64::from(self.max) + self.total.ln()
    }
}

/// Loss and statistics of one row; `z` becomes `dℓ/dz` if `want_grad`.
pub(super) fn row(
    inputs: &Inputs<'_>,
    index: usize,
    z: &mut [f32],
    teacher: Option<TeacherRow<'_>>,
    want_grad: bool,
) -> Row {
    if let SoftTargets::Sparse(distributions, factors) = &inputs.soft {
        return sparse::row(inputs, (distributions, factors), index, z, want_grad);
    }
    let label = inputs.labels[index] as usize;
    let label_logit = f64::from(z[label]);
    let entries = match inputs.soft {
        SoftTargets::TopK { ids, log_probs, k, tail } => {
            Some(TopK::new(&ids[index * k..][..k], &log_probs[index * k..][..k], z, tail))
        }
        _ => None,
    };
    let whole = matches!(inputs.soft, SoftTargets::Full | SoftTargets::Weighted(_));
    let expected_logit = match teacher {
        Some((p, softmax)) if whole => expectation(p, z) / softmax.total,
        _ => 0.0,
    };
    let q = Softmax::of(z);
    let hard = q.log_sum_exp() - label_logit;
    let agrees = q.argmax as usize == label;
    let mut out = Row { loss: 0.0, hard, soft: 0.0, agrees, acceptance: (-hard).exp() };
    let tail = entries.as_ref().map(|entries| entries.finish(&q, z, &mut out));
    // −Σ p log q = lse(z) − Σ p z
    let cross_entropy = q.log_sum_exp() - expected_logit;
    let (of_label, weight) = (inputs.label_weight(index), inputs.soft_weight);
    if let (SoftTargets::Weighted(factors), Some((p, softmax))) = (inputs.soft, teacher) {
        let distribution = Acceptance::new(&factors, index, z, &q, p, softmax);
        out.soft = cross_entropy;
        out.acceptance = distribution.alpha;
        out.loss = of_label * hard + weight * distribution.loss(cross_entropy);
        if want_grad {
            distribution.gradient((of_label, weight), z, p);
            z[label] -= of_label as f32;
        }
        return out;
    }
    if let Some((p, softmax)) = teacher {
        teacher_statistics(&q, z, softmax, p, &mut out);
        if whole {
            out.soft = cross_entropy;
        }
    }
    out.loss = of_label * hard + weight * out.soft;
    if want_grad {
        let entries = entries.as_ref().zip(tail.as_ref());
        gradient(inputs, (label, of_label), &q, entries, teacher, z);
    }
    out
}

vectorised! {
    /// `z ← z · q_scale − p · p_scale`
    fn difference(z: &mut [f32], q_scale: f32, p: &[f32], p_scale: f32) {
        for (z, p) in z.iter_mut().zip(p) {
            *z = *z * q_scale - p * p_scale;
        }
    }

    /// `Σ min(q · q_scale, p · p_scale)`
    pub(super) fn overlap(q: &[f32], q_scale: f32, p: &[f32], p_scale: f32) -> f32 {
        let mut lanes = [0.0_f32; 16];
        let ((q_chunks, q_tail), (p_chunks, p_tail)) =
            (q.as_chunks::<16>(), p.as_chunks::<16>());
        for (q, p) in q_chunks.iter().zip(p_chunks) {
            for i in 0..16 {
                let (q, p) = (q[i] * q_scale, p[i] * p_scale);
                lanes[i] += if q < p { q } else { p };
            }
        }
        let tail: f32 = q_tail.iter().zip(p_tail).map(|(q, p)| (q * q_scale).min(p * p_scale)).sum();
        lanes.iter().sum::<f32>() + tail
    }
}

/// Turns `z`, which holds `e^(z − max)`, into `dℓ/dz`.
fn gradient(
    inputs: &Inputs<'_>,
    (label, of_label): (usize, f64),
    q: &Softmax,
    top_k: Option<(&TopK<'_>, &TailTerm)>,
    teacher: Option<TeacherRow<'_>>,
    z: &mut [f32],
) {
    let weight = inputs.soft_weight;
    if let (SoftTargets::Full, Some((p, softmax))) = (inputs.soft, teacher) {
        let q_scale = ((of_label + weight) / q.total) as f32;
        difference(z, q_scale, p, (weight / softmax.total) as f32);
    } else {
        let on_others = top_k.map_or(0.0, |(_, tail)| weight * tail.on_others);
        let q_scale = ((of_label + on_others) / q.total) as f32;
        let kept: Vec<f64> = top_k.map_or_else(Vec::new, |(entries, _)| {
            entries.ids.iter().map(|&id| f64::from(z[id as usize]) / q.total).collect()
        });
        scale(z, q_scale);
        if let Some((entries, tail)) = top_k {
            entries.gradient(&kept, tail, (of_label, weight, 0.0), z);
        }
    }
    z[label] -= of_label as f32;
}

/// `Σ_v p_v z_v`, blocks of f32 added in f64.
fn expectation(p: &[f32], z: &[f32]) -> f64 {
    p.chunks(256).zip(z.chunks(256)).map(|(p, z)| f64::from(dot(p, z))).sum()
}

fn teacher_statistics(q: &Softmax, e: &[f32], softmax: &Softmax, p: &[f32], out: &mut Row) {
    let (q_scale, p_scale) = ((1.0 / q.total) as f32, (1.0 / softmax.total) as f32);
    out.acceptance = f64::from(overlap(e, q_scale, p, p_scale));
    out.agrees = q.argmax == softmax.argmax;
}
