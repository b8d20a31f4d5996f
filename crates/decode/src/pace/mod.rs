//! Whether drafting pays, and how much of it: from measured times and acceptance.
//!
//! Nothing here changes the distribution of the output: depth, width and the choice of plain
//! decoding are fixed before a round's draws, or concern proposals that carry no randomness.
//!
//! A round's *gain* is what plain decoding of its tokens would have taken then, less its time. A draft
//! model has an account in plain steps. Gains of its rounds are paid in, up to a limit; losses are taken
//! out; every token that is decoded without it pays in a little. Of several requests in a round the mean counts, so
//! that the bad luck of some does not end what pays for all. It drafts while there is something in
//! the account, and tries again when a trial's worth has come together. So a draft that never pays costs
//! three steps, about one more at each further number of requests that decode together (doubled), and then at most
//! one in a hundred, over all requests, whatever their lengths. Of several requests that
//! decode together one tries the draft, until it is seen to pay; where they share its passes all of them try, for one
//! alone would pay for what serves all.
//! After a trial that failed, tokens of the same request pay in half as much. Lookup goes on meanwhile:
//! its time is that of its rows. A row that is not worth its measured chance is left out. That chance is also known of
//! what was left out, for the next tokens show whether it was right.
//!
//! Requests that decode together wait for one another: what one of them adds to a round costs all of them. So the
//! more there are, the surer a proposal must be. Of a pass over the draft that several share, each has added its part
//! of the time.

mod costs;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::acceptance::RoundRecord;
use crate::drafter::{Drafted, LookedUp, Worth};
use crate::layout::DraftShape;

pub use costs::{Costs, Pass, Proposals};

/// Plain steps before anything is drafted, if no plain step was ever measured.
const FIRST_STEPS: usize = 2;
/// Plain steps in a new account, and most that it holds.
const FIRST_BUDGET: f64 = 3.0;
/// Plain steps from which a draft that failed is tried again.
const TRIAL_BUDGET: f64 = 1.0;
/// Plain steps that a token pays in which is decoded without the draft, before a trial failed, and at least.
const EARNED: f64 = 0.01;
const LEAST_EARNED: f64 = 0.001;
/// Rounds with proposals after which the plain step is measured anew.
const REMEASURE: usize = 64;
/// Passes with proposals that are waited through for a plain step. Tokens that grammars force are proposed in them.
const MOST_WAITED: usize = 4;

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

/// The paces of a decoder by the number of requests that decode together (its logarithm): what a row costs depends
/// on how many others the pass has. They are one for all of its requests.
#[derive(Debug, Clone, Default)]
pub struct Paces(BTreeMap<u32, Pace>);

impl Paces {
    /// That of so many requests. A new one loses no more before it knows the draft than the nearest one has left
    /// to lose, if that is a trial's worth.
    pub fn of(&mut self, together: usize) -> &mut Pace {
        let together = together.max(1);
        let size = together.ilog2();
        let nearest = self.0.iter().min_by_key(|(known, _)| known.abs_diff(size));
        let account = nearest.map_or(FIRST_BUDGET, |(_, pace)| pace.first_budget_beside());
        let pace = self.0.entry(size).or_insert_with(|| Pace { account, ..Pace::default() });
        pace.costs.together = together;
        pace
    }

    /// A request starts.
    pub fn begin(&mut self) {
        self.0.values_mut().for_each(Pace::begin);
    }
}

/// Decides round by round.
#[derive(Debug, Clone)]
pub struct Pace {
    costs: Costs,
    /// What drafting may lose, in plain steps.
    account: f64,
    /// What a token pays in.
    earned: f64,
    /// The account was empty and has not come to a trial's worth since.
    rests: bool,
    /// The account was full since; before that one request of a round tries alone.
    pays: bool,
    /// One tries in this round.
    on_trial: bool,
    /// Rounds with proposals since the last plain step, or since it was no longer waited for.
    since_plain: usize,
    /// Rounds with proposals while a plain step was waited for.
    waited: usize,
    /// The round that is being learned from.
    round: Round,
}

