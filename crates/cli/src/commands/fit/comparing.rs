//! Two drafts on the same prompts, of which the better one is kept.
//!
//! A further round goes on from the draft of an earlier one, and need not make it better: its learning rate rises again, and
//! its answers are others. So both answer the prompts that were set aside, greedily and in full chains. They are one
//! network, so that a round of either takes the same time, and tokens a pass say which one is faster. They depend on
//! no other work on the machine.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use longdraft_decode::evaluate::Prompt;
use longdraft_decode::{DecodeOptions, SpeculativeDecoder};
use longdraft_train::stage::bootstrap_interval;

use super::proof::{Way, held_out};
use super::state::Settings;
use crate::decoding::open_draft;
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Share of the proof's time that it takes, and prompts at least.
pub(super) const SHARE: f64 = 0.2;
const LEAST_PROMPTS: usize = 4;

/// Tokens and passes of an answer.
type Answer = (usize, usize);

/// What two drafts came to, the newer one first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Compared {
    pub(super) prompts: usize,
    /// Tokens a pass of each.
    pub(super) tau: [f64; 2],
    /// 95 % interval of the difference.
    pub(super) interval: (f64, f64),
}

impl Compared {
    fn of(answers: &[[Answer; 2]]) -> Self {
        let tau = |draft: usize, draws: &[usize]| {
            let of = |answer: &Answer| (answer.0 as f64, answer.1 as f64);
            let each = draws.iter().map(|at| of(&answers[*at][draft]));
            let (tokens, passes) = each.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            if passes > 0.0 { tokens / passes } else { 1.0 }
        };
        let all: Vec<usize> = (0..answers.len()).collect();
        let gain = |draws: &[usize]| tau(0, draws) - tau(1, draws);
        let interval = bootstrap_interval(answers.len(), gain);
        Self { prompts: answers.len(), tau: [tau(0, &all), tau(1, &all)], interval }
    }

    /// What the newer draft gains, in tokens a pass.
    pub(super) fn gain(&self) -> f64 {
        self.tau[0] - self.tau[1]
    }

    /// Whether the newer draft is kept. Of two that are alike it has learned more.
    pub(super) fn keeps_newer(&self) -> bool {
        self.gain() >= 0.0
    }
}

/// Answers prompts with two drafts in turns, in some seconds; the newer one is that of the first way.
pub(super) fn measure(
    folder: &Path,
    settings: &Settings,
    [newer, older]: [&Way; 2],
    seconds: f64,
    interrupts: &Interrupts,
) -> Result<Compared> {
    let models = newer.decoding.open(&settings.target)?;
    let source = older.decoding.draft_source()?;
    let draft = source.as_ref().map(|source| open_draft(source, &models.target)).transpose()?;
    let opened = (Arc::clone(&models.target), Arc::clone(&models.tokenizer));
    let others = older.decoding.with(opened, source.as_ref(), (draft, None))?;
    let prompts = held_out(folder, (&models.target, &models.tokenizer))?;
    let options = newer.options(settings, &models.target)?;
    let mut decoders = [
        SpeculativeDecoder::new(&models.target, newer.decoding.drafter(&models)?),
        SpeculativeDecoder::new(&others.target, older.decoding.drafter(&others)?),
    ];
    let (started, mut answers) = (Instant::now(), Vec::new());
    for prompt in &prompts {
        if answers.len() >= LEAST_PROMPTS && started.elapsed().as_secs_f64() >= seconds {
            break;
        }
        if interrupts.asked() {
            return Err(interrupts.failure());
        }
        let [newer, older] = &mut decoders;
        answers.push([answer(newer, prompt, &options)?, answer(older, prompt, &options)?]);
    }
    Ok(Compared::of(&answers))
}

fn answer(
    decoder: &mut SpeculativeDecoder<'_>,
    prompt: &Prompt,
    options: &DecodeOptions,
) -> Result<Answer> {
    let all = &mut |_| ControlFlow::Continue(());
    let metrics = decoder.generate(&prompt.tokens, options, all)?.metrics;
    Ok((metrics.committed, metrics.rounds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_draft_is_kept_by_the_same_prompts() {
        // Prompts differ much, and the newer draft is better on each of them.
        let of = |newer: usize, older: usize| -> Vec<[Answer; 2]> {
            (1..=20).map(|i| [(100 + newer, 50 + i), (100 + older, 50 + i)]).collect()
        };
        let better = Compared::of(&of(10, 0));
        assert!(better.keeps_newer() && better.interval.0 > 0.0, "{better:?}");
        assert!(better.interval.0 <= better.gain() && better.gain() <= better.interval.1);
        let worse = Compared::of(&of(0, 10));
        assert!(!worse.keeps_newer() && worse.interval.1 < 0.0, "{worse:?}");
        assert!((worse.gain() + better.gain()).abs() < 1e-9);
        // Of two that are alike the newer one is kept; nothing says nothing.
        assert!(Compared::of(&of(0, 0)).keeps_newer());
        assert_eq!(Compared::of(&[]), Compared { prompts: 0, tau: [1.0; 2], interval: (0.0, 0.0) });
    }
}
