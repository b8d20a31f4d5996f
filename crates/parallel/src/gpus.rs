//! Whether ranks exchange tensors on their GPUs, by NCCL.

use std::sync::Arc;

use candle_core::Device;
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::device::uuid_of;
use longdraft_models::target_model::Ranks;

use super::communicators::{Members, Purpose};
use super::{ParallelConfig, Reduction, World};
use crate::error::Result;

/// Whether this build can exchange tensors between GPUs.
pub const SUMS_BY_NCCL: bool = cfg!(feature = "nccl");

/// What NCCL waits longer than the ranks' transport, which names the rank that does not answer.
#[cfg(feature = "nccl")]
const LATER: std::time::Duration = std::time::Duration::from_secs(30);

/// What gives each rank a GPU of its own.
const APART: &str = "start one rank a GPU with `device: auto`, and set LOCAL_RANK where host names \
                     do not tell which ranks are on one machine";

/// Where several ranks exchange tensors.
enum Gpus {
    /// On the GPUs.
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
    /// What keeps some of them from their GPUs, if there are some; all ranks have the same.
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
            let (ranks, apart) = exchanging(world, Purpose::Weights, device, self)?;
            (spread, remark) = (Some(ranks.as_ranks()), apart);
        }
        if let Some(group) = self.tensor_group(world)? {
            let (ranks, apart) = summing(&group, Purpose::Layers, device, self)?;
            tensor = Some(ranks.as_ranks());
            remark = remark.or(remark_of_any(world, &group, apart)?);
        }
        Ok(TargetRanks { spread, tensor, remark })
    }
}

/// The same ranks, which exchange tensors on their GPUs where each has one of its own; else, if there are GPUs, with a
/// remark on what keeps them from it. All call it, with their devices.
/// It fails where the GPUs do not reach each other.
fn exchanging(
    ranks: &World,
    purpose: Purpose,
    device: &Device,
    config: &ParallelConfig,
) -> Result<(World, Option<String>)> {
    Ok(match meet(ranks, purpose, (device, config))? {
        Gpus::Joined(gpus) => (ranks.over_gpus(gpus), None),
        Gpus::Unused => (ranks.clone(), None),
        Gpus::Apart(obstacle) => (ranks.clone(), Some(remark_on(&obstacle, purpose))),
    })
}

fn remark_on(obstacle: &str, purpose: Purpose) -> String {
    match purpose {
        Purpose::Gradients => format!(
            "gradients are summed in main memory, which takes longer than on the GPUs: {obstacle}; \
             parallel.reduction=rank_order is meant to do so"
        ),
        Purpose::Weights | Purpose::Layers | Purpose::Rows => format!(
            "what ranks exchange of the target goes through main memory, which takes longer than between \
             GPUs: {obstacle}"
        ),
    }
}

/// The same, unless sums are to run in the order of the ranks. It fails as [`exchanging`] does.
pub(super) fn summing(
    ranks: &World,
    purpose: Purpose,
    device: &Device,
    config: &ParallelConfig,
) -> Result<(World, Option<String>)> {
    if config.reduction == Reduction::RankOrder {
        return Ok((ranks.clone(), None));
    }
    exchanging(ranks, purpose, device, config)
}

/// What the first group that has a remark says; each rank has that of its own `group`. All call it.
/// It fails as [`World::gather_json`] does.
pub(super) fn remark_of_any(
    world: &World,
    group: &World,
    own: Option<String>,
) -> Result<Option<String>> {
    // One rank alone exchanges nothing, and a group of all knows it.
    if group.size() == 1 || group.size() == world.size() {
        return Ok(own);
    }
    Ok(world.gather_json(&own)?.into_iter().flatten().next())
}

/// Connects the GPUs of ranks that have one each; all call it with their devices.
fn meet(
    ranks: &World,
    purpose: Purpose,
    (device, config): (&Device, &ParallelConfig),
) -> Result<Gpus> {
    if ranks.size() == 1 {
        return Ok(Gpus::Unused);
    }
    // Launchers may show every rank its own GPU as the first.
    let gpus = ranks.gather_json(&uuid_of(device)?)?;
    if gpus.iter().all(Option::is_none) {
        return Ok(Gpus::Unused);
    }
    let base = ranks.base();
    if let Some(obstacle) = obstacle(&gpus, base) {
        return Ok(Gpus::Apart(obstacle));
    }
    let members = Members { purpose, base, gpus, timeout: config.timeout() };
    Ok(Gpus::Joined(ranks.communicators().once(members, || join(ranks, device, config))?))
}

