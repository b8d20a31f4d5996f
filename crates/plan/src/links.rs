//! Seconds of collectives, from a model of what connects the ranks.
//!
//! ```text
//! seconds = calls · (start + steps within a machine · w + steps between machines · b) + bytes / bandwidth
//! bandwidth = that within a machine; of ranks of several machines at most what those of one machine send together
//! ```
//!
//! Blocks travel in a ring, so a collective of `N` ranks on `M` machines takes `N − M` steps within machines and `M − 1`
//! between them. Ranks of a group are neighbours, and a machine's ranks too. Whoever takes part has links of its own: a
//! GPU its NVLink and its network card. These are estimates: nobody else uses the links, and no rank is late.

use longdraft_parallel::{Reduction, SUMS_BY_NCCL};
use serde::Serialize;

use crate::communication::{Sent, Way};
use crate::machine::{Gpu, INFINIBAND, NVLINK};

/// GPUs of a machine.
const GPUS: u64 = 8;

/// A 10 Gbit/s network.
const NETWORK: f64 = 1.25;

/// Seconds of a collective of NCCL by rings before it moves anything, and of a step within and between machines: its own
/// model's (`baseLatencies`, `hwLatencies`, protocol Simple).
const NCCL_SECONDS: [f64; 3] = [8.4e-6, 3.4e-6, 14.0e-6];

/// What connects ranks; bandwidths in 10⁹ bytes a second that a rank sends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Links {
    /// Ranks of a machine.
    pub machine_ranks: u64,
    /// To ranks of the same machine.
    pub within: f64,
    /// To ranks of other machines.
    pub between: f64,
    /// Through main memory, where ranks exchange on their GPUs what is not small.
    pub host: f64,
    /// Whether GPUs exchange by NCCL, whose starts and steps are counted.
    pub by_nccl: bool,
}

impl Links {
    /// GPUs that exchange by NCCL: eight a machine by NVLink, machines by InfiniBand, small numbers by a 10 Gbit/s network.
    fn of_gpus() -> Self {
        Self {
            machine_ranks: GPUS,
            within: NVLINK,
            between: INFINIBAND,
            host: NETWORK,
            by_nccl: true,
        }
    }

    /// Ranks that exchange through main memory and a 10 Gbit/s network, wherever they are; latencies are not counted.
    fn of_hosts() -> Self {
        Self { machine_ranks: 1, within: NETWORK, between: NETWORK, host: NETWORK, by_nccl: false }
    }

    /// Those of ranks that have a GPU each or none, in this build or in one with NCCL where that is asked for.
    pub fn of(on_gpus: bool, reduction: Reduction) -> Self {
        let has_nccl = SUMS_BY_NCCL || reduction == Reduction::Library;
        let by_nccl = on_gpus && has_nccl && reduction != Reduction::RankOrder;
        if by_nccl { Self::of_gpus() } else { Self::of_hosts() }
    }

    /// The same of these GPUs, where they exchange by NCCL.
    #[must_use]
    pub fn on(self, gpu: &Gpu) -> Self {
        let [within, between] = gpu.links;
        if self.by_nccl { Self { within, between, ..self } } else { self }
    }

    /// The same, where it is known better: ranks of a machine, bandwidth within it and between machines.
    #[must_use]
    pub fn given(
        self,
        machine_ranks: Option<u64>,
        within: Option<f64>,
        between: Option<f64>,
    ) -> Self {
        let within = within.unwrap_or(self.within);
        // Without GPUs there is one network, unless two are told apart.
        let otherwise = if self.by_nccl { self.between } else { within };
        Self {
            machine_ranks: machine_ranks.unwrap_or(self.machine_ranks).max(1),
            within,
            between: between.unwrap_or(otherwise),
            host: if self.by_nccl { self.host } else { within },
            ..self
        }
    }

