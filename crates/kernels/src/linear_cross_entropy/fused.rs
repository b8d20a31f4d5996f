//! Chunked CPU implementation: logits of some rows, their loss and gradient in place, next rows.

use candle_core::{Result, Storage, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::weighted::Acceptance;
use super::{Inputs, RowStatistics, SoftTargets, TAIL_FLOOR, Tail};
use crate::gemm::{Mat, Threads, matmul};
use crate::linear::{Weight, product_nn, product_nt};
use crate::simd::{exp_in_place, max_of, vectorised};
use crate::storage::with_f32;

/// Rows whose logits exist at the same time.
const CHUNK_ROWS: usize = 256;

/// What was asked for by what trains.
pub(super) struct Gradients {
    /// `dh`, `[R, H]`
    pub(super) hidden: Option<Vec<f32>>,
    /// `dW`, `[V, H]`
    pub(super) head: Option<Vec<f32>>,
}

/// `Σ ℓ`, statistics of every row, and the gradients of `Σ ℓ`.
pub(super) fn forward(inputs: &Inputs<'_>) -> Result<(f64, RowStatistics, Gradients)> {
    let (vocabulary, width) = inputs.head.dims2()?;
    let mut gradients = Gradients {
        hidden: inputs.hidden.track_op().then(Vec::new),
        head: inputs.head.track_op().then(|| vec![0.0; vocabulary * width]),
    };
    let want_grad = gradients.hidden.is_some() || gradients.head.is_some();
    let mut statistics = RowStatistics::default();
    let mut loss = 0.0;
    with_f32(inputs.hidden, |hidden| {
        with_weight(inputs.head, |head| {
            for (index, hidden) in hidden.chunks(CHUNK_ROWS * width).enumerate() {
                let first = index * CHUNK_ROWS;
                let rows = hidden.len() / width;
                let mut logits = product_nt(hidden, head, width, vocabulary);
                let teacher = teacher_logits(inputs, first, rows, vocabulary)?;
                let results: Vec<Row> = logits
                    .par_chunks_mut(vocabulary)
                    .enumerate()
                    .map(|(i, z)| {
                        let teacher =
                            teacher.as_ref().map(|t| &t[i * vocabulary..(i + 1) * vocabulary]);
                        row(inputs, first + i, z, teacher, want_grad)
                    })
                    .collect();
                for row in results {
                    loss += row.loss;
                    statistics.hard.push(row.hard);
                    statistics.soft.push(row.soft);
                    statistics.agrees.push(row.agrees);
                    statistics.acceptance.push(row.acceptance);
                }
                if let Some(grad) = &mut gradients.hidden {
                    grad.extend(product_nn(&logits, head, width, vocabulary));
                }
                if let Some(grad) = &mut gradients.head {
                    let dz = Mat::rows(&logits, rows, vocabulary, vocabulary).t();
                    let hidden = Mat::rows(hidden, rows, width, width);
                    matmul(grad, width, dz, hidden, true, Threads::Pool);
                }
            }
            Ok(())
        })
    })?;
    Ok((loss, statistics, gradients))
}

fn with_weight<R>(tensor: &Tensor, f: impl FnOnce(Weight<'_>) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => f(Weight::from_storage(cpu, layout)?),
        _ => bail!("linear_cross_entropy: CPU head expected"),
    }
}

fn teacher_logits(
    inputs: &Inputs<'_>,
    first: usize,
    rows: usize,
    vocabulary: usize,
) -> Result<Option<Vec<f32>>> {
    let Some(teacher) = inputs.teacher else {
        return Ok(None);
    };
    let width = teacher.hidden.dim(1)?;
    with_f32(&teacher.hidden.narrow(0, first, rows)?, |hidden| {
        with_weight(teacher.head, |head| {
            let mut logits = product_nt(hidden, head, width, vocabulary);
            if matches!(inputs.soft, SoftTargets::Weighted(_)) {
                round_like(&mut logits, head);
            }
            Ok(Some(logits))
        })
    })
}

/// Rounds logits to a 16-bit head's type.
fn round_like(logits: &mut [f32], head: Weight<'_>) {
    match head {
        Weight::F32(_) => {}
        Weight::Bf16(_) => logits.iter_mut().for_each(|z| *z = bf16::from_f32(*z).to_f32()),
        Weight::F16(_) => logits.iter_mut().for_each(|z| *z = f16::from_f32(*z).to_f32()),
    }
}

struct Row {
    loss: f64,
    hard: f64,
    soft: f64,
    agrees: bool,
    acceptance: f64,
}

/// A row of logits turned into unnormalised probabilities `e^(z − max)`.
pub(super) struct Softmax {
    pub(super) max: f32,
    argmax: u32,
    pub(super) total: f64,
}

impl Softmax {
    fn of(z: &mut [f32]) -> Self {
        let (argmax, max) = argmax(z);
        let total = exp_sum(z, max);
        Self { max, argmax: argmax as u32, total }
    }

    fn log_sum_exp(&self) -> f64 {
        f64::from(self.max) + self.total.ln()
    }
}

/// Index and value of the first largest element; NaN is never larger.
fn argmax(z: &[f32]) -> (usize, f32) {
    let max = max_of(z);
    let index = z.iter().position(|&x| x >= max).unwrap_or(0);
    (index, max)
}

/// `z ← e^(z − max)`; blocks summed in f32, added in f64.
fn exp_sum(z: &mut [f32], max: f32) -> f64 {
    z.chunks_mut(4096).map(|block| f64::from(exp_in_place(block, max))).sum()
}

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

/// Loss and statistics of one row; `z` becomes `dℓ/dz` if `want_grad`.
fn row(
    inputs: &Inputs<'_>,
    index: usize,
    z: &mut [f32],
    teacher: Option<&[f32]>,
    want_grad: bool,
) -> Row {
    let label = inputs.labels[index] as usize;
    let label_logit = f64::from(z[label]);
    let entries = match inputs.soft {
        SoftTargets::TopK { ids, log_probs, k, tail } => {
            Some(TopK::new(&ids[index * k..][..k], &log_probs[index * k..][..k], z, tail))
        }
        _ => None,
    };
    let p = teacher.map(|teacher| {
        let mut p = teacher.to_vec();
        let softmax = Softmax::of(&mut p);
        (p, softmax)
    });
    let whole = matches!(inputs.soft, SoftTargets::Full | SoftTargets::Weighted(_));
    let expected_logit = match &p {
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
    let weight = inputs.soft_weight;
    if let (SoftTargets::Weighted(factors), Some((p, softmax))) = (inputs.soft, &p) {
        let law = Acceptance::new(&factors, index, z, &q, p, softmax);
        out.soft = cross_entropy;
        out.acceptance = law.alpha;
        out.loss = (1.0 - weight) * hard + weight * law.loss(cross_entropy);
        if want_grad {
            law.gradient(weight, z, p);
            z[label] -= (1.0 - weight) as f32;
        }
        return out;
    }
    if let Some((p, softmax)) = &p {
        teacher_statistics(&q, z, softmax, p, &mut out);
        if whole {
            out.soft = cross_entropy;
        }
    }
    out.loss = (1.0 - weight) * hard + weight * out.soft;
    if want_grad {
        gradient(inputs, label, &q, entries.as_ref().zip(tail.as_ref()), p.as_ref(), z);
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

    fn scale(z: &mut [f32], factor: f32) {
        for z in z {
            *z *= factor;
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
    label: usize,
    q: &Softmax,
    top_k: Option<(&TopK<'_>, &TailTerm)>,
    teacher: Option<&(Vec<f32>, Softmax)>,
    z: &mut [f32],
) {
    let weight = inputs.soft_weight;
    if let (SoftTargets::Full, Some((p, softmax))) = (inputs.soft, teacher) {
        let (q_scale, p_scale) = ((1.0 / q.total) as f32, (weight / softmax.total) as f32);
        difference(z, q_scale, p, p_scale);
    } else {
        let on_others = top_k.map_or(0.0, |(_, tail)| weight * tail.on_others);
        let q_scale = ((1.0 - weight + on_others) / q.total) as f32;
        let kept: Vec<f64> = top_k.map_or_else(Vec::new, |(entries, _)| {
            entries.ids.iter().map(|&id| f64::from(z[id as usize]) / q.total).collect()
        });
        scale(z, q_scale);
        if let Some((entries, tail)) = top_k {
            entries.gradient(&kept, tail, weight, z);
        }
    }
    z[label] -= (1.0 - weight) as f32;
}

/// `Σ_v p_v z_v`, blocks of f32 added in f64.
fn expectation(p: &[f32], z: &[f32]) -> f64 {
    p.chunks(256).zip(z.chunks(256)).map(|(p, z)| f64::from(crate::simd::dot(p, z))).sum()
}

fn teacher_statistics(q: &Softmax, e: &[f32], softmax: &Softmax, p: &[f32], out: &mut Row) {
    let (q_scale, p_scale) = ((1.0 / q.total) as f32, (1.0 / softmax.total) as f32);
    out.acceptance = f64::from(overlap(e, q_scale, p, p_scale));
    out.agrees = q.argmax == softmax.argmax;
}

/// Top-k targets of one row, with the logits of their ids.
struct TopK<'a> {
    ids: &'a [u32],
    /// Target probabilities, rescaled if the tail is dropped.
    p: Vec<f64>,
    /// What `p` was divided by.
    rescale: f64,
    rest: f64,
    logits: Vec<f64>,
    tail: Tail,
    best: u32,
}

/// The tail of the draft's law and what it does to the gradient.
struct TailTerm {
    /// `Σ p + r` when the tail term is live, `Σ p` when it is a constant: factor of `q` on ids.
    on_ids: f64,
    /// Factor of `q` elsewhere.
    on_others: f64,
}

impl<'a> TopK<'a> {
    fn new(ids: &'a [u32], log_probs: &[f32], z: &[f32], tail: Tail) -> Self {
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

    /// Writes soft loss and statistics; returns the tail's factors.
    fn finish(&self, q: &Softmax, e: &[f32], out: &mut Row) -> TailTerm {
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

    /// Replaces the ids' entries of `dz`; `q` holds their probabilities.
    fn gradient(&self, q: &[f64], tail: &TailTerm, weight: f64, dz: &mut [f32]) {
        for ((&id, &q), &p) in self.ids.iter().zip(q).zip(&self.p) {
            let value = (1.0 - weight) * q + weight * (q * tail.on_ids - p);
            dz[id as usize] = value as f32;
        }
    }
}
