//! Small vector loops and a branch-free exponential.
//!
//! Sums are taken in an order that depends on the length only, and products are fused with their
//! additions on every machine, so that a value depends neither on what is computed beside it nor
//! on the instruction set.

use std::mem::MaybeUninit;

use rayon::prelude::*;

use crate::settings::{Simd, may_use};

/// Functions compiled once per instruction set, the widest that the machine has chosen at each call,
/// so that plain loops inside them vectorise. Sums must name their lanes: the order is the source's.
macro_rules! vectorised {
    ($($(#[$attribute:meta])* $visibility:vis fn $name:ident(
        $($argument:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$attribute])*
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn plain($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn widest($($argument: $type),*) $(-> $result)? {
                    plain($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn wide($($argument: $type),*) $(-> $result)? {
                    plain($($argument),*)
                }
                if $crate::simd::has_avx512() {
                    // SAFETY: the CPU features that `widest` is compiled for were just checked.
                    return unsafe { widest($($argument),*) };
                }
                if $crate::simd::has_avx2_fma() {
                    // SAFETY: the CPU features that `wide` is compiled for were just checked.
                    return unsafe { wide($($argument),*) };
                }
            }
            plain($($argument),*)
        }
    )*};
}
pub(crate) use vectorised;

/// Values that a thread maps at a time.
pub(crate) const CHUNK: usize = 8192;

/// What `f` writes of equally long slices, chunks of them side by side.
pub(crate) fn map_two(
    a: &[f32],
    b: &[f32],
    f: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
) -> Vec<f32> {
    let (out, _) = by_chunk(a.len(), CHUNK, |index, out| {
        let part = index * CHUNK..index * CHUNK + out.len();
        f(&a[part.clone()], &b[part], out);
    });
    out
}

/// `len` values and what `write` says of each `chunk` of them. It finds zeros, which the thread that calls it wrote just before:
/// a pass over all memory would be slow, and have the other threads wait.
pub(crate) fn by_chunk<R: Send>(
    len: usize,
    chunk: usize,
    write: impl Fn(usize, &mut [f32]) -> R + Sync,
) -> (Vec<f32>, Vec<R>) {
    let mut values = Vec::with_capacity(len);
    let memory: &mut [MaybeUninit<f32>] = &mut values.spare_capacity_mut()[..len];
    let chunks = memory.par_chunks_mut(chunk.max(1)).enumerate();
    let said = chunks
        .map(|(index, part)| {
            part.fill(MaybeUninit::new(0.0));
            // SAFETY: values lie in memory as `MaybeUninit` holds them, and all of these were just written.
            let part = unsafe { &mut *(std::ptr::from_mut(part) as *mut [f32]) };
            write(index, part)
        })
        .collect();
    // SAFETY: so many fit, and each stood in a chunk.
    unsafe { values.set_len(len) };
    (values, said)
}

/// Zeros that all threads write.
pub(crate) fn zeros(len: usize) -> Vec<f32> {
    by_chunk(len, CHUNK, |_, _| ()).0
}

/// Whether kernels may use AVX-512, and the machine has it.
pub fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has && may_use(Simd::Widest) && has_avx2_fma()
}

/// Whether kernels may use AVX2 with FMA, and the machine has them.
pub fn has_avx2_fma() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has =
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has && may_use(Simd::Avx2)
}

/// Whether kernels may use NEON, and the machine has it.
#[cfg(target_arch = "aarch64")]
pub(crate) fn has_neon() -> bool {
    std::arch::is_aarch64_feature_detected!("neon") && may_use(Simd::Widest)
}

/// `e^x` for `x <= 88`, relative error below 3e-7; 0 below -87.
///
/// Cody-Waite reduction to `|r| <= ln2 / 2`, degree-6 Taylor polynomial, exponent by bit shift:
/// no branch, so a loop over it vectorises.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons that are false for NaN let it through, one instruction each.
    let clamped = if x < -87.0 { -87.0 } else { x };
    let clamped = if clamped > 88.0 { 88.0 } else { clamped };
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, clamped));
    let mut p = 1.0 / 720.0;
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    // The integer stands in the low bits of `rounded`; the shift drops the rest.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { p * scale }
}

/// `tanh x`, relative error below 1e-6: a Padé approximant of order 7/6 up to 1, `1 − 2 / (e^2x + 1)`
/// beyond; no branch.
#[allow(clippy::inline_always, reason = "loops over it are compiled per instruction set")]
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let s = x * x;
    let top = x * s.mul_add(s.mul_add(s + 378.0, 17_325.0), 135_135.0);
    let bottom = s.mul_add(s.mul_add(s.mul_add(28.0, 3150.0), 62_370.0), 135_135.0);
    let size = x.abs();
    let size = if size > 20.0 { 20.0 } else { size };
    let large = (1.0 - 2.0 / (exp(2.0 * size) + 1.0)).copysign(x);
    // A comparison that is false for NaN would lose it on this side.
    if size >= 1.0 { large } else { top / bottom }
}

