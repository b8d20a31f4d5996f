//! What the target says: two numbers of every teacher row over its whole vocabulary; its law over
//! the draft's vocabulary is formed inside the loss.

use candle_core::Tensor;
use longdraft_kernels::log_sum_exp::linear_log_sum_exp;
use longdraft_models::draft::eagle3::VocabularyMap;
use longdraft_models::{DraftTokenId, TargetTokenId};

use super::rows::rows_read;
use crate::error::Result;

/// By token; only rows that some step reads are filled in.
#[derive(Debug, Clone)]
pub(super) struct TeacherSummary {
    /// `log Σ_v e^{z_v}` over the whole vocabulary, `[T]`.
    pub(super) log_sum_exp: Vec<f64>,
    /// The most likely token, `[T]`.
    pub(super) best: Vec<TargetTokenId>,
    /// The same as a draft token, if the draft can propose it, `[T]`.
    pub(super) label: Vec<Option<DraftTokenId>>,
}

impl TeacherSummary {
    /// Summarises the teacher rows that `supervised` rows of every step read.
    pub(super) fn new(
        hidden: &Tensor,
        head: &Tensor,
        vocabulary: &VocabularyMap,
        supervised: &[Vec<u32>],
    ) -> Result<Self> {
        let tokens = hidden.dim(0)?;
        let rows = rows_read(tokens, supervised);
        let mut summary = Self {
            log_sum_exp: vec![f64::INFINITY; tokens],
            best: vec![TargetTokenId(0); tokens],
            label: vec![None; tokens],
        };
        if rows.is_empty() {
            return Ok(summary);
        }
        let chosen = Tensor::from_slice(&rows, rows.len(), hidden.device())?;
        let of_rows = linear_log_sum_exp(&hidden.index_select(&chosen, 0)?, head)?;
        for (index, &t) in rows.iter().enumerate() {
            let best = TargetTokenId(of_rows.argmax[index]);
            summary.log_sum_exp[t as usize] = of_rows.log_sum_exp[index];
            summary.best[t as usize] = best;
            summary.label[t as usize] = vocabulary.to_draft(best);
        }
        Ok(summary)
    }
}
