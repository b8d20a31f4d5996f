//! Acceptance of a run of rounds. The prefill pass and the token it yields are outside.

use serde::Serialize;

/// Counters over rounds; sums over requests before they are divided.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AcceptanceMetrics {
    /// Target passes that verified a draft (or decoded plainly).
    pub rounds: usize,
    /// Tokens committed by them.
    pub committed: usize,
    /// Tokens proposed.
    pub drafted: usize,
    /// Proposals committed.
    pub accepted: usize,
    /// Rounds in which position i was tested (drafted, and all before it accepted).
    pub tested_by_position: Vec<usize>,
    /// Rounds in which position i was accepted.
    pub accepted_by_position: Vec<usize>,
}

impl AcceptanceMetrics {
    /// Adds a round of `drafted` proposals of which `accepted` hold; a stop or limit may have cut
    /// it to `committed` tokens, then positions behind the cut count as untested.
    pub fn add_round(&mut self, drafted: usize, accepted: usize, committed: usize) {
        self.rounds += 1;
        self.committed += committed;
        self.drafted += drafted;
        let kept = accepted.min(committed);
        self.accepted += kept;
        let cut = committed <= accepted;
        let tested = if cut { committed } else { (accepted + 1).min(drafted) };
        if self.tested_by_position.len() < drafted {
            self.tested_by_position.resize(drafted, 0);
            self.accepted_by_position.resize(drafted, 0);
        }
        self.tested_by_position[..tested].iter_mut().for_each(|count| *count += 1);
        self.accepted_by_position[..kept].iter_mut().for_each(|count| *count += 1);
    }

    /// Adds other rounds.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.committed += other.committed;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        let positions = self.tested_by_position.len().max(other.tested_by_position.len());
        self.tested_by_position.resize(positions, 0);
        self.accepted_by_position.resize(positions, 0);
        for (sum, part) in self.tested_by_position.iter_mut().zip(&other.tested_by_position) {
            *sum += part;
        }
        for (sum, part) in self.accepted_by_position.iter_mut().zip(&other.accepted_by_position) {
            *sum += part;
        }
    }

    /// tau: tokens committed per target pass, the target's own token included; 1 without a draft.
    pub fn acceptance_length(&self) -> f64 {
        if self.rounds == 0 { 1.0 } else { self.committed as f64 / self.rounds as f64 }
    }

    /// Share of tested proposals that were accepted, position by position.
    pub fn conditional_acceptance(&self) -> Vec<f64> {
        let positions = self.accepted_by_position.iter().zip(&self.tested_by_position);
        positions.map(|(a, t)| if *t == 0 { 0.0 } else { *a as f64 / *t as f64 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tau_and_positions_of_two_rounds() {
        let mut metrics = AcceptanceMetrics::default();
        metrics.add_round(4, 2, 3);
        metrics.add_round(4, 0, 1);
        assert!((metrics.acceptance_length() - 2.0).abs() < 1e-12);
        assert_eq!(metrics.tested_by_position, [2, 1, 1, 0]);
        assert_eq!(metrics.accepted_by_position, [1, 1, 0, 0]);
        // 1 + Σ survival equals tau when nothing is cut.
        let survival: f64 = metrics.accepted_by_position.iter().map(|a| *a as f64 / 2.0).sum();
        assert!((1.0 + survival - metrics.acceptance_length()).abs() < 1e-12);
    }

    #[test]
    fn a_cut_round_tests_only_what_was_committed() {
        let mut metrics = AcceptanceMetrics::default();
        metrics.add_round(4, 3, 2);
        assert_eq!(metrics.tested_by_position, [1, 1, 0, 0]);
        assert_eq!((metrics.accepted, metrics.committed), (2, 2));
    }
}
