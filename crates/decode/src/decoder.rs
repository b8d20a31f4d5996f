//! The loop: prefill, then rounds of draft, one target pass, verification.

use std::time::Instant;

use candle_core::Tensor;
use longdraft_models::TargetTokenId;
use longdraft_models::target::{KvCache, Tap, Taps, Target};

use crate::drafter::{DraftContext, Drafter};
use crate::error::{DecodeError, Result};
use crate::metrics::AcceptanceMetrics;
use crate::verifier::{GreedyVerifier, Verifier};

/// Prompt tokens that go through the target at once.
const PREFILL_TOKENS: usize = 512;

/// Limits of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Tokens proposed per round.
    pub draft_len: usize,
    /// Tokens to generate, the first one included.
    pub max_new_tokens: usize,
    /// Tokens that end the text; the one that does is committed and counted.
    pub stop_tokens: Vec<TargetTokenId>,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self { draft_len: 4, max_new_tokens: 256, stop_tokens: Vec::new() }
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// A stop token was committed.
    StopToken,
    /// `max_new_tokens` were generated.
    TokenLimit,
    /// The target's context is full.
    ContextLimit,
}

/// What a request came to.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, a stop token included.
    pub tokens: Vec<TargetTokenId>,
    /// Acceptance.
    pub metrics: AcceptanceMetrics,
    /// Why it ended.
    pub end: EndReason,
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
}

/// A target with an optional drafter.
pub struct SpeculativeDecoder<'a> {
    target: &'a Target,
    drafter: Option<Box<dyn Drafter + 'a>>,
    verifier: Box<dyn Verifier>,
    taps: Taps,
}

/// State of the request that runs.
struct Request<'r> {
    options: &'r DecodeOptions,
    tokens: Vec<TargetTokenId>,
    prompt_len: usize,
    cache: KvCache,
    end: Option<EndReason>,
}

impl Request<'_> {
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Adds a token unless the request has ended; checks stop token, budget and context in order.
    fn commit(
        &mut self,
        token: TargetTokenId,
        context: usize,
        on_token: &mut dyn FnMut(TargetTokenId),
    ) -> bool {
        if self.end.is_some() {
            return false;
        }
        self.tokens.push(token);
        on_token(token);
        if self.options.stop_tokens.contains(&token) {
            self.end = Some(EndReason::StopToken);
        } else if self.generated() >= self.options.max_new_tokens {
            self.end = Some(EndReason::TokenLimit);
        } else if self.tokens.len() >= context {
            self.end = Some(EndReason::ContextLimit);
        }
        true
    }

    /// Proposals that still fit: a round commits at most one more token than it drafts.
    fn draft_len(&self, context: usize) -> usize {
        let budget = self.options.max_new_tokens - self.generated();
        let room = context - self.tokens.len();
        self.options.draft_len.min(budget.saturating_sub(1)).min(room.saturating_sub(1))
    }
}

impl<'a> SpeculativeDecoder<'a> {
    /// Decodes with a drafter, or plainly without one.
    pub fn new(target: &'a Target, drafter: Option<Box<dyn Drafter + 'a>>) -> Self {
        let taps = Taps::of(&[Tap::FinalHidden]);
        Self { target, drafter, verifier: Box::new(GreedyVerifier), taps }
    }

    /// Accepts by `verifier` instead of greedily.
    #[must_use]
    pub fn with_verifier(mut self, verifier: Box<dyn Verifier>) -> Self {
        self.verifier = verifier;
        self
    }

    /// Generates after `prompt`; `on_token` hears of every token as it is committed.
    ///
    /// # Errors
    /// - the prompt is empty or fills the context, the draft is too long, a model cannot run
    pub fn generate(
        &mut self,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
        on_token: &mut dyn FnMut(TargetTokenId),
    ) -> Result<Generation> {
        let context = self.target.config().max_position_embeddings;
        check(prompt, context)?;
        let started = Instant::now();
        let mut request = Request {
            options,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            cache: self.target.new_cache()?,
            end: None,
        };
        let first = self.prefill(&mut request)?;
        let prefill_seconds = started.elapsed().as_secs_f64();
        request.commit(first, context, on_token);
        let started = Instant::now();
        let mut metrics = AcceptanceMetrics::default();
        let mut drafting = false;
        let end = loop {
            if let Some(end) = request.end {
                break end;
            }
            if !drafting && let Some(drafter) = &mut self.drafter {
                drafter.begin(draft_context(self.target, &request))?;
                drafting = true;
            }
            self.round(&mut request, context, &mut metrics, on_token)?;
        };
        let tokens = request.tokens.split_off(request.prompt_len);
        let decode_seconds = started.elapsed().as_secs_f64();
        Ok(Generation { tokens, metrics, end, prefill_seconds, decode_seconds })
    }

    /// Runs the prompt; the first new token is the target's most likely one.
    fn prefill(&mut self, request: &mut Request<'_>) -> Result<TargetTokenId> {
        let mut last = None;
        let prompt = request.tokens.clone();
        for chunk in prompt.chunks(PREFILL_TOKENS) {
            last = Some(self.extend(request, chunk)?);
        }
        let hidden = last.ok_or(DecodeError::EmptyPrompt)?;
        let hidden = hidden.narrow(0, hidden.dim(0)? - 1, 1)?;
        let verdict = self.verifier.verify(&[], &self.target.logits(&hidden)?)?;
        Ok(verdict.next)
    }

    /// Final hidden states of tokens appended to the cache, `[T, H]`.
    fn extend(&self, request: &mut Request<'_>, tokens: &[TargetTokenId]) -> Result<Tensor> {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        let first = request.cache.len();
        let positions: Vec<u32> = (0..ids.len()).map(|i| (first + i) as u32).collect();
        let features = self.target.extend(&ids, &positions, &mut request.cache, &self.taps)?;
        Ok(features.final_hidden()?.clone())
    }

    fn round(
        &mut self,
        request: &mut Request<'_>,
        context: usize,
        metrics: &mut AcceptanceMetrics,
        on_token: &mut dyn FnMut(TargetTokenId),
    ) -> Result<()> {
        let draft_len = request.draft_len(context);
        let root = request.tokens.len() - 1;
        let proposed = match &mut self.drafter {
            Some(drafter) => drafter.propose(draft_context(self.target, request), draft_len)?,
            None => Vec::new(),
        };
        let mut rows = vec![request.tokens[root]];
        rows.extend(&proposed);
        let hidden = self.extend(request, &rows)?;
        let verdict = self.verifier.verify(&proposed, &self.target.logits(&hidden)?)?;
        // Root and accepted tokens stay; rejected rows leave no trace.
        request.cache.truncate(root + 1 + verdict.accepted);
        let mut committed = 0;
        for token in proposed[..verdict.accepted].iter().copied().chain([verdict.next]) {
            committed += usize::from(request.commit(token, context, on_token));
        }
        metrics.add_round(proposed.len(), verdict.accepted, committed);
        if request.end.is_none()
            && let Some(drafter) = &mut self.drafter
        {
            drafter.accept(draft_context(self.target, request), &proposed[..verdict.accepted])?;
        }
        Ok(())
    }
}

fn draft_context<'c>(target: &'c Target, request: &'c Request<'_>) -> DraftContext<'c> {
    DraftContext { target, cache: &request.cache, tokens: &request.tokens }
}

fn check(prompt: &[TargetTokenId], context: usize) -> Result<()> {
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    if prompt.len() >= context {
        return Err(DecodeError::PromptTooLong { prompt: prompt.len(), context });
    }
    Ok(())
}
