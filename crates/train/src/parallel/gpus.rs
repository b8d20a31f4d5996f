//! Sums on the GPUs of several ranks, one each, by NCCL.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::nccl::{Communicator, NAME_BYTES, new_name, uuid_of};

use super::World;
use super::transport::GpuRanks;
use crate::error::Result;

/// Connects the ranks' GPUs, if several ranks have one each; all call it.
///
/// # Errors
/// - the GPUs do not reach each other
pub(super) fn join(world: &World, device: &Device) -> Result<Option<Arc<dyn GpuRanks>>> {
    // Launchers may show every rank its own GPU as the first.
    let gpus = world.gather_json(&uuid_of(device)?)?;
    let is_own = |rank: usize| gpus[rank].is_some() && !gpus[..rank].contains(&gpus[rank]);
    if world.size() == 1 || !(0..world.size()).all(is_own) {
        return Ok(None);
    }
    let mut name = if world.is_first() { new_name()? } else { [0; NAME_BYTES] };
    world.broadcast(0, &mut name);
    Ok(Some(Arc::new(Nccl(Communicator::join(device, world.rank(), world.size(), &name)?))))
}

struct Nccl(Communicator);

impl GpuRanks for Nccl {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn sum(&self, tensors: &[Tensor]) -> candle_core::Result<Vec<Tensor>> {
        self.0.sum(tensors)
    }
}
