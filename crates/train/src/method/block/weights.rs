//! What a slot's loss is multiplied by.
//!
//! ```text
//! decay           w_k = exp(−(k − 1) / γ)
//! dpace           s_k = (1 − α) p_k + α,  P_k = Π_{j ≤ k} s_j,  w_k = Σ_{j ≥ k} P_j     (arXiv 2605.18810)
//!   confidence    w_k = P_k
//!   continuation  w_k = Σ_{j ≥ k} P_j / P_k
//! ```
//!
//! `p_k` is the draft's probability of the label, of which no gradient is taken. Slots that are not
//! learned weigh nothing and count as certain.

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
}

impl SlotWeights {
    /// Whether they depend on the draft.
    pub(in crate::method) fn look_at_the_draft(self) -> bool {
        !matches!(self, Self::Decay | Self::Uniform)
    }

    /// Weights of one block by slot, `[G]`. `learned[k]` holds the label's probability where slot `k`
    /// is learned; it is read by the weights of D-PACE only.
    pub(super) fn of_block(self, learned: &[Option<f64>], (decay, alpha): (f64, f64)) -> Vec<f64> {
        let is_learned = |slot: usize| if learned[slot].is_some() { 1.0 } else { 0.0 };
        let slots = 0..learned.len();
        match self {
            Self::Uniform => return slots.map(is_learned).collect(),
            Self::Decay => {
                let weight = |slot: usize| (-(slot as f64 - 1.0) / decay).exp();
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

#[cfg(test)]
mod tests {
    use super::*;

    const LEARNED: [Option<f64>; 5] = [None, Some(0.5), None, Some(0.25), Some(1.0)];

    #[test]
    fn decaying_weights_begin_at_one_and_skip_what_is_not_learned() {
        let weights = SlotWeights::Decay.of_block(&LEARNED, (2.0, 0.0));
        let wanted = [0.0, 1.0, 0.0, (-1.0_f64).exp(), (-1.5_f64).exp()];
        assert_eq!(weights, wanted);
        assert_eq!(SlotWeights::Uniform.of_block(&LEARNED, (2.0, 0.0)), [0.0, 1.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn where_every_slot_is_certain_a_weight_is_the_number_of_slots_left() {
        let certain = LEARNED.map(|chance| chance.map(|_| 1.0));
        for (learned, alpha) in [(LEARNED, 1.0), (certain, 0.0)] {
            let weights = SlotWeights::Dpace.of_block(&learned, (1.0, alpha));
            assert_eq!(weights, [0.0, 3.0, 0.0, 2.0, 1.0]);
        }
    }

    #[test]
    fn chances_multiply_along_the_block() {
        let of = |kind: SlotWeights| kind.of_block(&LEARNED, (1.0, 0.0));
        assert_eq!(of(SlotWeights::DpaceConfidence), [0.0, 0.5, 0.0, 0.125, 0.125]);
        assert_eq!(of(SlotWeights::Dpace), [0.0, 0.75, 0.0, 0.25, 0.125]);
        assert_eq!(of(SlotWeights::DpaceContinuation), [0.0, 1.5, 0.0, 2.0, 1.0]);
    }

    #[test]
    fn a_draft_that_is_never_right_gives_finite_weights() {
        let lost = [None, Some(0.0), Some(0.0)];
        for kind in [SlotWeights::Dpace, SlotWeights::DpaceContinuation] {
            assert!(kind.of_block(&lost, (1.0, 0.0)).iter().all(|weight| weight.is_finite()));
        }
    }
}
