//! Counters of a draft's agreement with its target, per delay; numerators and denominators are
//! summed over steps and ranks before they are divided.
//!
//! A figure is the same quantity as another of its name only where both were measured against the
//! same thing: [`Quantities`] says against what.

use longdraft_kernels::linear_cross_entropy::RowStatistics;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Result, TrainError};
use crate::replay::Rounds;

/// Rows at one delay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct DelayCounts {
    /// Learned rows.
    pub rows: usize,
    /// Rows where draft and target have the same most likely token.
    pub top1_count: usize,
    /// `Σ_rows Σ_v min(p_v, q_v)`.
    pub acceptance_sum: f64,
    /// Rows that acceptance is measured on: all but in EAGLE-3's compat.
    pub acceptance_rows: usize,
}

impl DelayCounts {
    /// Share of rows with the same most likely token.
    pub fn top1_agreement(&self) -> f64 {
        ratio(self.top1_count as f64, self.rows)
    }

    /// Mean of `Σ_v min(p_v, q_v)`.
    pub fn acceptance_rate(&self) -> f64 {
        ratio(self.acceptance_sum, self.acceptance_rows)
    }
}

/// A part of a loss: GLIDE has one, EAGLE-3 one a test-time step, a selector and a confidence head one beside the slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct LossPart {
    /// In the sum of all parts.
    pub weight: f64,
    /// `Σ ℓ` over learned rows.
    pub sum: f64,
    /// What `sum` is divided by.
    pub denominator: f64,
}

impl LossPart {
    fn merge(&mut self, other: &Self) {
        self.weight = other.weight;
        self.sum += other.sum;
        self.denominator += other.denominator;
    }

    /// Before its weight; 0 of nothing.
    pub fn mean(&self) -> f64 {
        if self.denominator == 0.0 { 0.0 } else { self.sum / self.denominator }
    }
}

fn ratio(numerator: f64, denominator: usize) -> f64 {
    if denominator == 0 { 0.0 } else { numerator / denominator as f64 }
}

/// Which per-delay rate a simulated length multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Greedy decoding: top-1 agreement.
    Top1,
    /// Sampling: `Σ min(p, q)`.
    Acceptance,
}

/// What figures are measured against, in words. Two figures of one name are the same quantity where
/// these texts are equal; empty where there is no such figure.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quantities {
    /// What is minimised: its parts with their weights, and the delays or steps it is a mean over.
    pub loss: String,
    /// The hard part of the loss.
    pub hard_loss: String,
    /// Top-1 agreement and the simulated acceptance length of greedy decoding.
    pub agreement: String,
    /// Acceptance rates and the simulated acceptance length of sampling.
    pub acceptance: String,
}

impl Quantities {
    /// The text itself.
    pub const TEXT: &str = "text";
    /// The target's whole distribution.
    pub const TARGET: &str = "target";
    /// Key in a record of `metrics.jsonl`.
    pub const KEY: &str = "measured_against";
}

/// Counters of some learned rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DraftMetrics {
    /// Index 0 is delay 1; an EAGLE-3 draft's step `i` stands at delay `i + 1`.
    pub by_delay: Vec<DelayCounts>,
    /// What is minimised.
    pub parts: Vec<LossPart>,
    /// What a confidence head minimises beside them; nothing without one.
    pub confidence: LossPart,
    /// `Σ ℓ_hard` in nats.
    pub hard_sum: f64,
    /// `Σ ℓ_soft` in nats.
    pub soft_sum: f64,
    /// Learned rows.
    pub rows: usize,
    /// Rows whose label was looked for among candidates.
    pub candidate_rows: usize,
    /// Rows whose label was a candidate.
    pub candidate_hits: usize,
    /// Greedy decoding of the text, replayed; held-out rows only.
    pub replayed: Rounds,
    /// The same rows measured against what training rows are measured against; held-out rows only,
    /// and only where that is something else.
    pub as_trained: Option<Box<DraftMetrics>>,
}

