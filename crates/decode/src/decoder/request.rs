//! State of a request that runs.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use longdraft_models::target_model::{KvCache, Target};
use longdraft_models::{TargetConfig, TargetTokenId};

use super::{Committed, DecodeOptions, EndReason, LateTokens, RoundListener};
use crate::acceptance::AcceptanceMetrics;
use crate::distribution::{Counts, Sampling};
use crate::draws::CounterDraws;
use crate::error::{DecodeError, Result};
use crate::grammar::{Grammar, SoFar, fitting};
use crate::log_probs::LogProbs;
use crate::tree::Tree;
use crate::verifier::{Verdict, Verifier, VerifyRule};

pub(super) struct Request {
    pub(super) options: DecodeOptions,
    verifier: Verifier,
    /// How drafts choose, where nothing depends on the answer so far.
    pub(super) sampling: Arc<Sampling>,
    pub(super) draws: CounterDraws,
    /// What the answer follows, after its tokens so far.
    grammar: Option<Box<dyn Grammar>>,
    pub(super) tokens: Vec<TargetTokenId>,
    pub(super) prompt_len: usize,
    /// How often the answer has each of its tokens, where penalties ask for it.
    pub(super) counts: Counts,
    pub(super) cache: KvCache,
    /// Tokens of the prompt that were not read: the cache holds them from the start.
    pub(super) reused_tokens: usize,
    context: usize,
    pub(super) metrics: AcceptanceMetrics,
    end: Option<EndReason>,
    started: Instant,
    /// When the first token was there, and the last one.
    times: Option<(Instant, Instant)>,
}

impl Request {
    /// # Errors
    /// - the target cannot read the prompt, or options make no sense
    pub(super) fn check(
        target: &Target,
        prompt: &[TargetTokenId],
        options: &DecodeOptions,
    ) -> Result<()> {
        options.sampling.check()?;
        options.shape.check()?;
        let threshold = options.confidence_threshold;
        if !(threshold >= 0.0 && threshold.is_finite()) {
            return Err(DecodeError::Shape(format!(
                "a confidence threshold is 0 or more, and not {threshold}"
            )));
        }
        let TargetConfig { max_position_embeddings, vocab_size, .. } = target.config();
        DecodeError::check_prompt(prompt, *max_position_embeddings, *vocab_size)
    }

    pub(super) fn new(
        prompt: &[TargetTokenId],
        context: usize,
        (options, grammar): (&DecodeOptions, Option<Box<dyn Grammar>>),
        cache: KvCache,
    ) -> Self {
        Self {
            options: options.clone(),
            verifier: Verifier { sampling: options.sampling.clone(), rule: options.rule },
            sampling: Arc::new(options.sampling.clone()),
            draws: CounterDraws::new(options.seed, &options.request).after(prompt),
            grammar,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            counts: Counts::new(),
            reused_tokens: cache.len(),
            cache,
            context,
            metrics: AcceptanceMetrics::default(),
            end: None,
            started: Instant::now(),
            times: None,
        }
    }

    pub(super) fn end(&self) -> Option<EndReason> {
        self.end
    }

    /// Seconds until the first token, and from there to the last one.
    pub(super) fn seconds(&self) -> (f64, f64) {
        let (first, last) = self.times.unwrap_or((self.started, self.started));
        ((first - self.started).as_secs_f64(), (last - first).as_secs_f64())
    }

    /// Tokens of the prompt that the target has not run.
    pub(super) fn unread(&self) -> usize {
        self.prompt_len.saturating_sub(self.cache.len())
    }

    /// Whether it has yet to begin reading its prompt.
    pub(super) fn begins(&self) -> bool {
        self.cache.len() == self.reused_tokens && self.unread() > 0
    }

    pub(super) fn generated(&self) -> &[TargetTokenId] {
        &self.tokens[self.prompt_len..]
    }

    /// The newest token: the root of the next round.
    pub(super) fn root(&self) -> TargetTokenId {
        self.tokens[self.tokens.len() - 1]
    }

    /// No proposals below the root.
    pub(super) fn plain(&self) -> Tree {
        Tree::new(self.root())
    }

    /// Judges a tree below the root by the logits `[rows, V]` of its rows.
    pub(super) fn verify(&mut self, tree: &Tree, logits: &[Vec<f32>]) -> Result<Verdict> {
        let position = self.position();
        let LateTokens { tokens: late, after } = &self.options.late;
        let left = after.saturating_sub(self.generated().len());
        let grammar = self.grammar.as_mut().map(|grammar| &mut **grammar as &mut dyn Grammar);
        let so_far = SoFar { counts: self.counts.clone(), grammar, late, left };
        self.verifier.verify_after(so_far, tree, logits, position, &mut self.draws)
    }

    /// The proposals that the answer's grammar lets pass.
    pub(super) fn fitting(&mut self, tree: Tree) -> Result<Tree> {
        match &mut self.grammar {
            Some(grammar) => fitting(tree, &mut **grammar),
            None => Ok(tree),
        }
    }

    /// At most so many tokens that the answer's grammar leaves no choice about.
    pub(super) fn forced(&mut self, most: usize) -> Result<Vec<TargetTokenId>> {
        match &mut self.grammar {
            Some(grammar) if most > 0 => grammar.forced(most),
            _ => Ok(Vec::new()),
        }
    }

    /// Adds a token, which the target's `logits` `[V]` decided, unless the request has ended; checks
    /// stop token, listener (stop strings), budget and context in order.
    /// It fails where the answer's grammar cannot go on by it.
    pub(super) fn commit(
        &mut self,
        committed: Committed,
        logits: &[f32],
        listener: &mut RoundListener<'_>,
    ) -> Result<bool> {
        if self.end.is_some() {
            return Ok(false);
        }
        self.tokens.push(committed.token);
        self.options.sampling.count(std::iter::once(committed.token), &mut self.counts);
        if let Some(grammar) = &mut self.grammar {
            grammar.advance(committed.token)?;
        }
        let of = |count| LogProbs::of(committed.token, logits, count);
        let told = listener(committed, self.options.log_probs.map(of).as_ref());
        if self.options.stop_tokens.contains(&committed.token) {
            self.end = Some(EndReason::StopToken);
        } else if let ControlFlow::Break(reason) = told {
            self.end = Some(reason);
        } else if self.generated().len() >= self.options.max_new_tokens {
            self.end = Some(EndReason::TokenLimit);
        } else if self.tokens.len() >= self.context {
            self.end = Some(EndReason::ContextLimit);
        }
        let now = Instant::now();
        self.times = Some((self.times.map_or(now, |(first, _)| first), now));
        Ok(true)
    }

    /// Levels that still fit: a round commits at most one more token than it drafts levels.
    pub(super) fn room(&self) -> usize {
        let budget = self.options.max_new_tokens - self.generated().len();
        let room = self.context - self.tokens.len();
        budget.min(room).saturating_sub(1)
    }

    /// Index of the next token. It keys the draws of a round: a text that goes on draws anew.
    pub(super) fn position(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// Whether proposals are drawn from the draft's distribution.
    pub(super) fn draws_proposals(&self) -> bool {
        !self.options.sampling.is_greedy() && self.options.rule == VerifyRule::Ratio
    }
}
