//! GPUs whose limits their makers publish.

use serde::Serialize;

/// What a GPU has at most, as its data sheet says it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    /// As `--gpu` names it.
    pub name: &'static str,
    /// Floating-point operations a second of its tensor cores, in bf16, of matrices without structure.
    pub bf16: f64,
    /// The same in f32, without tensor cores.
    pub f32: f64,
    /// Bytes a second of its memory.
    pub bandwidth: f64,
    /// GiB of its memory, which data sheets write as GB.
    pub memory: f64,
    /// GiB of its memory that a rank finds free, about: the data sheet's less what driver and error correction take.
    pub free_gib: f64,
    /// 10⁹ bytes a second that it sends to GPUs of the same machine, and of other machines.
    pub links: [f64; 2],
    /// Where the figures stand.
    pub source: &'static str,
}

/// What NCCL takes for 18 links of NVLink 4, of 20.6 each (`SM90_NVLINK_BW` in its topo.h): an H100 or H200.
pub(crate) const NVLINK: f64 = 370.8;

/// InfiniBand of 400 Gbit/s with its headers, one card for each GPU.
pub(crate) const INFINIBAND: f64 = 48.5;

/// What NCCL takes for 12 links of NVLink 3 (`SM80_NVLINK_BW` in its topo.h), and for PCI Express 4.0 with 16 lanes.
const NVLINK_3: f64 = 240.0;
const PCI_4: f64 = 24.0;

/// InfiniBand of 200 Gbit/s with its headers.
const INFINIBAND_200: f64 = INFINIBAND / 2.0;

/// All that are known, the fastest first.
pub static GPUS: [Gpu; 4] = [
    Gpu {
        name: "h200",
        bf16: 989.5e12,
        f32: 67e12,
        bandwidth: 4.8e12,
        memory: 141.0,
        free_gib: 139.0,
        links: [NVLINK, INFINIBAND],
        source: "NVIDIA H200 Tensor Core GPU data sheet, SXM",
    },
    Gpu {
        name: "h100",
        bf16: 989.5e12,
        f32: 67e12,
        bandwidth: 3.35e12,
        memory: 80.0,
        free_gib: 78.0,
        links: [NVLINK, INFINIBAND],
        source: "NVIDIA H100 Tensor Core GPU data sheet, SXM",
    },
    Gpu {
        name: "a100",
        bf16: 312e12,
        f32: 19.5e12,
        bandwidth: 2.039e12,
        memory: 80.0,
        free_gib: 78.0,
        links: [NVLINK_3, INFINIBAND_200],
        source: "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM",
    },
    Gpu {
        name: "l40s",
        bf16: 362.05e12,
        f32: 91.6e12,
        bandwidth: 0.864e12,
        memory: 48.0,
        free_gib: 44.0,
        links: [PCI_4, INFINIBAND_200],
        source: "NVIDIA L40S GPU data sheet",
    },
];

impl Gpu {
    /// The one of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        GPUS.iter().find(|gpu| gpu.name == name)
    }
}
