//! The heads of a block draft's loss: the one that slots propose through, and the target's.
//!
//! They differ where a draft proposes some of the target's tokens through a head of its own. Its slots learn the
//! target's distribution over these tokens, rescaled to 1. A label that is not among them is not learned, and counts
//! as wrong. Chances of acceptance are those under the target's true probabilities.

use std::sync::OnceLock;

use candle_core::Tensor;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::linear_cross_entropy::{Inputs, Output, RowStatistics, Teacher};
use longdraft_kernels::log_sum_exp::bent_log_sum_exp;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::block::OwnHead;

use super::blocks::{Slots, distinct};
use super::drawn::DrawnBlocks;
use super::slot_loss::Terms;
use super::teacher::against_whole;
use crate::error::Result;

/// The heads of a loss.
pub(in crate::method) struct Heads<'a> {
    /// What slots propose through, `[Vd, H]`.
    proposing: Matrix,
    /// The target's rows of the tokens that are proposed, `[Vd, H]`, once they were needed.
    kept: &'a OnceLock<Matrix>,
    /// The target's, `[V, H]`.
    whole: &'a Matrix,
    /// The tokens that are proposed, where these are not all.
    vocabulary: Option<&'a VocabularyMap>,
    /// What makes logits of products.
    bend: Bend,
}

/// Labels of slots, as tokens that the draft proposes.
struct Labels {
    ids: Vec<u32>,
    /// Slots whose label it does not propose; another token stands there.
    unknown: Vec<usize>,
}

/// The loss with a label that was learned, 0 with one that is not proposed.
pub(in crate::method) fn learned_loss(hard: f64) -> f64 {
    if hard == f64::INFINITY { 0.0 } else { hard }
}

impl<L> DrawnBlocks<L> {
    /// The heads of the loss.
    pub(super) fn heads(&self) -> Result<Heads<'_>> {
        let (whole, kept, bend) = (&self.head, &self.kept_head, self.bend);
        let own = self.draft.own_head();
        let proposing = match own {
            Some(own) => Matrix::Dense(own.rows()?),
            None => whole.clone(),
        };
        Ok(Heads { proposing, kept, whole, vocabulary: own.map(OwnHead::vocabulary), bend })
    }

    /// What `loss` makes of learned slots' states `[S, H]` beside their labels, under some terms; `of_labels` says
    /// that these are about the labels alone.
    pub(in crate::method) fn losses(
        &self,
        (states, slots): (&Tensor, &Slots),
        (mut terms, of_labels): (Terms, bool),
        loss: impl FnOnce(&Heads<'_>, &Inputs<'_>, &Terms) -> Result<Output>,
    ) -> Result<Output> {
        let heads = self.heads()?;
        let labels = Labels::of(&slots.labels, heads.vocabulary);
        labels.unknown.iter().for_each(|slot| terms.leave_label_out(*slot, of_labels));
        let inputs = Inputs::of_labels(states, &heads.proposing, &labels.ids).bent(self.bend);
        let mut output = loss(&heads, &inputs, &terms)?;
        labels.miss(&mut output.rows, of_labels);
        Ok(output)
    }
}

impl Heads<'_> {
    /// The target's head, `[V, H]`.
    pub(super) fn whole(&self) -> &Matrix {
        self.whole
    }

    /// The tokens that are proposed.
    pub(super) fn vocabulary(&self) -> Result<VocabularyMap> {
        match self.vocabulary {
            Some(vocabulary) => Ok(vocabulary.clone()),
            None => Ok(VocabularyMap::identity(self.whole.dims()?.0)),
        }
    }

    /// The slots' losses against the target's whole distributions: those of its final states `[T, H]`, of which
    /// `rows` has one for every slot.
    pub(in crate::method) fn against_whole(
        &self,
        labels: &Inputs<'_>,
        (hidden, rows): (&Tensor, &[u32]),
        terms: &Terms,
    ) -> Result<Output> {
        let teacher = Teacher { hidden, rows: Some(rows), head: self.teaching()?.into() };
        against_whole(labels, teacher, self.normalisers(hidden, rows)?.as_deref(), terms)
    }

    /// The target's rows of the tokens that are proposed.
    fn teaching(&self) -> Result<&Matrix> {
        let Some(vocabulary) = self.vocabulary else { return Ok(self.whole) };
        if let Some(rows) = self.kept.get() {
            return Ok(rows);
        }
        let tokens: Vec<u32> = vocabulary.kept().iter().map(|id| id.0).collect();
        let rows = self.whole.select(&tokens)?;
        Ok(self.kept.get_or_init(|| rows))
    }

    /// `log Σ e^z` over all of the target's tokens, `[S]`, where some of them are not proposed.
    fn normalisers(&self, hidden: &Tensor, rows: &[u32]) -> Result<Option<Vec<f64>>> {
        if self.vocabulary.is_none() {
            return Ok(None);
        }
        let known = distinct(rows.to_vec());
        let summary = bent_log_sum_exp(&select_rows(hidden, &known)?, self.whole, self.bend)?;
        let of_row = |row: &u32| summary.log_sum_exp[known.partition_point(|known| known < row)];
        Ok(Some(rows.iter().map(of_row).collect()))
    }
}

impl Labels {
    fn of(labels: &[u32], vocabulary: Option<&VocabularyMap>) -> Self {
        let Some(vocabulary) = vocabulary else {
            return Self { ids: labels.to_vec(), unknown: Vec::new() };
        };
        let known: Vec<_> =
            labels.iter().map(|id| vocabulary.to_draft(TargetTokenId(*id))).collect();
        let unknown = (0..).zip(&known).filter(|(_, id)| id.is_none()).map(|(slot, _)| slot);
        let unknown = unknown.collect();
        Self { ids: known.into_iter().map(|id| id.map_or(0, |id| id.0)).collect(), unknown }
    }

    /// What is not proposed is missed: its chance is 0. Chances of acceptance are those of labels where there is no
    /// distribution.
    fn miss(&self, rows: &mut RowStatistics, of_labels: bool) {
        for slot in &self.unknown {
            (rows.agrees[*slot], rows.hard[*slot]) = (false, f64::INFINITY);
            if of_labels {
                rows.acceptance[*slot] = 0.0;
            }
        }
    }
}
