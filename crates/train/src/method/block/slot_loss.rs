//! What slots learn of a distribution `p`, by name; `q` is the draft's.
//!
//! ```text
//! ce           −Σ p log q
//! tv           1 − α,  α = Σ min(p, q)                      l1 = 2 tv = Σ |p − q|
//! lk_alpha     −log α
//! lk_lambda    κ ce + (1 − κ) tv,  κ = s exp(−d α)          α the mean of the step's learned slots
//! lk_hybrid    the same                                     α the slot's own
//! reverse_kl   Σ q log(q / p)
//! jsd          ½ Σ p log(p / m) + ½ Σ q log(q / m)          m = (p + q) / 2
//! renyi        −2 log Σ √(p q)
//! ```
//!
//! LK losses are those of arXiv 2602.23881; no gradient is taken of κ. The text's token is a distribution of one
//! token: α is then its probability, and `lk_alpha` its cross-entropy.

use longdraft_kernels::linear_cross_entropy::{Rejection, Weighted};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a slot's distribution is held to the one that it learns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SlotLoss {
    /// Cross-entropy.
    #[default]
    Ce,
    /// The chance of rejection `1 − α` (total variation).
    Tv,
    /// Twice that: `Σ |p − q|`.
    L1,
    /// `−log α`, α the chance that speculative sampling accepts.
    LkAlpha,
    /// Cross-entropy mixed with rejection, by the mean α of the step.
    LkLambda,
    /// The same by every slot's own α.
    LkHybrid,
    /// Kullback-Leibler divergence from the draft's side.
    ReverseKl,
    /// Jensen-Shannon divergence.
    Jsd,
    /// Rényi divergence of order one half.
    Renyi,
}

impl SlotLoss {
    /// Whether it looks at all tokens of both distributions.
    pub(in crate::method) fn compares_whole(self) -> bool {
        matches!(self, Self::ReverseKl | Self::Jsd | Self::Renyi)
    }

    /// Whether it mixes cross-entropy with rejection.
    pub(in crate::method) fn mixes(self) -> bool {
        matches!(self, Self::LkLambda | Self::LkHybrid)
    }

    /// What stands before the name of the distribution in descriptions.
    pub(in crate::method) fn in_words(self) -> &'static str {
        match self {
            Self::Ce => "",
            Self::Tv => "rejection, ",
            Self::L1 => "distance, ",
            Self::LkAlpha => "LK (-log acceptance), ",
            Self::LkLambda => "LK (mixed with rejection), ",
            Self::LkHybrid => "LK (mixed with rejection slot by slot), ",
            Self::ReverseKl => "reverse KL, ",
            Self::Jsd => "Jensen-Shannon, ",
            Self::Renyi => "Renyi 1/2, ",
        }
    }
}

/// A slot's loss with the numbers of its mix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotForm {
    /// The loss.
    pub loss: SlotLoss,
    /// `s` of κ.
    pub kl_scale: f64,
    /// `d` of κ.
    pub kl_decay: f64,
}

impl SlotForm {
    /// A loss with the numbers of its publication where none are given.
    pub fn new(loss: SlotLoss, kl_scale: Option<f64>, kl_decay: Option<f64>) -> Self {
        let published = if loss == SlotLoss::LkHybrid { 3.0 } else { 1.0 };
        Self { loss, kl_scale: kl_scale.unwrap_or(1.0), kl_decay: kl_decay.unwrap_or(published) }
    }

    /// The same of a distribution of one token.
    pub(in crate::method) fn of_a_token(self) -> Self {
        let loss = if self.loss == SlotLoss::LkAlpha { SlotLoss::Ce } else { self.loss };
        Self { loss, ..self }
    }

    /// Whether the mix follows the mean over the whole optimizer step.
    pub(in crate::method) fn follows_the_step(&self) -> bool {
        self.loss == SlotLoss::LkLambda
    }

    /// That mean, where it is followed: the last two denominators of a step are the sum of all chances and the number
    /// of slots.
    pub(in crate::method) fn mean_of_step(&self, denominators: &[f64]) -> f64 {
        match denominators {
            [.., sum, slots] if self.follows_the_step() && *slots > 0.0 => sum / slots,
            _ => 0.0,
        }
    }

    /// Whether the mix follows each slot.
    pub(in crate::method) fn follows_slots(&self) -> bool {
        self.loss == SlotLoss::LkHybrid
    }

    /// The factors of every slot: where these follow slots, of those with `chances` of acceptance, else of
    /// `slots` slots by their mean.
    pub(in crate::method) fn factors(
        &self,
        slots: usize,
        chances: &[f64],
        mean: f64,
    ) -> Vec<Factors> {
        if self.follows_slots() {
            return chances.iter().map(|chance| self.factors_at(*chance)).collect();
        }
        vec![self.factors_at(mean); slots]
    }

