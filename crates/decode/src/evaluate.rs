//! Speculative against plain decoding on a set of prompts: same engine, weights and limits, run in
//! turns. Tokens are counted by the same counter on both sides, cut at the stop.

use std::ops::ControlFlow;

use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Tap, Taps, Target};
use serde::{Deserialize, Serialize};

use crate::acceptance::AcceptanceMetrics;
use crate::decoder::{Committed, DecodeOptions, Generation, SpeculativeDecoder};
use crate::drafter::Drafter;
use crate::error::Result;

/// Tokens of the request that warms both sides up and is not counted.
const WARM_UP_TOKENS: usize = 8;
/// Resamples of an interval.
const RESAMPLES: usize = 10_000;

/// A prompt with the group it is reported in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Group.
    pub category: String,
    /// Tokens.
    pub tokens: Vec<TargetTokenId>,
}

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

    fn add(&mut self, generation: &Generation) {
        self.tokens += generation.tokens.len();
        self.requests += 1;
        self.prefill_seconds += generation.prefill_seconds;
        self.decode_seconds += generation.decode_seconds;
    }

    /// All of some sides.
    pub fn pooled<'a>(sides: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut pooled = Self::default();
        sides.into_iter().for_each(|side| pooled.merge(side));
        pooled
    }

    fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.requests += other.requests;
        self.prefill_seconds += other.prefill_seconds;
        self.decode_seconds += other.decode_seconds;
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
    #[serde(default)]
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

    /// Whether every output that had to be equal was.
    pub fn lossless(&self) -> bool {
        let (checked, equal) = self.equal();
        checked == equal
    }

    /// The parts by a key of the prompts, in the key's order.
    pub fn groups<K: Ord>(&self, key: impl Fn(&PromptFigures) -> K) -> Vec<(K, Self)> {
        let mut groups = std::collections::BTreeMap::new();
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

/// How often what is measured.
pub struct Schedule<'a> {
    /// Runs over all prompts.
    pub runs: usize,
    /// Options of every request; the prompt's number and the run's are its key.
    pub options: &'a DecodeOptions,
    /// Whether outputs have to be equal token for token.
    pub must_be_equal: bool,
}

/// How far a comparison has come.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The figures so far.
    pub comparison: Comparison,
    /// Whole runs.
    pub runs: usize,
    /// Prompts of the run under way.
    pub prompts: usize,
    /// The run under way: plain decoding, and with the draft.
    sides: [Side; 2],
}

/// Decodes every prompt plainly and with `drafter`, in turns and in alternating order, from where
/// `progress` stands (the default: all), and hears of it after each; `false` ends it early. Without a
/// drafter both sides decode plainly: what they differ by is the error of the measurement.
///
/// # Errors
/// - a prompt does not fit, or a model cannot run
pub fn compare(
    target: &Target,
    drafter: Option<Box<dyn Drafter + '_>>,
    prompts: &[Prompt],
    schedule: &Schedule<'_>,
    mut progress: Progress,
    on_prompt: &mut dyn FnMut(&Progress) -> bool,
) -> Result<Comparison> {
    let mut plain = SpeculativeDecoder::new(target, None);
    let mut drafted = SpeculativeDecoder::new(target, drafter);
    let all = &mut |_| ControlFlow::Continue(());
    if let Some(first) = prompts.first() {
        let limit = schedule.options.max_new_tokens.min(WARM_UP_TOKENS);
        let short = DecodeOptions { max_new_tokens: limit, ..schedule.options.clone() };
        plain.generate(&first.tokens, &short, all)?;
        drafted.generate(&first.tokens, &short, all)?;
    }
    for run in progress.runs..schedule.runs {
        for (index, prompt) in prompts.iter().enumerate().skip(progress.prompts) {
            let request = vec![index as u64, run as u64];
            let options = DecodeOptions { request, ..schedule.options.clone() };
            let plain_first = (index + run).is_multiple_of(2);
            let early = if plain_first {
                Some(plain.generate(&prompt.tokens, &options, all)?)
            } else {
                None
            };
            let mut answer = Vec::new();
            let with = drafted.generate(&prompt.tokens, &options, &mut |committed| {
                answer.push(committed);
                ControlFlow::Continue(())
            })?;
            if (run, index) == (0, 0) {
                progress.comparison.first_answer = answer;
            }
            let without = match early {
                Some(early) => early,
                None => plain.generate(&prompt.tokens, &options, all)?,
            };
            progress.add(index, prompt, (&without, &with), schedule.must_be_equal);
            let figures = &mut progress.comparison.prompts[index];
            if figures.equal == Some(false) && figures.divergence.is_none() {
                figures.divergence = divergence(target, &prompt.tokens, &without, &with)?;
            }
            if !on_prompt(&progress) {
                return Ok(progress.comparison);
            }
        }
        progress.end_run();
    }
    Ok(progress.comparison)
}

