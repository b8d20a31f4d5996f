//! What a slot's loss is multiplied by, and what the sum of all is divided by.
//!
//! ```text
//! decay           w_k = exp(−(k − f) / γ)          f the first slot that proposes
//! dpace           s_k = (1 − α) p_k + α,  P_k = Π_{j ≤ k} s_j,  w_k = Σ_{j ≥ k} P_j     (arXiv 2605.18810)
//!   confidence    w_k = P_k
//!   continuation  w_k = Σ_{j ≥ k} P_j / P_k
//! dpard           as dpace
//! ```
//!
//! `p_k` is the draft's probability of the label, of `dpard` the chance `Σ min(p, q)` that the target accepts
//! the slot's token. No gradient is taken of it. Slots that are not learned weigh nothing and count as certain.

use longdraft_data::Batch;
use longdraft_kernels::linear_cross_entropy::RowStatistics;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which weights slots have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SlotWeights {
    /// Less for later slots, by `slot_decay`.
    #[default]
    Decay,
    /// The same for all.
    Uniform,
    /// By what a slot adds to the expected length (D-PACE).
    Dpace,
    /// By the chance that the slot is reached.
    DpaceConfidence,
    /// By what follows once the slot is reached.
    DpaceContinuation,
    /// As `dpace`, by the chance that the target accepts a slot's token (D-PARD).
    Dpard,
}

/// What the losses of slots are divided by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Divisor {
    /// The sum of their weights.
    #[default]
    Weights,
    /// Their number.
    Slots,
    /// The number of rows.
    Rows,
}

impl Divisor {
    /// What a row adds to it with so many learned slots of this weight together.
    pub(in crate::method) fn of_row(self, batch: &Batch, learned: usize, weight: f64) -> f64 {
        match self {
            Self::Weights => weight,
            Self::Slots => learned as f64,
            // Once, whichever ranks share the row.
            Self::Rows => f64::from(u8::from(batch.owns(0))),
        }
    }
}

/// What a part of the loss is divided by, of those of a whole step.
pub(in crate::method) fn divisor(denominators: &[f64], part: usize) -> f64 {
    denominators.get(part).copied().filter(|divisor| *divisor > 0.0).unwrap_or(1.0)
}

impl SlotWeights {
    /// The end of a phrase about a loss, with the numbers that belong to the weights.
    pub(in crate::method) fn in_words(self, (decay, alpha): (f64, f64)) -> String {
        match self {
            Self::Decay => format!("; weights fall by 1/e every {decay} slots"),
            Self::Uniform => String::new(),
            Self::Dpard => format!("; D-PARD weights, α = {alpha}"),
            Self::Dpace | Self::DpaceConfidence | Self::DpaceContinuation => {
                format!("; D-PACE weights, α = {alpha}")
            }
        }
    }

    /// Whether they depend on the draft.
    pub(in crate::method) fn look_at_the_draft(self) -> bool {
        !matches!(self, Self::Decay | Self::Uniform)
    }

    /// The chances that they read, `[S]`, of learned slots.
    pub(in crate::method) fn chances(self, rows: &RowStatistics) -> Vec<f64> {
        match self {
            Self::Dpard => rows.acceptance.clone(),
            _ => rows.hard.iter().map(|loss| (-loss).exp()).collect(),
        }
    }

    /// Weights of one block by slot, `[G]`. `learned[k]` holds slot `k`'s chance where it is learned; only weights
    /// that look at the draft read it. `first` is the first slot that proposes.
    pub(in crate::method) fn of_block(
        self,
        learned: &[Option<f64>],
        first: usize,
        (decay, alpha): (f64, f64),
    ) -> Vec<f64> {
        let is_learned = |slot: usize| if learned[slot].is_some() { 1.0 } else { 0.0 };
        let slots = 0..learned.len();
        match self {
            Self::Uniform => return slots.map(is_learned).collect(),
            Self::Decay => {
                let weight = |slot: usize| (-(slot as f64 - first as f64) / decay).exp();
                return slots.map(|slot| is_learned(slot) * weight(slot)).collect();
            }
            _ => {}
        }
        let mut reached = 1.0;
        let chances: Vec<f64> = learned
            .iter()
            .map(|chance| {
                reached *= chance.map_or(1.0, |chance| (1.0 - alpha) * chance + alpha);
                reached
            })
            .collect();
        let mut rest = 0.0;
        let mut weights: Vec<f64> = slots
            .rev()
            .map(|slot| {
                rest += is_learned(slot) * chances[slot];
                is_learned(slot)
                    * match self {
                        Self::DpaceConfidence => chances[slot],
                        Self::DpaceContinuation => {
                            rest / chances[slot].max(f64::from(f32::MIN_POSITIVE))
                        }
                        _ => rest,
                    }
            })
            .collect();
        weights.reverse();
        weights
    }
}

