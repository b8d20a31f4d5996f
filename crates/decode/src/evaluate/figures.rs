//! Figures of a comparison with plain decoding, and their intervals.

use std::collections::BTreeMap;

use longdraft_kernels::random::CounterRng;
use serde::{Deserialize, Serialize};

use crate::acceptance::AcceptanceMetrics;
use crate::decoder::{Committed, Generation};

/// Resamples of an interval.
const RESAMPLES: usize = 10_000;

/// Tokens and time of one side, summed over runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Side {
    /// Tokens, the first one of each request included.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Seconds until the first tokens.
    pub prefill_seconds: f64,
    /// Seconds after them.
    pub decode_seconds: f64,
}

impl Side {
    /// Tokens after the first, per second after the first.
    pub fn decode_tokens_per_second(&self) -> f64 {
        self.tokens.saturating_sub(self.requests) as f64 / self.decode_seconds.max(1e-9)
    }

    /// All tokens per second, prefill included.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / (self.prefill_seconds + self.decode_seconds).max(1e-9)
    }

    pub(super) fn add(&mut self, generation: &Generation) {
        self.tokens += generation.tokens.len();
        self.requests += 1;
        self.prefill_seconds += generation.prefill_seconds;
        self.decode_seconds += generation.decode_seconds;
    }

    /// All of some sides.
    pub fn pooled<'a>(sides: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut pooled = Self::default();
        for side in sides {
            pooled.tokens += side.tokens;
            pooled.requests += side.requests;
            pooled.prefill_seconds += side.prefill_seconds;
            pooled.decode_seconds += side.decode_seconds;
        }
        pooled
    }
}

/// Where two greedy outputs part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Index among the generated tokens.
    pub position: usize,
    /// Log-probability that the target gives to plain decoding's token less that of the other, in
    /// nats: what following the other token costs.
    pub regret: f64,
}

/// One prompt, decoded both ways in every run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptFigures {
    /// Group.
    pub category: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Plain decoding.
    pub plain: Side,
    /// With the draft.
    pub drafted: Side,
    /// Acceptance.
    pub acceptance: AcceptanceMetrics,
    /// Whether the outputs were equal in every run; none if they need not be (draws differ).
    pub equal: Option<bool>,
    /// Where they first part, if they have to be equal and are not.
    pub divergence: Option<Divergence>,
}

/// All prompts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// In the order given.
    pub prompts: Vec<PromptFigures>,
    /// Pooled speed-up of each run.
    pub speed_up_of_runs: Vec<f64>,
    /// The first prompt's answer of the first run, as it was committed with the draft.
    pub first_answer: Vec<Committed>,
}

impl Comparison {
    /// Acceptance pooled over prompts.
    pub fn acceptance(&self) -> AcceptanceMetrics {
        let mut pooled = AcceptanceMetrics::default();
        self.prompts.iter().for_each(|prompt| pooled.merge(&prompt.acceptance));
        pooled
    }

    /// Plain decoding, pooled.
    pub fn plain(&self) -> Side {
        Side::pooled(self.prompts.iter().map(|prompt| &prompt.plain))
    }

    /// Decoding with the draft, pooled.
    pub fn drafted(&self) -> Side {
        Side::pooled(self.prompts.iter().map(|prompt| &prompt.drafted))
    }

    /// Ratio of the pooled decoding speeds.
    pub fn speed_up(&self) -> f64 {
        speed_up(self.prompts.iter())
    }

    /// Mean over prompts of each one's own tau, which several tools report. An answer that ends at its first token
    /// has none.
    pub fn acceptance_length_per_prompt(&self) -> f64 {
        let each = self.prompts.iter().map(|prompt| &prompt.acceptance);
        let each: Vec<&AcceptanceMetrics> = each.filter(|metrics| metrics.rounds > 0).collect();
        let sum: f64 = each.iter().map(|metrics| metrics.acceptance_length()).sum();
        sum / each.len().max(1) as f64
    }

    /// 95 % interval of the speed-up: paired bootstrap over prompts, percentiles of 10,000. Prompts take part that
    /// both sides answered with more than a first token: others have no speed.
    pub fn speed_up_interval(&self) -> (f64, f64) {
        let has_speed = |side: &Side| side.tokens > side.requests;
        let counts =
            |prompt: &PromptFigures| has_speed(&prompt.plain) && has_speed(&prompt.drafted);
        self.interval("speed-up", counts, |prompts| speed_up(prompts.iter().copied()))
    }

    /// 95 % interval of tau, likewise over prompts with rounds.
    pub fn acceptance_length_interval(&self) -> (f64, f64) {
        let counts = |prompt: &PromptFigures| prompt.acceptance.rounds > 0;
        self.interval("tau", counts, |prompts| {
            let sum = |of: fn(&AcceptanceMetrics) -> usize| -> usize {
                prompts.iter().map(|prompt| of(&prompt.acceptance)).sum()
            };
            sum(|m| m.committed) as f64 / sum(|m| m.rounds).max(1) as f64
        })
    }