impl DraftMetrics {
    /// Adds one learned row.
    pub fn add_row(&mut self, delay: u32, hard: f64, soft: f64, agrees: bool, acceptance: f64) {
        let index = delay.max(1) as usize - 1;
        if self.by_delay.len() <= index {
            self.by_delay.resize(index + 1, DelayCounts::default());
        }
        let counts = &mut self.by_delay[index];
        counts.rows += 1;
        counts.top1_count += usize::from(agrees);
        counts.acceptance_sum += acceptance;
        counts.acceptance_rows += 1;
        self.hard_sum += hard;
        self.soft_sum += soft;
        self.rows += 1;
    }

    /// Adds learned rows as a loss has them, each at its delay.
    pub fn add_rows(&mut self, delays: impl IntoIterator<Item = u32>, rows: &RowStatistics) {
        for (row, delay) in delays.into_iter().enumerate() {
            let (agrees, acceptance) = (rows.agrees[row], rows.acceptance[row]);
            self.add_row(delay, rows.hard[row], rows.soft[row], agrees, acceptance);
        }
    }

    /// Adds the counters of other rows.
    pub fn merge(&mut self, other: &Self) {
        if self.by_delay.len() < other.by_delay.len() {
            self.by_delay.resize(other.by_delay.len(), DelayCounts::default());
        }
        for (sum, part) in self.by_delay.iter_mut().zip(&other.by_delay) {
            sum.rows += part.rows;
            sum.top1_count += part.top1_count;
            sum.acceptance_sum += part.acceptance_sum;
            sum.acceptance_rows += part.acceptance_rows;
        }
        if self.parts.len() < other.parts.len() {
            self.parts.resize(other.parts.len(), LossPart::default());
        }
        for (sum, part) in self.parts.iter_mut().zip(&other.parts) {
            sum.merge(part);
        }
        // A row without a learned slot has no weight to tell.
        if other.confidence.denominator > 0.0 {
            self.confidence.merge(&other.confidence);
        }
        self.hard_sum += other.hard_sum;
        self.soft_sum += other.soft_sum;
        self.rows += other.rows;
        self.candidate_rows += other.candidate_rows;
        self.candidate_hits += other.candidate_hits;
        self.replayed.merge(other.replayed);
        if let Some(other) = &other.as_trained {
            self.as_trained.get_or_insert_default().merge(other);
        }
    }

    /// All counters as numbers, for other ranks.
    pub fn to_numbers(&self) -> Vec<f64> {
        let sizes = [self.by_delay.len() as f64, self.parts.len() as f64];
        let mut numbers = vec![sizes[0], sizes[1], self.hard_sum, self.soft_sum, self.rows as f64];
        numbers.extend([self.replayed.rounds as f64, self.replayed.tokens as f64]);
        numbers.push(f64::from(u8::from(self.as_trained.is_some())));
        numbers.extend([self.candidate_rows as f64, self.candidate_hits as f64]);
        let LossPart { weight, sum, denominator } = self.confidence;
        numbers.extend([weight, sum, denominator]);
        for counts in &self.by_delay {
            numbers.extend([counts.rows as f64, counts.top1_count as f64, counts.acceptance_sum]);
            numbers.push(counts.acceptance_rows as f64);
        }
        self.parts
            .iter()
            .for_each(|part| numbers.extend([part.weight, part.sum, part.denominator]));
        numbers.extend(self.as_trained.iter().flat_map(|metrics| metrics.to_numbers()));
        numbers
    }

    /// The counters that a list of numbers holds, one after the other.
    ///
    /// # Errors
    /// - the list ends within them
    pub fn list(mut numbers: &[f64]) -> Result<Vec<Self>> {
        let mut all = Vec::new();
        while !numbers.is_empty() {
            let problem = || TrainError::ranks("a rank sent torn counters");
            let (metrics, rest) = Self::from_numbers(numbers).ok_or_else(problem)?;
            all.push(metrics);
            numbers = rest;
        }
        Ok(all)
    }

