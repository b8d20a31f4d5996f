//! What prompt lookup alone brings here.
//!
//! It is measured as the proof measures it, so that both say the same quantity: the prompts that were set aside in their
//! order, each answered plainly and with lookup, at the temperature of the fit. Lookup finds what a text repeats, and
//! the beginning of an answer repeats little. So answers are as long as those of the proof: three answers of 32 tokens
//! said 1.05 where 32 answers of 128 tokens gave 1.14 (`docs/results/fit.md`). It goes on until its time is used, or its
//! interval is narrow.

use std::time::Instant;

use longdraft_decode::evaluate::{Comparison, Progress, Prompt, Schedule, compare};

use super::expect::Range;
use super::proof::NEW_TOKENS;
use super::state::Settings;
use crate::cli::{DecodingArguments, LookupChoice, PaceChoice};
use crate::decoding::Models;
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Share of a budget that it may take, and most seconds.
const SHARE: f64 = 0.02;
const MOST_SECONDS: f64 = 60.0;
/// Prompts at least, whatever they take, and tokens of an answer at least: a slow target says less.
const LEAST_PROMPTS: usize = 3;
const LEAST_TOKENS: usize = 32;
/// Prompts from which an interval is believed, and the width of a narrow one.
const ENOUGH_PROMPTS: usize = 8;
const NARROW: f64 = 0.1;

/// Seconds that it may take of a budget.
pub(super) fn seconds(budget: f64) -> f64 {
    (SHARE * budget).min(MOST_SECONDS)
}

/// The speed-up with its 95 % interval, measured in some seconds where a plain step takes `step`; `None` where no answer is
/// longer than a token.
pub(super) fn measure(
    models: &Models,
    prompts: &[Prompt],
    (seconds, step): (f64, f64),
    settings: &Settings,
    interrupts: &Interrupts,
) -> Result<Option<Range>> {
    let lookup = Some(LookupChoice::Switch);
    let decoding = DecodingArguments { lookup, ..DecodingArguments::plain() };
    let how = (settings.temperature, PaceChoice::Measured);
    let most = tokens(seconds, step).min(settings.max_tokens);
    let options = decoding.request(how, most, &models.target)?;
    let schedule = Schedule { runs: 1, options: &options, must_be_equal: false };
    let started = Instant::now();
    let goes_on = &mut |progress: &Progress| {
        let left = seconds - started.elapsed().as_secs_f64();
        !interrupts.asked() && !is_enough(&progress.comparison, left)
    };
    let drafter = decoding.drafter(models)?;
    let from = Progress::default();
    let mut found = compare(&models.target, drafter, prompts, &schedule, from, goes_on)?;
    if interrupts.asked() {
        return Err(interrupts.failure());
    }
    // Answers of one token have no pace.
    found.prompts.retain(|prompt| prompt.plain.tokens > prompt.plain.requests);
    let (low, high) = found.speed_up_interval();
    let range = Range { low, middle: found.speed_up(), high };
    Ok(Some(range).filter(|range| range.middle > 0.0))
}

/// Tokens of an answer, of which the fewest prompts can be answered in some seconds, plainly and with lookup.
pub(super) fn tokens(seconds: f64, step: f64) -> usize {
    let affordable = seconds / (2.0 * LEAST_PROMPTS as f64 * step.max(1e-9));
    (affordable as usize).clamp(LEAST_TOKENS, NEW_TOKENS)
}

/// Whether a comparison says enough, with so many seconds left for it.
fn is_enough(found: &Comparison, left: f64) -> bool {
    let prompts = found.prompts.len();
    if prompts < LEAST_PROMPTS {
        return false;
    }
    let is_narrow = || {
        let (low, high) = found.speed_up_interval();
        high - low <= NARROW
    };
    left <= 0.0 || (prompts >= ENOUGH_PROMPTS && is_narrow())
}

#[cfg(test)]
mod tests {
    use longdraft_decode::evaluate::{PromptFigures, Side};

    use super::*;

    /// Prompts that lookup answers in so many seconds where plain decoding takes one.
    fn compared(seconds: &[f64]) -> Comparison {
        let side = |decode_seconds| Side {
            tokens: 101,
            requests: 1,
            prefill_seconds: 0.0,
            decode_seconds,
        };
        let figures = |seconds: &f64| PromptFigures {
            category: "all".to_owned(),
            prompt_tokens: 10,
            plain: side(1.0),
            drafted: side(*seconds),
            acceptance: longdraft_decode::acceptance::AcceptanceMetrics::default(),
            equal: None,
            divergence: None,
        };
        Comparison { prompts: seconds.iter().map(figures).collect(), ..Comparison::default() }
    }

    #[test]
    fn it_ends_with_its_time_or_where_its_interval_is_narrow() {
        let wide: Vec<f64> = (0..20).map(|i| if i % 2 == 0 { 0.5 } else { 1.0 }).collect();
        assert!(!is_enough(&compared(&wide), 1.0) && is_enough(&compared(&wide), 0.0));
        // Eight that are alike say enough, seven do not.
        assert!(is_enough(&compared(&[0.8; 8]), 1.0) && !is_enough(&compared(&[0.8; 7]), 1.0));
        // Two say nothing, whatever they took.
        assert!(!is_enough(&compared(&[0.8; 2]), -1.0));
    }

    #[test]
    fn answers_are_as_long_as_those_of_the_proof_where_the_target_is_fast() {
        assert_eq!(tokens(seconds(7200.0), 13e-3), NEW_TOKENS);
        assert_eq!(
            (tokens(seconds(7200.0), 0.25), tokens(seconds(7200.0), 5.0)),
            (40, LEAST_TOKENS)
        );
        assert!((seconds(600.0) - 12.0).abs() < 1e-9 && seconds(1e6) <= 60.0);
    }
}
