//! Soft targets as the kernel reads them.

use candle_core::{DType, Result, Tensor};

use super::super::{SparseDistributions, Tail, Teacher};
use crate::linear::composed as linear;

/// A teacher's logits, each row once, and which of them every row has.
pub(super) struct TeacherLogits {
    pub(super) logits: Tensor,
    pub(super) of: Vec<u32>,
}

impl TeacherLogits {
    pub(super) fn new(teacher: &Teacher<'_>, rounded: bool) -> Result<Self> {
        let head = teacher.head.to_tensor()?.detach();
        let mut logits = linear(&teacher.hidden.detach(), &head, None)?;
        let (own, half) = (logits.dtype(), teacher.head.dtype());
        if rounded && matches!(half, DType::BF16 | DType::F16) {
            // Two of the three are there at a time.
            logits = logits.to_dtype(half)?;
            logits = logits.to_dtype(own)?;
        }
        let of = match teacher.rows {
            Some(rows) => rows.to_vec(),
            None => (0..teacher.hidden.dim(0)? as u32).collect(),
        };
        Ok(Self { logits: logits.contiguous()?, of })
    }
}

/// Targets of which only some tokens are known, as the kernel reads them.
#[derive(Default)]
pub(super) struct Entries {
    /// Where every row's entries begin and end.
    pub(super) from: Vec<u32>,
    pub(super) until: Vec<u32>,
    pub(super) ids: Vec<u32>,
    /// Sum to 1 with `rest`.
    pub(super) probabilities: Vec<f32>,
    /// Mass of the bucket for all other tokens, a number a row.
    pub(super) rest: Vec<f32>,
    /// Makes `probabilities` true, a number a row.
    pub(super) rescale: Vec<f32>,
    pub(super) bucket: bool,
}

impl Entries {
    pub(super) fn top_k(ids: &[u32], log_probs: &[f32], k: usize, tail: Tail) -> Self {
        let mut entries =
            Self { ids: ids.to_vec(), bucket: tail == Tail::Bucket, ..Self::default() };
        for (row, log_probs) in (0..).zip(log_probs.chunks(k.max(1))) {
            let p: Vec<f64> = log_probs.iter().map(|&lp| f64::from(lp).exp()).collect();
            let mass: f64 = p.iter().sum();
            let (rest, rescale) =
                if entries.bucket { ((1.0 - mass).max(0.0), 1.0) } else { (0.0, mass) };
            entries.add_row(row * k, k, (rest, rescale));
            entries.probabilities.extend(p.iter().map(|p| (p / rescale) as f32));
        }
        entries
    }

    pub(super) fn sparse(distributions: &SparseDistributions<'_>) -> Self {
        let mut entries = Self { ids: distributions.ids.to_vec(), bucket: true, ..Self::default() };
        let mass_of = |distribution: usize| distributions.of_distribution(distribution).mass();
        for distribution in 0..distributions.tails.len() {
            let mass = mass_of(distribution);
            let of = &distributions.log_probs
                [distributions.starts[distribution]..distributions.starts[distribution + 1]];
            let scaled = of.iter().map(|&lp| (f64::from(lp).exp() / mass) as f32);
            entries.probabilities.extend(scaled);
        }
        for &distribution in distributions.rows {
            let distribution = distribution as usize;
            let (start, mass) = (distributions.starts[distribution], mass_of(distribution));
            let shares = (distributions.tails[distribution] / mass, mass);
            entries.add_row(start, distributions.starts[distribution + 1] - start, shares);
        }
        entries
    }

    fn add_row(&mut self, first: usize, count: usize, (rest, rescale): (f64, f64)) {
        self.from.push(first as u32);
        self.until.push((first + count) as u32);
        self.rest.push(rest as f32);
        self.rescale.push(rescale as f32);
    }
}
