//! Normaliser and most likely token of every row's distribution: `log Σ_v e^{z_v}` and `argmax_v
//! z_v` of
//! `z = h Wᵀ`.
//!
//! Two numbers a row are what a loss over part of a vocabulary needs of the whole of it. Rows go
//! through in chunks: memory is `O(chunk · V)`. No gradient. Logits are rounded to a 16-bit head's
//! type, as a target of that type has them.

use candle_core::{D, DType, Result, Tensor};
use rayon::prelude::*;

use crate::bend::Bend;
use crate::chunks::{logits_on, rows_at_once};
use crate::composed::CHUNK_VALUES;
use crate::cuda::takes;
use crate::dispatch::fused;
use crate::factors::as_of_type;
use crate::linear_cross_entropy::log_sum_exp_of_rows;
use crate::matrix::Head;
use crate::simd::{exp_in_place, max_of};
use crate::storage::{host_f64, with_f32};

/// Rows whose logits exist at the same time.
const CHUNK_ROWS: usize = 128;

/// Values whose exponentials exist at the same time.
const BLOCK: usize = 4096;

/// Two numbers of every row, `[R]` each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadSummary {
    /// `log Σ_v e^{z_v}`
    pub log_sum_exp: Vec<f64>,
    /// The most likely token; ties go to the lower id.
    pub argmax: Vec<u32>,
}

/// Normaliser and most likely token of `hidden · headᵀ`.
///
/// # Shapes
/// - `hidden`: `[R, H]`, `head`: `[V, H]` → `[R]`
///
/// # Errors
/// - shapes do not fit
pub fn linear_log_sum_exp(hidden: &Tensor, head: &Tensor) -> Result<HeadSummary> {
    bent_log_sum_exp(hidden, head, Bend::default())
}

/// The same of bent logits, of any head.
///
/// # Errors
/// - as [`linear_log_sum_exp`]
pub fn bent_log_sum_exp<'a>(
    hidden: &Tensor,
    head: impl Into<Head<'a>>,
    bend: Bend,
) -> Result<HeadSummary> {
    let head: Head<'_> = head.into();
    let (rows, (vocabulary, _)) = (hidden.dim(0)?, head.dims()?);
    if !fused(&[hidden]) || vocabulary == 0 {
        return composed(hidden, &head.to_tensor()?, bend);
    }
    let mut summary = HeadSummary::default();
    for first in (0..rows).step_by(CHUNK_ROWS) {
        let chunk = hidden.narrow(0, first, CHUNK_ROWS.min(rows - first))?;
        let logits = as_of_type(&bend.of(head.linear(&chunk)?)?, head.dtype())?;
        summary.append(&logits)?;
    }
    Ok(summary)
}

impl HeadSummary {
    /// Adds those of rows of logits.
    ///
    /// # Shapes
    /// - `logits`: `[R, V]` in f32 on the host
    ///
    /// # Errors
    /// - `logits` is no such matrix
    pub fn append(&mut self, logits: &Tensor) -> Result<()> {
        let vocabulary = logits.dims2()?.1.max(1);
        let results: Vec<(f64, u32)> =
            with_f32(logits, |z| Ok(z.par_chunks(vocabulary).map(summary_of_row).collect()))?;
        for (log_sum_exp, argmax) in results {
            self.log_sum_exp.push(log_sum_exp);
            self.argmax.push(argmax);
        }
        Ok(())
    }
}

/// The same on any device, [`reference()`] of some rows at a time.
fn composed(hidden: &Tensor, head: &Tensor, bend: Bend) -> Result<HeadSummary> {
    let rows = hidden.dim(0)?;
    let chunk_rows = (CHUNK_VALUES / head.dim(0)?.max(1)).max(1);
    let whole = matches!(head.dtype(), DType::F32 | DType::BF16) && head.dim(0)? > 0;
    if rows > 0 && whole && takes(&[hidden]) {
        let logits = logits_on(hidden.device(), bend)?;
        return on_gpu(hidden, head, bend, rows_at_once(logits, head.dim(0)?));
    }
    let mut summary = HeadSummary::default();
    for first in (0..rows).step_by(chunk_rows) {
        let part = hidden.narrow(0, first, chunk_rows.min(rows - first))?;
        let chunk = reference_bent(&part, head, bend)?;
        summary.log_sum_exp.extend(chunk.log_sum_exp);
        summary.argmax.extend(chunk.argmax);
    }
    Ok(summary)
}

/// The same by a kernel; the device is waited for once.
fn on_gpu(hidden: &Tensor, head: &Tensor, bend: Bend, chunk_rows: usize) -> Result<HeadSummary> {
    let rows = hidden.dim(0)?;
    let mut parts = Vec::new();
    for first in (0..rows).step_by(chunk_rows) {
        let part = hidden.narrow(0, first, chunk_rows.min(rows - first))?;
        let logits = bend.of(crate::linear::composed(&part.detach(), &head.detach(), None)?)?;
        parts.push(log_sum_exp_of_rows(&logits, head.dtype() == DType::BF16)?);
    }
    let mut summary = HeadSummary::default();
    for row in Tensor::cat(&parts, 0)?.flatten_all()?.to_vec1::<f32>()?.chunks_exact(2) {
        summary.log_sum_exp.push(f64::from(row[0]));
        summary.argmax.push(row[1] as u32);
    }
    Ok(summary)
}

/// The same from plain tensor ops, for any device and float type; `[R, V]` is materialised.
pub(crate) fn reference(hidden: &Tensor, head: &Tensor) -> Result<HeadSummary> {
    reference_bent(hidden, head, Bend::default())
}

