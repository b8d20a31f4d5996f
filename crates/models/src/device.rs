//! Where a model is held and in which precision it computes.

use std::fmt;
use std::str::FromStr;

use candle_core::{DType, Device};
use longdraft_kernels::dispatch::{Products, set_products, with_rounded_products};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// A device as a user names it: `auto`, `cpu`, `cuda:0`, `metal:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// A GPU if the build can use one and there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU by its index.
    Cuda(usize),
    /// An Apple GPU by its index.
    Metal(usize),
}

/// Type of weights and products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// `bf16` on a GPU, `f32` on the CPU.
    #[default]
    Auto,
    /// Everything in f32.
    F32,
    /// The frozen target in bf16, on a GPU also the products' factors; trained weights, norms,
    /// softmax, losses and the optimizer's state stay f32.
    Bf16,
    /// The frozen target as its file holds it, on a CPU: quantised blocks are multiplied as integers, as when it
    /// decodes from the same file. All that trains, losses and the optimizer's state are f32; large products go by [`StepProducts`].
    Stored,
}

/// Factors of the large products of training on a CPU. A GPU takes those of its [`Precision`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepProducts {
    /// Integers of 12 to 16 bits, with one scale for up to 512 values of a row, where the CPU multiplies them faster than
    /// f32; f32 elsewhere. Sums are f32.
    #[default]
    Rounded,
    /// f32.
    F32,
}

impl StepProducts {
    /// What `f` computes on the calling thread with these factors.
    pub fn within<R>(self, f: impl FnOnce() -> R) -> R {
        with_rounded_products(self == Self::Rounded, f)
    }

    /// What is asked for on `device`, to compare runs: whether the machine gains by rounding does not count.
    pub fn on(self, device: &Device) -> &'static str {
        if self == Self::Rounded && device.is_cpu() { "rounded" } else { "f32" }
    }
}

impl DeviceChoice {
    /// Opens the device for a process. With [`Self::Auto`] the processes of one machine are assigned
    /// to its GPUs round-robin by `local_rank`, their place among the machine's processes.
    ///
    /// # Errors
    /// - the build cannot use it, there is no driver, or no GPU of the index
    /// - [`Self::Auto`]: the driver shows a GPU, and it cannot be opened
    pub fn open(self, local_rank: usize) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => match gpu_of(local_rank, cuda_gpus().unwrap_or(0), metal_is_there()) {
                Some(gpu) => gpu.open(local_rank),
                None => Ok(Device::Cpu),
            },
            Self::Cuda(index) => self.cuda(index),
            Self::Metal(index) => self.metal(index),
        }
    }

    fn cuda(self, index: usize) -> Result<Device> {
        if !candle_core::utils::cuda_is_available() {
            return Err(self.unusable(
                "this build has no CUDA support",
                "build it with `scripts/cuda-toolchain` and `cargo build --release --features \
                 cuda -p longdraft`, or take device cpu",
            ));
        }
        let remedy = "check the driver with nvidia-smi; in a container, start it with its GPUs \
                      (docker run --gpus all)";
        match cuda_gpus() {
            Err(cause) => Err(self.unusable(cause, remedy)),
            Ok(0) => Err(self.unusable("the driver shows no GPU", remedy)),
            Ok(count) if index >= count => Err(self.unusable(
                format!("there are {count} GPUs"),
                format!("take cuda:0 to cuda:{}, or look at CUDA_VISIBLE_DEVICES", count - 1),
            )),
            Ok(_) => {
                longdraft_kernels::device::open(index).map_err(|error| self.unusable(error, remedy))
            }
        }
    }

    fn metal(self, index: usize) -> Result<Device> {
        if !candle_core::utils::metal_is_available() {
            return Err(self.unusable(
                "this build has no Metal support",
                "build it on a Mac with `cargo build --release --features metal -p longdraft`, or \
                 take device cpu",
            ));
        }
        let remedy = "take metal:0, or device cpu";
        Device::new_metal(index).map_err(|error| self.unusable(error, remedy))
    }

    fn unusable(self, problem: impl fmt::Display, remedy: impl fmt::Display) -> ModelError {
        let (device, problem, remedy) = (self.to_string(), problem.to_string(), remedy.to_string());
        ModelError::Device { device, problem, remedy }
    }
}

/// The GPU that `auto` means for a process of this machine, if there is one. A GPU that is there and
/// fails must not become the CPU, so it is opened by its name.
fn gpu_of(local_rank: usize, nvidia: usize, metal: bool) -> Option<DeviceChoice> {
    match nvidia {
        0 => metal.then_some(DeviceChoice::Metal(0)),
        count => Some(DeviceChoice::Cuda(local_rank % count)),
    }
}

fn metal_is_there() -> bool {
    candle_core::utils::metal_is_available()
}

/// Refuses what needs more NVIDIA GPUs than this machine has.
///
/// # Errors
/// - there are fewer, or the driver or this build does not know them
pub fn require_gpus(count: usize) -> Result<()> {
    if cuda_gpus().is_ok_and(|there| there >= count) {
        return Ok(());
    }
    // What is said of the last one is true of all.
    DeviceChoice::Cuda(count.saturating_sub(1)).open(0).map(drop)
}

