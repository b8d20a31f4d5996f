//! What a draft is expected to bring, from what is measured here and from drafts that were measured once.
//!
//! A round of `n` proposals takes the draft's time and a pass of the target over `n + 1` rows, and brings
//! `tau(n) = 1 + α + α² + … + αⁿ` tokens if every proposal holds with the chance α:
//!
//! ```text
//! speed-up = max over n of  tau(n) · step / (draft(n) + pass(n + 1)),  and 1 where no n is better,
//! ```
//!
//! for the pace leaves out rounds that do not pay. Its tau is that of the best n, and 1 where none pays: the proof counts
//! the tokens of plain passes, too. The tau of a full chain is that of the most proposals, every round. Step, passes and
//! draft are measured here, on this target and with this program. α is not known before the training. It is read off the curve
//!
//! ```text
//! α(t) = A · t / (t + T)
//! ```
//!
//! of the tokens `t` that training learns from. `A` is each method's own, the least squares over its
//! [`Evidence`]; `T` is one for all, the least squares over the methods with several points (a test holds
//! both to that). The six points of these lie within 0.04 of their curves in α, but for one within 0.06.
//!
//! All of that evidence is of one target, SmolLM2-135M, of prompts like those of the training, and of one seed a
//! draft. So every expectation is a range:
//! - the middle is [`UNLIKE`] of α: prompts that are set aside share no subject with those of the training. A fit of
//!   1.2 M tokens had tau 1.48 at chains of 5 on these, where the curve says 1.80, which is 0.73 of its α; one of 0.6 M
//!   tokens for Qwen2.5-Coder-0.5B had 1.29, which is 0.61. Both had prompts of few subjects. Two with prompts of many
//!   subjects had 1.74 after 2.4 M tokens, which is 0.88, and 1.29 after 0.37 M, which is 0.69;
//! - the lower end is half of α: drafts had 1.69 on prompts like those of their training and 1.33 on
//!   others of all kinds, which is half of what they gain;
//! - the upper end is 1.25 times α within what was measured, 1.5 times beyond it: larger targets are easier to
//!   guess for their size, as published drafts show, but none was measured here.
//!
//! Lookup beside a draft: what both gain adds up, what one of them loses counts against it. So it was where all three were
//! measured on the same prompts (times as fast as plain decoding, at measured pace):
//!
//! ```text
//! draft  lookup  both   draft + lookup - 1
//! 1.29   1.14    1.43   1.43   docs/results/fit.md, 2 hours
//! 1.05   1.18    1.32   1.23   the same, 21 minutes
//! 1.05   1.17    1.22   1.22   the same, 35 minutes
//! 0.93   1.20    1.13   1.13   the same, SmolLM2-135M
//! 1.20   1.42    1.79   1.62   the draft of 2 hours on HumanEval
//! 1.64   1.35    1.91   1.99   docs/results/draft-quality.md, prompts like those of the training
//! 1.19   1.56    1.70   1.75   the same draft on Spec-Bench
//! ```
//!
//! The least squares over all seven are 1.00 times the sum of the gains. The product of both is as near on the four fits,
//! and too much by 16 and 9 % on the last two.

use longdraft_train::method::Evidence;
use serde::{Deserialize, Serialize};

use super::measure::Machine;

/// `T`: tokens of training after which a draft has half of its last chance.
const HALF: f64 = 2.5e5;
/// Share of α at the lower end of a range; times α at the upper end, within the evidence and beyond it.
const LOW: f64 = 0.5;
const UNLIKE: f64 = 0.7;
const HIGH: (f64, f64) = (1.25, 1.5);
/// The largest chance of a proposal that is expected.
pub(super) const MOST_LIKELY: f64 = 0.92;

/// A value with the ends of its range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Range {
    pub(super) low: f64,
    pub(super) middle: f64,
    pub(super) high: f64,
}

impl Range {
    pub(super) fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { low: f(self.low), middle: f(self.middle), high: f(self.high) }
    }
}

/// What rounds cost here.
pub(super) struct Costs<'a> {
    pub(super) machine: &'a Machine,
    /// Seconds of the draft for so many proposals.
    pub(super) draft: &'a dyn Fn(usize) -> f64,
    /// Proposals at most.
    pub(super) most: usize,
    /// Times that a pass takes in rounds what it takes alone: it comes after a draft's passes, which have taken
    /// the caches, and after longer texts.
    pub(super) surcharge: f64,
}

