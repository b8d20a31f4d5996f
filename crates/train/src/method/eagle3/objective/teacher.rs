//! What the target says: two numbers of every teacher row over its whole vocabulary; its
//! distribution over the draft's vocabulary is formed inside the loss, or from its most likely
//! tokens.

use candle_core::Tensor;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::log_sum_exp::bent_log_sum_exp;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::top_k::TopK;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::{DraftTokenId, TargetTokenId};

use crate::error::Result;
use crate::objective::{TailKind, TopDistributions};

/// By token; only rows that some step reads are filled in.
#[derive(Debug, Clone)]
pub(super) struct TeacherSummary {
    /// `log Σ_v e^{z_v}` over the whole vocabulary, `[T]`.
    pub(super) log_sum_exp: Vec<f64>,
    /// The most likely token, `[T]`.
    pub(super) best: Vec<TargetTokenId>,
    /// The same as a draft token, if the draft can propose it, `[T]`.
    pub(super) label: Vec<Option<DraftTokenId>>,
    /// In place of the whole distribution.
    pub(super) distributions: Option<TopDistributions>,
}

impl TeacherSummary {
    fn empty(tokens: usize) -> Self {
        Self {
            log_sum_exp: vec![f64::INFINITY; tokens],
            best: vec![TargetTokenId(0); tokens],
            label: vec![None; tokens],
            distributions: None,
        }
    }

    fn set(&mut self, t: u32, best: u32, log_sum_exp: f64, vocabulary: &VocabularyMap) {
        let (t, best) = (t as usize, TargetTokenId(best));
        self.log_sum_exp[t] = log_sum_exp;
        self.best[t] = best;
        self.label[t] = vocabulary.to_draft(best);
    }

    /// Summarises the teacher at some of `tokens` tokens from its states there.
    pub(super) fn new(
        hidden: &Tensor,
        (head, bend): (&Matrix, Bend),
        vocabulary: &VocabularyMap,
        (rows, tokens): (&[u32], usize),
    ) -> Result<Self> {
        let mut summary = Self::empty(tokens);
        if rows.is_empty() {
            return Ok(summary);
        }
        let of_rows = bent_log_sum_exp(hidden, head, bend)?;
        for (index, &t) in rows.iter().enumerate() {
            summary.set(t, of_rows.argmax[index], of_rows.log_sum_exp[index], vocabulary);
        }
        Ok(summary)
    }

    /// The same from its `k` most likely tokens at `rows`, which carry true log-probabilities.
    pub(super) fn of_top_k(
        entries: &TopK,
        k: usize,
        (rows, tokens): (&[u32], usize),
        vocabulary: &VocabularyMap,
        tail: TailKind,
    ) -> Self {
        let mut summary = Self::empty(tokens);
        for (&t, ids) in rows.iter().zip(entries.ids.chunks(k.max(1))) {
            summary.set(t, ids[0], 0.0, vocabulary);
        }
        summary.distributions =
            Some(TopDistributions::new(entries, k, (rows, tokens), vocabulary, tail));
        summary
    }
}
