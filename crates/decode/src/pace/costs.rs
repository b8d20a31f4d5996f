//! What things cost and how often proposals hold, from measured rounds.
//!
//! `plain`, a plain step; `row` and the base of a pass, a line fitted through passes of different
//! sizes; `drafting`, one level, or a whole block.

use crate::drafter::{Drafted, LookupChances, MatchClass, Worth};
use crate::metrics::RoundRecord;
use crate::tree::LookedUp;

/// Plain steps whose median counts.
const WINDOW: usize = 15;
/// Share of old measurements that survives a new one.
const MEMORY: f64 = 0.95;
/// The same for lookups, a round without one.
const MEMORY_OF_LOOKUPS: f64 = 0.99;
/// Weight of the acceptance that is assumed before any is measured, in rounds.
const PRIOR_ROUNDS: f64 = 20.0;
const PRIOR_ACCEPTANCE: f64 = 0.6;
/// The same for what a round of the draft gains, in tokens.
const PRIOR_GAINS: f64 = 4.0;
const PRIOR_GAIN: f64 = 0.5;
/// The same for what lookup finds.
const PRIOR_LOOKUPS: f64 = 4.0;
const PRIOR_OF_DEEPER: f64 = 0.5;

/// Who proposed what in a round.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Proposals {
    /// What a draft model ran.
    pub drafted: Drafted,
    /// The model's own chance that some node of the first level holds.
    pub predicted: Option<f64>,
    /// What lookup added.
    pub lookup: Option<LookedUp>,
}

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

    /// The mean with some rounds of `prior` before it.
    fn mean_with(&self, rounds: f64, prior: f64) -> f64 {
        (self.sum + rounds * prior) / (self.weight + rounds)
    }
}

/// What things cost and how often proposals hold; lives across requests.
#[derive(Debug, Clone, Default)]
pub struct Costs {
    pub(super) plain: Vec<f64>,
    /// Time of a pass over rows: means of rows, time, rows², rows · time.
    passes: [Fading; 4],
    /// Time of a pass of the draft model.
    drafting: Fading,
    /// Whether such a pass covers a whole block: another level of it takes no time.
    is_block: bool,
    /// Accepted and predicted tokens of first levels.
    calibration: [Fading; 2],
    /// Accepted by tested at each depth.
    acceptance: Vec<Fading>,
    /// Accepted by tested at each depth of lookups, by class.
    lookups: [[Fading; LookupChances::DEPTHS]; MatchClass::COUNT],
    /// Seconds a committed token of drafted rounds.
    token: Fading,
    /// What the draft's rounds gained, in tokens.
    gain: Fading,
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

    /// What a round gained, in plain steps: plain decoding of its tokens less its time.
    pub(super) fn gain(&self, plain: f64, round: &RoundRecord) -> f64 {
        (self.plain_now(plain, round) * round.committed as f64 - round.seconds.total()) / plain
    }

    /// Chance that position `depth` (from 0) is accepted where it is tested.
    fn acceptance(&self, depth: usize) -> f64 {
        let measured = self.acceptance.get(depth).copied().unwrap_or_default();
        measured.mean_with(PRIOR_ROUNDS, PRIOR_ACCEPTANCE)
    }

    /// Seconds that another level of drafting takes.
    fn level(&self) -> f64 {
        if self.is_block { 0.0 } else { self.drafting.mean().unwrap_or(0.0) }
    }

    /// When a node or level of a certain tree pays.
    pub fn worth(&self) -> Option<Worth> {
        let plain = self.plain()?;
        let level = self.level();
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
            gain: self.gain.mean_with(PRIOR_GAINS, PRIOR_GAIN),
            lookup: self.of_lookups(),
        })
    }

    fn of_lookups(&self) -> LookupChances {
        let chance = |class: MatchClass, depth: usize| {
            // After a first token that held the next ones are as good as those of any class.
            let prior = if depth == 0 { class.prior() } else { PRIOR_OF_DEEPER };
            self.lookups[class.index()][depth].mean_with(PRIOR_LOOKUPS, prior)
        };
        let of_class = |class| std::array::from_fn(|depth| chance(class, depth));
        LookupChances::new(MatchClass::ALL.map(of_class))
    }

    /// Depth of drawn chains with the best expected speed, `argmax E(k) / cost(k)`, at least 1.
    pub fn best_depth(&self, most: usize) -> usize {
        let (Some(plain), Some(pass)) = (self.plain(), self.drafting.mean()) else { return most };
        let row = self.row(plain);
        let (mut survival, mut tokens) = (1.0, 1.0);
        let mut best = (1, 0.0);
        for depth in 1..=most {
            survival *= self.acceptance(depth - 1);
            tokens += survival;
            let levels = depth as f64;
            let extra = if self.is_block { pass + levels * row } else { levels * (pass + row) };
            let speed = tokens / (plain + extra);
            if speed > best.1 {
                best = (depth, speed);
            }
        }
        best.0.min(most)
    }

    /// Learns from a round.
    pub(super) fn add(&mut self, round: &RoundRecord, proposals: &Proposals) {
        let rows = (round.nodes + 1) as f64;
        let pass = round.seconds.verify + round.seconds.rest;
        for (mean, value) in self.passes.iter_mut().zip([rows, pass, rows * rows, rows * pass]) {
            mean.add(value, 1.0);
        }
        self.add_lookup(proposals.lookup);
        let passes = match proposals.drafted {
            Drafted::Nothing => 0,
            Drafted::Levels(levels) => levels,
            Drafted::Block => 1,
        };
        if passes > 0 {
            self.is_block = proposals.drafted == Drafted::Block;
            self.drafting.add(round.seconds.draft / passes as f64, 1.0);
        } else if round.nodes == 0 {
            self.plain.push(pass);
            let old = self.plain.len().saturating_sub(WINDOW);
            self.plain.drain(..old);
            return;
        }
        self.token
            .add(round.seconds.total() / round.committed.max(1) as f64, round.committed as f64);
        if passes == 0 {
            return;
        }
        if let Some(plain) = self.plain() {
            self.gain.add(self.gain(plain, round), 1.0);
        }
        if round.nodes == 0 {
            return;
        }
        if let Some(predicted) = proposals.predicted {
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

    fn add_lookup(&mut self, lookup: Option<LookedUp>) {
        let Some(LookedUp { class, proposed, accepted }) = lookup else {
            // What failed for long gets another chance.
            for mean in self.lookups.as_flattened_mut() {
                mean.sum *= MEMORY_OF_LOOKUPS;
                mean.weight *= MEMORY_OF_LOOKUPS;
            }
            return;
        };
        let depths = &mut self.lookups[class.index()];
        for (depth, mean) in
            depths[..(accepted + 1).min(proposed).min(LookupChances::DEPTHS)].iter_mut().enumerate()
        {
            mean.add(f64::from(u8::from(depth < accepted)), 1.0);
        }
    }
}