impl Costs<'_> {
    /// Times as fast as plain decoding, in rounds of `n` proposals that bring so many tokens.
    pub(super) fn speed_up(&self, n: usize, tokens: f64) -> f64 {
        tokens * self.machine.step() / ((self.draft)(n) + self.surcharge * self.machine.pass(n + 1))
    }

    /// The length of the fastest chains and their speed-up, if every round drafts; `tokens` are those of a
    /// round of so many proposals.
    pub(super) fn fastest(&self, tokens: impl Fn(usize) -> f64) -> (usize, f64) {
        let all = (1..=self.most.max(1)).map(|n| (n, self.speed_up(n, tokens(n))));
        all.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((1, 0.0))
    }

    /// Tau and speed-up at a pace that leaves out what does not pay.
    pub(super) fn paced(&self, chance: f64) -> (f64, f64) {
        let (n, speed_up) = self.fastest(|n| tau(chance, n));
        if speed_up > 1.0 { (tau(chance, n), speed_up) } else { (1.0, 1.0) }
    }
}

/// `1 + α + … + αⁿ`
pub(super) fn tau(chance: f64, n: usize) -> f64 {
    (0..=n).map(|i| chance.powi(i as i32)).sum()
}

/// The chance α that gives a tau at chains of `n`.
fn chance_of(evidence: &Evidence) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if tau(middle, evidence.draft_len) < evidence.tau { low = middle } else { high = middle }
    }
    low
}

/// Share of a draft's last chance after so many tokens.
fn share(tokens: f64, half: f64) -> f64 {
    tokens.max(0.0) / (tokens.max(0.0) + half)
}

/// `A`: the last chance of drafts like these.
fn last(evidence: &[Evidence], half: f64) -> f64 {
    let sum = |f: &dyn Fn(&Evidence) -> f64| evidence.iter().map(f).sum::<f64>();
    let of = |point: &Evidence| share(point.tokens, half);
    sum(&|point| of(point) * chance_of(point)) / sum(&|point| of(point).powi(2))
}

/// The chance of a proposal after training on so many tokens. `None` where nothing was measured.
pub(super) fn chance(evidence: &[Evidence], tokens: f64) -> Option<Range> {
    let most = evidence.iter().map(|point| point.tokens).reduce(f64::max)?;
    let alike = last(evidence, HALF) * share(tokens, HALF);
    let upper = if tokens <= most { HIGH.0 } else { HIGH.1 };
    let [low, middle, high] = [LOW, UNLIKE, upper].map(|part| (part * alike).min(MOST_LIKELY));
    Some(Range { low, middle, high })
}

/// The speed-up of a draft with lookup beside it, of that of each alone.
pub(super) fn together(draft: f64, lookup: f64) -> f64 {
    draft + lookup - 1.0
}

#[cfg(test)]
mod tests {
    use longdraft_train::method::Method;

    use super::super::rules::recipes_of_all_methods;
    use super::*;

    /// Squares of what points are away from the curves of their methods.
    fn squares(methods: &[&[Evidence]], half: f64) -> f64 {
        let of = |points: &&[Evidence]| -> f64 {
            let last = last(points, half);
            let away = |point: &Evidence| chance_of(point) - last * share(point.tokens, half);
            points.iter().map(|point| away(point).powi(2)).sum()
        };
        methods.iter().map(of).sum()
    }

    #[test]
    fn the_curve_is_the_least_squares_fit_to_the_stated_points() {
        let recipes = recipes_of_all_methods();
        let all: Vec<&[Evidence]> = recipes.iter().map(|recipe| recipe.evidence).collect();
        let several: Vec<&[Evidence]> = all.iter().copied().filter(|all| all.len() > 1).collect();
        assert!(several.len() >= 2 && Method::all().count() == all.len());
        let least = squares(&several, HALF);
        for factor in [0.6, 0.8, 0.9, 1.1, 1.25, 1.7] {
            assert!(squares(&several, HALF * factor) > least * 0.98, "{factor} fits better");
        }
        for points in all {
            for point in points {
                let found = chance(points, point.tokens).expect("measured");
                let alike = found.middle / UNLIKE;
                assert!((alike - chance_of(point)).abs() < 0.07, "{point:?}: {found:?}");
                assert!(found.low < chance_of(point) && found.high > chance_of(point), "{point:?}");
            }
        }
    }

