//! What things cost and how often proposals hold, from measured rounds.
//!
//! `plain`, a plain step; `jump` and `row`, a line fitted through passes with different numbers of proposals;
//! `drafting`, one level, or a whole block.
//!
//! Where several requests decode together, all wait for what one of them adds to a round: a second of it is worth
//! what all of them decode in a second.

use crate::acceptance::RoundRecord;
use crate::drafter::{Drafted, LookedUp, LookupChances, MatchClass, Worth};

/// Plain steps whose median counts.
const WINDOW: usize = 15;
/// Share of old measurements that survives a new one.
const MEMORY: f64 = 0.95;
/// The same for what lookup finds.
const MEMORY_OF_LOOKUPS: f64 = 0.97;
/// The same for passes with proposals. A round without any makes them fade.
const MEMORY_OF_PASSES: f64 = 0.995;
/// What a row is assumed to take before any is measured, in plain steps, and the weight of that, in rounds.
const PRIOR_ROW: f64 = 0.1;
const PRIOR_PASSES: f64 = 2.0;
/// A pass counts for at most so many times what its rows would take one by one. In the rest the machine did something
/// else.
const LONGEST_PASS: f64 = 1.5;
/// Weight of the acceptance that is assumed before any is measured, in rounds.
const PRIOR_ROUNDS: f64 = 20.0;
const PRIOR_ACCEPTANCE: f64 = 0.6;
/// The same for what a round of the draft gains, in tokens.
const PRIOR_GAINS: f64 = 4.0;
const PRIOR_GAIN: f64 = 0.5;
/// The same for what lookup finds.
const PRIOR_LOOKUPS: f64 = 2.0;
const PRIOR_OF_DEEPER: f64 = 0.5;

/// The target's pass of a round, over all requests that decode together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pass {
    /// Its time.
    pub seconds: f64,
    /// Proposals in it.
    pub nodes: usize,
}

/// Who proposed what in a round.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Proposals {
    /// What a draft model ran.
    pub drafted: Drafted,
    /// The model's own chance that some node of the first level holds.
    pub predicted: Option<f64>,
}

/// A mean that forgets.
#[derive(Debug, Clone, Copy, Default)]
struct Fading {
    sum: f64,
    weight: f64,
}

impl Fading {
    fn add(&mut self, value: f64, weight: f64) {
        self.fade(MEMORY);
        self.sum += value * weight;
        self.weight += weight;
    }

    fn fade(&mut self, share: f64) {
        self.sum *= share;
        self.weight *= share;
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
#[derive(Debug, Clone)]
pub struct Costs {
    /// Requests that decode together.
    pub(super) together: usize,
    pub(super) plain: Vec<f64>,
    /// Time of a plain step on average.
    steps: Fading,
    /// Time of a pass with proposals: means of their number, time, number², number · time.
    passes: [Fading; 4],
    /// Time of a pass of the draft model; where requests share it, the part of each.
    drafting: Fading,
    /// Whether such a pass covers a whole block: another level of it takes no time.
    is_block: bool,
    /// Accepted and predicted tokens of first levels.
    calibration: [Fading; 2],
    /// Accepted by tested at each depth.
    acceptance: Vec<Fading>,
    /// Held by tested at each depth of what lookup found, by class.
    lookups: [[Fading; LookupChances::DEPTHS]; MatchClass::COUNT],
    /// Seconds a committed token of drafted rounds.
    token: Fading,
    /// What the draft's rounds gained, in tokens.
    gain: Fading,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            together: 1,
            plain: Vec::new(),
            steps: Fading::default(),
            passes: Default::default(),
            drafting: Fading::default(),
            is_block: false,
            calibration: Default::default(),
            acceptance: Vec::new(),
            lookups: Default::default(),
            token: Fading::default(),
            gain: Fading::default(),
        }
    }
}