    /// 10⁹ bytes a second that each of some neighbouring ranks sends in a collective.
    pub fn bandwidth(&self, ranks: u64) -> f64 {
        match self.ranks_together(ranks) {
            together if together == ranks => self.within,
            together => self.within.min(self.between * together as f64),
        }
    }

    /// Seconds of all collectives of a kind in a step.
    pub fn seconds(&self, sent: &Sent) -> f64 {
        let (bytes, ranks) = (sent.bytes as f64 / 1e9, sent.ranks.max(1));
        if sent.way == Way::Host && self.by_nccl {
            return bytes / self.host;
        }
        if !self.by_nccl {
            return bytes / self.bandwidth(ranks);
        }
        let machines = ranks.div_ceil(self.ranks_together(ranks));
        let [start, within, between] = NCCL_SECONDS;
        let steps = (ranks - machines) as f64 * within + (machines - 1) as f64 * between;
        sent.calls as f64 * (start + steps) + bytes / self.bandwidth(ranks)
    }

    /// How many of a group of neighbours a machine has, wherever the group begins.
    fn ranks_together(&self, ranks: u64) -> u64 {
        let (mut a, mut b) = (self.machine_ranks.max(1), ranks.max(1));
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(bytes: u64, ranks: u64) -> Sent {
        Sent { name: "gradients", bytes, calls: 2, ranks, way: Way::Devices, is_beside: false }
    }

    #[track_caller]
    fn assert_close(found: f64, wanted: f64) {
        assert!((found - wanted).abs() < 1e-9, "{found} in place of {wanted}");
    }

    #[test]
    fn a_group_of_one_machine_uses_its_links_and_a_wider_one_the_network() {
        let gpus = Links::of_gpus();
        for ranks in [1, 2, 4, 8] {
            assert_close(gpus.bandwidth(ranks), NVLINK);
        }
        // All eight cards of a machine together send more than a GPU by NVLink.
        assert_close(gpus.bandwidth(64), NVLINK);
        let slower = gpus.given(None, None, Some(12.0));
        for (ranks, wanted) in [(8, NVLINK), (16, 96.0), (64, 96.0)] {
            assert_close(slower.bandwidth(ranks), wanted);
        }
        assert_close(gpus.given(Some(1), None, None).bandwidth(8), INFINIBAND);
        // Twelve over machines of eight: somewhere four stand alone.
        assert_close(slower.bandwidth(12), 48.0);
    }

    #[test]
    fn seconds_are_those_of_the_bytes_and_of_the_steps() {
        let gpus = Links::of_gpus();
        let of = |ranks| gpus.seconds(&sent(3_708_000_000, ranks));
        assert_close(of(8), 0.01 + 2.0 * (8.4e-6 + 7.0 * 3.4e-6));
        assert_close(of(64), 0.01 + 2.0 * (8.4e-6 + 56.0 * 3.4e-6 + 7.0 * 14.0e-6));
        assert_close(gpus.seconds(&Sent { way: Way::Host, ..sent(1_250_000_000, 8) }), 1.0);
        // One rank sends nothing to itself.
        assert_close(gpus.seconds(&Sent { calls: 0, ..sent(0, 1) }), 0.0);
    }

    #[test]
    fn hosts_have_one_network_unless_two_are_told_apart() {
        let hosts = Links::of(false, Reduction::Auto);
        assert_close(hosts.seconds(&sent(1_250_000_000, 4)), 1.0);
        let faster = hosts.given(None, Some(100.0), None);
        assert_close(faster.bandwidth(8), 100.0);
        assert_close(faster.host, 100.0);
        let apart = hosts.given(Some(4), Some(100.0), Some(10.0));
        assert_close(apart.bandwidth(4), 100.0);
        assert_close(apart.bandwidth(8), 40.0);
        // Sums in the order of the ranks go through main memory, whatever the ranks have.
        assert!(!Links::of(true, Reduction::RankOrder).by_nccl);
        assert!(Links::of(true, Reduction::Library).by_nccl);
    }
}
