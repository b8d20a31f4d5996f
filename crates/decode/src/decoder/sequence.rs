//! One place in a decoder: a drafter, and what it keeps from request to request.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Features, KvCache, Tap, Target};

use super::request::Request;
use super::round::{Round, Step};
use super::{Committed, DecodeOptions, EndReason, Generation, Pacing, RoundListener};
use crate::acceptance::RoundRecord;
use crate::distribution::Sampling;
use crate::drafter::{DraftState, Drafter, Worth};
use crate::error::Result;
use crate::grammar::Grammar;
use crate::layout::DraftShape;
use crate::pace::{Mode, Pace, Pass, Proposals};
use crate::tree::{Origin, Tree};

/// Tokens that a grammar forces which are proposed at a time.
const MOST_FORCED: usize = 16;

/// What a request wants to propose in a round.
pub(super) struct Wish {
    /// What its grammar leaves no choice about.
    pub(super) forced: Vec<TargetTokenId>,
    /// What is drafted, if anything.
    pub(super) layout: Option<Layout>,
}

/// How a draft proposes.
pub(super) struct Layout {
    pub(super) shape: DraftShape,
    pub(super) sampling: Arc<Sampling>,
    pub(super) worth: Option<Worth>,
    /// Whether proposals that take time of their own are wanted.
    pub(super) paid: bool,
}

pub(super) struct Sequence<'a> {
    drafter: Option<Box<dyn Drafter + 'a>>,
    /// The last request's text and the cache of its first tokens.
    kept: Option<(Vec<TargetTokenId>, KvCache)>,
}

impl<'a> Sequence<'a> {
    pub(super) fn new(drafter: Option<Box<dyn Drafter + 'a>>) -> Self {
        Self { drafter, kept: None }
    }

    /// What the target has to hand out.
    pub(super) fn taps(&self) -> Vec<Tap> {
        self.drafter.as_ref().map(|drafter| drafter.taps()).unwrap_or_default()
    }

    /// Begins a request; its prompt is read in rounds.
    pub(super) fn begin(
        &mut self,
        target: &Target,
        prompt: &[TargetTokenId],
        (options, grammar): (&DecodeOptions, Option<Box<dyn Grammar>>),
    ) -> Result<Request> {
        let context = target.config().max_position_embeddings;
        Request::check(target, prompt, options)?;
        let limit = prompt.len().saturating_add(options.max_new_tokens).min(context);
        let mut cache = self.cache_for(target, prompt, options.reuse_prefix)?;
        target.prepare_cache(&mut cache, limit);
        let request = Request::new(prompt, context, (options, grammar), cache);
        if let Some(drafter) = &mut self.drafter {
            drafter.begin(request.reused_tokens)?;
        }
        Ok(request)
    }

    /// Tokens at the start of `prompt` that need not be read again, and all that the kept cache holds.
    pub(super) fn kept_of(&self, prompt: &[TargetTokenId]) -> (usize, usize) {
        let Some((tokens, cache)) = &self.kept else { return (0, 0) };
        let tokens = &tokens[..cache.len().min(tokens.len())];
        // Features of the last common token are needed anew.
        (cache.reusable(common(prompt, tokens).saturating_sub(1)), tokens.len())
    }

    /// The last request's text and the cache of its first tokens.
    pub(super) fn kept(&self) -> Option<(&[TargetTokenId], &KvCache)> {
        self.kept.as_ref().map(|(tokens, cache)| (&tokens[..], cache))
    }

    /// Whether nothing is kept.
    pub(super) fn is_empty(&self) -> bool {
        self.kept.as_ref().is_none_or(|(_, cache)| cache.is_empty())
    }

