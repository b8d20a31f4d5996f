//! GPUs that ranks joined, once for each purpose.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longdraft_kernels::collectives::DeviceRanks;

use crate::error::Result;

/// What GPUs are joined for. Each has a joint of its own, for calls of two may overlap.
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

/// GPUs that are joined, the same for all of their ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Joint {
    pub(super) purpose: Purpose,
    /// Number of the first rank.
    pub(super) base: usize,
    pub(super) gpus: Vec<Option<[u8; 16]>>,
    pub(super) timeout: Duration,
}

/// GPUs that this process has joined so far. None leaves without waiting for the others, so they stay joined: a later
/// stage goes on with those of the one before.
#[derive(Default)]
pub(super) struct Joined(Mutex<Vec<(Joint, Arc<dyn DeviceRanks>)>>);

impl Joined {
    /// The devices of a joint, which `join` makes the first time. All of its ranks call it.
    pub(super) fn once(
        &self,
        joint: Joint,
        join: impl FnOnce() -> Result<Arc<dyn DeviceRanks>>,
    ) -> Result<Arc<dyn DeviceRanks>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, devices)) = all.iter().find(|(known, _)| *known == joint) {
            return Ok(Arc::clone(devices));
        }
        let devices = join()?;
        all.push((joint, Arc::clone(&devices)));
        Ok(devices)
    }
}
