//! Whether drafting pays, and how much of it: from measured times and acceptance.
//!
//! Nothing here changes the distribution of the output: depth, width and the choice of plain
//! decoding are fixed before a round's draws, or concern proposals that carry no randomness.
//!
//! A round's *gain* is what plain decoding of its tokens would have taken then, less its time. A draft
//! model has an account in plain steps. Gains of its rounds are paid in, up to a limit; losses are taken
//! out; every token that is decoded without it pays in a little. It drafts while there is something in
//! the account, and tries again when a trial's worth has come together. So a draft that never pays costs
//! three steps and then at most one in a hundred, over all requests, whatever their lengths.
//! After a trial that failed, tokens of the same request pay in half as much. Lookup goes on meanwhile:
//! its time is that of its rows, of which each is worth its measured chance or is left out.

mod costs;

use crate::drafter::Drafted;
use crate::metrics::RoundRecord;
use crate::shape::DraftShape;

pub use costs::{Costs, Proposals};

/// Plain steps before anything is drafted, if no plain step was ever measured.
const FIRST_STEPS: usize = 2;
/// Plain steps in a new account, and most that it holds.
const FIRST_BUDGET: f64 = 3.0;
/// Plain steps from which a draft that failed is tried again.
const TRIAL_BUDGET: f64 = 1.0;
/// Plain steps that a token pays in which is decoded without the draft, before a trial failed, and at least.
const EARNED: f64 = 0.01;
const LEAST_EARNED: f64 = 0.001;
/// Drafted rounds after which the plain step is measured anew.
const REMEASURE: usize = 64;

/// What a request does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A plain step.
    Plain,
    /// A round with proposals that cost no time of their own.
    Free,
    /// A round with all proposals.
    Draft,
}

/// Decides round by round; one for a decoder, over all of its requests.
#[derive(Debug, Clone)]
pub struct Pace {
    costs: Costs,
    /// What drafting may lose, in plain steps.
    account: f64,
    /// What a token pays in.
    earned: f64,
    /// The account was empty and has not come to a trial's worth since.
    rests: bool,
    drafted_rounds: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            costs: Costs::default(),
            account: FIRST_BUDGET,
            earned: EARNED,
            rests: false,
            drafted_rounds: 0,
        }
    }
}

impl Pace {
    /// A request starts: its text may suit the draft better.
    pub fn begin(&mut self) {
        self.earned = EARNED;
    }

    /// What was measured.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// What the next round is.
    pub fn mode(&self) -> Mode {
        let measure = self.costs.plain.len() < FIRST_STEPS
            || (self.drafted_rounds > 0 && self.drafted_rounds.is_multiple_of(REMEASURE));
        match (measure, self.rests) {
            (true, _) => Mode::Plain,
            (false, false) => Mode::Draft,
            (false, true) => Mode::Free,
        }
    }

    /// Cuts a layout of drawn proposals to the depth that pays.
    pub fn cut(&self, shape: &DraftShape) -> DraftShape {
        shape.cut(self.costs.best_depth(shape.depth()))
    }