impl Progress {
    /// Whether it is one over so many prompts: what was read from a file may be anything.
    pub fn fits(&self, prompts: usize) -> bool {
        let known = if self.runs == 0 { self.prompts } else { prompts };
        self.comparison.prompts.len() == known && self.prompts <= prompts
    }

    /// Adds a prompt of the run under way, decoded plainly and with the draft.
    fn add(
        &mut self,
        index: usize,
        prompt: &Prompt,
        (without, with): (&Generation, &Generation),
        must_be_equal: bool,
    ) {
        let [plain, drafted] = &mut self.sides;
        plain.add(without);
        drafted.add(with);
        let known = &mut self.comparison.prompts;
        if index == known.len() {
            known.push(PromptFigures {
                category: prompt.category.clone(),
                prompt_tokens: prompt.tokens.len(),
                plain: Side::default(),
                drafted: Side::default(),
                acceptance: AcceptanceMetrics::default(),
                equal: must_be_equal.then_some(true),
                divergence: None,
            });
        }
        let figures = &mut known[index];
        figures.plain.add(without);
        figures.drafted.add(with);
        figures.acceptance.merge(&with.metrics);
        if must_be_equal && with.tokens != without.tokens {
            figures.equal = Some(false);
        }
        self.prompts = index + 1;
    }

    fn end_run(&mut self) {
        let [plain, drafted] = std::mem::take(&mut self.sides);
        let plain = plain.decode_tokens_per_second().max(1e-9);
        self.comparison.speed_up_of_runs.push(drafted.decode_tokens_per_second() / plain);
        self.runs += 1;
        self.prompts = 0;
    }
}

/// The first place where two outputs differ, judged by the target in one plain pass.
fn divergence(
    target: &Target,
    prompt: &[TargetTokenId],
    plain: &Generation,
    drafted: &Generation,
) -> Result<Option<Divergence>> {
    let pairs = plain.tokens.iter().zip(&drafted.tokens);
    let Some(position) = pairs.clone().position(|(a, b)| a != b) else { return Ok(None) };
    let text = prompt.iter().chain(&plain.tokens[..position]);
    let ids: Vec<u32> = text.map(|token| token.0).collect();
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.extend(&ids, &positions, &mut target.new_cache()?, &taps)?;
    let last = features.final_hidden()?.narrow(0, ids.len() - 1, 1)?;
    let logits = target.hold_ends()?.logits(&last)?.flatten_all()?.to_vec1::<f32>()?;
    let logit = |token: TargetTokenId| f64::from(logits[token.0 as usize]);
    let regret = logit(plain.tokens[position]) - logit(drafted.tokens[position]);
    Ok(Some(Divergence { position, regret }))
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
mod tests {
    use super::*;

    fn figures(category: &str, plain: f64, drafted: f64) -> PromptFigures {
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
        assert_eq!((comparison.equal(), comparison.lossless()), ((2, 1), false));
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
    fn progress_that_does_not_add_up_does_not_fit() {
        let prompts = vec![figures("a", 2.0, 1.0), figures("b", 6.0, 1.0)];
        let of = |runs, prompts: &[PromptFigures], done| {
            let comparison = Comparison { prompts: prompts.to_vec(), ..Default::default() };
            Progress { comparison, runs, prompts: done, sides: [Side::default(); 2] }
        };
        assert!(Progress::default().fits(2) && of(0, &prompts[..1], 1).fits(2));
        assert!(of(1, &prompts, 0).fits(2) && of(1, &prompts, 2).fits(2));
        assert!(!of(0, &prompts[..1], 2).fits(2) && !of(0, &prompts, 1).fits(2));
        assert!(!of(1, &prompts[..1], 1).fits(2) && !of(1, &prompts, 3).fits(2));
    }

    #[test]
    fn wilson_intervals_stay_within_shares() {
        let (low, high) = wilson_interval(8, 10);
        assert!((low - 0.4902).abs() < 1e-3 && (high - 0.9433).abs() < 1e-3, "{low} {high}");
        assert_eq!(wilson_interval(0, 0), (0.0, 1.0));
        assert!(wilson_interval(0, 5).0 == 0.0 && wilson_interval(5, 5).1 > 0.999);
    }
}