/// Number of NVIDIA GPUs, or what keeps the driver from telling.
#[cfg(feature = "cuda")]
fn cuda_gpus() -> std::result::Result<usize, String> {
    let count = candle_core::cuda::cudarc::driver::CudaContext::device_count();
    count.map(|count| count.max(0) as usize).map_err(|error| format!("the driver: {error}"))
}

#[cfg(not(feature = "cuda"))]
fn cuda_gpus() -> std::result::Result<usize, String> {
    Err("this build has no CUDA support".to_owned())
}

/// Bytes of an NVIDIA GPU's memory in all; of others the driver does not tell.
pub fn total_memory(device: &Device) -> Option<u64> {
    longdraft_kernels::device::total_memory(device).ok().flatten()
}

/// Free bytes of an NVIDIA GPU's memory; of others the driver does not tell.
pub fn free_memory(device: &Device) -> Option<u64> {
    longdraft_kernels::device::free_memory(device).ok().flatten()
}

impl Precision {
    /// Bytes of a value of frozen weights, on an accelerator or the CPU; of those as stored the next whole number
    /// of most files.
    pub fn frozen_bytes(self, on_accelerator: bool) -> usize {
        match self {
            Self::Stored => 1,
            _ => self.frozen_type(on_accelerator).size_in_bytes(),
        }
    }

    /// The type of frozen weights on a GPU or beside it.
    pub fn frozen_type(self, on_accelerator: bool) -> DType {
        match self {
            Self::Auto if !on_accelerator => DType::F32,
            Self::F32 | Self::Stored => DType::F32,
            Self::Auto | Self::Bf16 => DType::BF16,
        }
    }

    /// The type of frozen weights on `device`; from here on the process multiplies accordingly.
    pub fn apply(self, device: &Device) -> DType {
        let dtype = self.frozen_type(!device.is_cpu());
        set_products(if dtype == DType::BF16 { Products::Half } else { Products::Single });
        dtype
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (kind, index) = text.split_once(':').map_or((text, None), |(k, i)| (k, Some(i)));
        let index = index.map(str::parse::<usize>).transpose();
        match (kind, index) {
            ("auto", Ok(None)) => Ok(Self::Auto),
            ("cpu", Ok(None)) => Ok(Self::Cpu),
            ("cuda", Ok(index)) => Ok(Self::Cuda(index.unwrap_or(0))),
            ("metal", Ok(index)) => Ok(Self::Metal(index.unwrap_or(0))),
            _ => Err(format!("`{text}` is not a device: auto, cpu, cuda:0 or metal:0")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Metal(index) => write!(f, "metal:{index}"),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

/// A device in words.
pub fn name_of(device: &Device) -> &'static str {
    match device {
        Device::Cpu => "cpu",
        Device::Cuda(_) => "cuda",
        Device::Metal(_) => "metal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["auto", "cpu", "cuda:0", "cuda:7", "metal:0"] {
            let choice: DeviceChoice = text.parse().expect(text);
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "cuda:0:1"] {
            let error = text.parse::<DeviceChoice>().expect_err(text);
            assert!(error.contains("cuda:0"), "{error}");
        }
    }

    #[test]
    fn auto_means_the_machines_gpus_in_turn() {
        assert_eq!(gpu_of(0, 2, false), Some(DeviceChoice::Cuda(0)));
        assert_eq!(gpu_of(3, 2, false), Some(DeviceChoice::Cuda(1)));
        assert_eq!(gpu_of(0, 0, false), None);
        assert_eq!(gpu_of(5, 0, true), Some(DeviceChoice::Metal(0)));
    }

    #[test]
    fn a_build_without_gpus_takes_the_cpu_and_says_how_to_get_more() {
        assert!(matches!(DeviceChoice::Cpu.open(0), Ok(Device::Cpu)));
        if candle_core::utils::cuda_is_available() || candle_core::utils::metal_is_available() {
            return;
        }
        assert!(matches!(DeviceChoice::Auto.open(3), Ok(Device::Cpu)));
        for (choice, feature) in [
            (DeviceChoice::Cuda(1), "--features cuda"),
            (DeviceChoice::Metal(0), "--features metal"),
        ] {
            match choice.open(0) {
                Err(ModelError::Device { device, remedy, .. }) => {
                    assert_eq!(device, choice.to_string());
                    assert!(remedy.contains(feature), "{remedy}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn memory_that_is_not_there_is_told_from_other_failures() {
        let driver = "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        let error = ModelError::from(candle_core::Error::Msg(driver.into()).context("matmul"));
        assert!(matches!(error, ModelError::DeviceMemory { .. }), "{error:?}");
        let other = candle_core::Error::Msg("shape mismatch in matmul".into());
        assert!(matches!(ModelError::from(other), ModelError::Tensor(_)));
    }
}