    #[test]
    fn chances_rise_with_the_tokens_and_end() {
        let evidence = [Evidence { tokens: 6e5, draft_len: 5, tau: 1.7 }];
        let at = |tokens| chance(&evidence, tokens).expect("measured").middle;
        assert!((tau(at(6e5) / UNLIKE, 5) - 1.7).abs() < 1e-6);
        assert!(at(0.0) == 0.0 && at(1e4) < at(1e5) && at(1e5) < at(3e5) && at(3e5) < at(1e6));
        assert!(at(1e12) - at(1e9) < 1e-3);
        let (within, beyond) = (chance(&evidence, 5e5), chance(&evidence, 7e5));
        assert!(beyond.expect("far").high > 1.15 * within.expect("near").high);
        assert_eq!(chance(&[], 1e6), None);
    }

    #[test]
    fn the_formula_is_that_of_measured_rounds() {
        // docs/results/draft-quality.md: tau 1.40 at chains of 5; a plain step of 4.5 ms, a pass over six of 10.8, speed-up 0.52.
        let passes = vec![(1, 4.5e-3), (6, 10.8e-3)];
        let machine = Machine { passes, ..Machine::default() };
        let costs = Costs { machine: &machine, draft: &|_| 1.3e-3, most: 5, surcharge: 1.0 };
        assert!((costs.speed_up(5, 1.40) - 0.52).abs() < 0.005);
        // A pace leaves such rounds out, and shorter chains are better.
        assert_eq!(costs.paced(0.1), (1.0, 1.0));
        assert!(costs.fastest(|n| tau(0.29, n)).0 < 3);
        assert_eq!(costs.fastest(|n| 1.0 + n as f64).0, 5);
    }

    #[test]
    fn the_tau_of_a_pace_is_that_of_its_best_chains() {
        let passes = vec![(1, 10.0), (6, 15.0)];
        let machine = Machine { passes, ..Machine::default() };
        let costs = Costs { machine: &machine, draft: &|n| n as f64, most: 5, surcharge: 1.0 };
        for chance in [0.3, 0.5, 0.9] {
            let (best, speed_up) = costs.fastest(|n| tau(chance, n));
            assert_eq!(costs.paced(chance), (tau(chance, best), speed_up), "{chance}");
        }
        // Likely proposals pay in longer chains.
        assert!(costs.paced(0.3).0 < tau(0.3, 5) && costs.paced(0.9).0 > tau(0.9, 3));
    }

    /// Speed-ups of drafts, of lookup, and of both, as the module states them.
    const TOGETHER: [(f64, f64, f64); 7] = [
        (1.29, 1.14, 1.43),
        (1.05, 1.18, 1.32),
        (1.05, 1.17, 1.22),
        (0.93, 1.20, 1.13),
        (1.20, 1.42, 1.79),
        (1.64, 1.35, 1.91),
        (1.19, 1.56, 1.70),
    ];

    #[test]
    fn what_a_draft_and_lookup_gain_adds_up() {
        let squares = |of: &dyn Fn(f64, f64) -> f64, measured: &[(f64, f64, f64)]| -> f64 {
            measured.iter().map(|(draft, lookup, both)| (of(*draft, *lookup) - both).powi(2)).sum()
        };
        // No share of the gains and no product is nearer to all, and the fits alone lie within 0.1.
        let least = squares(&together, &TOGETHER);
        for share in [0.8, 0.92, 1.1, 1.2] {
            let of = |draft: f64, lookup: f64| 1.0 + share * (draft + lookup - 2.0);
            assert!(squares(&of, &TOGETHER) > least, "{share} fits better");
        }
        assert!(squares(&|draft, lookup| draft * lookup, &TOGETHER) > 2.0 * least);
        assert!(squares(&together, &TOGETHER[..4]) < 0.01);
        // Where lookup loses, both do.
        assert!((together(1.2, 0.9) - 1.1).abs() < 1e-9);
    }
}