/// The chance that each slot of a block is reached: that all learned slots before it are accepted; 0 where
/// nothing is learned. `learned[k]` holds slot `k`'s chance of acceptance where it is learned.
pub(in crate::method) fn reach(learned: &[Option<f64>]) -> Vec<f64> {
    let mut reached = 1.0;
    let of_slot = |chance: &Option<f64>| {
        let own = if chance.is_some() { reached } else { 0.0 };
        reached *= chance.unwrap_or(1.0);
        own
    };
    learned.iter().map(of_slot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEARNED: [Option<f64>; 5] = [None, Some(0.5), None, Some(0.25), Some(1.0)];

    #[test]
    fn decaying_weights_begin_at_one_and_skip_what_is_not_learned() {
        let weights = SlotWeights::Decay.of_block(&LEARNED, 1, (2.0, 0.0));
        let wanted = [0.0, 1.0, 0.0, (-1.0_f64).exp(), (-1.5_f64).exp()];
        assert_eq!(weights, wanted);
        assert_eq!(
            SlotWeights::Uniform.of_block(&LEARNED, 1, (2.0, 0.0)),
            [0.0, 1.0, 0.0, 1.0, 1.0]
        );
    }

    #[test]
    fn where_every_slot_is_certain_a_weight_is_the_number_of_slots_left() {
        let certain = LEARNED.map(|chance| chance.map(|_| 1.0));
        for (learned, alpha) in [(LEARNED, 1.0), (certain, 0.0)] {
            let weights = SlotWeights::Dpace.of_block(&learned, 1, (1.0, alpha));
            assert_eq!(weights, [0.0, 3.0, 0.0, 2.0, 1.0]);
        }
    }

    #[test]
    fn chances_multiply_along_the_block() {
        let of = |kind: SlotWeights| kind.of_block(&LEARNED, 1, (1.0, 0.0));
        assert_eq!(of(SlotWeights::DpaceConfidence), [0.0, 0.5, 0.0, 0.125, 0.125]);
        assert_eq!(of(SlotWeights::Dpace), [0.0, 0.75, 0.0, 0.25, 0.125]);
        assert_eq!(of(SlotWeights::DpaceContinuation), [0.0, 1.5, 0.0, 2.0, 1.0]);
    }

    #[test]
    fn where_slot_0_proposes_it_weighs_1_and_reach_counts_the_slots_before() {
        let weights = SlotWeights::Decay.of_block(&[Some(0.5); 3], 0, (2.0, 0.0));
        assert_eq!(weights, [1.0, (-0.5_f64).exp(), (-1.0_f64).exp()]);
        assert_eq!(reach(&LEARNED), [0.0, 1.0, 0.0, 0.5, 0.125]);
    }

    #[test]
    fn dpard_reads_the_chance_of_acceptance_and_dpace_that_of_the_label() {
        let rows = RowStatistics {
            hard: vec![2.0_f64.ln()],
            acceptance: vec![0.75],
            ..RowStatistics::default()
        };
        assert_eq!(SlotWeights::Dpard.chances(&rows), [0.75]);
        assert!((SlotWeights::Dpace.chances(&rows)[0] - 0.5).abs() < 1e-12);
        let of = |kind: SlotWeights| kind.of_block(&LEARNED, 1, (1.0, 0.5));
        assert_eq!(of(SlotWeights::Dpard), of(SlotWeights::Dpace));
    }

    #[test]
    fn a_draft_that_is_never_right_gives_finite_weights() {
        let lost = [None, Some(0.0), Some(0.0)];
        for kind in [SlotWeights::Dpace, SlotWeights::DpaceContinuation] {
            assert!(kind.of_block(&lost, 1, (1.0, 0.0)).iter().all(|weight| weight.is_finite()));
        }
    }
}
