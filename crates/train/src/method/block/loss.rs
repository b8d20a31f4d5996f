//! What block drafts without a chain minimise.

use super::labels::SlotLabels;
use super::selected::SelectorLoss;
use super::slot_loss::SlotForm;
use super::teacher::SoftLoss;
use super::weights::{Divisor, SlotWeights};
use crate::objective::{TailKind, TeacherDistribution};

/// What is minimised.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockLoss {
    /// What a slot's loss is multiplied by.
    pub weights: SlotWeights,
    /// γ of [`SlotWeights::Decay`], in slots.
    pub decay: f64,
    /// α of D-PACE and D-PARD.
    pub alpha: f64,
    /// What divides the losses of slots.
    pub divide_by: Divisor,
    /// How a slot is held to the target's distribution, or without one to its label.
    pub form: SlotForm,
    /// Which tokens are labels.
    pub labels: SlotLabels,
    /// The part of the target's distribution; without it slots learn their labels alone.
    pub soft: Option<SoftLoss>,
    /// The part of the draft's selector; without it a selector is neither trained nor asked.
    pub selector: Option<SelectorLoss>,
    /// Share of all steps over which the weight of that part grows to what it is.
    pub selector_ramp: f64,
}

impl Default for BlockLoss {
    /// The text's tokens with weights that decay as in a published draft of 16 slots.
    fn default() -> Self {
        Self {
            weights: SlotWeights::Decay,
            decay: 7.0,
            alpha: 0.5,
            divide_by: Divisor::Weights,
            form: SlotForm::default(),
            labels: SlotLabels::Text,
            soft: None,
            selector: None,
            selector_ramp: 0.0,
        }
    }
}

impl BlockLoss {
    /// Whether weights, divisors or mixes wait for the draft's pass over all rows of a step.
    pub(in crate::method) fn waits(&self) -> bool {
        let of_weights = self.weights.look_at_the_draft() && self.divide_by == Divisor::Weights;
        of_weights || self.form.follows_the_step() || self.hits_divide()
    }

    /// Whether weights, divisors or mixes depend on the draft.
    pub(super) fn looks_at_the_draft(&self) -> bool {
        self.weights.look_at_the_draft() || self.form.follows_the_step() || self.hits_divide()
    }

    /// How much of its weight a selector has at a step of so many, from 1; all of it where none is known.
    pub(super) fn selector_share(&self, step: Option<(u64, u64)>) -> f64 {
        let Some((step, steps)) = step else { return 1.0 };
        let ramp = self.selector_ramp * steps as f64;
        if ramp > 0.0 { (step as f64 / ramp).min(1.0) } else { 1.0 }
    }

    /// Whether the selector's loss is divided by the weights of its hits.
    pub(super) fn hits_divide(&self) -> bool {
        self.selector.is_some_and(|selector| selector.over_hits)
    }

    /// What is read of the target's distribution: what is learned of it, or its most likely token.
    pub(in crate::method) fn reads(&self) -> Option<SoftLoss> {
        let best = TeacherDistribution::TopK { k: 1, tail: TailKind::Renormalise };
        let label = || SoftLoss { weight: 1.0, distribution: best };
        self.soft.or_else(|| (self.labels == SlotLabels::Target).then(label))
    }

    /// How slots are held to what they learn.
    pub(super) fn own_form(&self) -> SlotForm {
        if self.soft.is_some() { self.form } else { self.form.of_a_token() }
    }

    /// Weights of the label's cross-entropy and of what `form` is about, which is the label without a distribution.
    pub(super) fn shares(&self) -> (f64, f64) {
        self.soft.map_or((0.0, 1.0), |soft| (1.0 - soft.weight, soft.weight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_grows_to_its_weight_over_a_share_of_the_steps() {
        let of = |ramp, step| {
            let loss = BlockLoss { selector_ramp: ramp, ..BlockLoss::default() };
            loss.selector_share(step)
        };
        let at = [1, 2, 3, 4, 5, 64].map(|step| of(0.0625, Some((step, 64))));
        assert_eq!(at.to_vec(), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        // Less than a step is none, and so is a step that nobody counts.
        let whole = [of(0.01, Some((1, 64))), of(0.0, Some((1, 64))), of(0.0625, None)];
        assert_eq!(whole.to_vec(), [1.0; 3]);
    }
}