/// What keeps these GPUs, one a rank from `base` on, from exchanging tensors.
fn obstacle<T: PartialEq>(gpus: &[Option<T>], base: usize) -> Option<String> {
    if let Some(rank) = gpus.iter().position(Option::is_none) {
        return Some(format!("rank {} has no NVIDIA GPU", base + rank));
    }
    let shared = (0..gpus.len()).find_map(|rank| {
        let other = gpus[..rank].iter().position(|other| *other == gpus[rank])?;
        let (other, rank) = (base + other, base + rank);
        Some(format!("ranks {other} and {rank} share a GPU; {APART}"))
    });
    let built = || "this build has no NCCL; build it with --features nccl".to_owned();
    shared.or_else(|| (!SUMS_BY_NCCL).then(built))
}

#[cfg(feature = "nccl")]
fn join(ranks: &World, device: &Device, config: &ParallelConfig) -> Result<Arc<dyn DeviceRanks>> {
    use longdraft_kernels::nccl::{Communicator, NAME_BYTES, new_name};

    let mut name = if ranks.is_first() { new_name()? } else { [0; NAME_BYTES] };
    ranks.broadcast(0, &mut name);
    let (place, limit) = ((ranks.rank(), ranks.size()), config.timeout() + LATER);
    let joined = ranks.meeting(|| Communicator::join(device, place, &name, limit))?;
    Ok(Arc::new(joined))
}

/// Not asked for: that the build has no NCCL is an obstacle itself.
#[cfg(not(feature = "nccl"))]
fn join(_: &World, _: &Device, _: &ParallelConfig) -> Result<Arc<dyn DeviceRanks>> {
    let problem = "this build has no NCCL".to_owned();
    Err(crate::error::ParallelError::Unsupported { problem })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::super::threads::{gpus_of, in_threads};
    use super::*;

    #[test]
    fn gpus_that_do_not_exchange_say_why() {
        let said = |gpus: &[Option<u8>]| obstacle(gpus, 0).unwrap_or_default();
        assert!(said(&[Some(1), None]).starts_with("rank 1 has no"));
        assert!(said(&[Some(1), Some(2), Some(1)]).starts_with("ranks 0 and 2 share"));
        let built = said(&[Some(1), Some(2)]);
        assert_eq!(built.contains("--features nccl"), !cfg!(feature = "nccl"), "{built}");
    }

    #[test]
    fn gpus_join_once_for_each_of_their_purposes() {
        in_threads(2, |world| {
            let stand_in = gpus_of(&world);
            let made = Cell::new(0);
            let join = |world: &World, purpose, timeout| {
                let gpus = vec![Some([1; 16]), Some([2; 16])];
                let members = Members { purpose, base: world.base(), gpus, timeout };
                let join = || {
                    made.set(made.get() + 1);
                    Ok(Arc::clone(&stand_in))
                };
                world.communicators().once(members, join).expect("joined");
                made.get()
            };
            let (short, long) = (Duration::from_secs(1), Duration::from_secs(2));
            assert_eq!(join(&world, Purpose::Gradients, short), 1);
            assert_eq!(join(&world, Purpose::Layers, short), 2);
            // A later stage, of which one has another limit, and a group that is the same ranks.
            assert_eq!(join(&world.clone(), Purpose::Gradients, short), 2);
            assert_eq!(join(&world.group(0..2), Purpose::Layers, short), 2);
            assert_eq!(join(&world, Purpose::Layers, long), 3);
        });
    }

    #[test]
    fn what_keeps_a_later_group_from_its_gpus_reaches_all_ranks() {
        let remarks = in_threads(6, |world| {
            let first = world.rank() / 2 * 2;
            let group = world.group(first..first + 2);
            let gpus = [Some(1), Some(if first == 4 { 1 } else { 2 })];
            let own = obstacle(&gpus, group.base()).filter(|_| first == 4);
            remark_of_any(&world, &group, own).expect("gathered").expect("a remark")
        });
        for remark in remarks {
            assert_eq!(remark, format!("ranks 4 and 5 share a GPU; {APART}"));
        }
    }

    #[test]
    fn ranks_without_gpus_sum_in_main_memory_without_a_word() {
        for reduction in [Reduction::Auto, Reduction::RankOrder, Reduction::Library] {
            let config = ParallelConfig { reduction, ..ParallelConfig::default() };
            in_threads(2, |world| {
                let summing = summing(&world, Purpose::Gradients, &Device::Cpu, &config);
                let (ranks, remark) = summing.expect("ranks");
                assert!(ranks.gpus().is_none() && remark.is_none());
            });
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
