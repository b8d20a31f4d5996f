//! One place in a decoder: a drafter, and what it keeps from request to request.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::Tensor;
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::target::{Extension, Features, KvCache, Tap, Taps, Target};

use super::request::Request;
use super::{Committed, DecodeOptions, Generation, Listener, Pacing};
use crate::drafter::{DraftContext, Drafted, Drafter, Plan};
use crate::error::{DecodeError, Result};
use crate::metrics::{RoundRecord, RoundSeconds};
use crate::pace::{Mode, Pace, Proposals};
use crate::tree::{Origin, Tree};

/// Prompt tokens that go through the target at once.
const PREFILL_TOKENS: usize = 512;

pub(super) struct Sequence<'a> {
    drafter: Option<Box<dyn Drafter + 'a>>,
    taps: Taps,
    pace: Pace,
    /// The last request's text and the cache of its first tokens.
    kept: Option<(Vec<TargetTokenId>, KvCache)>,
}

/// A round between its proposals and its end.
pub(super) struct Round {
    tree: Tree,
    mode: Mode,
    /// What a draft model ran.
    drafted: Drafted,
    seconds: RoundSeconds,
    /// Of the target's pass over the tree.
    features: Features,
    /// `[rows, V]`
    logits: Vec<Vec<f32>>,
}

impl<'a> Sequence<'a> {
    pub(super) fn new(drafter: Option<Box<dyn Drafter + 'a>>) -> Self {
        let mut taps = drafter.as_ref().map(|drafter| drafter.taps()).unwrap_or_default();
        taps.push(Tap::FinalHidden);
        Self { drafter, taps: Taps::of(&taps), pace: Pace::default(), kept: None }
    }

    /// What the target has to hand out.
    pub(super) fn taps(&self) -> &Taps {
        &self.taps
    }

    /// Runs the prompt and commits the first token.
    pub(super) fn begin<'r>(
        &mut self,
        target: &Target,
        prompt: &[TargetTokenId],
        options: &'r DecodeOptions,
        listener: &mut Listener<'_>,
    ) -> Result<Request<'r>> {
        let context = target.config().max_position_embeddings;
        Request::check(prompt, context, options)?;
        let cache = self.cache_for(target, prompt, options.reuse_prefix)?;
        let mut request = Request::new(prompt, context, options, cache);
        if let Some(drafter) = &mut self.drafter {
            drafter.begin(request.reused_tokens)?;
        }
        self.pace.begin();
        let first = self.prefill(target, &mut request)?;
        request.commit(Committed { token: first, proposed_by: None }, listener);
        Ok(request)
    }

    /// The last cache with what the prompt has in common with its text, less the last token of
    /// that: its features are needed anew. Empty if nothing is to be kept.
    fn cache_for(
        &mut self,
        target: &Target,
        prompt: &[TargetTokenId],
        reuse: bool,
    ) -> Result<KvCache> {
        let Some((tokens, mut cache)) = self.kept.take() else {
            return Ok(target.new_cache()?);
        };
        let common = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let common = common.min(cache.len()).min(prompt.len());
        cache.truncate(if reuse { common.saturating_sub(1) } else { 0 });
        Ok(cache)
    }

    /// Runs the rest of the prompt; the first new token comes from the target's distribution after
    /// it.
    fn prefill(&mut self, target: &Target, request: &mut Request<'_>) -> Result<TargetTokenId> {
        let mut last = None;
        let prompt = request.tokens[request.cache.len()..].to_vec();
        for chunk in prompt.chunks(PREFILL_TOKENS) {
            let ids: Vec<u32> = chunk.iter().map(|token| token.0).collect();
            let first = request.cache.len() as u32;
            let positions: Vec<u32> = (first..first + ids.len() as u32).collect();
            let features = target.extend(&ids, &positions, &mut request.cache, &self.taps)?;
            if let Some(drafter) = &mut self.drafter {
                drafter.observe(&request.tokens, &features)?;
            }
            last = Some(features.final_hidden()?.narrow(0, ids.len() - 1, 1)?);
        }
        let hidden = last.ok_or(DecodeError::EmptyPrompt)?;
        let logits = target.logits(&hidden)?.to_vec2::<f32>()?;
        let tree = Tree::new(request.root());
        let round = request.round_key();
        Ok(request.verifier.verify(&tree, &logits, round, &mut request.draws)?.next)
    }

    /// Begins a round.
    pub(super) fn propose(&mut self, target: &Target, request: &mut Request<'_>) -> Result<Round> {
        request.rounds += 1;
        let started = Instant::now();
        let mode = match (&self.drafter, request.options.pacing) {
            (None, _) => Mode::Plain,
            (Some(_), Pacing::Fixed) => Mode::Draft,
            (Some(_), Pacing::Measured) => self.pace.mode(),
        };
        let (tree, drafted) = match mode {
            Mode::Plain => (Tree::new(request.root()), Drafted::Nothing),
            Mode::Free | Mode::Draft => self.draft(target, request, mode == Mode::Draft)?,
        };
        // Looking up takes no time to speak of.
        let is_paid = drafted != Drafted::Nothing;
        let draft = if is_paid { started.elapsed().as_secs_f64() } else { 0.0 };
        let seconds = RoundSeconds { draft, ..RoundSeconds::default() };
        let (features, logits) = (Features::default(), Vec::new());
        Ok(Round { tree, mode, drafted, seconds, features, logits })
    }

    /// Proposals, and what a draft model ran for them; without one unless they are `paid`.
    fn draft(
        &mut self,
        target: &Target,
        request: &mut Request<'_>,
        paid: bool,
    ) -> Result<(Tree, Drafted)> {
        let room = request.room();
        let Some(drafter) = self.drafter.as_mut().filter(|_| room > 0) else {
            return Ok((Tree::new(request.root()), Drafted::Nothing));
        };
        let drawn = request.draws_proposals();
        let mut shape = request.options.shape.cut(room);
        let mut worth = None;
        if request.options.pacing == Pacing::Measured {
            // A confidence tells round by round how deep to draw; else what held on average.
            if drawn && !drafter.tells_confidence() {
                shape = self.pace.cut(&shape);
            }
            worth = self.pace.costs().worth();
        }
        let context = DraftContext { target, cache: &request.cache, tokens: &request.tokens };
        let mut plan = Plan {
            shape: &shape,
            drawn,
            sampling: &request.options.sampling,
            round: request.rounds,
            draws: &mut request.draws,
            worth,
            confidence_threshold: request.options.confidence_threshold,
            paid,
            drafted: Drafted::Nothing,
        };
        let tree = drafter.propose(context, &mut plan)?;
        Ok((tree, plan.drafted))
    }

    /// Ends a round that the target has run: verdict, cache, committed tokens, measurements.
    pub(super) fn settle(
        &mut self,
        request: &mut Request<'_>,
        round: Round,
        listener: &mut Listener<'_>,
    ) -> Result<()> {
        let started = Instant::now();
        let Round { tree, mode, drafted, mut seconds, features, logits } = round;
        let key = request.round_key();
        let verdict = request.verifier.verify(&tree, &logits, key, &mut request.draws)?;
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
        seconds.rest = started.elapsed().as_secs_f64();
        record.seconds = seconds;
        if self.drafter.is_some() && request.options.pacing == Pacing::Measured {
            let (predicted, lookup) = (predicted(&tree), tree.looked_up(&verdict.path));
            self.pace.add(mode, &record, &Proposals { drafted, predicted, lookup });
        }
        request.metrics.add_round(&record);
        Ok(())
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

    /// What an ended request came to; its text and cache are kept.
    pub(super) fn end(&mut self, request: Request<'_>) -> Generation {
        let (prefill_seconds, decode_seconds) = request.seconds();
        let end = request.end().unwrap_or(super::EndReason::Interrupted);
        let Request { tokens, prompt_len, cache, metrics, reused_tokens, .. } = request;
        let generated = tokens[prompt_len..].to_vec();
        self.kept = Some((tokens, cache));
        let tokens = generated;
        Generation { tokens, metrics, end, reused_tokens, prefill_seconds, decode_seconds }
    }
}

