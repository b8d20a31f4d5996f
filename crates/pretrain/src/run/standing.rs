//! How far a run on disk is.

use std::path::Path;

use longdraft_train::checkpoint::{LAST, PREVIOUS};

use super::identity::STEPS;
use crate::checkpoint::read_state;

/// How far the newest checkpoint of a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Steps that are done.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Whether nothing is left to do.
    pub is_finished: bool,
}

impl Standing {
    /// Of a run directory; nothing where no checkpoint of a language model is.
    pub fn of(run: &Path) -> Option<Self> {
        let checkpoints = run.join("checkpoints");
        let state =
            [LAST, PREVIOUS].iter().find_map(|name| read_state(&checkpoints.join(name)).ok())?;
        let (progress, identity) = (state.progress, state.identity);
        let steps = identity.value(STEPS).and_then(|steps| steps.parse().ok());
        let is_finished = progress.ended || steps.is_some_and(|steps| progress.step >= steps);
        Some(Self { step: progress.step, steps, is_finished })
    }
}
