//! The loop: prefill, then rounds of draft, one target pass, verification.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Instant;

use candle_core::Tensor;
use longdraft_models::TargetTokenId;
use longdraft_models::target::{Features, KvCache, Tap, Taps, Target};

use crate::drafter::{DraftContext, Drafter, Plan};
use crate::draws::CounterDraws;
use crate::error::{DecodeError, Result};
use crate::law::Sampling;
use crate::metrics::{AcceptanceMetrics, RoundRecord, RoundSeconds};
use crate::pace::{Mode, Pace};
use crate::shape::DraftShape;
use crate::tree::{Origin, Tree};
use crate::verifier::{Round, Verifier, VerifyRule};

/// Prompt tokens that go through the target at once.
const PREFILL_TOKENS: usize = 512;

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeOptions {
    /// Layout of a round's proposals.
    pub shape: DraftShape,
    /// Tokens to generate, the first one included.
    pub max_new_tokens: usize,
    /// Tokens that end the text; the one that does is committed and counted.
    pub stop_tokens: Vec<TargetTokenId>,
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
    /// Keep what the last request's text and this prompt have in common.
    pub reuse_prefix: bool,
}

/// Who decides how much is drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pacing {
    /// The whole layout, every round.
    #[default]
    Fixed,
    /// Measured times and acceptance: as much of the layout as pays, plain decoding if none does.
    Measured,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self {
            shape: DraftShape::Chain { length: 4 },
            max_new_tokens: 256,
            stop_tokens: Vec::new(),
            sampling: Sampling::default(),
            rule: VerifyRule::default(),
            seed: 0,
            request: Vec::new(),
            pacing: Pacing::default(),
            reuse_prefix: false,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The token.
    pub token: TargetTokenId,
    /// Who proposed it; the target's own if nobody.
    pub proposed_by: Option<Origin>,
}

/// Hears of every token as it is committed, and may end the request.
pub type Listener<'l> = dyn FnMut(Committed) -> ControlFlow<EndReason> + 'l;

/// What a request came to.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Generated tokens, a stop token included.
    pub tokens: Vec<TargetTokenId>,
    /// Acceptance.
    pub metrics: AcceptanceMetrics,
    /// Why it ended.
    pub end: EndReason,
    /// Tokens of the prompt that were kept from the request before.
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
    target: &'a Target,
    drafter: Option<Box<dyn Drafter + 'a>>,
    taps: Taps,
    pace: Pace,
    /// The last request's text and the cache of its first tokens.
    kept: Option<(Vec<TargetTokenId>, KvCache)>,
}

/// State of the request that runs.
struct Request<'r> {
    options: &'r DecodeOptions,
    verifier: Verifier,
    draws: CounterDraws,
    tokens: Vec<TargetTokenId>,
    prompt_len: usize,
    cache: KvCache,
    context: usize,
    rounds: u64,
    end: Option<EndReason>,
}

impl Request<'_> {
    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Adds a token unless the request has ended; checks stop token, listener (stop strings),
    /// budget and context in order.
    fn commit(&mut self, committed: Committed, listener: &mut Listener<'_>) -> bool {
        if self.end.is_some() {
            return false;
        }
        self.tokens.push(committed.token);
        let told = listener(committed);
        if self.options.stop_tokens.contains(&committed.token) {
            self.end = Some(EndReason::StopToken);
        } else if let ControlFlow::Break(reason) = told {
            self.end = Some(reason);
        } else if self.generated() >= self.options.max_new_tokens {
            self.end = Some(EndReason::TokenLimit);
        } else if self.tokens.len() >= self.context {
            self.end = Some(EndReason::ContextLimit);
        }
        true
    }

    /// Levels that still fit: a round commits at most one more token than it drafts levels.
    fn room(&self) -> usize {
        let budget = self.options.max_new_tokens - self.generated();
        let room = self.context - self.tokens.len();
        budget.min(room).saturating_sub(1)
    }

    fn round_key(&self) -> Round {
        Round { index: self.rounds, position: self.tokens.len() as u64 }
    }

    /// Whether proposals are drawn from the draft's law.
    fn draws_proposals(&self) -> bool {
        !self.options.sampling.is_greedy() && self.options.rule == VerifyRule::Ratio
    }
}

