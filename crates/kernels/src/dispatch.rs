//! Which implementation of an op runs, and in which type products are formed.
//!
//! Tensors on a CPU go through the fused implementations, tensors on an NVIDIA GPU through its kernels
//! where there are some, all others through the composed ops, made of candle's. Both settings hold for the whole process; a program makes
//! them once, before its first op.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};

/// Implementation of the ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ops {
    /// Fused where there is one: f32 activations on the CPU and on NVIDIA GPUs.
    #[default]
    Fused,
    /// Composed of tensor ops on every device: what a GPU computes, to find faults on a CPU.
    Composed,
    /// The kernels for NVIDIA GPUs, run by the CPU: slow, to check them.
    #[cfg(feature = "emulate-cuda")]
    Emulated,
}

/// Type in which a device other than the CPU multiplies f32 activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// f32: 16-bit weights are widened first.
    #[default]
    Single,
    /// Both factors in the weight's 16-bit type, bf16 for f32 weights; sums in f32. Products of
    /// attention are one bf16 product on an NVIDIA GPU, composed ones TF32 where the device has it.
    Half,
}

static COMPOSED: AtomicBool = AtomicBool::new(false);
#[cfg(any(test, feature = "emulate-cuda"))]
static EMULATED: AtomicBool = AtomicBool::new(false);
static HALF: AtomicBool = AtomicBool::new(false);

/// Chooses the implementation for all later ops of the process.
pub fn set_ops(ops: Ops) {
    COMPOSED.store(ops == Ops::Composed, Ordering::Relaxed);
    #[cfg(feature = "emulate-cuda")]
    EMULATED.store(ops == Ops::Emulated, Ordering::Relaxed);
}

/// Chooses the type of all later products of the process.
pub fn set_products(products: Products) {
    let half = products == Products::Half;
    HALF.store(half, Ordering::Relaxed);
    // Only a build with CUDA has the switch.
    #[cfg(feature = "cuda")]
    candle_core::cuda::set_gemm_reduced_precision_f32(half);
}

/// The type of products of `x` on its device.
pub(crate) fn products_of(x: &Tensor) -> Products {
    let half = HALF.load(Ordering::Relaxed) && !matches!(x.device(), Device::Cpu);
    if half { Products::Half } else { Products::Single }
}

/// Whether the fused implementation of an op takes these tensors: all f32 on the CPU.
pub(crate) fn fused(tensors: &[&Tensor]) -> bool {
    let fits = |t: &&Tensor| matches!(t.device(), Device::Cpu) && t.dtype() == DType::F32;
    !composed_only() && !crate::cuda::emulated() && tensors.iter().all(fits)
}

/// Whether the kernels for NVIDIA GPUs take CPU tensors.
#[cfg(any(test, feature = "emulate-cuda"))]
pub(crate) fn emulates() -> bool {
    EMULATED.load(Ordering::Relaxed)
}

/// Whether ops are composed on every device.
pub(crate) fn composed_only() -> bool {
    COMPOSED.load(Ordering::Relaxed)
}
