//! Speculative against plain decoding on a set of prompts: same engine, weights and limits, run in
//! turns. Tokens are counted by the same counter on both sides, cut at the stop.

mod figures;

use std::ops::ControlFlow;

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Tap, Taps, Target};
use serde::{Deserialize, Serialize};

use crate::acceptance::AcceptanceMetrics;
use crate::decoder::{DecodeOptions, Generation, SpeculativeDecoder};
use crate::drafter::Drafter;
use crate::error::Result;

pub use figures::{Comparison, Divergence, PromptFigures, Side, wilson_interval};

/// Tokens of the request that warms both sides up and is not counted.
const WARM_UP_TOKENS: usize = 8;

/// A prompt with the group it is reported in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Group.
    pub category: String,
    /// Tokens.
    pub tokens: Vec<TargetTokenId>,
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

#[cfg(test)]
mod tests {
    use super::figures::tests::figures;
    use super::*;

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
}
