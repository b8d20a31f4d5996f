//! The target's distribution in the loss of slots: that of the token before a slot's label.
//!
//! ```text
//! ℓ = (1 − λ) (−log q[x_t]) + λ (−Σ_v p_{t−1}[v] log q[v])
//! ```

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, untapped};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, Rejection, SoftTargets, Teacher, Weighted, linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::{TopK, bent_top_k};
use longdraft_models::draft::VocabularyMap;

use super::blocks::{Slots, is_learned};
use crate::error::Result;
use crate::objective::{TailKind, TeacherDistribution, TopDistributions};

/// The part of the target's distribution in a slot's loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftLoss {
    /// λ, above 0 and at most 1; the rest of the loss learns the text.
    pub weight: f64,
    /// How much of the distribution is learned.
    pub distribution: TeacherDistribution,
}

/// Tokens whose distributions slots may learn: those before a supervised token of their document. A
/// rank that runs a part of a row has also those that its last block of `slots` reaches.
pub(super) fn teacher_rows(batch: &Batch, slots: usize) -> Vec<u32> {
    let tokens = batch.ids.len();
    let own = batch.own.clone().unwrap_or(0..tokens);
    let reached = own.start..(own.end + slots).min(tokens);
    reached.filter(|t| is_learned(batch, *t, t + 1)).map(|t| t as u32).collect()
}

impl SoftLoss {
    /// The slots' losses under weights `[S]`; `labels` are the learned slots' states `[S, H]`, the
    /// target's head `[V, H]` and the text.
    pub(super) fn cross_entropy(
        &self,
        labels: &Inputs<'_>,
        (batch, slots): (&Batch, &Slots),
        features: &BatchFeatures,
        weights: &[f32],
    ) -> Result<Output> {
        let head = labels.head;
        let share =
            |share: f64| weights.iter().map(|w| (share * f64::from(*w)) as f32).collect::<Vec<_>>();
        let (of_labels, of_target) = (share(1.0 - self.weight), share(self.weight));
        let weighted = Weighted {
            cross_entropy: &of_target,
            rejection: &vec![0.0; weights.len()],
            form: Rejection::Linear,
            log_sum_exp: None,
        };
        let output = |soft: SoftTargets<'_>, teacher: Option<Teacher<'_>>| -> Result<Output> {
            let label_weights = Some(of_labels.as_slice());
            let inputs = Inputs { label_weights, soft, soft_weight: 1.0, teacher, ..*labels };
            Ok(linear_cross_entropy(&inputs)?)
        };
        let sparse = |(entries, k, tail): (&TopK, usize, TailKind), tokens: &[u32]| {
            let every = VocabularyMap::identity(head.dim(0)?);
            let of = (tokens, batch.ids.len());
            let distributions = TopDistributions::new(entries, k, of, &every, tail);
            let rows = distributions.of_tokens(&slots.teachers());
            let rows = rows.ok_or_else(|| untapped("the teacher at a learned slot"))?;
            output(SoftTargets::Sparse(distributions.of_rows(&rows), weighted), None)
        };
        // States of a part of a row begin with its own first token.
        let first = features.rows().map_or(0, |rows| rows.start as u32);
        let from_first = |tokens: &[u32]| tokens.iter().map(|t| t - first).collect::<Vec<u32>>();
        match (&features.teacher, self.distribution) {
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::Whole) => {
                let rows = from_first(&slots.teachers());
                let teacher = Teacher { hidden, rows: Some(&rows), head };
                output(SoftTargets::Weighted(weighted), Some(teacher))
            }
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::TopK { k, tail }) => {
                let mut tokens = slots.teachers();
                tokens.sort_unstable();
                tokens.dedup();
                let k = k.min(head.dim(0)?);
                let hidden = select_rows(hidden, &from_first(&tokens))?;
                sparse((&bent_top_k(&hidden, head, k, labels.teacher_bend)?, k, tail), &tokens)
            }
            (TeacherFeatures::TopK { entries, k, .. }, TeacherDistribution::TopK { tail, .. }) => {
                sparse((entries, *k, tail), &teacher_rows(batch, slots.of_a_block()))
            }
            _ => Err(untapped("the teacher at every token").into()),
        }
    }
}
