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

/// Type in which a device other than the CPU, or the CPU in its place, multiplies f32 activations.
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
#[cfg(not(test))]
static HALF: AtomicBool = AtomicBool::new(false);
// Tests run side by side on threads of one process.
#[cfg(test)]
thread_local! {
    static HALF: AtomicBool = const { AtomicBool::new(false) };
}

/// Chooses the implementation for all later ops of the process.
pub fn set_ops(ops: Ops) {
    COMPOSED.store(ops == Ops::Composed, Ordering::Relaxed);
    #[cfg(feature = "emulate-cuda")]
    EMULATED.store(ops == Ops::Emulated, Ordering::Relaxed);
}

/// Chooses the type of all later products of the process.
pub fn set_products(products: Products) {
    let half = products == Products::Half;
    #[cfg(not(test))]
    HALF.store(half, Ordering::Relaxed);
    #[cfg(test)]
    HALF.with(|own| own.store(half, Ordering::Relaxed));
    // Only a build with CUDA has the switch.
    #[cfg(feature = "cuda")]
    candle_core::cuda::set_gemm_reduced_precision_f32(half);
}

/// Whether a device multiplies in 16 bits when it is asked to: all but the CPU, and the CPU where it
/// runs the kernels for NVIDIA GPUs.
pub fn has_half_products(device: &Device) -> bool {
    !matches!(device, Device::Cpu) || crate::cuda::emulated()
}

/// Whether f32 tensors on the device go through fused ops or kernels of ours, where there are some.
pub fn has_kernels(device: &Device) -> bool {
    let is_cpu = matches!(device, Device::Cpu);
    !composed_only() && (is_cpu || crate::cuda::runs_on(device))
}

/// The type of products of `x` on its device.
pub(crate) fn products_of(x: &Tensor) -> Products {
    #[cfg(not(test))]
    let half = HALF.load(Ordering::Relaxed);
    #[cfg(test)]
    let half = HALF.with(|own| own.load(Ordering::Relaxed));
    if half && has_half_products(x.device()) { Products::Half } else { Products::Single }
}

/// What `f` computes with [`Products::Half`] on the calling thread.
#[cfg(test)]
pub(crate) fn with_half_products<R>(f: impl FnOnce() -> R) -> R {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            set_products(Products::Single);
        }
    }
    set_products(Products::Half);
    let _off = Off;
    f()
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
