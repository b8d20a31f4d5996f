//! Acceptance and time of a run of rounds. The prefill pass and the token it yields are outside.

use serde::{Deserialize, Serialize};

/// What one round did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RoundRecord {
    /// Levels proposed.
    pub depth: usize,
    /// Nodes proposed.
    pub nodes: usize,
    /// Levels accepted.
    pub accepted: usize,
    /// Tokens committed: `accepted + 1` unless a stop or limit cut the round.
    pub committed: usize,
    /// Accepted tokens that prompt lookup proposed.
    pub from_lookup: usize,
    /// Accepted tokens that the answer's form forced.
    pub from_grammar: usize,
    /// Rejections that exact arithmetic rules out.
    pub residual_fallbacks: usize,
    /// Seconds of drafting, of the target's pass with its head, and of the rest.
    pub seconds: RoundSeconds,
}

/// Where a round's time went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundSeconds {
    /// Drafting; of passes that requests share, the part of this one.
    pub draft: f64,
    /// The target's pass with its head.
    pub verify: f64,
    /// Verification, compaction, bookkeeping.
    pub rest: f64,
}

impl RoundSeconds {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.draft + self.verify + self.rest
    }

    fn add(&mut self, other: &Self) {
        self.draft += other.draft;
        self.verify += other.verify;
        self.rest += other.rest;
    }
}

/// Counters over rounds; sums over requests before they are divided.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceMetrics {
    /// Target passes that verified a draft (or decoded plainly).
    pub rounds: usize,
    /// Of them, those without proposals.
    pub plain_rounds: usize,
    /// Tokens committed by them.
    pub committed: usize,
    /// Levels proposed.
    pub drafted: usize,
    /// Nodes proposed; more than `drafted` for trees.
    pub nodes: usize,
    /// Proposals committed.
    pub accepted: usize,
    /// Of them, those of prompt lookup.
    pub from_lookup: usize,
    /// Of them, those that the answer's form forced.
    pub from_grammar: usize,
    /// Rounds cut by a stop or limit.
    pub cut_rounds: usize,
    /// Tokens committed by them.
    pub cut_committed: usize,
    /// Rejections that exact arithmetic rules out; 0 but for rounding.
    pub residual_fallbacks: usize,
    /// Rounds in which position i was drafted (a tree: some node of that depth).
    pub drafted_by_position: Vec<usize>,
    /// Rounds in which position i was tested (drafted, and all before it accepted).
    pub tested_by_position: Vec<usize>,
    /// Rounds in which position i was accepted.
    pub accepted_by_position: Vec<usize>,
    /// Where the time of rounds with proposals went.
    pub seconds: RoundSeconds,
    /// Seconds of rounds without proposals.
    pub plain_seconds: f64,
}

impl AcceptanceMetrics {
    /// Adds a round; positions after a cut count as untested.
    pub fn add_round(&mut self, round: &RoundRecord) {
        let &RoundRecord { depth, nodes, accepted, committed, .. } = round;
        self.rounds += 1;
        self.committed += committed;
        self.drafted += depth;
        self.nodes += nodes;
        self.from_lookup += round.from_lookup;
        self.from_grammar += round.from_grammar;
        self.residual_fallbacks += round.residual_fallbacks;
        let kept = accepted.min(committed);
        self.accepted += kept;
        let cut = committed <= accepted;
        if cut {
            self.cut_rounds += 1;
            self.cut_committed += committed;
        }
        if nodes == 0 {
            self.plain_rounds += 1;
            self.plain_seconds += round.seconds.total();
        } else {
            self.seconds.add(&round.seconds);
        }
        let tested = if cut { committed } else { (accepted + 1).min(depth) };
        for (counts, reached) in [
            (&mut self.drafted_by_position, depth),
            (&mut self.tested_by_position, tested),
            (&mut self.accepted_by_position, kept),
        ] {
            counts.resize(counts.len().max(depth), 0);
            counts[..reached].iter_mut().for_each(|count| *count += 1);
        }
    }

    /// Adds other rounds.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.plain_rounds += other.plain_rounds;
        self.committed += other.committed;
        self.drafted += other.drafted;
        self.nodes += other.nodes;
        self.accepted += other.accepted;
        self.from_lookup += other.from_lookup;
        self.from_grammar += other.from_grammar;
        self.cut_rounds += other.cut_rounds;
        self.cut_committed += other.cut_committed;
        self.residual_fallbacks += other.residual_fallbacks;
        self.seconds.add(&other.seconds);
        self.plain_seconds += other.plain_seconds;
        for (sums, parts) in [
            (&mut self.drafted_by_position, &other.drafted_by_position),
            (&mut self.tested_by_position, &other.tested_by_position),
            (&mut self.accepted_by_position, &other.accepted_by_position),
        ] {
            sums.resize(sums.len().max(parts.len()), 0);
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
    }