vectorised! {
    /// `Σ a_i b_i` over equal lengths, in 16 lanes.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        debug_assert_eq!(a.len(), b.len(), "dot: lengths differ");
        let mut lanes = [0.0_f32; 16];
        let ((a_chunks, a_tail), (b_chunks, b_tail)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
        for (a, b) in a_chunks.iter().zip(b_chunks) {
            for i in 0..16 {
                lanes[i] = a[i].mul_add(b[i], lanes[i]);
            }
        }
        let tail = a_tail.iter().zip(b_tail).fold(0.0, |sum: f32, (a, b)| a.mul_add(*b, sum));
        lanes.iter().sum::<f32>() + tail
    }

    /// `Σ a_i b_i` one after the other: the bits of a matrix product's element.
    pub(crate) fn dot_in_order(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).fold(0.0, |sum: f32, (a, b)| a.mul_add(*b, sum))
    }

    /// `acc += scale · x`
    pub(crate) fn axpy(scale: f32, x: &[f32], acc: &mut [f32]) {
        for (a, x) in acc.iter_mut().zip(x) {
            *a = x.mul_add(scale, *a);
        }
    }

    /// `x ← factor · x`
    pub(crate) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    /// `acc ← mine · acc + theirs · x`
    pub(crate) fn blend(mine: f32, acc: &mut [f32], theirs: f32, x: &[f32]) {
        for (a, x) in acc.iter_mut().zip(x) {
            *a = x.mul_add(theirs, *a * mine);
        }
    }

    /// [`exp`] of two values, for callers that are not compiled for the instruction set: products fused with
    /// additions would be calls there.
    pub(crate) fn exp_of_two(x: f32, y: f32) -> [f32; 2] {
        [exp(x), exp(y)]
    }

    /// `x ← e^(x − max)`; returns the sum, taken in 16 lanes.
    pub(crate) fn exp_in_place(row: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0.0_f32; 16];
        let (chunks, tail) = row.as_chunks_mut::<16>();
        for chunk in chunks {
            for i in 0..16 {
                chunk[i] = exp(chunk[i] - max);
                lanes[i] += chunk[i];
            }
        }
        let mut total = 0.0;
        for x in tail {
            *x = exp(*x - max);
            total += *x;
        }
        total + lanes.iter().sum::<f32>()
    }

    /// Largest value; NaN is never larger, and −∞ stands for no value.
    pub(crate) fn max_of(row: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let (chunks, tail) = row.as_chunks::<16>();
        for chunk in chunks {
            for i in 0..16 {
                lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            }
        }
        let larger = |a: f32, &b: &f32| if b > a { b } else { a };
        let tail = tail.iter().fold(f32::NEG_INFINITY, larger);
        lanes.iter().fold(tail, larger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_hold_zeros_and_lie_in_their_order() {
        for (len, chunk) in [(0, 4), (7, 0), (10, 4), (3 * CHUNK + 5, CHUNK)] {
            let (values, said) = by_chunk(len, chunk, |index, out| {
                assert!(out.iter().all(|value| value.to_bits() == 0));
                out.fill(index as f32);
                (index, out.len())
            });
            let want: Vec<f32> = (0..len).map(|at| (at / chunk.max(1)) as f32).collect();
            assert_eq!(values, want);
            assert!(said.iter().enumerate().all(|(index, said)| index == said.0));
            assert_eq!(said.iter().map(|said| said.1).sum::<usize>(), len);
        }
    }

    #[test]
    fn exp_is_close_over_its_range() {
        for i in -8700..8800 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            assert!((got - want).abs() <= 3e-7 * want + 1e-44, "exp({x}): {got} against {want}");
        }
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
    }

    #[test]
    fn tanh_is_close_everywhere_and_keeps_nan() {
        for i in -4000..4000 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).tanh();
            let got = f64::from(tanh(x));
            assert!((got - want).abs() <= 1e-6 * want.abs(), "tanh({x}): {got} against {want}");
        }
        assert!(tanh(f32::NAN).is_nan());
        assert!((tanh(f32::INFINITY) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn exp_keeps_nan() {
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn both_dot_products_match_f64() {
        for n in [0, 1, 7, 8, 9, 15, 16, 17, 31, 64, 100, 577] {
            let row = |s: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * s).sin()).collect() };
            let (a, b) = (row(0.7), row(1.3));
            let want: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(x * y)).sum();
            for got in [dot(&a, &b), dot_in_order(&a, &b)] {
                assert!((f64::from(got) - want).abs() < 1e-4);
            }
        }
    }
}
