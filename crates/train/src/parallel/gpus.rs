//! Sums on the GPUs of several ranks, one each, by NCCL.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::nccl::{Communicator, NAME_BYTES, new_name};

use super::World;
use super::transport::GpuRanks;
use crate::error::Result;

/// Connects the ranks' GPUs; all call it.
///
/// # Errors
/// - two ranks have the same GPU, or they do not reach each other
pub(super) fn join(world: &World, device: &Device) -> Result<Arc<dyn GpuRanks>> {
    let mut name = if world.is_first() { new_name()? } else { [0; NAME_BYTES] };
    world.broadcast(0, &mut name);
    Ok(Arc::new(Nccl(Communicator::join(device, world.rank(), world.size(), &name)?)))
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
