//! Communicators of GPUs that ranks joined, one for each purpose.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longdraft_kernels::collectives::DeviceRanks;

use crate::error::Result;

/// What GPUs are joined for. Each has a communicator of its own, for calls of two may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The target's weights.
    Weights,
    /// Layers that ranks share.
    Layers,
    /// Rows that ranks share.
    Rows,
    Gradients,
}

/// Who is joined, and for what; the same for all of these ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Members {
    pub(super) purpose: Purpose,
    /// Number of the first rank.
    pub(super) base: usize,
    pub(super) gpus: Vec<Option<[u8; 16]>>,
    pub(super) timeout: Duration,
}

/// Those that this process has joined so far. None is left without waiting for the others, so they stay: a later stage
/// goes on with those of the one before.
#[derive(Default)]
pub(super) struct Communicators(Mutex<Vec<(Members, Arc<dyn DeviceRanks>)>>);

impl Communicators {
    /// That of these members, which `join` makes the first time. All of them call it.
    pub(super) fn once(
        &self,
        members: Members,
        join: impl FnOnce() -> Result<Arc<dyn DeviceRanks>>,
    ) -> Result<Arc<dyn DeviceRanks>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, devices)) = all.iter().find(|(known, _)| *known == members) {
            return Ok(Arc::clone(devices));
        }
        let devices = join()?;
        all.push((members, Arc::clone(&devices)));
        Ok(devices)
    }
}