impl<'a> SpeculativeDecoder<'a> {
    /// Decodes with a drafter, or plainly without one.
    pub fn new(target: &'a Target, drafter: Option<Box<dyn Drafter + 'a>>) -> Self {
        let mut taps = drafter.as_ref().map(|drafter| drafter.taps()).unwrap_or_default();
        taps.push(Tap::FinalHidden);
        Self { target, drafter, taps: Taps::of(&taps), pace: Pace::default(), kept: None }
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
        let context = self.target.config().max_position_embeddings;
        check(prompt, context, options)?;
        let started = Instant::now();
        let cache = self.cache_for(prompt, options.reuse_prefix)?;
        let reused_tokens = cache.len();
        let mut request = Request {
            options,
            verifier: Verifier { sampling: options.sampling.clone(), rule: options.rule },
            draws: CounterDraws::new(options.seed, &options.request),
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            cache,
            context,
            rounds: 0,
            end: None,
        };
        if let Some(drafter) = &mut self.drafter {
            drafter.begin(reused_tokens)?;
        }
        self.pace.begin();
        let first = self.prefill(&mut request)?;
        let prefill_seconds = started.elapsed().as_secs_f64();
        request.commit(Committed { token: first, proposed_by: None }, listener);
        let started = Instant::now();
        let mut metrics = AcceptanceMetrics::default();
        let end = loop {
            if let Some(end) = request.end {
                break end;
            }
            metrics.add_round(&self.round(&mut request, listener)?);
        };
        let decode_seconds = started.elapsed().as_secs_f64();
        let Request { tokens, cache, .. } = request;
        let generated = tokens[prompt.len()..].to_vec();
        self.kept = Some((tokens, cache));
        let tokens = generated;
        Ok(Generation { tokens, metrics, end, reused_tokens, prefill_seconds, decode_seconds })
    }

    /// The last cache with what the prompt has in common with its text, less the last token of
    /// that: its features are needed anew. Empty if nothing is to be kept.
    fn cache_for(&mut self, prompt: &[TargetTokenId], reuse: bool) -> Result<KvCache> {
        let Some((tokens, mut cache)) = self.kept.take() else {
            return Ok(self.target.new_cache()?);
        };
        let common = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let common = common.min(cache.len()).min(prompt.len());
        cache.truncate(if reuse { common.saturating_sub(1) } else { 0 });
        Ok(cache)
    }

    /// Runs the rest of the prompt; the first new token comes from the target's law behind it.
    fn prefill(&mut self, request: &mut Request<'_>) -> Result<TargetTokenId> {
        let mut last = None;
        let prompt = request.tokens[request.cache.len()..].to_vec();
        for chunk in prompt.chunks(PREFILL_TOKENS) {
            let ids: Vec<u32> = chunk.iter().map(|token| token.0).collect();
            let first = request.cache.len() as u32;
            let positions: Vec<u32> = (first..first + ids.len() as u32).collect();
            let features = self.target.extend(&ids, &positions, &mut request.cache, &self.taps)?;
            if let Some(drafter) = &mut self.drafter {
                drafter.observe(&request.tokens, &features)?;
            }
            last = Some(features.final_hidden()?.narrow(0, ids.len() - 1, 1)?);
        }
        let hidden = last.ok_or(DecodeError::EmptyPrompt)?;
        let logits = self.target.logits(&hidden)?.to_vec2::<f32>()?;
        let tree = Tree::new(request.tokens[request.tokens.len() - 1]);
        let round = request.round_key();
        Ok(request.verifier.verify(&tree, &logits, round, &mut request.draws)?.next)
    }

    fn round(
        &mut self,
        request: &mut Request<'_>,
        listener: &mut Listener<'_>,
    ) -> Result<RoundRecord> {
        request.rounds += 1;
        let started = Instant::now();
        let mode = match (&self.drafter, request.options.pacing) {
            (None, _) => Mode::Plain,
            (Some(_), Pacing::Fixed) => Mode::Draft,
            (Some(_), Pacing::Measured) => self.pace.mode(),
        };
        let tree = match mode {
            Mode::Draft => self.propose(request)?,
            Mode::Plain => Tree::new(request.tokens[request.tokens.len() - 1]),
        };
        let draft = if mode == Mode::Draft { started.elapsed().as_secs_f64() } else { 0.0 };
        let (features, logits) = self.run_target(request, &tree)?;
        let verify = started.elapsed().as_secs_f64() - draft;
        let round = request.round_key();
        let verdict = request.verifier.verify(&tree, &logits, round, &mut request.draws)?;
        self.keep_path(request, &features, &tree, &verdict.path)?;
        let mut record = RoundRecord {
            depth: tree.depth(),
            nodes: tree.len(),
            accepted: verdict.path.len(),
            residual_fallbacks: verdict.residual_fallbacks,
            ..RoundRecord::default()
        };
        for &row in &verdict.path {
            let proposed_by = tree.node(row).map(|node| node.origin);
            if request.commit(Committed { token: tree.token(row), proposed_by }, listener) {
                record.committed += 1;
                record.from_lookup += usize::from(proposed_by == Some(Origin::Lookup));
            }
        }
        let own = Committed { token: verdict.next, proposed_by: None };
        record.committed += usize::from(request.commit(own, listener));
        let rest = started.elapsed().as_secs_f64() - draft - verify;
        record.seconds = RoundSeconds { draft, verify, rest };
        if self.drafter.is_some() && request.options.pacing == Pacing::Measured {
            self.pace.add(mode, &record, predicted(&tree));
        }
        Ok(record)
    }

