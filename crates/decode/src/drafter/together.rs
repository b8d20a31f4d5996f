//! Proposals of several requests at a time. Their trees grow level by level, and in each level those whose models
//! read one draft share its passes. As many passes run as the deepest of them needs.

use std::time::Instant;

use super::grow::Growth;
use super::model::{Beside, DraftModel, Forecast, Turn};
use super::{DraftContext, Drafter, Plan};
use crate::error::{DecodeError, Result};
use crate::tree::Tree;

/// A proposal that is to be made.
pub struct Proposal<'p, 'q> {
    /// Who makes it.
    pub drafter: &'p mut (dyn Drafter + 'p),
    /// After which text.
    pub context: DraftContext<'p>,
    /// How.
    pub plan: &'p mut Plan<'q>,
    /// Seconds that it took, those of a shared pass in equal parts; they are added here.
    pub seconds: f64,
}

/// Makes proposals together. Each is what its drafter would propose alone, on a CPU to the bit.
///
/// # Errors
/// - a draft cannot run
pub fn propose_each(proposals: &mut [Proposal<'_, '_>]) -> Result<Vec<Tree>> {
    let mut growths = Vec::with_capacity(proposals.len());
    for Proposal { drafter, context, plan, seconds } in proposals.iter_mut() {
        let started = Instant::now();
        growths.push(drafter.start(*context, plan)?);
        *seconds += started.elapsed().as_secs_f64();
    }
    loop {
        let heard = read_level(proposals, &growths)?;
        if heard.is_empty() {
            break;
        }
        for Heard { at, forecasts, seconds } in heard {
            let started = Instant::now();
            let Proposal { drafter, context, plan, seconds: all } = &mut proposals[at];
            let vocabulary = context.target.config().vocab_size;
            if let Some(model) = drafter.model() {
                growths[at].add(model, vocabulary, plan, forecasts)?;
            }
            *all += seconds + started.elapsed().as_secs_f64();
        }
    }
    let finish = |(proposal, growth): (&mut Proposal<'_, '_>, Growth)| {
        let started = Instant::now();
        let tree = proposal.drafter.finish(growth);
        proposal.seconds += started.elapsed().as_secs_f64();
        tree
    };
    Ok(proposals.iter_mut().zip(growths).map(finish).collect())
}

/// The proposal of one drafter.
pub(super) fn propose_alone(
    drafter: &mut dyn Drafter,
    context: DraftContext<'_>,
    plan: &mut Plan<'_>,
) -> Result<Tree> {
    let trees = propose_each(&mut [Proposal { drafter, context, plan, seconds: 0.0 }])?;
    let none = || Tree::new(context.tokens[context.tokens.len() - 1]);
    Ok(trees.into_iter().next().unwrap_or_else(none))
}

/// What a tree is to read.
struct Read<'r> {
    /// Which proposal's.
    at: usize,
    model: &'r mut (dyn DraftModel + 'r),
    /// Whose passes it can share: the draft and the head, the target, and the level.
    network: Option<([usize; 2], usize, usize)>,
    turn: Turn<'r>,
}

/// What a model said.
struct Heard {
    at: usize,
    forecasts: Vec<Forecast>,
    seconds: f64,
}

/// Reads what growing trees ask for.
fn read_level(proposals: &mut [Proposal<'_, '_>], growths: &[Growth]) -> Result<Vec<Heard>> {
    let mut reads = Vec::with_capacity(proposals.len());
    for (at, (proposal, growth)) in proposals.iter_mut().zip(growths).enumerate() {
        let Some(asked) = growth.asked() else { continue };
        let Some(model) = proposal.drafter.model() else { continue };
        let turn = Turn { context: proposal.context, asked };
        let target = std::ptr::from_ref(turn.context.target).addr();
        let network = model.shared().map(|shared| (shared.network(), target, asked.level()));
        reads.push(Read { at, model, network, turn });
    }
    let mut heard = Vec::with_capacity(reads.len());
    while !reads.is_empty() {
        let first = reads.remove(0);
        let is_alike = |read: &Read<'_>| read.network.is_some() && read.network == first.network;
        let (with, others) = reads.into_iter().partition(is_alike);
        reads = others;
        heard.extend(read_together(first, with)?);
    }
    Ok(heard)
}

/// Has the first read, with the others beside it.
fn read_together<'r>(first: Read<'r>, mut with: Vec<Read<'r>>) -> Result<Vec<Heard>> {
    let started = Instant::now();
    let Read { at, model: reader, turn, .. } = first;
    let mut beside: Vec<Beside<'_>> = Vec::with_capacity(with.len());
    for Read { model, turn, .. } in &mut with {
        beside.extend(model.shared().map(|shared| shared.beside(*turn)));
    }
    let said = reader.read(turn, &mut beside)?;
    drop(beside);
    let places: Vec<usize> = std::iter::once(at).chain(with.iter().map(|read| read.at)).collect();
    if said.len() != places.len() {
        let problem = format!("a draft answered {} of {} requests", said.len(), places.len());
        return Err(DecodeError::Shape(problem));
    }
    let seconds = started.elapsed().as_secs_f64() / places.len() as f64;
    let heard = places.into_iter().zip(said);
    Ok(heard.map(|(at, forecasts)| Heard { at, forecasts, seconds }).collect())
}