    /// What the drafter holds of the text here.
    pub(super) fn state(&self) -> DraftState<'_> {
        self.drafter.as_ref().map_or(DraftState::Nothing, |drafter| drafter.state())
    }

    /// Has a request that has read nothing go on from the first `count` tokens of a text at another place, of which
    /// that place holds the cache and the drafter's state. It fails where the device has no memory for the copies.
    pub(super) fn share(
        &mut self,
        request: &mut Request,
        (cache, state): (&KvCache, DraftState<'_>),
        count: usize,
    ) -> Result<()> {
        request.cache.copy_prefix(cache, count)?;
        request.reused_tokens = request.cache.len();
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        if let DraftState::Rows(rows) = state {
            drafter.take_over(rows, request.reused_tokens)?;
        }
        drafter.begin(request.reused_tokens)
    }

    /// Forgets what the last request left.
    pub(super) fn forget(&mut self) {
        self.kept = None;
    }

    /// The last cache with what the prompt has in common with its text and need not read again. Empty if
    /// nothing is to be kept.
    fn cache_for(
        &mut self,
        target: &Target,
        prompt: &[TargetTokenId],
        reuse: bool,
    ) -> Result<KvCache> {
        let common = self.kept_of(prompt).0;
        let Some((_, mut cache)) = self.kept.take() else {
            let mut cache = target.new_cache()?;
            if self.drafter.as_ref().is_some_and(|drafter| drafter.reads_last_layer()) {
                cache.keep_last_layer()?;
            }
            return Ok(cache);
        };
        cache.truncate(if reuse { common } else { 0 });
        Ok(cache)
    }

    /// What drafts here.
    pub(super) fn drafter(&mut self) -> Option<&mut (dyn Drafter + 'a)> {
        self.drafter.as_deref_mut()
    }

    /// Begins a round of a request that decodes; `pace` is that of all who decode together.
    /// It fails where the answer cannot follow its grammar any further.
    pub(super) fn begin_round(&mut self, request: &mut Request, pace: &mut Pace) -> Result<Wish> {
        let forced = request.forced(request.room().min(MOST_FORCED))?;
        let layout = self.layout(request, forced.len(), pace);
        Ok(Wish { forced, layout })
    }

    /// What is drafted beside so many `forced` tokens.
    fn layout(&mut self, request: &Request, forced: usize, pace: &mut Pace) -> Option<Layout> {
        let drafter = self.drafter.as_mut()?;
        let (options, room) = (&request.options, request.room());
        let is_paced = options.pacing == Pacing::Measured;
        let mode = if is_paced {
            let shares = drafter.model().is_some_and(|model| model.shared().is_some());
            pace.mode(shares)
        } else {
            Mode::Draft
        };
        // What a draft could add to a long run is not worth its time.
        let are_enough = forced > 0 && forced >= options.shape.depth();
        if mode == Mode::Plain || are_enough || room == 0 {
            return None;
        }
        let mut shape = options.shape.cut(room);
        // A confidence tells round by round how deep to draw; else what held on average.
        if is_paced && request.draws_proposals() && !drafter.tells_confidence() {
            shape = pace.cut(&shape);
        }
        let worth = if is_paced { pace.worth() } else { None };
        let sampling = match options.sampling.for_drafts(&request.counts) {
            Cow::Borrowed(_) => Arc::clone(&request.sampling),
            Cow::Owned(folded) => Arc::new(folded),
        };
        Some(Layout { shape, sampling, worth, paid: mode == Mode::Draft })
    }

    /// Ends a round that the target has run: what it read, or verdict, cache, committed tokens and
    /// measurements.
    pub(super) fn settle(
        &mut self,
        request: &mut Request,
        (round, learns): (Round, Option<(&mut Pace, &Pass)>),
        listener: &mut RoundListener<'_>,
    ) -> Result<()> {
        let started = Instant::now();
        let Round { step, mut seconds, is_measured, features, logits } = round;
        let (tree, drafted) = match step {
            Step::Read(_) => return self.settle_read(request, &features, &logits, listener),
            Step::Judge { tree, drafted } => (tree, drafted),
        };
        let verdict = request.verify(&tree, &logits)?;
        self.keep_path(request, &features, &tree, &verdict.path)?;
        let mut record = RoundRecord {
            depth: tree.depth(),
            nodes: tree.len(),
            accepted: verdict.path.len(),
            residual_fallbacks: verdict.residual_fallbacks,
            ..RoundRecord::default()
        };
        let mut decided_by = 0;
        for &row in &verdict.path {
            let proposed_by = tree.node(row).map(|node| node.origin);
            let committed = Committed { token: tree.token(row), proposed_by };
            if request.commit(committed, &logits[decided_by], listener)? {
                record.committed += 1;
                record.from_lookup += usize::from(proposed_by == Some(Origin::Lookup));
                record.from_grammar += usize::from(proposed_by == Some(Origin::Grammar));
            }
            decided_by = row;
        }
        let own = Committed { token: verdict.next, proposed_by: None };
        record.committed += usize::from(request.commit(own, &logits[decided_by], listener)?);
        seconds.rest = started.elapsed().as_secs_f64();
        record.seconds = seconds;
        let is_paced = self.drafter.is_some() && request.options.pacing == Pacing::Measured;
        if let Some((pace, pass)) = learns.filter(|_| is_paced && is_measured) {
            pace.add((&record, pass), &Proposals { drafted, predicted: predicted(&tree) });
        }
        request.metrics.add_round(&record);
        Ok(())
    }

    /// Ends a round that read some of the prompt; the first new token comes from the target's
    /// distribution after all of it.
    fn settle_read(
        &mut self,
        request: &mut Request,
        features: &Features,
        logits: &[Vec<f32>],
        listener: &mut RoundListener<'_>,
    ) -> Result<()> {
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(&request.tokens, features)?;
        }
        if let Some(last) = logits.first() {
            let token = request.verify(&Tree::new(request.root()), logits)?.next;
            request.commit(Committed { token, proposed_by: None }, last, listener)?;
        }
        Ok(())
    }

    /// Root and accepted rows stay in the cache; rejected ones leave no trace.
    fn keep_path(
        &mut self,
        request: &mut Request,
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
    pub(super) fn end(&mut self, request: Request) -> Generation {
        let (prefill_seconds, decode_seconds) = request.seconds();
        let end = request.end().unwrap_or(EndReason::Interrupted);
        let Request { tokens, prompt_len, mut cache, metrics, reused_tokens, .. } = request;
        // A sequence that waits takes no memory from those that run.
        cache.forget_passes();
        let generated = tokens[prompt_len..].to_vec();
        self.kept = Some((tokens, cache));
        let tokens = generated;
        Generation { tokens, metrics, end, reused_tokens, prefill_seconds, decode_seconds }
    }
}

/// Tokens that two texts begin with alike.
pub(super) fn common(text: &[TargetTokenId], other: &[TargetTokenId]) -> usize {
    text.iter().zip(other).take_while(|(a, b)| a == b).count()
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
