//! Whether ranks exchange tensors on their GPUs, by NCCL.

use std::sync::Arc;

use candle_core::Device;
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::device::uuid_of;
use longdraft_models::target_model::Ranks;

use super::{ParallelConfig, Reduction, World};
use crate::error::Result;

/// Whether this build can exchange tensors between GPUs.
pub const SUMS_BY_NCCL: bool = cfg!(feature = "nccl");

/// What NCCL waits longer than the ranks' transport, which names the rank that does not answer.
#[cfg(feature = "nccl")]
const LATER: std::time::Duration = std::time::Duration::from_secs(30);

/// Where several ranks exchange tensors.
pub(super) enum Gpus {
    /// On the GPUs.
    #[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "NCCL joins them"))]
    Joined(Arc<dyn DeviceRanks>),
    /// In main memory, though there are GPUs: in words, why.
    Apart(String),
    /// In main memory, as it is meant to be.
    Unused,
}

/// The ranks that hold a target together.
#[derive(Debug)]
pub struct TargetRanks {
    /// Those that it is spread over (ZeRO-3), if it is.
    pub spread: Option<Arc<dyn Ranks>>,
    /// Those that share its layers (tensor parallel), if there are several.
    pub tensor: Option<Arc<dyn Ranks>>,
    /// What keeps them from their GPUs, if there are some.
    pub remark: Option<String>,
}

impl ParallelConfig {
    /// The ranks that hold a target with this one. Where each has a GPU of its own they exchange its weights and
    /// states there. All ranks call it, with their devices.
    ///
    /// # Errors
    /// - the ranks do not divide into groups, or the GPUs do not reach each other
    pub fn target_ranks(&self, world: &World, device: &Device) -> Result<TargetRanks> {
        let (mut spread, mut tensor, mut remark) = (None, None, None);
        if self.spreads_weights(world) {
            // Whoever gathers layers, they have the same bits.
            let (ranks, apart) = exchanging(world, device, self)?;
            (spread, remark) = (Some(ranks.as_ranks()), apart);
        }
        if let Some(group) = self.tensor_group(world)? {
            let (ranks, apart) = summing(&group, device, self)?;
            (tensor, remark) = (Some(ranks.as_ranks()), remark.or(apart));
        }
        Ok(TargetRanks { spread, tensor, remark })
    }
}

/// The same ranks, which exchange tensors on their GPUs where each has one of its own; else, if there are GPUs, with a
/// remark on what keeps them from it. All call it, with their devices.
///
/// # Errors
/// - the GPUs do not reach each other
fn exchanging(
    ranks: &World,
    device: &Device,
    config: &ParallelConfig,
) -> Result<(World, Option<String>)> {
    Ok(match meet(ranks, device, config, None)? {
        Gpus::Joined(gpus) => (ranks.over_gpus(gpus), None),
        Gpus::Unused => (ranks.clone(), None),
        Gpus::Apart(obstacle) => {
            let remark = format!(
                "what ranks exchange of the target goes through main memory, which takes longer than between \
                 GPUs: {obstacle}"
            );
            (ranks.clone(), Some(remark))
        }
    })
}

/// The same, unless sums are to run in the order of the ranks.
///
/// # Errors
/// - as [`exchanging`]
pub(super) fn summing(
    ranks: &World,
    device: &Device,
    config: &ParallelConfig,
) -> Result<(World, Option<String>)> {
    if config.reduction == Reduction::RankOrder {
        return Ok((ranks.clone(), None));
    }
    exchanging(ranks, device, config)
}

/// Connects the ranks' GPUs for gradients, where each has one of its own, the order of sums is free and every rank
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
    if config.reduction == Reduction::RankOrder {
        return Ok(Gpus::Unused);
    }
    let zero = config.zero;
    let spread = is_sharded.then(|| {
        if zero == 0 {
            "optimizer.matrices=muon spreads the update over the ranks".to_owned()
        } else {
            format!("parallel.zero={zero} spreads the update over the ranks; set parallel.zero=0")
        }
    });
    Ok(match meet(world, device, config, spread)? {
        Gpus::Apart(obstacle) => Gpus::Apart(format!(
            "gradients are summed in main memory, which takes longer than on the GPUs: {obstacle}; \
             parallel.reduction=rank_order is meant to do so"
        )),
        other => other,
    })
}