    fn propose(&mut self, request: &mut Request<'_>) -> Result<Tree> {
        let root = request.tokens[request.tokens.len() - 1];
        let room = request.room();
        let Some(drafter) = self.drafter.as_mut().filter(|_| room > 0) else {
            return Ok(Tree::new(root));
        };
        let drawn = request.draws_proposals();
        let mut shape = request.options.shape.cut(room);
        let mut worth = None;
        if request.options.pacing == Pacing::Measured {
            if drawn {
                shape = self.pace.cut(&shape);
            }
            worth = self.pace.costs().worth();
        }
        let context =
            DraftContext { target: self.target, cache: &request.cache, tokens: &request.tokens };
        let mut plan = Plan {
            shape: &shape,
            drawn,
            sampling: &request.options.sampling,
            round: request.rounds,
            draws: &mut request.draws,
            worth,
        };
        drafter.propose(context, &mut plan)
    }

    /// One pass over the root and all proposals: features and logits `[rows, V]`.
    fn run_target(
        &self,
        request: &mut Request<'_>,
        tree: &Tree,
    ) -> Result<(Features, Vec<Vec<f32>>)> {
        let (ids, positions) = (tree.ids(), tree.positions(request.cache.len()));
        let cache = &mut request.cache;
        let features = if tree.is_chain() {
            self.target.extend(&ids, &positions, cache, &self.taps)?
        } else {
            self.target.extend_tree(&ids, &positions, &tree.parents(), cache, &self.taps)?
        };
        let logits = self.target.logits(features.final_hidden()?)?.to_vec2::<f32>()?;
        Ok((features, logits))
    }

    /// Root and accepted rows stay in the cache; rejected ones leave no trace.
    fn keep_path(
        &mut self,
        request: &mut Request<'_>,
        features: &Features,
        tree: &Tree,
        path: &[usize],
    ) -> Result<()> {
        let mut rows = vec![0];
        rows.extend(path);
        request.cache.compact(request.tokens.len() - 1, &rows)?;
        if let Some(drafter) = &mut self.drafter {
            let mut tokens = request.tokens.clone();
            tokens.extend(path.iter().map(|row| tree.token(*row)));
            drafter.observe(&tokens, &select(features, &rows)?)?;
        }
        Ok(())
    }
}

/// The draft's own chance that some node of the first level holds, for trees it gave one for.
fn predicted(tree: &Tree) -> Option<f64> {
    let of_draft = |origin| origin == Origin::Draft;
    let first = tree.children(0).filter(|(_, node)| of_draft(node.origin) && !node.drawn);
    let chances: Vec<f64> = first.map(|(_, node)| f64::from(node.log_prob).exp()).collect();
    (!chances.is_empty()).then(|| chances.iter().sum::<f64>().min(1.0))
}

/// Tapped states of some rows.
fn select(features: &Features, rows: &[usize]) -> Result<Features> {
    let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
    let of_rows = |tensor: &Tensor| -> Result<Tensor> {
        let at = Tensor::from_slice(&rows, rows.len(), tensor.device())?;
        Ok(tensor.index_select(&at, 0)?)
    };
    let hidden = features.hidden.iter().map(|(layer, states)| Ok((*layer, of_rows(states)?)));
    Ok(Features { hidden: hidden.collect::<Result<BTreeMap<_, _>>>()?, ..Features::default() })
}

fn check(prompt: &[TargetTokenId], context: usize, options: &DecodeOptions) -> Result<()> {
    options.sampling.check()?;
    options.shape.check()?;
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    if prompt.len() >= context {
        return Err(DecodeError::PromptTooLong { prompt: prompt.len(), context });
    }
    Ok(())
}