    /// tau: tokens committed per target pass, the target's own token included; 1 without a draft.
    pub fn acceptance_length(&self) -> f64 {
        ratio(self.committed, self.rounds).unwrap_or(1.0)
    }

    /// tau over rounds that no stop or limit cut.
    pub fn uncut_acceptance_length(&self) -> f64 {
        let (committed, rounds) =
            (self.committed - self.cut_committed, self.rounds - self.cut_rounds);
        ratio(committed, rounds).unwrap_or(1.0)
    }

    /// Accepted tokens per target pass: tau less the target's own.
    pub fn accepted_length(&self) -> f64 {
        ratio(self.accepted, self.rounds).unwrap_or(0.0)
    }

    /// Accepted levels by drafted levels.
    pub fn acceptance_rate(&self) -> f64 {
        ratio(self.accepted, self.drafted).unwrap_or(0.0)
    }

    /// Share of tested proposals that were accepted, position by position.
    pub fn conditional_acceptance(&self) -> Vec<f64> {
        rates(&self.accepted_by_position, &self.tested_by_position)
    }

    /// Share of drafted positions that were accepted, tested or not.
    pub fn survival(&self) -> Vec<f64> {
        rates(&self.accepted_by_position, &self.drafted_by_position)
    }

    /// Share of all rounds, those without proposals included, in which a position was accepted. tau is
    /// 1 more than their sum, where no stop or limit cut a round.
    pub fn accepted_share(&self) -> Vec<f64> {
        let rounds = vec![self.rounds; self.accepted_by_position.len()];
        rates(&self.accepted_by_position, &rounds)
    }

    /// Share of accepted tokens that prompt lookup proposed.
    pub fn lookup_share(&self) -> f64 {
        ratio(self.from_lookup, self.accepted).unwrap_or(0.0)
    }
}

fn ratio(part: usize, whole: usize) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn rates(parts: &[usize], wholes: &[usize]) -> Vec<f64> {
    parts.iter().zip(wholes).map(|(part, whole)| ratio(*part, *whole).unwrap_or(0.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(depth: usize, accepted: usize, committed: usize) -> RoundRecord {
        RoundRecord { depth, nodes: depth, accepted, committed, ..RoundRecord::default() }
    }

    #[test]
    fn tau_and_positions_of_two_rounds() {
        let mut metrics = AcceptanceMetrics::default();
        metrics.add_round(&round(4, 2, 3));
        metrics.add_round(&round(4, 0, 1));
        assert!((metrics.acceptance_length() - 2.0).abs() < 1e-12);
        assert_eq!(metrics.tested_by_position, [2, 1, 1, 0]);
        assert_eq!(metrics.accepted_by_position, [1, 1, 0, 0]);
        // tau = 1 + Σ survival and survival = Π conditional when nothing is cut.
        let survival = metrics.survival();
        let tau = 1.0 + survival.iter().sum::<f64>();
        assert!((tau - metrics.acceptance_length()).abs() < 1e-12);
        assert!((1.0 + metrics.accepted_share().iter().sum::<f64>() - tau).abs() < 1e-12);
        let mut product = 1.0;
        for (alpha, s) in metrics.conditional_acceptance().iter().zip(&survival) {
            product *= alpha;
            assert!((product - s).abs() < 1e-12);
        }
        assert!((metrics.acceptance_rate() - 0.25).abs() < 1e-12);
    }

    #[test]
    fn a_cut_round_tests_only_what_was_committed() {
        let mut metrics = AcceptanceMetrics::default();
        metrics.add_round(&round(4, 3, 2));
        assert_eq!(metrics.tested_by_position, [1, 1, 0, 0]);
        assert_eq!((metrics.accepted, metrics.committed, metrics.cut_rounds), (2, 2, 1));
        metrics.add_round(&round(0, 0, 1));
        assert_eq!((metrics.plain_rounds, metrics.rounds), (1, 2));
        assert!((metrics.uncut_acceptance_length() - 1.0).abs() < 1e-12);
    }
}
