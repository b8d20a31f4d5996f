//! What block drafts with a chain minimise.

use super::config::Dspark;
use crate::method::block::{Divisor, SlotForm, SlotLoss, SlotWeights};

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChainLoss {
    /// What a slot's loss is multiplied by.
    pub weights: SlotWeights,
    /// γ of [`SlotWeights::Decay`], in slots.
    pub decay: f64,
    /// α of D-PACE and D-PARD.
    pub alpha: f64,
    /// What divides the losses of slots.
    pub divide_by: Divisor,
    /// Weight of the cross-entropy with the text.
    pub hard: f64,
    /// How a slot is held to the target's distribution.
    pub form: SlotForm,
    /// Weight of that distance.
    pub distance: f64,
    /// Weight of the confidence's loss.
    pub confidence: f64,
    /// Whether slots weigh in it by the chance that they are reached.
    pub by_reach: bool,
}

impl Default for ChainLoss {
    /// The published loss.
    fn default() -> Self {
        Dspark::default().loss()
    }
}

impl ChainLoss {
    /// Whether weights, divisors or mixes wait for the draft's pass over all rows of a step.
    pub(super) fn waits(&self) -> bool {
        let of_slots = self.weights.look_at_the_draft() && self.divide_by == Divisor::Weights;
        let of_confidence = self.by_reach && self.divide_by != Divisor::Slots;
        of_slots || of_confidence || self.form.follows_the_step()
    }

    /// Whether weights, divisors or mixes depend on the draft.
    pub(super) fn looks_at_the_draft(&self) -> bool {
        self.weights.look_at_the_draft() || self.by_reach || self.form.follows_the_step()
    }

    /// The loss of some slots, in words.
    pub(super) fn in_words(&self, slots: &str) -> String {
        let Self { hard, distance, confidence, decay, alpha, .. } = self;
        let weights = self.weights.in_words((*decay, *alpha));
        let held = match self.form.loss {
            SlotLoss::L1 => "distance to the target".to_owned(),
            SlotLoss::Ce => "target".to_owned(),
            loss => format!("{}target", loss.in_words()),
        };
        format!("{hard} text + {distance} {held} + {confidence} confidence; {slots}{weights}")
    }
}
