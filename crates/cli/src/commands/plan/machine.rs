//! The machine that a plan is held against: its ranks, memory and links.

use candle_core::Device;
use longdraft_kernels::dispatch::has_kernels;
use longdraft_models::device::{free_memory, total_memory};
use longdraft_models::{DeviceChoice, Precision, StepProducts, TargetConfig};
use longdraft_parallel::Reduction;
use longdraft_plan::{Estimate, Gpu, Layout, Links, Pace, PartTime, Speed};
use longdraft_train::config::TrainConfig;

use crate::cli::PlanArguments;
use crate::doctor::available_memory;
use crate::failure::{Failure, Result};
use crate::threads::cores;

/// What a plan is held against.
pub(super) struct Machine {
    pub(super) layout: Layout,
    /// Free bytes of a rank.
    pub(super) free: Option<u64>,
    /// What connects the ranks.
    pub(super) links: Links,
    /// Unknown of a GPU unless it is given.
    pub(super) speed: Option<Speed>,
    /// Whether the operations a second were measured here.
    pub(super) measured: bool,
    /// Tokens of a document, if a row holds several.
    pub(super) document_tokens: Option<u64>,
    /// Whether our kernels run on its GPU.
    pub(super) has_nvidia_kernels: bool,
}

impl Machine {
    pub(super) fn of(
        arguments: &PlanArguments,
        (wanted, started): (Option<usize>, usize),
        (device, precision, products, reduction): (
            DeviceChoice,
            Precision,
            StepProducts,
            Reduction,
        ),
    ) -> Self {
        let ranks = wanted.unwrap_or(started);
        let gpu = arguments.gpu;
        let device = if gpu.is_some() { DeviceChoice::Cuda(0) } else { device };
        // A GPU that is not here can be planned for.
        let opened = if gpu.is_some() { None } else { device.open(0).ok() };
        let named = matches!(device, DeviceChoice::Cuda(_) | DeviceChoice::Metal(_));
        let found = opened.as_ref().is_some_and(|device| !device.is_cpu());
        let on_gpu = arguments.table || named || found;
        // One that is not here is as new as the kernels ask for.
        let is_metal =
            matches!(device, DeviceChoice::Metal(_)) || matches!(opened, Some(Device::Metal(_)));
        let has_nvidia_kernels = !is_metal && has_kernels(opened.as_ref().unwrap_or(&Device::Cpu));
        let here = ranks_here(arguments.machine_ranks, ranks);
        let threads = if on_gpu { 0 } else { threads_of_each(here, started) };
        let given = arguments.memory.or(gpu.map(|gpu| gpu.free_gib));
        let bytes = |gib: f64| (gib * (1_u64 << 30) as f64) as u64;
        let given = given.map(bytes);
        let gpu_memory = match (gpu, &opened) {
            (Some(gpu), _) => Some(bytes(gpu.memory)),
            (None, Some(device)) if found => total_memory(device),
            _ => given,
        };
        let free = given.or_else(|| match opened {
            Some(device) if on_gpu => free_memory(&device),
            _ if on_gpu => None,
            _ => available_memory().map(|free| free_of_each(free, here)),
        });
        let PlanArguments { machine_ranks, bandwidth, network_bandwidth, .. } = *arguments;
        let links = Links::of(on_gpu, reduction);
        let links = gpu.map_or(links, |gpu| links.on(gpu));
        // Ranks that share this machine send within it.
        let of_machine = machine_ranks.or((!on_gpu).then_some(here as u64));
        let links = links.given(of_machine, bandwidth, network_bandwidth);
        let measured = arguments.gflops.is_none() && !on_gpu;
        // Of the threads of this process, of which a rank may have fewer.
        let share = threads as f64 / rayon::current_num_threads() as f64;
        let pace = match (arguments.gflops, gpu) {
            (Some(gflops), _) => Some(Pace::Gflops(gflops)),
            (None, Some(gpu)) => Some(Pace::Gpu(gpu)),
            (None, None) if on_gpu => None,
            (None, None) => Some(Pace::Gflops(share * Speed::measured_gflops(products))),
        };
        let target_value_bytes =
            arguments.target_bytes.map_or(precision.frozen_bytes(on_gpu), usize::from);
        let has_nvidia_kernels = on_gpu && has_nvidia_kernels;
        let half_states = has_nvidia_kernels && target_value_bytes == 2;
        Self {
            layout: Layout {
                target_value_bytes,
                half_states,
                gpu_memory: gpu_memory.filter(|_| has_nvidia_kernels),
                ..Layout::of(ranks, threads)
            },
            free,
            links,
            speed: pace.map(|pace| Speed { pace, links }),
            measured,
            document_tokens: arguments.document_tokens,
            has_nvidia_kernels,
        }
    }

    /// 10⁹ operations a second, where these tell the time.
    pub(super) fn gflops(&self) -> Option<f64> {
        match self.speed?.pace {
            Pace::Gflops(gflops) => Some(gflops),
            Pace::Gpu(_) => None,
        }
    }

    /// The GPU whose roofline tells the time.
    pub(super) fn gpu(&self) -> Option<&'static Gpu> {
        match self.speed?.pace {
            Pace::Gflops(_) => None,
            Pace::Gpu(gpu) => Some(gpu),
        }
    }

    /// The parts of a step, where its time comes from a roofline.
    pub(super) fn parts(&self, estimate: &Estimate) -> Option<Vec<PartTime>> {
        self.gpu().map(|gpu| estimate.parts(gpu))
    }

    pub(super) fn layout_of(&self, config: &TrainConfig, target: &TargetConfig) -> Result<Layout> {
        let ranks = self.layout.ranks;
        config.check_layers_of(ranks, target)?;
        let (sequence, tensor) = (config.parallel.sequence, config.parallel.tensor);
        if ranks.is_multiple_of(sequence.max(1)) {
            return Ok(Layout { sequence, tensor, ..self.layout });
        }
        Err(Failure::usage(format!(
            "{ranks} ranks do not make groups of `parallel.sequence` = {sequence}"
        ))
        .hint("give --ranks a multiple of it"))
    }
}

/// Ranks of a plan that share this machine: as `--ranks` would start them, all of them, unless it is said otherwise.
fn ranks_here(machine_ranks: Option<u64>, ranks: usize) -> usize {
    machine_ranks.map_or(ranks, |of_machine| ranks.min(of_machine as usize)).max(1)
}

/// Bytes of each of so many ranks on this machine.
fn free_of_each(free: u64, here: usize) -> u64 {
    free / here.max(1) as u64
}

/// Threads of each of so many ranks on this machine; ranks that a launcher started have theirs already.
fn threads_of_each(here: usize, started: usize) -> usize {
    let threads = rayon::current_num_threads();
    if started > 1 { threads } else { threads.min((cores() / here).max(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_this_machine_unless_it_is_said_otherwise() {
        let here = [(None, 4), (Some(1), 4), (Some(8), 4), (None, 0)];
        assert_eq!(here.map(|(given, ranks)| ranks_here(given, ranks)), [4, 1, 4, 1]);
        assert_eq!((free_of_each(100, 4), free_of_each(100, 1)), (25, 100));
        assert_eq!(threads_of_each(usize::MAX, 1), 1);
        assert_eq!(threads_of_each(usize::MAX, 2), rayon::current_num_threads());
    }
}
