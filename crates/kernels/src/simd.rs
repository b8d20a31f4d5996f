//! Small vector loops: dot products in a fixed order and a branch-free exponential.
//!
//! The dot product always adds in the same order for a given length, so that a value does not
//! depend on how many rows are computed beside it. AVX2 with FMA is chosen at run time; the
//! portable version is used elsewhere.

/// `Σ a_i b_i` over equal-length slices, in an order that depends on the length only.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut out = [0.0];
    dot_rows::<1>(&[a], b, &mut out);
    out[0]
}

/// `out[r] = rows[r] · b` for `M` rows; each row's bits equal those of [`dot`].
pub(crate) fn dot_rows<const M: usize>(rows: &[&[f32]; M], b: &[f32], out: &mut [f32; M]) {
    assert!(rows.iter().all(|r| r.len() == b.len()), "dot: lengths differ");
    #[cfg(target_arch = "x86_64")]
    if has_avx2_fma() {
        // SAFETY: the CPU features were just checked and all lengths are equal.
        unsafe { x86::dot_rows(rows, b, out) };
        return;
    }
    for (row, out) in rows.iter().zip(out.iter_mut()) {
        *out = portable_dot(row, b);
    }
}

fn portable_dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let (a_chunks, b_chunks) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for i in 0..16 {
            lanes[i] += x[i] * y[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

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

#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f") && has_avx2_fma()
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2_fma() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
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

vectorised! {
    /// `acc += scale · x`, each product rounded before it is added.
    pub(crate) fn axpy(scale: f32, x: &[f32], acc: &mut [f32]) {
        for (a, x) in acc.iter_mut().zip(x) {
            *a += x * scale;
        }
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps,
        _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps,
        _mm256_loadu_ps, _mm256_setzero_ps,
    };

    /// # Safety
    /// The CPU has AVX2 and FMA, and every row is as long as `b`.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn dot_rows<const M: usize>(
        rows: &[&[f32]; M],
        b: &[f32],
        out: &mut [f32; M],
    ) {
        let n = b.len();
        let mut acc = [[_mm256_setzero_ps(); 2]; M];
        let mut i = 0;
        // SAFETY: `i + 16 <= n` (then `i + 8 <= n`) bounds every load, as all rows have length n.
        unsafe {
            while i + 16 <= n {
                let b0 = _mm256_loadu_ps(b.as_ptr().add(i));
                let b1 = _mm256_loadu_ps(b.as_ptr().add(i + 8));
                for r in 0..M {
                    let a = rows[r].as_ptr().add(i);
                    acc[r][0] = _mm256_fmadd_ps(_mm256_loadu_ps(a), b0, acc[r][0]);
                    acc[r][1] = _mm256_fmadd_ps(_mm256_loadu_ps(a.add(8)), b1, acc[r][1]);
                }
                i += 16;
            }
            if i + 8 <= n {
                let b0 = _mm256_loadu_ps(b.as_ptr().add(i));
                for r in 0..M {
                    let a = _mm256_loadu_ps(rows[r].as_ptr().add(i));
                    acc[r][0] = _mm256_fmadd_ps(a, b0, acc[r][0]);
                }
                i += 8;
            }
        }
        for r in 0..M {
            let mut sum = horizontal_sum(_mm256_add_ps(acc[r][0], acc[r][1]));
            for j in i..n {
                sum = rows[r][j].mul_add(b[j], sum);
            }
            out[r] = sum;
        }
    }

    #[target_feature(enable = "avx2,fma")]
    fn horizontal_sum(v: __m256) -> f32 {
        let s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps::<1>(s, s)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn exp_keeps_nan() {
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn dot_bits_do_not_depend_on_rows_beside() {
        for n in [0, 1, 7, 8, 9, 15, 16, 17, 31, 64, 100, 577] {
            let row = |s: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * s).sin()).collect() };
            let (a, b, c) = (row(0.7), row(1.3), row(2.1));
            let mut out = [0.0; 2];
            dot_rows(&[&a, &c], &b, &mut out);
            assert_eq!(out[0].to_bits(), dot(&a, &b).to_bits());
            let want: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(x * y)).sum();
            assert!((f64::from(out[0]) - want).abs() < 1e-4);
        }
    }
}
