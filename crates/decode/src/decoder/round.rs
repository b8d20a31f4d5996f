//! One pass of the target over what several requests want of it: the next tokens of a prompt, or a
//! tree.

use std::ops::Range;
use std::time::Instant;

use longdraft_kernels::rows::select_rows;
use longdraft_models::target_model::{Extension, Features, Taps, Target};

use super::request::Request;
use crate::acceptance::RoundSeconds;
use crate::drafter::Drafted;
use crate::error::Result;
use crate::pace::Pass;
use crate::tree::Tree;

/// A request's part of a round, from what it wants of the target's pass to its end.
pub(super) struct Round {
    pub(super) step: Step,
    pub(super) seconds: RoundSeconds,
    /// Whether its tokens say what drafting is worth: nothing else proposed any.
    pub(super) is_measured: bool,
    /// Of the target's pass over its rows.
    pub(super) features: Features,
    /// Of the rows that are judged, `[rows, V]`.
    pub(super) logits: Vec<Vec<f32>>,
}

/// What a request does in a round.
pub(super) enum Step {
    /// Reads the next tokens of the prompt, so many.
    Read(usize),
    /// Proposes a tree below the root.
    Judge {
        tree: Tree,
        /// What a draft model ran.
        drafted: Drafted,
    },
}

impl Round {
    pub(super) fn new(step: Step) -> Self {
        Self {
            step,
            seconds: RoundSeconds::default(),
            is_measured: true,
            features: Features::default(),
            logits: Vec::new(),
        }
    }

    /// Judges a tree that nothing was drafted for.
    pub(super) fn of_tree(tree: Tree) -> Self {
        Self::new(Step::Judge { tree, drafted: Drafted::Nothing })
    }

    /// Reads `tokens` more of the prompt.
    pub(super) fn of_prompt(tokens: usize) -> Self {
        Self::new(Step::Read(tokens))
    }

    /// Whether it reads a prompt.
    fn reads(&self) -> bool {
        matches!(self.step, Step::Read(_))
    }

    /// Makes room in a request's cache for the rows. It fails where the device has no memory for it.
    pub(super) fn reserve(&self, request: &mut Request) -> Result<()> {
        let rows = match &self.step {
            Step::Read(count) => *count,
            Step::Judge { tree, .. } => tree.rows(),
        };
        Ok(request.cache.reserve(rows)?)
    }

    /// Ids, positions and, of a tree that is no chain, parents of the rows.
    fn rows(&self, request: &Request) -> Rows {
        let first = request.cache.len();
        match &self.step {
            Step::Read(count) => {
                let ids = request.tokens[first..first + count].iter().map(|token| token.0);
                let positions = (first as u32..(first + count) as u32).collect();
                (ids.collect(), positions, None)
            }
            Step::Judge { tree, .. } => {
                let parents = (!tree.is_chain()).then(|| tree.parents());
                (tree.ids(), tree.positions(first), parents)
            }
        }
    }

    /// Which of its `rows` are judged: all of a tree; of a prompt the last one, if it is read to its
    /// end.
    fn judged(&self, rows: usize, request: &Request) -> Range<usize> {
        match self.step {
            Step::Read(_) if request.unread() > rows => rows..rows,
            Step::Read(_) => rows - 1..rows,
            Step::Judge { .. } => 0..rows,
        }
    }
}

/// Ids, positions and parents.
type Rows = (Vec<u32>, Vec<u32>, Option<Vec<Option<usize>>>);

/// One pass of the target over the rows of several requests. Its time is shared out by rows. The pass, unless a
/// prompt was read in it.
pub(super) fn run_target(
    target: &Target,
    parts: &mut [(&mut Request, &mut Round)],
    taps: &Taps,
) -> Result<Option<Pass>> {
    let started = Instant::now();
    let rows: Vec<Rows> = parts.iter().map(|(request, round)| round.rows(request)).collect();
    let judged: Vec<Range<usize>> = parts
        .iter()
        .zip(&rows)
        .map(|((request, round), rows)| round.judged(rows.0.len(), request))
        .collect();
    let mut extensions: Vec<Extension<'_>> = Vec::with_capacity(parts.len());
    for ((request, round), (ids, position_ids, parents)) in parts.iter_mut().zip(&rows) {
        let (parents, cache) = (parents.as_deref(), &mut request.cache);
        let is_text = round.reads();
        extensions.push(Extension { ids, position_ids, parents, is_text, cache });
    }
    let features = target.extend_each(&mut extensions, taps)?;
    drop(extensions);
    let mut logits = judged_logits(target, &features, &rows, &judged)?.into_iter();
    let seconds = started.elapsed().as_secs_f64();
    let all: usize = rows.iter().map(|rows| rows.0.len()).sum();
    let is_measured = !parts.iter().any(|(_, round)| round.reads());
    let mut first = 0;
    for (((_, round), (ids, ..)), judged) in parts.iter_mut().zip(&rows).zip(judged) {
        round.features = features.rows(first..first + ids.len())?;
        round.logits = logits.by_ref().take(judged.len()).collect();
        round.seconds.verify = seconds * ids.len() as f64 / all.max(1) as f64;
        first += ids.len();
    }
    Ok(is_measured.then(|| Pass { seconds, nodes: all - parts.len() }))
}

/// Logits `[judged rows, V]` of the judged rows of all parts, in order.
fn judged_logits(
    target: &Target,
    features: &Features,
    rows: &[Rows],
    judged: &[Range<usize>],
) -> Result<Vec<Vec<f32>>> {
    let (mut wanted, mut first) = (Vec::new(), 0);
    for ((ids, ..), judged) in rows.iter().zip(judged) {
        wanted.extend(judged.clone().map(|row| (first + row) as u32));
        first += ids.len();
    }
    let hidden = features.final_hidden()?;
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let logits = if wanted.len() == first {
        target.hold_ends()?.logits(hidden)?
    } else {
        target.hold_ends()?.logits(&select_rows(hidden, &wanted)?)?
    };
    Ok(logits.to_vec2()?)
}
