//! Top-k targets: the teacher's most likely tokens and what becomes of the rest.

use super::row::{Row, Softmax};
use super::sparse::SparseDistribution;
use super::{TAIL_FLOOR, Tail};

/// The most likely of top-k entries; ties go to the lower id.
pub(super) fn best_of(ids: &[u32], log_probs: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, u32::MAX);
    for (&id, &log_prob) in ids.iter().zip(log_probs) {
        if log_prob > best.0 || (log_prob >= best.0 && id < best.1) {
            best = (log_prob, id);
        }
    }
    best.1
}

/// Top-k targets of one row, with the logits of their ids.
pub(super) struct TopK<'a> {
    pub(super) ids: &'a [u32],
    /// Target probabilities, rescaled if the tail is dropped.
    p: Vec<f64>,
    /// What `p` was divided by.
    rescale: f64,
    rest: f64,
    logits: Vec<f64>,
    tail: Tail,
    best: u32,
}

/// The tail of the draft's distribution and what it does to the gradient.
pub(super) struct TailTerm {
    /// `Σ p + r` when the tail term is live, `Σ p` when it is a constant: factor of `q` on ids.
    on_ids: f64,
    /// Factor of `q` elsewhere.
    pub(super) on_others: f64,
}

impl<'a> TopK<'a> {
    pub(super) fn new(ids: &'a [u32], log_probs: &[f32], z: &[f32], tail: Tail) -> Self {
        let mut p: Vec<f64> = log_probs.iter().map(|&lp| f64::from(lp).exp()).collect();
        let mass: f64 = p.iter().sum();
        let (mut rest, mut rescale) = ((1.0 - mass).max(0.0), 1.0);
        if tail == Tail::Renormalise {
            p.iter_mut().for_each(|p| *p /= mass);
            (rest, rescale) = (0.0, mass);
        }
        let logits = ids.iter().map(|&id| f64::from(z[id as usize])).collect();
        Self { ids, p, rescale, rest, logits, tail, best: best_of(ids, log_probs) }
    }

    /// A distribution with a tail bucket, all of it rescaled to mass 1.
    pub(super) fn of_distribution(distribution: SparseDistribution<'a>, z: &[f32]) -> Self {
        let SparseDistribution { ids, log_probs, tail } = distribution;
        let mass = distribution.mass();
        let p = log_probs.iter().map(|&lp| f64::from(lp).exp() / mass).collect();
        let logits = ids.iter().map(|&id| f64::from(z[id as usize])).collect();
        let best = best_of(ids, log_probs);
        Self { ids, p, rescale: mass, rest: tail / mass, logits, tail: Tail::Bucket, best }
    }

    /// `Σ q 1[q < p̄]` over the ids; `q` holds their probabilities.
    pub(super) fn mass_below(&self, q: &[f64]) -> f64 {
        let below = |(q, p): &(&f64, &f64)| **q < **p * self.rescale;
        q.iter().zip(&self.p).filter(below).map(|(q, _)| q).sum()
    }

    /// Writes soft loss and statistics; returns the tail's factors.
    pub(super) fn finish(&self, q: &Softmax, e: &[f32], out: &mut Row) -> TailTerm {
        let lse = q.log_sum_exp();
        let mut soft = 0.0;
        let mut accepted = 0.0;
        let mut on_ids = 0.0;
        for (p, z) in self.p.iter().zip(&self.logits) {
            soft -= p * (z - lse);
            let q_v = (z - lse).exp();
            accepted += (p * self.rescale).min(q_v);
            on_ids += q_v;
        }
        let mass: f64 = self.p.iter().sum();
        let mut term = TailTerm { on_ids: mass, on_others: mass };
        if self.tail == Tail::Bucket {
            // 1 − Σ q loses all digits for a peaked draft: then sum the other entries instead.
            let q_tail = if on_ids < 0.99 { 1.0 - on_ids } else { self.sum_of_others(e) / q.total };
            soft -= self.rest * q_tail.max(TAIL_FLOOR).ln();
            if q_tail > TAIL_FLOOR {
                term.on_ids = mass + self.rest;
                term.on_others = mass + self.rest - self.rest / q_tail;
            }
        }
        out.soft = soft;
        out.acceptance = accepted;
        out.agrees = q.argmax == self.best;
        term
    }

    fn sum_of_others(&self, e: &[f32]) -> f64 {
        let mut sorted = self.ids.to_vec();
        sorted.sort_unstable();
        let mut start = 0;
        let mut sum = 0.0;
        for end in sorted.into_iter().map(|id| id as usize).chain([e.len()]) {
            sum += e[start..end.max(start)].iter().map(|&x| f64::from(x)).sum::<f64>();
            start = end + 1;
        }
        sum
    }

    /// Replaces the ids' entries of `dz`; `q` holds their probabilities. The factors are those of
    /// `q` itself, of the cross-entropy's gradient, and of `−q 1[q < p̄]`.
    pub(super) fn gradient(
        &self,
        q: &[f64],
        tail: &TailTerm,
        (everywhere, cross_entropy, slope): (f64, f64, f64),
        dz: &mut [f32],
    ) {
        for ((&id, &q), &p) in self.ids.iter().zip(q).zip(&self.p) {
            let below = if q < p * self.rescale { slope * q } else { 0.0 };
            let value = everywhere * q + cross_entropy * (q * tail.on_ids - p) - below;
            dz[id as usize] = value as f32;
        }
    }
}