/// Connects the GPUs of ranks that have one each, unless something else is against it; all call it with their devices.
fn meet(
    ranks: &World,
    device: &Device,
    config: &ParallelConfig,
    against: Option<String>,
) -> Result<Gpus> {
    if ranks.size() == 1 {
        return Ok(Gpus::Unused);
    }
    // Launchers may show every rank its own GPU as the first.
    let gpus = ranks.gather_json(&uuid_of(device)?)?;
    if gpus.iter().all(Option::is_none) {
        return Ok(Gpus::Unused);
    }
    match obstacle(&gpus, against) {
        Some(obstacle) => Ok(Gpus::Apart(obstacle)),
        None => join(ranks, device, config),
    }
}

/// What keeps these GPUs, one a rank, from exchanging tensors.
fn obstacle<T: PartialEq>(gpus: &[Option<T>], against: Option<String>) -> Option<String> {
    if let Some(rank) = gpus.iter().position(Option::is_none) {
        return Some(format!("rank {rank} has no NVIDIA GPU"));
    }
    let shared = (0..gpus.len()).find_map(|rank| {
        let other = gpus[..rank].iter().position(|other| *other == gpus[rank])?;
        Some(format!("ranks {other} and {rank} share a GPU; start one rank a GPU"))
    });
    let built = || "this build has no NCCL; build it with --features nccl".to_owned();
    shared.or(against).or_else(|| (!SUMS_BY_NCCL).then(built))
}

#[cfg(feature = "nccl")]
fn join(ranks: &World, device: &Device, config: &ParallelConfig) -> Result<Gpus> {
    use longdraft_kernels::nccl::{Communicator, NAME_BYTES, new_name};

    let mut name = if ranks.is_first() { new_name()? } else { [0; NAME_BYTES] };
    ranks.broadcast(0, &mut name);
    let (place, limit) = ((ranks.rank(), ranks.size()), config.timeout() + LATER);
    let joined = ranks.watched(|| Communicator::join(device, place, &name, limit))?;
    Ok(Gpus::Joined(Arc::new(joined)))
}

/// Not asked for: that the build has no NCCL is an obstacle itself.
#[cfg(not(feature = "nccl"))]
fn join(_: &World, _: &Device, _: &ParallelConfig) -> Result<Gpus> {
    let problem = "this build has no NCCL".to_owned();
    Err(crate::error::ParallelError::Unsupported { problem })
}

#[cfg(test)]
mod tests {
    use super::super::threads::in_threads;
    use super::*;

    #[test]
    fn gpus_that_do_not_exchange_say_why() {
        let said = |gpus: &[Option<u8>], against: Option<&str>| {
            obstacle(gpus, against.map(str::to_owned)).unwrap_or_default()
        };
        assert!(said(&[Some(1), None], None).starts_with("rank 1 has no"));
        assert!(said(&[Some(1), Some(2), Some(1)], None).starts_with("ranks 0 and 2 share"));
        assert_eq!(said(&[Some(1), Some(2)], Some("ZeRO")), "ZeRO");
        let built = said(&[Some(1), Some(2)], None);
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

    #[test]
    fn a_target_is_held_by_those_who_share_it() {
        let held = |config: ParallelConfig, ranks: usize| {
            in_threads(ranks, |world| {
                let ranks = config.target_ranks(&world, &Device::Cpu).expect("ranks");
                let size = |ranks: Option<Arc<dyn Ranks>>| ranks.map(|ranks| ranks.size());
                assert!(ranks.remark.is_none());
                (size(ranks.spread), size(ranks.tensor))
            })
        };
        assert_eq!(held(ParallelConfig::default(), 4), [(None, None); 4]);
        let spread = ParallelConfig { zero: 3, ..ParallelConfig::default() };
        assert_eq!(held(spread.clone(), 4), [(Some(4), None); 4]);
        assert_eq!(held(spread, 1), [(None, None)]);
        let tensor = ParallelConfig { tensor: 2, ..ParallelConfig::default() };
        assert_eq!(held(tensor, 4), [(None, Some(2)); 4]);
    }
}