    fn interval(
        &self,
        of: &str,
        counts: impl Fn(&PromptFigures) -> bool,
        figure: impl Fn(&[&PromptFigures]) -> f64,
    ) -> (f64, f64) {
        let known: Vec<&PromptFigures> =
            self.prompts.iter().filter(|prompt| counts(prompt)).collect();
        let count = known.len();
        if count == 0 {
            return (0.0, 0.0);
        }
        let mut rng = CounterRng::new(0, of, &[count as u64]);
        let mut figures: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let draw = |_| known[rng.below(count as u64) as usize];
                figure(&(0..count).map(draw).collect::<Vec<_>>())
            })
            .collect();
        figures.sort_by(f64::total_cmp);
        let at = |share: f64| figures[(share * (RESAMPLES - 1) as f64).round() as usize];
        (at(0.025), at(0.975))
    }

    /// Prompts whose outputs had to be equal, and those that were.
    pub fn equal(&self) -> (usize, usize) {
        let checked = self.prompts.iter().filter_map(|prompt| prompt.equal);
        checked.fold((0, 0), |(all, equal), ok| (all + 1, equal + usize::from(ok)))
    }

    /// The parts by a key of the prompts, in the key's order.
    pub fn groups<K: Ord>(&self, key: impl Fn(&PromptFigures) -> K) -> Vec<(K, Self)> {
        let mut groups = BTreeMap::new();
        for prompt in &self.prompts {
            let group: &mut Self = groups.entry(key(prompt)).or_default();
            group.prompts.push(prompt.clone());
        }
        groups.into_iter().collect()
    }
}

fn speed_up<'a>(prompts: impl Iterator<Item = &'a PromptFigures> + Clone) -> f64 {
    let plain = Side::pooled(prompts.clone().map(|prompt| &prompt.plain));
    let drafted = Side::pooled(prompts.map(|prompt| &prompt.drafted));
    drafted.decode_tokens_per_second() / plain.decode_tokens_per_second().max(1e-9)
}

/// 95 % interval of a share (Wilson 1927).
pub fn wilson_interval(hits: usize, trials: usize) -> (f64, f64) {
    if trials == 0 {
        return (0.0, 1.0);
    }
    let (n, z) = (trials as f64, 1.959_964);
    let share = hits as f64 / n;
    let centre = share + z * z / (2.0 * n);
    let half = z * (share * (1.0 - share) / n + z * z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z * z / n;
    (((centre - half) / scale).max(0.0), ((centre + half) / scale).min(1.0))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn figures(category: &str, plain: f64, drafted: f64) -> PromptFigures {
        let side =
            |decode_seconds| Side { tokens: 11, requests: 1, prefill_seconds: 1.0, decode_seconds };
        PromptFigures {
            category: category.into(),
            prompt_tokens: 3,
            plain: side(plain),
            drafted: side(drafted),
            acceptance: AcceptanceMetrics { rounds: 5, committed: 10, ..Default::default() },
            equal: Some(plain < 5.0),
            divergence: None,
        }
    }

    #[test]
    fn speeds_are_pooled_and_the_interval_holds_them() {
        let prompts = vec![figures("a", 2.0, 1.0), figures("b", 6.0, 1.0)];
        let comparison = Comparison { prompts, speed_up_of_runs: vec![4.0], ..Default::default() };
        assert!((comparison.speed_up() - 4.0).abs() < 1e-9);
        assert_eq!(comparison.speed_up_interval(), (2.0, 6.0));
        assert!((comparison.plain().decode_tokens_per_second() - 2.5).abs() < 1e-9);
        assert!((comparison.plain().tokens_per_second() - 2.2).abs() < 1e-9);
        assert_eq!(comparison.equal(), (2, 1));
        let groups = comparison.groups(|prompt| prompt.category.clone());
        assert!((groups[1].1.speed_up() - 6.0).abs() < 1e-9);
        assert!((comparison.acceptance_length_per_prompt() - 2.0).abs() < 1e-12);
    }

    #[test]
    fn an_answer_that_ends_at_its_first_token_widens_no_interval() {
        let side =
            |decode_seconds| Side { tokens: 1, requests: 1, prefill_seconds: 1.0, decode_seconds };
        let short = PromptFigures {
            plain: side(0.0),
            drafted: side(0.0),
            acceptance: AcceptanceMetrics::default(),
            ..figures("a", 2.0, 1.0)
        };
        let of = |prompts| Comparison { prompts, ..Default::default() };
        let comparison = of(vec![figures("a", 2.0, 1.0), short.clone()]);
        assert_eq!(comparison.acceptance_length_interval(), (2.0, 2.0));
        assert_eq!(comparison.speed_up_interval(), (2.0, 2.0));
        assert!((comparison.acceptance_length_per_prompt() - 2.0).abs() < 1e-12);
        let nothing = of(vec![short]);
        assert_eq!(nothing.acceptance_length_interval(), (0.0, 0.0));
        assert_eq!(nothing.speed_up_interval(), (0.0, 0.0));
        assert!(nothing.acceptance_length_per_prompt().abs() < 1e-12);
    }

    #[test]
    fn wilson_intervals_stay_within_shares() {
        let (low, high) = wilson_interval(8, 10);
        assert!((low - 0.4902).abs() < 1e-3 && (high - 0.9433).abs() < 1e-3, "{low} {high}");
        assert_eq!(wilson_interval(0, 0), (0.0, 1.0));
        assert!(wilson_interval(0, 5).0 == 0.0 && wilson_interval(5, 5).1 > 0.999);
    }
}