    /// Learns from a round.
    pub fn add(&mut self, round: &RoundRecord, proposals: &Proposals) {
        self.costs.add(round, proposals);
        let Some(plain) = self.costs.plain() else { return };
        if round.nodes > 0 || self.drafted_rounds.is_multiple_of(REMEASURE) {
            self.drafted_rounds += 1;
        }
        if proposals.drafted == Drafted::Nothing {
            self.account += self.earned * round.committed as f64;
            self.rests &= self.account < TRIAL_BUDGET;
        } else {
            self.account += self.costs.gain(plain, round);
            if self.account >= FIRST_BUDGET {
                // It pays: whatever failed before is over.
                self.earned = EARNED;
            } else if self.account <= 0.0 {
                self.rests = true;
                self.earned = (0.5 * self.earned).max(LEAST_EARNED);
            }
        }
        self.account = self.account.clamp(0.0, FIRST_BUDGET);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drafter::MatchClass;
    use crate::metrics::RoundSeconds;
    use crate::tree::LookedUp;

    /// What drafting costs in plain steps: each of 4 levels, or a block of 8 slots.
    #[derive(Clone, Copy)]
    enum Cost {
        Level(f64),
        Block(f64),
    }

    /// What decoding came to.
    struct Outcome {
        /// Seconds a token, of which plain decoding takes 1.
        time: f64,
        /// Tokens that were verified in the rounds that drafted.
        depths: Vec<usize>,
    }

    /// Decodes `tokens` tokens when every proposal at each depth is accepted with the given regular
    /// pattern. Of a block as much is verified as pays.
    fn decode(tokens: usize, cost: Cost, row: f64, accepts: impl Fn(usize) -> usize) -> Outcome {
        let mut pace = Pace::default();
        let (mut done, mut time, mut depths) = (0, 0.0, Vec::new());
        while done < tokens {
            let mode = pace.mode();
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            let mut proposals = Proposals::default();
            record.seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
            if mode == Mode::Draft {
                let (depth, draft, drafted) = match cost {
                    Cost::Level(level) => (4, 4.0 * level, Drafted::Levels(4)),
                    Cost::Block(pass) => {
                        (pace.cut(&DraftShape::Chain { length: 8 }).depth(), pass, Drafted::Block)
                    }
                };
                record.accepted = accepts(depths.len()).min(depth);
                record.committed = record.accepted + 1;
                (record.depth, record.nodes) = (depth, depth);
                record.seconds.draft = draft;
                record.seconds.verify += row * depth as f64;
                proposals.drafted = drafted;
                depths.push(depth);
            }
            done += record.committed;
            time += record.seconds.total();
            pace.add(&record, &proposals);
        }
        Outcome { time: time / done as f64, depths }
    }

    fn simulate(tokens: usize, level: f64, row: f64, accepts: impl Fn(usize) -> usize) -> f64 {
        decode(tokens, Cost::Level(level), row, accepts).time
    }

    #[test]
    fn an_untrained_block_is_soon_left_for_plain_steps() {
        for (pass, row, most) in [(0.05, 0.02, 90), (0.3, 0.05, 25), (1.0, 0.1, 12), (2.0, 0.2, 8)]
        {
            let Outcome { time, depths } = decode(256, Cost::Block(pass), row, |_| 0);
            assert!(time < 1.05 && depths.len() < most, "{pass} {row}: {time} {}", depths.len());
            // Trials become rare.
            let Outcome { time, depths } = decode(4096, Cost::Block(pass), row, |_| 0);
            assert!(
                time < 1.01 && depths.len() < 3 * most,
                "{pass} {row}: {time} {}",
                depths.len()
            );
        }
    }

    #[test]
    fn a_block_is_verified_as_far_as_its_rows_pay() {
        let accepts = |round: usize| [8, 3, 5, 1, 8][round % 5];
        let last = |row| {
            let Outcome { time, depths } = decode(2000, Cost::Block(0.5), row, accepts);
            assert!(time < 1.0, "{row}: {time}");
            depths[depths.len() - 1]
        };
        // The pass is the same: only rows of the target tell how many slots to verify.
        let (cheap, dear) = (last(0.01), last(0.3));
        assert!(cheap == 8 && dear < 6, "{cheap} {dear}");
    }

    #[test]
    fn a_useless_draft_costs_less_than_five_percent() {
        for (level, row) in [(0.05, 0.02), (0.2, 0.1), (0.3, 0.2), (0.5, 0.3)] {
            let time = simulate(256, level, row, |_| 0);
            assert!(time < 1.05, "{level} {row}: {time}");
        }
    }

    #[test]
    fn a_good_draft_keeps_nearly_all_of_its_gain() {
        let accepts = |round: usize| [3, 1, 4, 0, 2][round % 5];
        // 3 tokens for 1.6 plain steps.
        let ideal = (1.0 + 4.0 * 0.15) / 3.0;
        assert!(simulate(2000, 0.1, 0.05, accepts) < ideal / 0.9);
    }

    #[test]
    fn drafting_comes_back_when_it_pays_again() {
        let accepts = |round: usize| if round < 6 { 0 } else { 4 };
        assert!(simulate(4000, 0.1, 0.05, accepts) < 0.5);
    }

    #[test]
    fn depth_follows_acceptance_and_cost() {
        let mut costs = Costs::default();
        assert_eq!(costs.best_depth(6), 6);
        let mut teach = |accepted, level: f64| {
            for _ in 0..100 {
                let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
                let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
                costs.add(&plain, &Proposals::default());
                let seconds = RoundSeconds { draft: 6.0 * level, verify: 1.3, rest: 0.0 };
                let round = RoundRecord {
                    depth: 6,
                    nodes: 6,
                    accepted,
                    committed: accepted + 1,
                    seconds,
                    ..RoundRecord::default()
                };
                let predicted = Some(0.5);
                costs.add(
                    &round,
                    &Proposals { drafted: Drafted::Levels(6), predicted, lookup: None },
                );
            }
            (costs.best_depth(6), costs.worth().expect("measured"))
        };
        let (shallow, _) = teach(0, 0.2);
        let (deep, worth) = teach(6, 0.05);
        assert!(shallow == 1 && deep == 6, "{shallow} {deep}");
        assert!(worth.calibration > 1.5 && worth.node < 0.5, "{worth:?}");
    }

    #[test]
    fn a_block_costs_its_pass_whatever_its_depth() {
        let taught = |drafted, draft: f64| {
            let mut costs = Costs::default();
            for _ in 0..100 {
                let seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
                let plain = RoundRecord { committed: 1, seconds, ..RoundRecord::default() };
                costs.add(&plain, &Proposals::default());
                let seconds = RoundSeconds { draft, verify: 1.06, rest: 0.0 };
                let (depth, nodes, accepted, committed) = (6, 6, 3, 4);
                let round = RoundRecord {
                    depth,
                    nodes,
                    accepted,
                    committed,
                    seconds,
                    ..Default::default()
                };
                costs.add(&round, &Proposals { drafted, ..Proposals::default() });
            }
            (costs.best_depth(6), costs.worth().expect("measured").level)
        };
        // The same seconds: a sixth of them a level, or all of them once.
        let (by_level, level) = taught(Drafted::Levels(6), 1.2);
        let (at_once, free) = taught(Drafted::Block, 1.2);
        assert!(at_once >= by_level && free < 0.5 * level, "{by_level} {at_once} {level} {free}");
    }

    #[test]
    fn lookup_goes_on_while_a_useless_draft_rests_and_is_cut_to_what_holds() {
        let mut pace = Pace::default();
        let class = MatchClass::of_text(3);
        let (mut looked_up, mut drafted) = (0, 0);
        for _ in 0..200 {
            let mode = pace.mode();
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            record.seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
            let mut proposals = Proposals::default();
            if mode != Mode::Plain {
                // The first two tokens of what is found always hold, later ones never.
                let kept = pace.costs().worth().map_or(6, |worth| {
                    worth
                        .lookup
                        .along(class)
                        .take(6)
                        .take_while(|chance| *chance >= worth.node)
                        .count()
                });
                let accepted = kept.min(2);
                let looked = LookedUp { class, proposed: kept, accepted };
                (record.nodes, record.depth, record.accepted) = (kept, kept, accepted);
                record.committed = accepted + 1;
                record.seconds.verify += 0.1 * kept as f64;
                proposals.lookup = Some(looked).filter(|_| kept > 0);
                looked_up += record.committed - 1;
            }
            if mode == Mode::Draft {
                (proposals.drafted, record.seconds.draft) = (Drafted::Levels(4), 2.0);
                drafted += 1;
            }
            pace.add(&record, &proposals);
        }
        let worth = pace.costs().worth().expect("measured");
        let chances: Vec<f64> = worth.lookup.along(class).take(3).collect();
        assert!(chances[1] > 0.7 && chances[2] < 0.3 * chances[1], "{chances:?}");
        assert!(looked_up > 250 && drafted < 40, "{looked_up} {drafted}");
    }
}
