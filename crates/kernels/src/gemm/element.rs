//! What the right operand of a product may be stored as.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::simd::vectorised;
#[cfg(target_arch = "x86_64")]
use crate::simd::{has_avx2_fma, has_avx512};

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
        assert_eq!(from.len(), to.len(), "widened slices differ in length");
        #[cfg(target_arch = "x86_64")]
        if has_avx512() {
            // SAFETY: AVX-512 was just detected.
            return unsafe { widen_f16(from, to) };
        }
        #[cfg(target_arch = "x86_64")]
        if has_avx2_fma() && std::arch::is_x86_feature_detected!("f16c") {
            // SAFETY: AVX2 and F16C were just detected.
            return unsafe { widen_f16_by_8(from, to) };
        }
        from.convert_to_f32_slice(to);
    }
}

/// 16 numbers at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn widen_f16(from: &[f16], to: &mut [f32]) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm512_cvtph_ps, _mm512_storeu_ps};

    let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<16>(), to.as_chunks_mut::<16>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both hold 16 numbers.
        unsafe {
            let numbers = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_cvtph_ps(numbers));
        }
    }
    from_rest.convert_to_f32_slice(to_rest);
}

/// 8 numbers at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn widen_f16_by_8(from: &[f16], to: &mut [f32]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};

    let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<8>(), to.as_chunks_mut::<8>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both hold 8 numbers.
        unsafe {
            let numbers = _mm_loadu_si128(from.as_ptr().cast());
            _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(numbers));
        }
    }
    from_rest.convert_to_f32_slice(to_rest);
}

vectorised! {
    /// bf16 is the upper half of an f32.
    fn widen_bf16(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_any_length_are_widened_exactly() {
        // Every number of 16 bits, infinities and subnormal ones among them.
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for count in [0, 1, 15, 16, 17, 47, all.len()] {
            let from = &all[all.len() - count..];
            let mut to = vec![1.0; count];
            f16::widen(from, &mut to);
            for (from, to) in from.iter().zip(to) {
                assert!(from.to_f32().to_bits() == to.to_bits() || from.is_nan() && to.is_nan());
            }
        }
    }
}
