//! The target's distribution in the loss of slots: that of the token before a slot's label.
//!
//! ```text
//! ℓ = (1 − λ) (−log q[x_t]) + λ D(p_{t−1}, q)          D as `slot_loss` says
//! ```

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, untapped};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, SoftTargets, SparseDistributions, Teacher, Weighted, linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::{TopK, bent_top_k};

use super::blocks::{Slots, distinct, is_learned};
use super::divergence::divergence;
use super::heads::Heads;
use super::slot_loss::Terms;
use crate::error::Result;
use crate::objective::{TailKind, TeacherDistribution, TopDistributions};

/// The part of the target's distribution in a slot's loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftLoss {
    /// λ, above 0 and at most 1; the rest of the loss is the label's cross-entropy.
    pub weight: f64,
    /// How much of the distribution is learned.
    pub distribution: TeacherDistribution,
}

/// Tokens whose distributions slots may learn: those before a supervised token of their document. A
/// rank that runs a part of a row has also those that the last blocks of its pieces reach, of `slots` each.
pub(super) fn teacher_tokens(batch: &Batch, slots: usize) -> Vec<u32> {
    let tokens = batch.ids.len();
    let own = batch.own.clone().unwrap_or_else(|| (0..tokens).into());
    let reached = own.with_after(slots, tokens);
    reached.iter().filter(|t| is_learned(batch, *t, t + 1)).map(|t| t as u32).collect()
}

/// The slots' losses against whole distributions; `labels` are the learned slots' states `[S, H]`, the head that they
/// propose through and the labels. `normalisers` are those of the target's whole vocabulary, `[S]`, where its head has
/// fewer rows here.
pub(super) fn against_whole(
    labels: &Inputs<'_>,
    teacher: Teacher<'_>,
    normalisers: Option<&[f64]>,
    terms: &Terms,
) -> Result<Output> {
    let labels = Inputs { label_weights: Some(&terms.label), teacher: Some(teacher), ..*labels };
    if terms.loss.compares_whole() {
        if normalisers.is_some() {
            return Err(untapped("a head over all of the target's tokens").into());
        }
        return Ok(divergence(&labels, &terms.cross_entropy, terms.loss)?);
    }
    let soft = SoftTargets::Weighted(Weighted { log_sum_exp: normalisers, ..terms.weighted() });
    Ok(linear_cross_entropy(&Inputs { soft, soft_weight: 1.0, ..labels })?)
}

/// The slots' losses against their labels as distributions of one token; all terms are about these.
pub(super) fn against_labels(labels: &Inputs<'_>, terms: &Terms) -> Result<Output> {
    // Of one token cross-entropy is that of the label.
    let labels = Inputs { label_weights: Some(&terms.cross_entropy), ..*labels };
    if terms.rejection.iter().all(|weight| *weight == 0.0) {
        return Ok(linear_cross_entropy(&labels)?);
    }
    let slots = labels.labels.len();
    let (starts, own): (Vec<usize>, Vec<u32>) =
        ((0..=slots).collect(), (0..slots as u32).collect());
    let distributions = SparseDistributions {
        starts: &starts,
        ids: labels.labels,
        log_probs: &vec![0.0; slots],
        tails: &vec![0.0; slots],
        rows: &own,
    };
    let none = vec![0.0; slots];
    let rejected = Weighted { cross_entropy: &none, ..terms.weighted() };
    let soft = SoftTargets::Sparse(distributions, rejected);
    Ok(linear_cross_entropy(&Inputs { soft, soft_weight: 1.0, ..labels })?)
}