    fn factors_at(&self, chance: f64) -> Factors {
        let (cross_entropy, rejection) = match self.loss {
            SlotLoss::Tv | SlotLoss::LkAlpha => (0.0, 1.0),
            SlotLoss::L1 => (0.0, 2.0),
            SlotLoss::LkLambda | SlotLoss::LkHybrid => {
                let mix = self.kl_scale * (-self.kl_decay * chance).exp();
                (mix, 1.0 - mix)
            }
            _ => (1.0, 0.0),
        };
        Factors { cross_entropy, rejection }
    }
}

impl Default for SlotForm {
    fn default() -> Self {
        Self::new(SlotLoss::default(), None, None)
    }
}

/// A slot's loss as `a` times cross-entropy, or a divergence, and `b` times rejection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::method) struct Factors {
    /// `a`
    pub(in crate::method) cross_entropy: f64,
    /// `b`
    pub(in crate::method) rejection: f64,
}

impl Factors {
    /// The loss of a slot with this cross-entropy or divergence and chance of acceptance.
    pub(in crate::method) fn loss(&self, loss: SlotLoss, divergence: f64, chance: f64) -> f64 {
        let rejected = match loss {
            SlotLoss::LkAlpha if chance > 0.0 => -chance.ln(),
            SlotLoss::LkAlpha => 0.0,
            _ => 1.0 - chance,
        };
        self.cross_entropy * divergence + self.rejection * rejected
    }
}

/// Weights of what the learned slots learn, `[S]` each.
#[derive(Debug, Clone)]
pub(in crate::method) struct Terms {
    /// Of the label's cross-entropy.
    pub(in crate::method) label: Vec<f32>,
    /// Of the cross-entropy with the distribution, or of the divergence.
    pub(in crate::method) cross_entropy: Vec<f32>,
    /// Of rejection.
    pub(in crate::method) rejection: Vec<f32>,
    /// What they are weights of.
    pub(in crate::method) loss: SlotLoss,
}

impl Terms {
    /// Slots that weigh `weights`: so much of that for the label, and so much for the distribution.
    pub(in crate::method) fn new(
        loss: SlotLoss,
        weights: &[f64],
        (label, distribution): (f64, f64),
        factors: &[Factors],
    ) -> Self {
        let of = |part: &dyn Fn(usize) -> f64| -> Vec<f32> {
            weights.iter().enumerate().map(|(row, weight)| (part(row) * weight) as f32).collect()
        };
        Self {
            label: of(&|_| label),
            cross_entropy: of(&|row| distribution * factors[row].cross_entropy),
            rejection: of(&|row| distribution * factors[row].rejection),
            loss,
        }
    }

    /// Slots that are only looked at.
    pub(in crate::method) fn none(loss: SlotLoss, slots: usize) -> Self {
        let zeros = || vec![0.0; slots];
        Self { label: zeros(), cross_entropy: zeros(), rejection: zeros(), loss }
    }

    /// Leaves the label of a slot out; with `of_labels` all terms are about it.
    pub(super) fn leave_label_out(&mut self, slot: usize, of_labels: bool) {
        self.label[slot] = 0.0;
        if of_labels {
            (self.cross_entropy[slot], self.rejection[slot]) = (0.0, 0.0);
        }
    }

    /// The distribution's part, where it is no divergence.
    pub(in crate::method) fn weighted(&self) -> Weighted<'_> {
        Weighted {
            cross_entropy: &self.cross_entropy,
            rejection: &self.rejection,
            form: match self.loss {
                SlotLoss::LkAlpha => Rejection::Log,
                _ => Rejection::Linear,
            },
            log_sum_exp: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_moves_from_cross_entropy_to_rejection_as_slots_are_accepted() {
        let mixed = |mix: f64| Factors { cross_entropy: mix, rejection: 1.0 - mix };
        let form = SlotForm::new(SlotLoss::LkHybrid, None, None);
        let factors = form.factors(2, &[0.0, 1.0], 0.3);
        assert_eq!(factors, [mixed(1.0), mixed((-3.0_f64).exp())]);
        let form = SlotForm::new(SlotLoss::LkLambda, Some(0.5), Some(2.0));
        let mix = 0.5 * (-2.0 * 0.3_f64).exp();
        assert_eq!(form.factors(2, &[0.0, 1.0], 0.3), [mixed(mix); 2]);
        let told = mixed(mix).loss(SlotLoss::LkLambda, 4.0, 0.75);
        assert!((told - (mix * 4.0 + (1.0 - mix) * 0.25)).abs() < 1e-12, "{told}");
    }

    #[test]
    fn a_slot_that_is_never_accepted_has_a_finite_loss() {
        let of = |loss| SlotForm::new(loss, None, None).factors(1, &[0.0], 0.0)[0];
        for (loss, chance, wanted) in [
            (SlotLoss::Tv, 0.0, 1.0),
            (SlotLoss::L1, 0.0, 2.0),
            (SlotLoss::LkAlpha, 0.0, 0.0),
            (SlotLoss::LkAlpha, 0.25, 4.0_f64.ln()),
            (SlotLoss::Ce, 0.0, 9.0),
        ] {
            let told = of(loss).loss(loss, 9.0, chance);
            assert!((told - wanted).abs() < 1e-12, "{loss:?}: {told}");
        }
    }
}
