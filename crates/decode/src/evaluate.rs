//! Speculative against plain decoding on a set of prompts, in the same engine, interleaved.

use std::ops::ControlFlow;

use longdraft_models::TargetTokenId;
use longdraft_models::target::Target;
use serde::Serialize;

use crate::decoder::{DecodeOptions, Generation, SpeculativeDecoder};
use crate::drafter::Drafter;
use crate::error::Result;
use crate::metrics::AcceptanceMetrics;

/// Totals over prompts; tokens are counted by the same counter on both sides.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// Prompts decoded both ways.
    pub prompts: usize,
    /// Prompts whose output was equal token for token.
    pub equal: usize,
    /// Acceptance of the speculative side.
    pub acceptance: AcceptanceMetrics,
    /// Tokens after the first one of each prompt.
    pub tokens: usize,
    /// Seconds of plain decoding after the first tokens.
    pub plain_seconds: f64,
    /// Seconds of speculative decoding after the first tokens.
    pub speculative_seconds: f64,
}

impl Comparison {
    /// Plain decoding speed, pooled.
    pub fn plain_tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.plain_seconds.max(1e-9)
    }

    /// Speculative decoding speed, pooled.
    pub fn speculative_tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.speculative_seconds.max(1e-9)
    }

    /// Ratio of the pooled speeds.
    pub fn speed_up(&self) -> f64 {
        self.plain_seconds / self.speculative_seconds.max(1e-9)
    }

    /// Whether every prompt's output was equal.
    pub fn lossless(&self) -> bool {
        self.equal == self.prompts
    }

    fn add(&mut self, plain: &Generation, speculative: &Generation) {
        self.prompts += 1;
        self.equal += usize::from(plain.tokens == speculative.tokens);
        self.acceptance.merge(&speculative.metrics);
        self.tokens += speculative.tokens.len().saturating_sub(1);
        self.plain_seconds += plain.decode_seconds;
        self.speculative_seconds += speculative.decode_seconds;
    }
}

/// Decodes every prompt plainly and with a fresh drafter, and hears of each prompt when done.
///
/// # Errors
/// - a prompt does not fit, or a model cannot run
pub fn compare<'a>(
    target: &'a Target,
    new_drafter: &dyn Fn() -> Result<Box<dyn Drafter + 'a>>,
    prompts: &[Vec<TargetTokenId>],
    options: &DecodeOptions,
    on_prompt: &mut dyn FnMut(&Comparison),
) -> Result<Comparison> {
    let mut totals = Comparison::default();
    for prompt in prompts {
        let all = &mut |_| ControlFlow::Continue(());
        let plain = SpeculativeDecoder::new(target, None).generate(prompt, options, all)?;
        let drafter = Some(new_drafter()?);
        let speculative =
            SpeculativeDecoder::new(target, drafter).generate(prompt, options, all)?;
        totals.add(&plain, &speculative);
        on_prompt(&totals);
    }
    Ok(totals)
}
