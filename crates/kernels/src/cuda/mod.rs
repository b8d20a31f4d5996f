//! Kernels of our own for NVIDIA GPUs, compiled by NVRTC when they are first needed.
//!
//! An op's kernels lie beside it (`gpu.cu`, started by `gpu.rs`), those of small ops in [`rows`]. They
//! take f32 tensors on a GPU that multiplies bf16 (compute capability 8.0), those of [`halves`] bf16 ones that do not
//! train; all else goes the composed way. Tests start the same kernels on a CPU: [`emulator`] compiles their text as C++.

pub(crate) mod blocks;
#[cfg(any(test, feature = "cuda"))]
mod code;
pub mod collectives;
pub mod device;
#[cfg(any(test, feature = "emulate-cuda"))]
pub(crate) mod emulator;
pub(crate) mod halves;
mod launch;
pub(crate) mod linear;
#[cfg(feature = "nccl")]
pub mod nccl;
pub(crate) mod product;
mod program;
pub mod repeat;
pub(crate) mod rows;
pub mod trace;
pub mod transfer;
#[cfg(any(test, feature = "nccl"))]
mod wait;

use candle_core::{DType, Device, Result, Tensor, bail};

pub(crate) use launch::{Argument, Arguments, Block, Launch, address};
pub(crate) use program::Program;

/// A program, and what blocks of its kernels have: to compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) type Compiled = (Program, Vec<Block>);

use crate::settings::composed_only;

/// Whether the kernels take these tensors: all f32, on one GPU that they run on.
pub(crate) fn takes(tensors: &[&Tensor]) -> bool {
    take(tensors) && tensors.iter().all(|t| t.dtype() == DType::F32)
}

/// The same of bf16 tensors, of which none trains.
pub(crate) fn takes_halves(tensors: &[&Tensor]) -> bool {
    take(tensors) && tensors.iter().all(|t| t.dtype() == DType::BF16 && !t.track_op())
}

/// Whether the kernels run where these tensors are, and are not switched off.
pub(crate) fn take(tensors: &[&Tensor]) -> bool {
    !composed_only() && tensors.first().is_some_and(|first| runs_on(first.device()))
}

/// Whether the kernels run on a device.
pub(crate) fn runs_on(device: &Device) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => launch::capability(device).is_ok_and(|(major, _)| major >= 8),
        Device::Cpu => emulated(),
        _ => false,
    }
}

/// Whether the calling thread's CPU tensors go through the emulator.
pub(crate) fn emulated() -> bool {
    #[cfg(any(test, feature = "emulate-cuda"))]
    return emulator::is_on();
    #[cfg(not(any(test, feature = "emulate-cuda")))]
    return false;
}

/// Whether a device multiplies by groups of warps: compute capability 9.0 and no other. The emulator does.
pub(crate) fn has_warp_groups(device: &Device) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => launch::capability(device).is_ok_and(|found| found == (9, 0)),
        Device::Cpu => emulated(),
        _ => false,
    }
}

/// Bytes of dynamic memory that a block may ask for.
/// It fails where the driver does not say, or the kernels do not run there.
pub(crate) fn block_memory(device: &Device) -> Result<usize> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => launch::block_memory(device),
        // That of compute capability 9.0.
        Device::Cpu => Ok(227 * 1024),
        other => bail!("no kernels for {:?}", other.location()),
    }
}

/// `values` on `device`; a kernel's argument must not be empty.
pub(crate) fn upload<T: candle_core::WithDType>(values: &[T], device: &Device) -> Result<Tensor> {
    if values.is_empty() {
        return Tensor::zeros(1, T::DTYPE, device);
    }
    Tensor::from_slice(values, values.len(), device)
}

/// The same of words. Where the pass that is recorded has them among its [`repeat::Inputs`], they are those.
pub(crate) fn upload_words(values: &[u32], device: &Device) -> Result<Tensor> {
    match repeat::input(values) {
        Some(there) => Ok(there),
        None => upload(values, device),
    }
}

/// A kernel's results by name. It fails where there are more or fewer.
pub(crate) fn exactly<const N: usize>(results: Vec<Tensor>) -> Result<[Tensor; N]> {
    let found = results.len();
    results.try_into().map_err(|_| candle_core::Error::msg(format!("{N} results, found {found}")))
}

/// Bytes that a kernel reads at once.
const AT_ONCE: usize = 16;

/// Contiguous values that begin where a kernel may read 16 bytes of them at once.
/// It fails where the device has no memory for a copy.
pub(crate) fn aligned(values: &Tensor) -> Result<Tensor> {
    let values = values.contiguous()?;
    let first = values.layout().start_offset() * values.dtype().size_in_bytes();
    let fits = first.is_multiple_of(AT_ONCE);
    if fits { Ok(values) } else { values.force_contiguous() }
}

#[cfg(all(test, feature = "cuda"))]
mod tests;
