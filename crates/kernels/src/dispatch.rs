//! Which implementation of an op runs, and in which type products are formed.
//!
//! Tensors on a CPU go through the fused implementations, tensors on an NVIDIA GPU through its kernels
//! where there are some, all others through the composed ops, made of
//! candle's. The settings hold for the whole process; a program makes them once, before its first op.

use candle_core::{DType, Device, Tensor};

use crate::composed::FULL_ROWS;

pub use crate::settings::{
    Ops, Products, Simd, rounds_products, set_one_pass_attention, set_ops, set_products, set_simd,
    with_rounded_products,
};
use crate::settings::{composed_only, half_products};
pub use crate::simd::{has_avx2_fma, has_avx512};

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
    if half_products() && has_half_products(x.device()) { Products::Half } else { Products::Single }
}

/// Whether our kernels run on a device and its products have 16-bit factors.
pub fn multiplies_halves(device: &Device) -> bool {
    half_products() && has_half_products(device) && !composed_only() && crate::cuda::runs_on(device)
}

/// The type in which a network that does not train computes between its norms and its sums, from sums `x`, `[T, ..]`:
/// bf16 where products round to it and our kernels take it, else that of `x`. Few rows stay as they are, as their
/// products do.
pub fn inner_type(x: &Tensor) -> DType {
    let is_many = x.dims().first().is_some_and(|rows| *rows >= FULL_ROWS);
    let rounds = x.dtype() == DType::F32 && !x.track_op() && multiplies_halves(x.device());
    if is_many && rounds { DType::BF16 } else { x.dtype() }
}

/// What `f` computes with [`Products::Half`] on the calling thread.
#[cfg(test)]
pub(crate) fn with_half_products<R>(f: impl FnOnce() -> R) -> R {
    set_products(Products::Half);
    let _single = crate::at_end::AtEnd(|| set_products(Products::Single));
    f()
}

/// Whether the fused implementation of an op takes these tensors: all f32 on the CPU.
pub(crate) fn fused(tensors: &[&Tensor]) -> bool {
    let fits = |t: &&Tensor| matches!(t.device(), Device::Cpu) && t.dtype() == DType::F32;
    !composed_only() && !crate::cuda::emulated() && tensors.iter().all(fits)
}