fn reference_bent(hidden: &Tensor, head: &Tensor, bend: Bend) -> Result<HeadSummary> {
    let logits = bend.of(crate::linear::composed(hidden, head, None)?)?;
    let logits = as_of_type(&logits, head.dtype())?;
    let wide = if logits.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let logits = logits.to_dtype(wide)?;
    Ok(HeadSummary {
        log_sum_exp: host_f64(&logits.log_sum_exp(D::Minus1)?)?,
        argmax: logits.argmax(D::Minus1)?.to_vec1()?,
    })
}

fn summary_of_row(z: &[f32]) -> (f64, u32) {
    let max = max_of(z);
    let argmax = z.iter().position(|&x| x >= max).unwrap_or(0);
    (log_sum_exp(z, max), argmax as u32)
}

/// `log Σ_v e^{z_v}` of one row, `[V]`; no finite number where a value is NaN or none is more than −∞.
pub fn row_log_sum_exp(z: &[f32]) -> f64 {
    log_sum_exp(z, max_of(z))
}

fn log_sum_exp(z: &[f32], max: f32) -> f64 {
    let mut buffer = [0.0_f32; BLOCK];
    let mut total = 0.0_f64;
    for block in z.chunks(BLOCK) {
        let copy = &mut buffer[..block.len()];
        copy.copy_from_slice(block);
        total += f64::from(exp_in_place(copy, max));
    }
    f64::from(max) + total.ln()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::test_support::Noise;

    #[test]
    fn fused_matches_reference_at_odd_sizes() -> Result<()> {
        let mut noise = Noise::new(4);
        for (rows, width, vocabulary) in [(1, 3, 1), (5, 8, 17), (131, 6, 33), (2, 4, 5000)] {
            let (hidden, head) = (noise.tensor(&[rows, width]), noise.tensor(&[vocabulary, width]));
            let head = (head * 4.0)?;
            let (fused, plain) = (linear_log_sum_exp(&hidden, &head)?, reference(&hidden, &head)?);
            assert_eq!(fused.argmax, plain.argmax);
            for (a, b) in fused.log_sum_exp.iter().zip(&plain.log_sum_exp) {
                assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}");
            }
            assert_eq!(fused.log_sum_exp.len(), rows);
            assert_eq!(composed(&hidden, &head, Bend::default())?, plain);
        }
        Ok(())
    }

    #[test]
    fn the_kernel_finds_the_same_as_plain_ops() -> Result<()> {
        let mut noise = Noise::new(5);
        for (rows, width, vocabulary) in [(1, 3, 1), (5, 8, 17), (3, 6, 33), (2, 4, 5000)] {
            let (hidden, head) = (noise.tensor(&[rows, width]), noise.tensor(&[vocabulary, width]));
            for head in [(&head * 9.0)?, head.to_dtype(DType::BF16)?, head.to_dtype(DType::F16)?] {
                let own = emulated(|| linear_log_sum_exp(&hidden, &head))?;
                let plain = reference(&hidden, &head)?;
                assert_eq!(own.argmax, plain.argmax);
                assert_eq!(own.log_sum_exp.len(), rows);
                for (a, b) in own.log_sum_exp.iter().zip(&plain.log_sum_exp) {
                    assert!((a - b).abs() < 1e-5 * (1.0 + b.abs()), "{a} {b}");
                }
            }
        }
        // A tie once it is rounded.
        let hidden = Tensor::new(&[[1.0_f32, 0.001]], &Device::Cpu)?;
        let head = Tensor::new(&[[1.0_f32, 0.0], [1.0, 1.0]], &Device::Cpu)?;
        let argmax = |head: &Tensor| emulated(|| linear_log_sum_exp(&hidden, head));
        assert_eq!(argmax(&head)?.argmax, [1]);
        assert_eq!(argmax(&head.to_dtype(DType::BF16)?)?.argmax, [0]);
        Ok(())
    }

    #[test]
    fn logits_are_rounded_to_the_head_s_type() -> Result<()> {
        // 1.001 rounds to 1 in bf16: a tie.
        let hidden = Tensor::new(&[[1.0_f32, 0.001]], &Device::Cpu)?;
        let head = Tensor::new(&[[1.0_f32, 0.0], [1.0, 1.0]], &Device::Cpu)?;
        let ways: [fn(&Tensor, &Tensor) -> Result<HeadSummary>; 3] =
            [linear_log_sum_exp, reference, |hidden, head| composed(hidden, head, Bend::default())];
        for summary in ways {
            assert_eq!(summary(&hidden, &head)?.argmax, [1]);
            assert_eq!(summary(&hidden, &head.to_dtype(DType::BF16)?)?.argmax, [0]);
        }
        Ok(())
    }

    #[test]
    fn a_row_without_numbers_has_no_sum() {
        assert!((row_log_sum_exp(&vec![0.0; 5000]) - 5000_f64.ln()).abs() < 1e-6);
        for z in [&[][..], &[f32::NEG_INFINITY; 3], &[1.0, f32::NAN], &[f32::NAN; 20]] {
            assert!(!row_log_sum_exp(z).is_finite(), "{z:?}");
        }
        assert!((row_log_sum_exp(&[f32::NEG_INFINITY, 2.0]) - 2.0).abs() < 1e-6);
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let (log_sum_exp, argmax) = summary_of_row(&[1.0, 3.0, 3.0]);
        assert_eq!(argmax, 1);
        assert!((log_sum_exp - (1.0_f64.exp() + 2.0 * 3.0_f64.exp()).ln()).abs() < 1e-6);
    }
}
