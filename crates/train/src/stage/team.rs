//! Ranks that share the target's layers capture as one: the first of them takes shards and writes them,
//! the others run its passes with it. Without such ranks a team is one rank, which tells nobody.

use std::cell::Cell;

use longdraft_features::Part;
use longdraft_features::store::Recipe;
use longdraft_models::target_model::Target;
use longdraft_parallel::World;

use super::Observer;
use crate::error::Result;

/// What the first rank of a team does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It waits for shards of other teams.
    Wait,
    /// It runs the target over a row of this part.
    Pass(Part),
    /// It is done.
    End,
}

impl Next {
    const ALL: [Self; 4] =
        [Self::Wait, Self::Pass(Part::Train), Self::Pass(Part::HeldOut), Self::End];

    fn code(self) -> u64 {
        Self::ALL.iter().position(|next| *next == self).unwrap_or_default() as u64
    }

    /// What no rank says ends the team, too.
    fn of(code: u64) -> Self {
        Self::ALL.get(code as usize).copied().unwrap_or(Self::End)
    }
}

/// The ranks that capture together.
pub(super) struct Team {
    ranks: World,
    /// Whether one of the others was asked to stop.
    stopped: Cell<bool>,
}

impl Team {
    /// These ranks, or this one alone.
    pub(super) fn new(ranks: Option<World>) -> Self {
        Self { ranks: ranks.unwrap_or_else(World::single), stopped: Cell::default() }
    }

    /// Whether this rank takes shards.
    pub(super) fn leads(&self) -> bool {
        self.ranks.is_first()
    }

    /// Ranks.
    pub(super) fn size(&self) -> usize {
        self.ranks.size()
    }

    /// Says what this rank, the first, does next, and hears whether another one was asked to stop.
    pub(super) fn tell(&self, next: Next) {
        self.exchange(next, false);
    }

    /// Whether this rank or another of the team was asked to stop.
    pub(super) fn should_stop(&self, observer: &dyn Observer) -> bool {
        observer.should_stop() || self.stopped.get()
    }

    /// Runs the first rank's passes until it is done. It fails where the target cannot run.
    pub(super) fn follow(
        &self,
        target: &Target,
        recipe: &Recipe,
        observer: &dyn Observer,
    ) -> Result<()> {
        loop {
            match self.exchange(Next::Wait, observer.should_stop()) {
                Next::Wait => {}
                Next::Pass(part) => target.join_forward(&recipe.part(part).contents.taps())?,
                Next::End => return Ok(()),
            }
        }
    }

    /// Everybody's wish to stop; returns what the first rank does next.
    fn exchange(&self, own: Next, stop: bool) -> Next {
        if self.size() == 1 {
            return own;
        }
        let all = self.ranks.all_gather(&[own.code(), u64::from(stop)]);
        let stopped = all.chunks(2).any(|said| said[1] > 0);
        self.stopped.set(self.stopped.get() || stopped);
        Next::of(all[0])
    }
}
