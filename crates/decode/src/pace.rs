//! Whether drafting pays, and how much of it: from measured times and acceptance.
//!
//! Nothing here changes the law of the output: depth, width and the choice of plain decoding are
//! fixed before a round's draws, or concern proposals that carry no randomness.
//!
//! Costs: `plain`, a plain step; `row` and the base of a pass, a line fitted through passes of
//! different sizes; `level`, one level of drafting. A round's *loss* is its time less what plain
//! decoding of its tokens would have taken then. Losses add up (gains are forgotten beyond a few steps, as in
//! Page's test of 1954); when they exceed a budget, the request goes on plainly, and tries again
//! with a small budget after a pause that doubles.

use crate::metrics::RoundRecord;
use crate::shape::DraftShape;

use crate::drafter::Worth;

/// Plain steps whose median counts.
const WINDOW: usize = 15;
/// Plain steps before anything is drafted, if no plain step was ever measured.
const FIRST_STEPS: usize = 2;
/// Loss, in plain steps, at which a request that just began gives drafting up.
const FIRST_BUDGET: f64 = 3.0;
/// The same for later trials.
const TRIAL_BUDGET: f64 = 1.0;
/// Gains remembered, in plain steps.
const CREDIT: f64 = 2.0;
/// Tokens of the first pause, and most.
const PAUSE: usize = 64;
const LONGEST_PAUSE: usize = 1024;
/// Drafted rounds after which the plain step is measured anew.
const REMEASURE: usize = 64;
/// Share of old measurements that survives a new one.
const MEMORY: f64 = 0.95;
/// Weight of the acceptance that is assumed before any is measured, in rounds.
const PRIOR_ROUNDS: f64 = 20.0;
const PRIOR_ACCEPTANCE: f64 = 0.6;

/// A mean that forgets.
#[derive(Debug, Clone, Copy, Default)]
struct Fading {
    sum: f64,
    weight: f64,
}

impl Fading {
    fn add(&mut self, value: f64, weight: f64) {
        self.sum = MEMORY * self.sum + value * weight;
        self.weight = MEMORY * self.weight + weight;
    }

    fn mean(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

/// What things cost and how often proposals hold; lives across requests.
#[derive(Debug, Clone, Default)]
pub struct Costs {
    plain: Vec<f64>,
    /// Time of a pass over rows: means of rows, time, rows², rows · time.
    passes: [Fading; 4],
    level: Fading,
    /// Accepted and predicted tokens of first levels.
    calibration: [Fading; 2],
    /// Accepted by tested at each depth.
    acceptance: Vec<Fading>,
    /// Seconds a committed token of drafted rounds.
    token: Fading,
}

impl Costs {
    /// Median seconds of a plain step.
    pub fn plain(&self) -> Option<f64> {
        let mut sorted = self.plain.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// Seconds that a pass takes for a row more.
    fn row(&self, plain: f64) -> f64 {
        let [x, y, xx, xy] = self.passes.map(|mean| mean.mean().unwrap_or(0.0));
        let variance = xx - x * x;
        let slope = if variance > 0.5 { (xy - x * y) / variance } else { 0.1 * plain };
        slope.clamp(0.01 * plain, plain)
    }

    /// What a plain step takes while this round runs, from its pass and the number of its rows: on
    /// a machine with other work, a step measured a second ago says little.
    fn plain_now(&self, plain: f64, round: &RoundRecord) -> f64 {
        let pass = round.seconds.verify + round.seconds.rest;
        pass * plain / (plain + self.row(plain) * round.nodes as f64)
    }

    /// Chance that position `depth` (from 0) is accepted where it is tested.
    fn acceptance(&self, depth: usize) -> f64 {
        let measured = self.acceptance.get(depth).copied().unwrap_or_default();
        (measured.sum + PRIOR_ROUNDS * PRIOR_ACCEPTANCE) / (measured.weight + PRIOR_ROUNDS)
    }

    /// When a node or level of a certain tree pays.
    pub fn worth(&self) -> Option<Worth> {
        let (plain, level) = (self.plain()?, self.level.mean()?);
        // What a second is worth: the better of both ways to decode.
        let tokens_per_second = 1.0 / self.token.mean().map_or(plain, |token| token.min(plain));
        let row = self.row(plain);
        let deeper = self.acceptance(1).max(0.1);
        let [accepted, predicted] = self.calibration.map(|mean| mean.mean());
        let calibration = match (accepted, predicted) {
            (Some(accepted), Some(predicted)) if predicted > 0.0 => accepted / predicted,
            _ => 1.0,
        };
        Some(Worth {
            node: tokens_per_second * row,
            level: tokens_per_second * (level + row) / deeper,
            calibration: calibration.clamp(0.2, 3.0),
        })
    }

    /// Depth of drawn chains with the best expected speed, `argmax E(k) / cost(k)`, at least 1.
    pub fn best_depth(&self, most: usize) -> usize {
        let (Some(plain), Some(level)) = (self.plain(), self.level.mean()) else { return most };
        let row = self.row(plain);
        let (mut survival, mut tokens) = (1.0, 1.0);
        let mut best = (1, 0.0);
        for depth in 1..=most {
            survival *= self.acceptance(depth - 1);
            tokens += survival;
            let speed = tokens / (plain + depth as f64 * (level + row));
            if speed > best.1 {
                best = (depth, speed);
            }
        }
        best.0.min(most)
    }

    /// Learns from a round; `predicted` is the draft's own chance for its first level.
    fn add(&mut self, round: &RoundRecord, predicted: Option<f64>) {
        let rows = (round.nodes + 1) as f64;
        let pass = round.seconds.verify + round.seconds.rest;
        for (mean, value) in self.passes.iter_mut().zip([rows, pass, rows * rows, rows * pass]) {
            mean.add(value, 1.0);
        }
        if round.nodes == 0 {
            if round.seconds.draft == 0.0 {
                self.plain.push(pass);
                let old = self.plain.len().saturating_sub(WINDOW);
                self.plain.drain(..old);
            }
            return;
        }
        self.level.add(round.seconds.draft / round.depth as f64, 1.0);
        self.token
            .add(round.seconds.total() / round.committed.max(1) as f64, round.committed as f64);
        if let Some(predicted) = predicted {
            self.calibration[0].add(f64::from(u8::from(round.accepted > 0)), 1.0);
            self.calibration[1].add(predicted, 1.0);
        }
        let tested = (round.accepted + 1).min(round.depth);
        if self.acceptance.len() < tested {
            self.acceptance.resize(tested, Fading::default());
        }
        for (depth, mean) in self.acceptance[..tested].iter_mut().enumerate() {
            mean.add(f64::from(u8::from(depth < round.accepted)), 1.0);
        }
    }
}

/// What a request does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A plain step.
    Plain,
    /// A round with proposals.
    Draft,
}

/// Decides round by round; one for a decoder, told where requests begin.
#[derive(Debug, Clone)]
pub struct Pace {
    costs: Costs,
    /// Loss of drafting in seconds since it was last trusted.
    loss: f64,
    budget: f64,
    /// Plain tokens until the next trial; drafting is on at 0.
    pause: usize,
    next_pause: usize,
    drafted_rounds: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            costs: Costs::default(),
            loss: 0.0,
            budget: FIRST_BUDGET,
            pause: 0,
            next_pause: PAUSE,
            drafted_rounds: 0,
        }
    }
}

