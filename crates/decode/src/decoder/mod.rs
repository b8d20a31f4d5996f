//! The loop: rounds of draft, one target pass, verification, after rounds that read the prompt. One
//! engine runs them, [`BatchEngine`]; on it stands [`SpeculativeDecoder`] for one request at a time.

mod engine;
mod proposing;
mod request;
mod round;
mod sequence;

use std::ops::ControlFlow;

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;
use serde::{Deserialize, Serialize};

use crate::acceptance::AcceptanceMetrics;
use crate::distribution::Sampling;
use crate::drafter::Drafter;
use crate::error::Result;
use crate::layout::DraftShape;
use crate::log_probs::LogProbs;
use crate::tree::Origin;
use crate::verifier::VerifyRule;

pub use engine::{BatchEngine, Ended, EngineListener, READ_ALONE};

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeOptions {
    /// Layout of a round's proposals.
    pub shape: DraftShape,
    /// Tokens to generate, the first one included.
    pub max_new_tokens: usize,
    /// Tokens that end the text; the one that does is committed and counted.
    pub stop_tokens: Vec<TargetTokenId>,
    /// Tokens that have no part in the distribution at the answer's start.
    pub late: LateTokens,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How proposals are tested at a temperature.
    pub rule: VerifyRule,
    /// Key of all random draws.
    pub seed: u64,
    /// Which text this is, the second part of the key.
    pub request: Vec<u64>,
    /// Who decides how much is drafted.
    pub pacing: Pacing,
    /// Propose nothing more where the draft's own chance that its token is kept is below this; 0 is off.
    /// Only drafts that tell one ([`Drafter::tells_confidence`]) follow it.
    pub confidence_threshold: f64,
    /// Keep what an earlier request's text and this prompt have in common, and copy what another place holds of it.
    pub reuse_prefix: bool,
    /// Tell log-probabilities: of every token, and of so many of the most likely ones beside it.
    pub log_probs: Option<usize>,
}

/// Tokens that may not come before an answer has a number of others, such as those that end it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LateTokens {
    /// Which these are.
    pub tokens: Vec<TargetTokenId>,
    /// Tokens of the answer that come before the first of them.
    pub after: usize,
}

/// Who decides how much is drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pacing {
    /// The whole layout, every round.
    #[default]
    Fixed,
    /// Measured times and acceptance: as much of the layout as pays, plain decoding if none does.
    Measured,
}

impl std::fmt::Display for Pacing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fixed => "fixed",
            Self::Measured => "measured",
        })
    }
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self {
            shape: DraftShape::Chain { length: 4 },
            max_new_tokens: 256,
            stop_tokens: Vec::new(),
            late: LateTokens::default(),
            sampling: Sampling::default(),
            rule: VerifyRule::default(),
            seed: 0,
            request: Vec::new(),
            pacing: Pacing::default(),
            confidence_threshold: 0.0,
            reuse_prefix: false,
            log_probs: None,
        }
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// A stop token was committed.
    StopToken,
    /// The listener found a stop string.
    StopString,
    /// `max_new_tokens` were generated.
    TokenLimit,
    /// The target's context is full.
    ContextLimit,
    /// The listener wants no more.
    Interrupted,
}

/// A token as it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The token.
    pub token: TargetTokenId,
    /// Who proposed it; the target's own if nobody.
    pub proposed_by: Option<Origin>,
}

/// Hears of every token as it is committed, and may end the request.
pub type Listener<'l> = dyn FnMut(Committed) -> ControlFlow<EndReason> + 'l;

/// The same of a request in an engine: with log-probabilities, if they are asked for.
pub(super) type RoundListener<'l> =
    dyn FnMut(Committed, Option<&LogProbs>) -> ControlFlow<EndReason> + 'l;

/// What a request came to.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, a stop token included.
    pub tokens: Vec<TargetTokenId>,
    /// Acceptance.
    pub metrics: AcceptanceMetrics,
    /// Why it ended.
    pub end: EndReason,
    /// Tokens of the prompt that were not read, because the request before or another one had them in common.
    pub reused_tokens: usize,
    /// Seconds until the first token was there.
    pub prefill_seconds: f64,
    /// Seconds after it.
    pub decode_seconds: f64,
}

impl Generation {
    /// Tokens after the first one, per second of decoding.
    pub fn decode_tokens_per_second(&self) -> f64 {
        (self.tokens.len().saturating_sub(1)) as f64 / self.decode_seconds.max(1e-9)
    }

    /// All tokens per second from the start, prefill included.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens.len() as f64 / (self.prefill_seconds + self.decode_seconds).max(1e-9)
    }
}

/// A target with an optional drafter; keeps its cache and measurements from request to request.
pub struct SpeculativeDecoder<'a> {
    engine: BatchEngine<'a>,
}

impl<'a> SpeculativeDecoder<'a> {
    /// Decodes with a drafter, or plainly without one.
    pub fn new(target: &'a Target, drafter: Option<Box<dyn Drafter + 'a>>) -> Self {
        Self { engine: BatchEngine::new(target, vec![drafter]) }
    }

    /// Generates after `prompt`.
    ///
    /// # Errors
    /// - the prompt is empty or fills the context, options make no sense, a model cannot run
    pub fn generate(
        &mut self,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
        listener: &mut Listener<'_>,
    ) -> Result<Generation> {
        self.generate_while(&|| true, prompt, options, listener)
    }

    /// The same, as long as `goes_on` says so before every round, also while the prompt is read. After that the answer
    /// is an interrupted one, and what was read is kept.
    ///
    /// # Errors
    /// - as [`Self::generate`]
    pub fn generate_while(
        &mut self,
        goes_on: &dyn Fn() -> bool,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
        listener: &mut Listener<'_>,
    ) -> Result<Generation> {
        self.engine.join(0, prompt, options)?;
        loop {
            if !goes_on()
                && let Some(generation) = self.engine.leave(0)
            {
                return Ok(generation);
            }
            let ended = self.engine.round(&mut |_, committed, _| listener(committed))?;
            if let Some((_, generation)) = ended.into_iter().next() {
                return generation;
            }
        }
    }
}
