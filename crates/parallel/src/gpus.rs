//! Whether ranks sum gradients on their GPUs, by NCCL.

use std::sync::Arc;

use candle_core::Device;
use longdraft_kernels::device::uuid_of;

use super::transport::GpuRanks;
use super::{ParallelConfig, Reduction, World};
use crate::error::Result;

/// Whether this build can sum gradients on GPUs.
pub const SUMS_BY_NCCL: bool = cfg!(feature = "nccl");

/// Where several ranks sum gradients.
pub(super) enum Gpus {
    /// On the GPUs.
    #[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "NCCL joins them"))]
    Joined(Arc<dyn GpuRanks>),
    /// In main memory, though there are GPUs: in words, why.
    Apart(String),
    /// In main memory, as it is meant to be.
    Unused,
}

/// Connects the ranks' GPUs where each has one of its own, the order of sums is free and every rank
/// updates everything; all call it with their devices.
///
/// # Errors
/// - the GPUs do not reach each other
pub(super) fn connect(
    world: &World,
    device: &Device,
    config: &ParallelConfig,
    is_sharded: bool,
) -> Result<Gpus> {
    if world.size() == 1 || config.reduction == Reduction::RankOrder {
        return Ok(Gpus::Unused);
    }
    // Launchers may show every rank its own GPU as the first.
    let gpus = world.gather_json(&uuid_of(device)?)?;
    if gpus.iter().all(Option::is_none) {
        return Ok(Gpus::Unused);
    }
    match obstacle(&gpus, is_sharded, config) {
        Some(obstacle) => Ok(Gpus::Apart(format!(
            "gradients are summed in main memory, which takes longer than on the GPUs: {obstacle}; \
             parallel.reduction=rank_order is meant to do so"
        ))),
        #[cfg(feature = "nccl")]
        None => join(world, device),
        // Which is an obstacle itself.
        #[cfg(not(feature = "nccl"))]
        None => Ok(Gpus::Unused),
    }
}

/// What keeps these GPUs, one a rank, from summing.
fn obstacle<T: PartialEq>(
    gpus: &[Option<T>],
    is_sharded: bool,
    config: &ParallelConfig,
) -> Option<String> {
    if let Some(rank) = gpus.iter().position(Option::is_none) {
        return Some(format!("rank {rank} has no NVIDIA GPU"));
    }
    let shared = (0..gpus.len()).find_map(|rank| {
        let other = gpus[..rank].iter().position(|other| *other == gpus[rank])?;
        Some(format!("ranks {other} and {rank} share a GPU; start one rank a GPU"))
    });
    if shared.is_some() {
        return shared;
    }
    if is_sharded {
        let zero = config.zero;
        return Some(if zero == 0 {
            "optimizer.matrices=muon spreads the update over the ranks".to_owned()
        } else {
            format!("parallel.zero={zero} spreads the update over the ranks; set parallel.zero=0")
        });
    }
    (!SUMS_BY_NCCL).then(|| "this build has no NCCL; build it with --features nccl".to_owned())
}

#[cfg(feature = "nccl")]
fn join(world: &World, device: &Device) -> Result<Gpus> {
    use longdraft_kernels::nccl::{Communicator, NAME_BYTES, new_name};

    let mut name = if world.is_first() { new_name()? } else { [0; NAME_BYTES] };
    world.broadcast(0, &mut name);
    let joined = world.watched(|| Communicator::join(device, world.rank(), world.size(), &name))?;
    Ok(Gpus::Joined(Arc::new(nccl::Nccl(joined))))
}

#[cfg(feature = "nccl")]
mod nccl {
    use std::time::Duration;

    use candle_core::{Device, Tensor};
    use longdraft_kernels::nccl::Communicator;

    use super::super::transport::GpuRanks;

    pub(super) struct Nccl(pub(super) Communicator);

    impl GpuRanks for Nccl {
        fn device(&self) -> Device {
            self.0.device()
        }

        fn sum(&self, tensors: &[Tensor], limit: Duration) -> candle_core::Result<Vec<Tensor>> {
            self.0.sum(tensors, limit)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::threads::in_threads;
    use super::*;

    #[test]
    fn gpus_that_do_not_sum_say_why() {
        let config = |zero: u8| ParallelConfig { zero, ..ParallelConfig::default() };
        let said = |gpus: &[Option<u8>], is_sharded: bool, zero: u8| {
            obstacle(gpus, is_sharded, &config(zero)).unwrap_or_default()
        };
        assert!(said(&[Some(1), None], false, 0).starts_with("rank 1 has no"));
        assert!(said(&[Some(1), Some(2), Some(1)], false, 0).starts_with("ranks 0 and 2 share"));
        assert!(said(&[Some(1), Some(2)], true, 1).contains("set parallel.zero=0"));
        assert!(said(&[Some(1), Some(2)], true, 0).contains("muon"));
        let built = said(&[Some(1), Some(2)], false, 0);
        assert_eq!(built.contains("--features nccl"), !cfg!(feature = "nccl"), "{built}");
    }

    #[test]
    fn ranks_without_gpus_sum_in_main_memory_without_a_word() {
        for reduction in [Reduction::Auto, Reduction::RankOrder, Reduction::Library] {
            let config = ParallelConfig { reduction, ..ParallelConfig::default() };
            for unused in in_threads(2, |world| {
                matches!(connect(&world, &Device::Cpu, &config, false), Ok(Gpus::Unused))
            }) {
                assert!(unused);
            }
        }
    }
}
