//! Counters of a draft's agreement with its target at every step; [`DraftMetrics`] adds those of several batches.

use crate::metrics::{DelayCounts, DraftMetrics, LossPart, Rate};

/// Rows of one test-time step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepCounts {
    /// Rows that the mask supervises: `Σ R` (`Σ m` in compat).
    pub supervised: usize,
    /// Rows that are learned: `Σ M`.
    pub learned: usize,
    /// Supervised rows where draft and target have the same most likely token; a token that the
    /// draft cannot propose counts against it.
    pub top1_count: usize,
    /// `Σ α` over the rows that it is measured on, `α = Σ_v min(p̄_v, q_v)`, `p̄` the target's true
    /// probabilities.
    pub acceptance_sum: f64,
    /// Rows that acceptance is measured on: the supervised ones (the learned ones in compat).
    pub acceptance_rows: usize,
    /// `Σ ℓ` over learned rows, in nats for cross-entropy.
    pub loss_sum: f64,
    /// What `loss_sum` is divided by.
    pub loss_denominator: f64,
}

impl StepCounts {
    /// `acc`: share of supervised rows with the same most likely token.
    pub fn accuracy(&self) -> f64 {
        ratio(self.top1_count as f64, self.supervised as f64)
    }

    /// Mean `α`.
    pub fn acceptance(&self) -> f64 {
        ratio(self.acceptance_sum, self.acceptance_rows as f64)
    }

    /// The step's loss before its weight.
    pub fn loss(&self) -> f64 {
        ratio(self.loss_sum, self.loss_denominator)
    }
}

fn ratio(numerator: f64, denominator: f64) -> f64 {
    if denominator == 0.0 { 0.0 } else { numerator / denominator }
}

/// Counters of every step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Eagle3Metrics {
    /// By step, from 0.
    pub steps: Vec<StepCounts>,
}

impl Eagle3Metrics {
    /// `Σ_i w_i · loss_i`.
    pub fn loss(&self, weights: &[f64]) -> f64 {
        self.steps.iter().zip(weights).map(|(step, weight)| weight * step.loss()).sum()
    }

    /// `1 + Σ_{k<S} Π_{j≤k} a_j`: tokens per target pass when `S` are drafted, the target's own
    /// (bonus) token included. `a_j` is the accuracy of step `j` (greedy decoding) or its
    /// acceptance (sampling). The public trainer reports the sum without the 1.
    pub fn simulated_acceptance_length(&self, rate: Rate) -> f64 {
        let (mut product, mut length) = (1.0, 1.0);
        for step in &self.steps {
            product *= match rate {
                Rate::Top1 => step.accuracy(),
                Rate::Acceptance => step.acceptance(),
            };
            length += product;
        }
        length
    }

    /// The same as counters per delay: delay `d` is step `d − 1`. Its rows are those that the first
    /// step learns.
    pub(super) fn by_delay(&self, weights: &[f64]) -> DraftMetrics {
        let counts = |step: &StepCounts| DelayCounts {
            rows: step.supervised,
            top1_count: step.top1_count,
            acceptance_sum: step.acceptance_sum,
            acceptance_rows: step.acceptance_rows,
        };
        let part = |(step, weight): (&StepCounts, &f64)| LossPart {
            weight: *weight,
            sum: step.loss_sum,
            denominator: step.loss_denominator,
        };
        DraftMetrics {
            by_delay: self.steps.iter().map(counts).collect(),
            parts: self.steps.iter().zip(weights).map(part).collect(),
            rows: self.steps.first().map_or(0, |step| step.learned),
            ..DraftMetrics::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_multiply_rates_and_include_the_bonus_token() {
        let step = |top1_count, acceptance_sum| StepCounts {
            supervised: 4,
            top1_count,
            acceptance_sum,
            acceptance_rows: 2,
            ..StepCounts::default()
        };
        let metrics = Eagle3Metrics { steps: vec![step(2, 1.5), step(3, 0.5)] };
        // 1 + 0.5 + 0.5 · 0.75, and 1 + 0.75 + 0.75 · 0.25
        assert!((metrics.simulated_acceptance_length(Rate::Top1) - 1.875).abs() < 1e-12);
        assert!((metrics.simulated_acceptance_length(Rate::Acceptance) - 1.9375).abs() < 1e-12);
        assert!(
            (Eagle3Metrics::default().simulated_acceptance_length(Rate::Top1) - 1.0).abs() < 1e-12
        );
    }
}