impl SoftLoss {
    /// The slots' losses; `labels` are the learned slots' states `[S, H]`, the head that they propose through and
    /// the labels.
    pub(super) fn against(
        &self,
        (heads, labels): (&Heads<'_>, &Inputs<'_>),
        (batch, slots): (&Batch, &Slots),
        features: &BatchFeatures,
        terms: &Terms,
    ) -> Result<Output> {
        let head = heads.whole();
        let sparse = |(entries, k, tail): (&TopK, usize, TailKind),
                      tokens: &[u32]|
         -> Result<Output> {
            if terms.loss.compares_whole() {
                return Err(untapped("the teacher's whole distribution").into());
            }
            let of = (tokens, batch.ids.len());
            let distributions = TopDistributions::new(entries, k, of, &heads.vocabulary()?, tail);
            let rows = distributions.of_tokens(&slots.teachers());
            let rows = rows.ok_or_else(|| untapped("the teacher at a learned slot"))?;
            let soft = SoftTargets::Sparse(distributions.of_rows(&rows), terms.weighted());
            let label_weights = Some(terms.label.as_slice());
            Ok(linear_cross_entropy(&Inputs { label_weights, soft, soft_weight: 1.0, ..*labels })?)
        };
        match (&features.teacher, self.distribution) {
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::Whole) => {
                let rows = features.state_rows(&slots.teachers())?;
                heads.against_whole(labels, (hidden, &rows), terms)
            }
            (TeacherFeatures::EveryToken { hidden }, TeacherDistribution::TopK { k, tail }) => {
                let tokens = distinct(slots.teachers());
                let k = k.min(head.dims()?.0);
                let hidden = select_rows(hidden, &features.state_rows(&tokens)?)?;
                sparse((&bent_top_k(&hidden, head, k, labels.teacher_bend)?, k, tail), &tokens)
            }
            (TeacherFeatures::TopK { entries, k, .. }, TeacherDistribution::TopK { tail, .. }) => {
                sparse((entries, *k, tail), &teacher_tokens(batch, slots.of_a_block()))
            }
            _ => Err(untapped("the teacher at every token").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Tensor};
    use longdraft_models::draft::block::BlockConfig;
    use longdraft_models::published::published_config;
    use longdraft_models::weights::memory::MemorySource;
    use longdraft_models::weights::{TensorSpec, WeightSource};

    use super::super::slot_loss::SlotLoss;
    use super::*;

    fn noise(shape: &[usize], seed: u64) -> Tensor {
        let spec = TensorSpec::new("noise.matrix", shape);
        let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
        source.load("noise.matrix", DType::F32).expect("there")
    }

    /// The teacher of a slot reads the token before the slot's label. Slot k of a block at token a that proposes
    /// from slot 0 on has that of a + k, of another block that of a + k − 1.
    #[test]
    fn a_draft_that_repeats_the_states_of_its_teachers_is_always_accepted() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = BlockConfig::for_target(&target, 1, 4, 99);
        let batch = Batch::of_document((0..12).map(|t| 5 * t % 9));
        let (hidden, head) = (noise(&[12, 4], 1), noise(&[9, 4], 2));
        let starts = [2, 6];
        for (slots, teachers) in [
            (Slots::from_anchors(&batch, &starts, &config), [2, 3, 4, 5, 6, 7, 8, 9].as_slice()),
            (Slots::new(&batch, &starts, &config), [2, 3, 4, 6, 7, 8].as_slice()),
        ] {
            let states = select_rows(&hidden, teachers).expect("rows");
            let labels = Inputs::of_labels(&states, &head, &slots.labels);
            let rows = slots.teachers();
            let teacher = Teacher { hidden: &hidden, rows: Some(&rows), head: (&head).into() };
            for loss in [SlotLoss::L1, SlotLoss::Renyi] {
                let terms = Terms::none(loss, teachers.len());
                let found = against_whole(&labels, teacher, None, &terms).expect("statistics").rows;
                let apart = found.acceptance.iter().map(|chance| (1.0 - chance).abs());
                assert!(apart.fold(0.0, f64::max) < 1e-5, "{loss:?}: {:?}", found.acceptance);
                assert_eq!(found.acceptance.len(), teachers.len());
            }
        }
    }
}