impl Costs {
    /// Median seconds of a plain step.
    pub fn plain(&self) -> Option<f64> {
        let mut sorted = self.plain.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    /// Seconds that a pass takes for a proposal more.
    fn row(&self, plain: f64) -> f64 {
        let [x, y, xx, xy] = self.passes.map(|mean| mean.mean().unwrap_or(0.0));
        // The more rows a pass has, the smaller the share of one.
        let prior = PRIOR_ROW * plain / (self.together as f64).sqrt();
        let variance = xx - x * x;
        // Where all passes have as many, nothing tells a row from the rest of what they take.
        let slope = if variance > 0.5 {
            (xy - x * y) / variance
        } else {
            (y - self.steps.mean().unwrap_or(plain)) / x.max(1.0)
        };
        (prior + self.certainty() * (slope - prior)).clamp(0.01 * plain, plain)
    }

    /// Seconds that a pass with proposals takes beyond a plain step and their rows.
    fn jump(&self, plain: f64) -> f64 {
        let [count, pass, ..] = self.passes.map(|mean| mean.mean());
        let (Some(count), Some(pass)) = (count, pass) else { return 0.0 };
        // Means of both: what disturbs some passes disturbs as many steps.
        let step = self.steps.mean().unwrap_or(plain);
        (self.certainty() * (pass - step - self.row(plain) * count)).clamp(0.0, plain)
    }

    /// How much of what is known of passes with proposals is measured. It fades where nothing is proposed, so that a
    /// bad measurement does not stand for ever.
    fn certainty(&self) -> f64 {
        self.passes[0].weight / (self.passes[0].weight + PRIOR_PASSES)
    }

    /// What a plain step takes while this pass runs, from its time and the number of its proposals: on
    /// a machine with other work, a step measured a second ago says little.
    fn plain_now(&self, plain: f64, pass: &Pass) -> f64 {
        let more = match pass.nodes {
            0 => 0.0,
            nodes => self.jump(plain) + self.row(plain) * nodes as f64,
        };
        pass.seconds * plain / (plain + more)
    }

    /// What a request's round gained, in plain steps: its tokens beyond the one of a plain step, less what its
    /// draft and its proposals took all who decode together.
    pub(super) fn gain(&self, plain: f64, (round, pass): (&RoundRecord, &Pass)) -> f64 {
        let step = self.plain_now(plain, pass);
        let share = round.nodes as f64 / pass.nodes.max(1) as f64;
        let took = round.seconds.draft + share * (pass.seconds - step);
        (step * (round.committed as f64 - 1.0) - self.together as f64 * took) / plain
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

    /// When a node or level of a certain tree pays; `None` before anything is measured.
    pub fn worth(&self) -> Option<Worth> {
        let plain = self.plain()?;
        let level = self.level();
        // What a second is worth: the better of both ways to decode.
        let tokens_per_second =
            self.together as f64 / self.token.mean().map_or(plain, |token| token.min(plain));
        let row = self.row(plain);
        let deeper = self.acceptance(1).max(0.1);
        let [accepted, predicted] = self.calibration.map(|mean| mean.mean());
        let calibration = match (accepted, predicted) {
            (Some(accepted), Some(predicted)) if predicted > 0.0 => accepted / predicted,
            _ => 1.0,
        };
        Some(Worth {
            node: tokens_per_second * row,
            // The requests that propose share it.
            jump: tokens_per_second * self.jump(plain) / self.together as f64,
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

    /// Depth of drawn chains with the best expected speed, `argmax E(k) / cost(k)`, at least 1; all who decode
    /// together draft alike.
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
            let speed = tokens / (plain + self.together as f64 * extra);
            if speed > best.1 {
                best = (depth, speed);
            }
        }
        best.0.min(most)
    }

    /// Learns from the pass of a round.
    pub(super) fn add_pass(&mut self, pass: &Pass) {
        let Pass { seconds, nodes } = *pass;
        let count = nodes as f64;
        let longest = self.plain().map_or(seconds, |plain| LONGEST_PASS * plain * (1.0 + count));
        let usual = seconds.min(longest);
        if nodes > 0 {
            let values = [count, usual, count * count, count * usual];
            self.passes.iter_mut().zip(values).for_each(|(mean, value)| mean.add(value, 1.0));
            return;
        }
        self.passes.iter_mut().for_each(|mean| mean.fade(MEMORY_OF_PASSES));
        self.steps.add(usual, 1.0);
        self.plain.push(seconds);
        let old = self.plain.len().saturating_sub(WINDOW);
        self.plain.drain(..old);
    }

    /// Learns from a request's round, after its pass.
    pub(super) fn add(&mut self, (round, pass): (&RoundRecord, &Pass), proposals: &Proposals) {
        let passes = match proposals.drafted {
            Drafted::Nothing => 0,
            Drafted::Levels(levels) => levels,
            Drafted::Block => 1,
        };
        if passes > 0 {
            self.is_block = proposals.drafted == Drafted::Block;
            self.drafting.add(round.seconds.draft / passes as f64, 1.0);
        } else if round.nodes == 0 {
            return;
        }
        // Of this request, while all draft like it.
        let seconds = pass.seconds + self.together as f64 * round.seconds.draft;
        self.token.add(seconds / round.committed.max(1) as f64, round.committed as f64);
        if passes == 0 {
            return;
        }
        if let Some(plain) = self.plain() {
            self.gain.add(self.gain(plain, (round, pass)), 1.0);
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

    /// Learns what came of something that lookup found.
    pub(super) fn add_lookup(&mut self, LookedUp { class, tested, held }: LookedUp) {
        let depths = &mut self.lookups[class.index()];
        for (depth, mean) in depths.iter_mut().take(tested).enumerate() {
            mean.fade(MEMORY_OF_LOOKUPS);
            mean.sum += f64::from(u8::from(depth < held));
            mean.weight += 1.0;
        }
    }
}
