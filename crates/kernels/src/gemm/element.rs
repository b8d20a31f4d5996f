//! What the right operand of a product may be stored as.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::simd::vectorised;

/// The types by name, for kernels that load each in its own way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    F32,
    Bf16,
    F16,
}

/// A float type that packing widens to f32, exactly.
pub(crate) trait Element: Copy + Send + Sync {
    const STORAGE: Storage;
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of the vector kernels"))]
    const ZERO: Self;

    /// Widens equally long slices.
    fn widen(from: &[Self], to: &mut [f32]);

    /// The values themselves, if they need no widening.
    fn as_f32(_values: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Element for f32 {
    const STORAGE: Storage = Storage::F32;
    const ZERO: Self = 0.0;

    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn as_f32(values: &[Self]) -> Option<&[f32]> {
        Some(values)
    }
}

impl Element for bf16 {
    const STORAGE: Storage = Storage::Bf16;
    const ZERO: Self = bf16::ZERO;

    fn widen(from: &[Self], to: &mut [f32]) {
        assert_eq!(from.len(), to.len(), "widened slices differ in length");
        widen_bf16(from, to);
    }
}

impl Element for f16 {
    const STORAGE: Storage = Storage::F16;
    const ZERO: Self = f16::ZERO;

    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

vectorised! {
    /// bf16 is the upper half of an f32.
    fn widen_bf16(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}