/// What the requests of a round brought, before it is booked.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// They share the passes of the draft: where one tries it, all do.
    shares: bool,
    requests: usize,
    /// Those whose draft ran.
    drafted: usize,
    /// Plain steps that these gained, in all.
    gained: f64,
    /// Tokens of the others.
    undrafted_tokens: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            costs: Costs::default(),
            account: FIRST_BUDGET,
            earned: EARNED,
            rests: false,
            pays: false,
            on_trial: false,
            since_plain: 0,
            waited: 0,
            round: Round::default(),
        }
    }
}

impl Pace {
    /// A request starts: its text may suit the draft better.
    pub fn begin(&mut self) {
        self.earned = EARNED;
    }

    /// Plain steps in the account of a new pace beside this one.
    fn first_budget_beside(&self) -> f64 {
        if self.pays { FIRST_BUDGET } else { self.account.clamp(TRIAL_BUDGET, FIRST_BUDGET) }
    }

    /// What was measured.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// When a node or level of a certain tree pays; `None` before anything is measured.
    pub fn worth(&self) -> Option<Worth> {
        self.costs.worth()
    }

    /// What a request does in the next round, whose draft shares its passes with those of others or not.
    pub fn mode(&mut self, shares: bool) -> Mode {
        self.book_round();
        self.round.shares = shares;
        match (self.waits(), self.rests) {
            (true, _) => Mode::Plain,
            (false, true) => Mode::Free,
            (false, false) if self.on_trial => Mode::Free,
            (false, false) => {
                self.on_trial = !self.pays && !shares;
                Mode::Draft
            }
        }
    }

    /// Whether a plain step is to be measured before anything is drafted.
    fn waits(&self) -> bool {
        let is_first = self.costs.plain.len() < FIRST_STEPS && self.waited < MOST_WAITED;
        is_first || self.since_plain >= REMEASURE
    }

    /// Cuts a layout of drawn proposals to the depth that pays.
    pub fn cut(&self, shape: &DraftShape) -> DraftShape {
        shape.cut(self.costs.best_depth(shape.depth()))
    }

    /// Learns what came of something that lookup found.
    pub fn add_lookup(&mut self, outcome: LookedUp) {
        self.costs.add_lookup(outcome);
    }

    /// Learns from the pass of a round.
    pub fn add_pass(&mut self, pass: &Pass) {
        self.book_round();
        self.count_pass(pass);
        self.costs.add_pass(pass);
        self.on_trial = false;
    }

    /// Counts rounds with proposals. After some in which a plain step was waited for, what is known of it stands until
    /// the next time.
    fn count_pass(&mut self, pass: &Pass) {
        if pass.nodes == 0 {
            (self.since_plain, self.waited) = (0, 0);
        } else if !self.waits() {
            self.since_plain += 1;
            if self.since_plain >= REMEASURE {
                self.waited = 0;
            }
        } else {
            self.waited += 1;
            if self.waited >= MOST_WAITED {
                self.since_plain = 0;
            }
        }
    }

    /// Learns from a request's round, after its pass.
    pub fn add(&mut self, (round, pass): (&RoundRecord, &Pass), proposals: &Proposals) {
        self.costs.add((round, pass), proposals);
        let Some(plain) = self.costs.plain() else { return };
        self.round.requests += 1;
        if proposals.drafted == Drafted::Nothing {
            self.round.undrafted_tokens += round.committed;
        } else {
            self.round.drafted += 1;
            self.round.gained += self.costs.gain(plain, (round, pass));
        }
    }

    /// Books the last round, once all of its requests are known.
    fn book_round(&mut self) {
        if self.round.requests == 0 {
            return;
        }
        let Round { shares, requests, drafted, gained, undrafted_tokens } =
            std::mem::take(&mut self.round);
        // A trial of all takes as many plain steps as one of a single request, and comes as often.
        let trying = if shares { requests } else { 1 };
        self.account += self.earned * undrafted_tokens as f64 / trying as f64;
        if drafted == 0 {
            self.rests &= self.account < TRIAL_BUDGET;
        } else {
            self.account += gained / drafted as f64;
            if self.account >= FIRST_BUDGET {
                // It pays: whatever failed before is over.
                (self.rests, self.pays) = (false, true);
                self.earned = EARNED;
            } else if self.account <= 0.0 {
                if !self.rests {
                    self.earned = (0.5 * self.earned).max(LEAST_EARNED);
                }
                (self.rests, self.pays) = (true, false);
            }
        }
        self.account = self.account.min(FIRST_BUDGET);
    }
}