/// One pass of the target over the trees of several requests. Its time is shared out by rows.
pub(super) fn run_target(
    target: &Target,
    requests: &mut [&mut Request<'_>],
    rounds: &mut [Round],
    taps: &Taps,
) -> Result<()> {
    let started = Instant::now();
    let (mut tokens, mut sizes) = (Vec::new(), Vec::new());
    for (request, round) in requests.iter().zip(&*rounds) {
        let tree = &round.tree;
        let parents = (!tree.is_chain()).then(|| tree.parents());
        tokens.push((tree.ids(), tree.positions(request.cache.len()), parents));
        sizes.push(tokens[tokens.len() - 1].0.len());
    }
    let mut extensions: Vec<Extension<'_>> = Vec::with_capacity(tokens.len());
    for ((ids, position_ids, parents), request) in tokens.iter().zip(requests) {
        let (parents, cache) = (parents.as_deref(), &mut request.cache);
        extensions.push(Extension { ids, position_ids, parents, cache });
    }
    let features = target.extend_each(&mut extensions, taps)?;
    let mut logits = target.logits(features.final_hidden()?)?.to_vec2::<f32>()?.into_iter();
    let seconds = started.elapsed().as_secs_f64();
    let all: usize = sizes.iter().sum();
    let mut first = 0;
    for (round, rows) in rounds.iter_mut().zip(sizes) {
        round.features = features.rows(first..first + rows)?;
        round.logits = logits.by_ref().take(rows).collect();
        round.seconds.verify = seconds * rows as f64 / all.max(1) as f64;
        first += rows;
    }
    Ok(())
}

/// The draft's own chance that some node of the first level holds, for trees it gave one for.
fn predicted(tree: &Tree) -> Option<f64> {
    let first = tree.children(0).filter(|(_, node)| node.origin == Origin::Draft);
    let chances: Vec<f64> = first.filter_map(|(_, node)| node.chance).collect();
    (!chances.is_empty()).then(|| chances.iter().sum::<f64>().min(1.0))
}

/// Tapped states of some rows.
fn select(features: &Features, rows: &[usize]) -> Result<Features> {
    let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
    let of_rows = |tensor: &Tensor| -> Result<Tensor> { Ok(select_rows(tensor, &rows)?) };
    let hidden = features.hidden.iter().map(|(layer, states)| Ok((*layer, of_rows(states)?)));
    let hidden = hidden.collect::<Result<BTreeMap<_, _>>>()?;
    let final_hidden = features.final_hidden.as_ref().map(of_rows).transpose()?;
    Ok(Features { hidden, final_hidden, ..Features::default() })
}