impl Pace {
    /// A request starts: drafting gets a new chance, a small one if it last failed.
    pub fn begin(&mut self) {
        self.budget = if self.pause > 0 { TRIAL_BUDGET } else { FIRST_BUDGET };
        self.pause = 0;
        self.loss = 0.0;
        self.next_pause = PAUSE;
    }

    /// What was measured.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// What the next round is.
    pub fn mode(&self) -> Mode {
        let measure = self.costs.plain.len() < FIRST_STEPS
            || (self.drafted_rounds > 0 && self.drafted_rounds.is_multiple_of(REMEASURE));
        if measure || self.pause > 0 { Mode::Plain } else { Mode::Draft }
    }

    /// Cuts a layout of drawn proposals to the depth that pays.
    pub fn cut(&self, shape: &DraftShape) -> DraftShape {
        shape.cut(self.costs.best_depth(shape.depth()))
    }

    /// Learns from a round.
    pub fn add(&mut self, mode: Mode, round: &RoundRecord, predicted: Option<f64>) {
        self.costs.add(round, predicted);
        let Some(plain) = self.costs.plain() else { return };
        if mode == Mode::Plain {
            self.pause = self.pause.saturating_sub(round.committed);
            if self.drafted_rounds.is_multiple_of(REMEASURE) {
                self.drafted_rounds += 1;
            }
            return;
        }
        self.drafted_rounds += 1;
        self.loss +=
            round.seconds.total() - self.costs.plain_now(plain, round) * round.committed as f64;
        if self.loss < -CREDIT * plain {
            // It pays: whatever failed before is over.
            self.loss = -CREDIT * plain;
            self.budget = FIRST_BUDGET;
            self.next_pause = PAUSE;
        }
        if self.loss > self.budget * plain {
            self.loss = 0.0;
            self.budget = TRIAL_BUDGET;
            self.pause = self.next_pause;
            self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::RoundSeconds;

    /// Seconds of `tokens` tokens relative to plain decoding, when every proposal at each depth is
    /// accepted with the given regular pattern.
    fn simulate(tokens: usize, level: f64, row: f64, accepts: impl Fn(usize) -> usize) -> f64 {
        const DEPTH: usize = 4;
        let mut pace = Pace::default();
        pace.begin();
        let (mut done, mut time, mut round) = (0, 0.0, 0);
        while done < tokens {
            let mode = pace.mode();
            let mut record = RoundRecord { committed: 1, ..RoundRecord::default() };
            record.seconds = RoundSeconds { draft: 0.0, verify: 1.0, rest: 0.0 };
            if mode == Mode::Draft {
                record.accepted = accepts(round).min(DEPTH);
                record.committed = record.accepted + 1;
                (record.depth, record.nodes) = (DEPTH, DEPTH);
                record.seconds.draft = level * DEPTH as f64;
                record.seconds.verify += row * DEPTH as f64;
                round += 1;
            }
            done += record.committed;
            time += record.seconds.total();
            pace.add(mode, &record, None);
        }
        time / done as f64
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
                costs.add(&RoundRecord { committed: 1, seconds, ..RoundRecord::default() }, None);
                let seconds = RoundSeconds { draft: 6.0 * level, verify: 1.3, rest: 0.0 };
                let round = RoundRecord {
                    depth: 6,
                    nodes: 6,
                    accepted,
                    committed: accepted + 1,
                    seconds,
                    ..RoundRecord::default()
                };
                costs.add(&round, Some(0.5));
            }
            (costs.best_depth(6), costs.worth().expect("measured"))
        };
        let (shallow, _) = teach(0, 0.2);
        let (deep, worth) = teach(6, 0.05);
        assert!(shallow == 1 && deep == 6, "{shallow} {deep}");
        assert!(worth.calibration > 1.5 && worth.node < 0.5, "{worth:?}");
    }
}
