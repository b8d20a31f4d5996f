//! The loss of drafts that learn to propose only the most frequent tokens: it reads these rows of the target's head.
//!
//! The target's distribution is that over the proposed tokens, rescaled to 1; its own most likely token is the label
//! where that is one of them. How often proposals hold is measured with true probabilities all the same, so that what
//! is never proposed counts as missed.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{TeacherFeatures, untapped};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, Rejection, SoftTargets, Teacher, Weighted, linear_cross_entropy,
};
use longdraft_kernels::matrix::Matrix;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Ends, Target};

use super::GlideObjectiveConfig;
use crate::error::Result;
use crate::objective::TopDistributions;

/// The tokens that a draft learns to propose.
pub(super) struct Proposed {
    vocabulary: VocabularyMap,
    /// Their rows of the target's head, `[Vd, H]`: as blocks where losses read blocks, else in f32.
    head: Matrix,
}

/// What is known of the target at the learned rows `[R]`.
pub(super) struct Known {
    /// The label of every row as a draft token, if it is proposed.
    labels: Vec<Option<u32>>,
    distributions: Distributions,
}

enum Distributions {
    /// Nothing but labels.
    None,
    /// Those of the most likely tokens.
    Top(TopDistributions),
    /// The target's final states and the normalisers of its whole vocabulary.
    Whole { hidden: Tensor, log_sum_exp: Vec<f64> },
}

impl Known {
    /// Whether it has distributions beside labels.
    pub(super) fn is_soft(&self) -> bool {
        !matches!(self.distributions, Distributions::None)
    }
}

impl Proposed {
    /// # Errors
    /// - a token lies outside the target's vocabulary
    pub(super) fn new(vocabulary: VocabularyMap, target: &Target) -> Result<Self> {
        let kept: Vec<u32> = vocabulary.kept().iter().map(|id| id.0).collect();
        let head = match target.hold_ends()?.head_matrix() {
            blocks @ Matrix::Quantised(_) => blocks.select(&kept)?,
            held => Matrix::Dense(held.rows(&kept)?),
        };
        Ok(Self { vocabulary, head })
    }

    /// How many.
    pub(super) fn size(&self) -> usize {
        self.vocabulary.draft_size()
    }

    /// What the draft's states at the learned rows are compared with.
    pub(super) fn known(
        &self,
        (ends, config): (&Ends<'_>, &GlideObjectiveConfig),
        batch: &Batch,
        teacher: &TeacherFeatures,
    ) -> Result<Known> {
        let of = |id: u32| self.vocabulary.to_draft(TargetTokenId(id)).map(|id| id.0);
        let rows: Vec<u32> = (0..batch.learned.len() as u32).collect();
        Ok(match teacher {
            TeacherFeatures::None => Known {
                labels: batch.labels().into_iter().map(of).collect(),
                distributions: Distributions::None,
            },
            TeacherFeatures::TopK { entries, k, .. } => {
                let of_rows = (rows.as_slice(), rows.len());
                let top =
                    TopDistributions::new(entries, *k, of_rows, &self.vocabulary, config.tail);
                let labels = entries.ids.chunks((*k).max(1)).map(|ids| of(ids[0])).collect();
                Known { labels, distributions: Distributions::Top(top) }
            }
            TeacherFeatures::Full { hidden } => {
                let summary = ends.head_summary(hidden)?;
                let (hidden, log_sum_exp) = (hidden.clone(), summary.log_sum_exp);
                Known {
                    labels: summary.argmax.into_iter().map(of).collect(),
                    distributions: Distributions::Whole { hidden, log_sum_exp },
                }
            }
            TeacherFeatures::EveryToken { .. } => {
                return Err(untapped("the teacher at the learned rows").into());
            }
        })
    }

    /// The loss of the draft's states at the learned rows, `[R, H]`.
    pub(super) fn judge(
        &self,
        hidden: &Tensor,
        known: &Known,
        (target, config): (&Target, &GlideObjectiveConfig),
    ) -> Result<Output> {
        let count = known.labels.len();
        let (ones, zeros) = (vec![1.0_f32; count], vec![0.0_f32; count]);
        let rows: Vec<u32> = (0..count as u32).collect();
        let mut factors = Weighted {
            cross_entropy: &ones,
            rejection: &zeros,
            form: Rejection::Linear,
            log_sum_exp: None,
        };
        let (soft, teacher, soft_weight) = match &known.distributions {
            Distributions::None => (SoftTargets::None, None, 0.0),
            Distributions::Top(top) => {
                (SoftTargets::Sparse(top.of_rows(&rows), factors), None, config.soft_weight)
            }
            Distributions::Whole { hidden, log_sum_exp } => {
                factors.log_sum_exp = Some(log_sum_exp);
                let teacher = Teacher { hidden, rows: None, head: (&self.head).into() };
                (SoftTargets::Weighted(factors), Some(teacher), config.soft_weight)
            }
        };
        let weight =
            |label: &Option<u32>| if label.is_some() { 1.0 - soft_weight as f32 } else { 0.0 };
        let weights: Vec<f32> = known.labels.iter().map(weight).collect();
        let labels: Vec<u32> = known.labels.iter().map(|label| label.unwrap_or(0)).collect();
        let inputs = Inputs::of_labels(hidden, &self.head, &labels).bent(target.bend());
        let label_weights = Some(weights.as_slice());
        let mut output =
            linear_cross_entropy(&Inputs { soft, soft_weight, teacher, label_weights, ..inputs })?;
        for (row, _) in known.labels.iter().enumerate().filter(|(_, label)| label.is_none()) {
            // What is not proposed is missed.
            (output.rows.agrees[row], output.rows.hard[row]) = (false, 0.0);
            if soft_weight == 0.0 {
                output.rows.acceptance[row] = 0.0;
            }
        }
        Ok(output)
    }
}
