//! What requests propose in a round: those that decode together draft together.

use longdraft_models::target_model::Target;

use super::request::Request;
use super::round::{Round, Step};
use super::sequence::{Sequence, Wish};
use crate::drafter::{DraftContext, Drafted, Plan, Proposal, propose_each};
use crate::error::{DecodeError, Result};
use crate::pace::Pace;

/// A request in a round.
pub(super) struct Part<'p, 'a> {
    pub(super) key: usize,
    pub(super) sequence: &'p mut Sequence<'a>,
    pub(super) request: &'p mut Request,
    /// Of this request alone.
    pub(super) error: &'p mut Option<DecodeError>,
    pub(super) round: Round,
    /// What it wants to propose, if it decodes.
    pub(super) wish: Option<Wish>,
}

/// Has all requests that want to propose do so; `pace` is theirs.
pub(super) fn propose(target: &Target, parts: &mut [Part<'_, '_>], pace: &mut Pace) -> Result<()> {
    draft(target, parts, pace)?;
    for part in parts {
        let Some(wish) = &part.wish else { continue };
        // What drafting is worth shows where a draft proposes alone.
        part.round.is_measured = wish.forced.is_empty();
        let Step::Judge { tree, .. } = &mut part.round.step else { continue };
        let plain = part.request.plain();
        match part.request.fitting(std::mem::replace(tree, plain)) {
            Ok(fitting) => *tree = fitting,
            // Its grammar is its own: the others go on.
            Err(error @ DecodeError::Grammar(_)) => *part.error = Some(error),
            Err(error) => return Err(error),
        }
        tree.insert_forced(&wish.forced);
    }
    Ok(())
}

fn draft(target: &Target, parts: &mut [Part<'_, '_>], pace: &mut Pace) -> Result<()> {
    let (mut drafters, mut plans, mut rounds) = (Vec::new(), Vec::new(), Vec::new());
    for Part { sequence, request, round, wish, .. } in parts {
        let Some(layout) = wish.as_ref().and_then(|wish| wish.layout.as_ref()) else { continue };
        let Some(drafter) = sequence.drafter() else { continue };
        let drawn = request.draws_proposals();
        let request = &mut **request;
        drafters.push((
            drafter,
            DraftContext { target, cache: &request.cache, tokens: &request.tokens },
        ));
        plans.push(Plan {
            drawn,
            position: request.position(),
            worth: layout.worth,
            confidence_threshold: request.options.confidence_threshold,
            paid: layout.paid,
            ..Plan::filling(&layout.shape, &layout.sampling, &mut request.draws)
        });
        rounds.push(round);
    }
    let mut proposals = Vec::with_capacity(plans.len());
    for ((drafter, context), plan) in drafters.into_iter().zip(&mut plans) {
        proposals.push(Proposal { drafter, context, plan, seconds: 0.0 });
    }
    let trees = propose_each(&mut proposals)?;
    let seconds: Vec<f64> = proposals.iter().map(|proposal| proposal.seconds).collect();
    drop(proposals);
    for (((plan, tree), seconds), round) in plans.into_iter().zip(trees).zip(seconds).zip(rounds) {
        let Plan { drafted, looked_up, .. } = plan;
        looked_up.into_iter().for_each(|outcome| pace.add_lookup(outcome));
        // Looking up takes no time to speak of.
        round.seconds.draft = if drafted == Drafted::Nothing { 0.0 } else { seconds };
        round.step = Step::Judge { tree, drafted };
    }
    Ok(())
}