    /// The counters that lead a list of numbers, and the rest of the list; `None` if there are none.
    fn from_numbers(numbers: &[f64]) -> Option<(Self, &[f64])> {
        let (head, rest) = numbers.split_at_checked(13)?;
        let (delays, rest) = rest.split_at_checked(4 * head[0] as usize)?;
        let (parts, rest) = rest.split_at_checked(3 * head[1] as usize)?;
        let delay = |n: &[f64]| DelayCounts {
            rows: n[0] as usize,
            top1_count: n[1] as usize,
            acceptance_sum: n[2],
            acceptance_rows: n[3] as usize,
        };
        let part = |n: &[f64]| LossPart { weight: n[0], sum: n[1], denominator: n[2] };
        let (as_trained, rest) = if head[7] == 0.0 {
            (None, rest)
        } else {
            let (metrics, rest) = Self::from_numbers(rest)?;
            (Some(Box::new(metrics)), rest)
        };
        let metrics = Self {
            by_delay: delays.chunks_exact(4).map(delay).collect(),
            parts: parts.chunks_exact(3).map(part).collect(),
            confidence: part(&head[10..]),
            hard_sum: head[2],
            soft_sum: head[3],
            rows: head[4] as usize,
            replayed: Rounds { rounds: head[5] as usize, tokens: head[6] as usize },
            candidate_rows: head[8] as usize,
            candidate_hits: head[9] as usize,
            as_trained,
        };
        Some((metrics, rest))
    }

    /// `1 + Σ_{d=1..gamma} Π_{j≤d} a_j`, the bonus token included.
    pub fn simulated_acceptance_length(&self, rate: Rate, gamma: usize) -> f64 {
        let mut product = 1.0;
        let mut length = 1.0;
        for counts in self.by_delay.iter().take(gamma) {
            product *= match rate {
                Rate::Top1 => counts.top1_agreement(),
                Rate::Acceptance => counts.acceptance_rate(),
            };
            length += product;
        }
        length
    }

    /// What is minimised: `Σ weight · sum / denominator`.
    pub fn loss(&self) -> f64 {
        let parts = self.parts.iter().chain([&self.confidence]);
        parts.map(|part| part.weight * part.mean()).sum()
    }

    /// Share of rows whose label was a candidate; `None` without candidates.
    pub fn candidate_recall(&self) -> Option<f64> {
        (self.candidate_rows > 0).then(|| ratio(self.candidate_hits as f64, self.candidate_rows))
    }

    /// Whether the loss is a sum over test-time steps.
    fn has_steps(&self) -> bool {
        self.parts.len() > 1 && self.candidate_rows == 0
    }

    /// Mean hard loss in nats.
    pub fn hard_loss(&self) -> f64 {
        ratio(self.hard_sum, self.rows)
    }

    /// Mean soft loss in nats.
    pub fn soft_loss(&self) -> f64 {
        ratio(self.soft_sum, self.rows)
    }

    /// Means as a JSON object.
    pub fn to_json(&self, gamma: usize) -> Map<String, Value> {
        let rates = |f: fn(&DelayCounts) -> f64| self.by_delay.iter().map(f).collect::<Vec<_>>();
        let losses = if self.has_steps() {
            let of_steps: Vec<f64> = self.parts.iter().map(LossPart::mean).collect();
            json!({ "loss": self.loss(), "loss_by_step": of_steps })
        } else {
            json!({
                "loss": self.loss(), "hard_loss": self.hard_loss(), "soft_loss": self.soft_loss(),
            })
        };
        let value = json!({
            "rows": self.rows,
            "top1_by_delay": rates(DelayCounts::top1_agreement),
            "acceptance_by_delay": rates(DelayCounts::acceptance_rate),
            "simulated_acceptance_length": self.simulated_acceptance_length(Rate::Top1, gamma),
            "simulated_acceptance_length_sampling":
                self.simulated_acceptance_length(Rate::Acceptance, gamma),
        });
        match (losses, value) {
            (Value::Object(mut all), Value::Object(rates)) => {
                all.extend(rates);
                if let Some(recall) = self.candidate_recall() {
                    let selector_loss = self.parts.last().map(LossPart::mean);
                    all.insert("candidate_recall".into(), recall.into());
                    all.insert("selector_loss".into(), selector_loss.into());
                }
                if let Some(length) = self.replayed.acceptance_length() {
                    all.insert("replayed_acceptance_length".into(), length.into());
                }
                if let Some(metrics) = &self.as_trained {
                    all.insert("as_trained".into(), metrics.to_json(gamma).into());
                }
                all
            }
            _ => Map::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_hold_all_counters() {
        let mut a = DraftMetrics::default();
        a.add_row(2, 2.0, f64::NAN, true, 0.5);
        a.parts = vec![LossPart { weight: 0.5, sum: 3.0, denominator: 7.0 }];
        a.replayed = Rounds { rounds: 3, tokens: 8 };
        (a.candidate_rows, a.candidate_hits) = (9, 4);
        a.confidence = LossPart { weight: 0.25, sum: 5.0, denominator: 11.0 };
        let mut as_trained = DraftMetrics::default();
        as_trained.add_row(1, 1.0, 0.5, false, 0.25);
        a.as_trained = Some(Box::new(as_trained));
        let numbers = [a.to_numbers(), DraftMetrics::default().to_numbers()].concat();
        let all = DraftMetrics::list(&numbers).expect("two");
        let first = &all[0];
        assert_eq!((&first.by_delay, &first.parts, first.rows), (&a.by_delay, &a.parts, 1));
        assert_eq!((first.replayed, &first.as_trained), (a.replayed, &a.as_trained));
        assert_eq!((first.confidence, first.candidate_recall()), (a.confidence, Some(4.0 / 9.0)));
        assert!(first.soft_sum.is_nan());
        assert_eq!(all[1], DraftMetrics::default());
        assert!(DraftMetrics::list(&numbers[..numbers.len() - 1]).is_err());
    }

    #[test]
    fn losses_are_divided_after_they_are_summed() {
        let of = |sum, denominator| {
            let parts = vec![LossPart { weight: 0.5, sum, denominator }];
            DraftMetrics { parts, ..DraftMetrics::default() }
        };
        let mut metrics = of(6.0, 2.0);
        metrics.merge(&of(2.0, 6.0));
        assert!((metrics.loss() - 0.5).abs() < 1e-12);
        // Confidence has a divisor of its own. A row without a learned slot changes nothing.
        for (sum, denominator) in [(3.0, 1.0), (1.0, 3.0)] {
            let confidence = LossPart { weight: 2.0, sum, denominator };
            metrics.merge(&DraftMetrics { confidence, ..DraftMetrics::default() });
        }
        metrics.merge(&DraftMetrics::default());
        assert!((metrics.loss() - 2.5).abs() < 1e-12);
        assert!(of(0.0, 0.0).loss().abs() < 1e-12);
    }

    #[test]
    fn sums_are_added_before_they_are_divided() {
        let mut a = DraftMetrics::default();
        a.add_row(1, 2.0, 1.0, true, 0.5);
        let mut b = DraftMetrics::default();
        b.add_row(1, 4.0, 1.0, false, 0.1);
        b.add_row(2, 6.0, 1.0, true, 0.9);
        a.merge(&b);
        assert_eq!((a.rows, a.by_delay[0].rows, a.by_delay[0].top1_count), (3, 2, 1));
        assert!((a.hard_loss() - 4.0).abs() < 1e-12);
        assert!((a.by_delay[0].acceptance_rate() - 0.3).abs() < 1e-12);
        // 1 + 0.5 + 0.5 · 1
        assert!((a.simulated_acceptance_length(Rate::Top1, 5) - 2.0).abs() < 1e-12);
        assert!((a.simulated_acceptance_length(Rate::Top1, 1) - 1.5).abs() < 1e-12);
        // 1 + 0.3 + 0.3 · 0.9
        assert!((a.simulated_acceptance_length(Rate::Acceptance, 2) - 1.57).abs() < 1e-12);
    }
}
