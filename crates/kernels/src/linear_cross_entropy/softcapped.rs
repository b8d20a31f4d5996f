//! Head product, soft-capped logits and cross-entropy of hard labels in one op.
//!
//! `z = h Wᵀ`, `t = tanh(z / c)`, `ℓ = lse(c t) − c t_y`; backward
//! `dz = (softmax(c t) − 1[y]) (1 − t²)`, then `dh = dz W`, `dW = dzᵀ h`. As in
//! [`super::linear_cross_entropy`] rows go through in chunks and `[T, V]` is never stored.

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use super::composed::in_chunks;
use super::fused::{Gradients, chunk_rows};
use super::reference::log_softmax;
use super::row::Softmax;
use super::{Output, RowStatistics, with_gradients};
use crate::composed::CHUNK_VALUES;
use crate::gemm::{Mat, Threads, matmul};
use crate::linear::{product_nn, product_nt, with_weight};
use crate::simd::{tanh, vectorised};
use crate::storage::{host_f64, with_f32};

/// `Σ_rows ℓ` and `ℓ` of every row (`rows.hard`).
///
/// # Shapes
/// - `hidden`: `[R, H]`, `head`: `[V, H]`, `labels`: `[R]` → a scalar
///
/// # Errors
/// - shapes do not fit, a label lies outside the vocabulary, or `softcap` is not positive
pub fn softcapped_linear_cross_entropy(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    softcap: f64,
) -> Result<Output> {
    check(hidden, head, labels, softcap)?;
    if !crate::dispatch::fused(&[hidden]) {
        return softcapped_composed(hidden, head, labels, softcap);
    }
    let (loss, rows, gradients) = forward(hidden, head, labels, softcap as f32)?;
    Ok(Output { loss_sum: with_gradients(loss, gradients, [hidden, head, head])?, rows })
}

/// The same on any device; `[R, V]` is never materialised.
///
/// # Errors
/// - as [`softcapped_linear_cross_entropy`]
pub fn softcapped_composed(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    softcap: f64,
) -> Result<Output> {
    check(hidden, head, labels, softcap)?;
    in_chunks(CHUNK_VALUES, &[(hidden, head)], None, |rows, products| {
        let (hidden, head) = products[0];
        let labels: Vec<u32> = rows.iter().map(|&row| labels[row as usize]).collect();
        softcapped_reference(hidden, head, &labels, softcap)
    })
}

/// The same from plain tensor ops, for any device and float type; `[R, V]` is materialised.
///
/// # Errors
/// - as [`softcapped_linear_cross_entropy`]
pub fn softcapped_reference(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    softcap: f64,
) -> Result<Output> {
    check(hidden, head, labels, softcap)?;
    let logits = softcapped_logits(hidden, head, softcap)?;
    let log_q = log_softmax(&logits)?;
    let ids = Tensor::from_slice(labels, (labels.len(), 1), hidden.device())?;
    let nll = log_q.gather(&ids, 1)?.squeeze(1)?.neg()?;
    let hard = host_f64(&nll)?;
    let best = logits.argmax(1)?.to_vec1::<u32>()?;
    let agrees = best.iter().zip(labels).map(|(best, label)| best == label).collect();
    Ok(Output { loss_sum: nll.sum_all()?, rows: statistics(hard, agrees) })
}

/// `c tanh(h Wᵀ / c)`, in f32 or wider.
///
/// # Shapes
/// - `hidden`: `[R, H]`, `head`: `[V, H]` → `[R, V]`
///
/// # Errors
/// - shapes do not fit
pub fn softcapped_logits(hidden: &Tensor, head: &Tensor, softcap: f64) -> Result<Tensor> {
    let wide = if hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let logits = crate::linear::linear(hidden, head, None)?.to_dtype(wide)?;
    (logits / softcap)?.tanh()? * softcap
}

fn check(hidden: &Tensor, head: &Tensor, labels: &[u32], softcap: f64) -> Result<()> {
    let (rows, width) = hidden.dims2()?;
    let (vocabulary, head_width) = head.dims2()?;
    if width != head_width || labels.len() != rows {
        bail!(
            "softcapped_linear_cross_entropy: hidden {:?}, head {:?} and {} labels do not fit",
            hidden.shape(),
            head.shape(),
            labels.len()
        );
    }
    if let Some(label) = labels.iter().find(|&&y| y as usize >= vocabulary) {
        bail!("softcapped_linear_cross_entropy: label {label} outside {vocabulary} tokens");
    }
    if !(softcap > 0.0 && softcap.is_finite()) {
        bail!("softcapped_linear_cross_entropy: positive softcap expected, found {softcap}");
    }
    Ok(())
}

fn statistics(hard: Vec<f64>, agrees: Vec<bool>) -> RowStatistics {
    let acceptance = hard.iter().map(|nll| (-nll).exp()).collect();
    RowStatistics { soft: vec![0.0; hard.len()], hard, agrees, acceptance }
}

fn forward(
    hidden: &Tensor,
    head: &Tensor,
    labels: &[u32],
    softcap: f32,
) -> Result<(f64, RowStatistics, Gradients)> {
    let (vocabulary, width) = head.dims2()?;
    let mut gradients = Gradients {
        hidden: hidden.track_op().then(Vec::new),
        head: head.track_op().then(|| vec![0.0; vocabulary * width]),
        low_rank: None,
    };
    let want_grad = gradients.hidden.is_some() || gradients.head.is_some();
    let (mut hard, mut agrees) = (Vec::new(), Vec::new());
    with_f32(hidden, |hidden| {
        with_weight(head, |head| {
            let chunk = chunk_rows(vocabulary);
            let chunks = hidden.chunks((chunk * width).max(1)).zip(labels.chunks(chunk));
            for (hidden, labels) in chunks {
                let mut logits = product_nt(hidden, head, width, vocabulary);
                let rows: Vec<(f64, bool)> = logits
                    .par_chunks_mut(vocabulary)
                    .zip(labels)
                    .map(|(z, &label)| row(z, label as usize, softcap, want_grad))
                    .collect();
                hard.extend(rows.iter().map(|row| row.0));
                agrees.extend(rows.iter().map(|row| row.1));
                if let Some(grad) = &mut gradients.hidden {
                    grad.extend(product_nn(&logits, head, width, vocabulary));
                }
                if let Some(grad) = &mut gradients.head {
                    let dz = Mat::rows(&logits, labels.len(), vocabulary, vocabulary).t();
                    let hidden = Mat::rows(hidden, labels.len(), width, width);
                    matmul(grad, width, dz, hidden, true, Threads::Pool);
                }
            }
            Ok(())
        })
    })?;
    let loss = hard.iter().sum();
    Ok((loss, statistics(hard, agrees), gradients))
}

/// Loss of one row and whether its label is the most likely token; `z` becomes `dℓ/dz` if wanted.
fn row(z: &mut [f32], label: usize, softcap: f32, want_grad: bool) -> (f64, bool) {
    let mut t = vec![0.0; z.len()];
    cap(z, &mut t, softcap);
    let label_logit = f64::from(z[label]);
    let q = Softmax::of(z);
    if want_grad {
        let of_label = (f64::from(z[label]) / q.total - 1.0) as f32;
        distribution_gradient(z, &t, (1.0 / q.total) as f32);
        z[label] = of_label * (1.0 - t[label] * t[label]);
    }
    (q.log_sum_exp() - label_logit, q.argmax as usize == label)
}

vectorised! {
    /// `t = tanh(z / c)`, `z ← c t`
    fn cap(z: &mut [f32], t: &mut [f32], softcap: f32) {
        let inverse = 1.0 / softcap;
        for (z, t) in z.iter_mut().zip(t) {
            *t = tanh(*z * inverse);
            *z = softcap * *t;
        }
    }

    /// `z ← scale · z (1 − t²)`
    fn distribution_gradient(z: &mut [f32], t: &[f32], scale: f32) {
        for (z, t) in z.iter_mut().zip(t) {
            *z *= scale * (1.0 - t * t);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Backward;
    use crate::test_support::{Noise, assert_close, gradcheck};

    #[test]
    fn fused_matches_reference_in_loss_and_both_gradients() -> Result<()> {
        for (seed, rows, width, vocabulary, softcap) in
            [(1, 1, 3, 1, 30.0), (2, 7, 5, 17, 2.0), (3, 300, 12, 65, 20.0), (4, 20, 4, 4500, 0.5)]
        {
            let mut noise = Noise::new(seed);
            let (hidden, head) = (noise.var(&[rows, width]), noise.var(&[vocabulary, width]));
            let labels: Vec<u32> = (0..rows).map(|_| noise.below(vocabulary) as u32).collect();
            let fused = softcapped_linear_cross_entropy(&hidden, &head, &labels, softcap)?;
            let plain = softcapped_reference(&hidden, &head, &labels, softcap)?;
            let own = softcapped_composed(&hidden, &head, &labels, softcap)?;
            assert_close("composed", &own.loss_sum, &plain.loss_sum, 2e-6);
            assert_eq!(own.rows.agrees, plain.rows.agrees);
            let own = own.loss_sum.gradients()?;
            assert_close("loss", &fused.loss_sum, &plain.loss_sum, 2e-6);
            assert_eq!(fused.rows.agrees, plain.rows.agrees);
            for (a, b) in fused.rows.hard.iter().zip(&plain.rows.hard) {
                assert!((a - b).abs() < 1e-5, "{a} {b}");
            }
            let (fused, plain) = (fused.loss_sum.gradients()?, plain.loss_sum.gradients()?);
            for (name, var) in [("hidden", &hidden), ("head", &head)] {
                let fused = fused.get(var).expect("fused gradient");
                assert_close(name, fused, plain.get(var).expect("gradient"), 1e-5);
                assert_close(name, own.get(var).expect("composed"), fused, 1e-5);
            }
        }
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(6);
        let inputs = [(noise.tensor(&[3, 4]) * 3.0).expect("scale"), noise.tensor(&[5, 4])];
        gradcheck(&inputs, |t| Ok(softcapped_reference(&t[0], &t[1], &[0, 4, 2], 1.5)?.loss_sum));
    }

    #[test]
    fn a_frozen_head_gets_no_gradient_and_bad_input_is_named() -> Result<()> {
        let mut noise = Noise::new(7);
        let (hidden, head) = (noise.var(&[2, 3]), noise.tensor(&[4, 3]));
        let loss = softcapped_linear_cross_entropy(&hidden, &head, &[1, 3], 30.0)?.loss_sum;
        let gradients = loss.gradients()?;
        assert!(gradients.get(&hidden).is_some() && gradients.get(&head).is_none());
        for (labels, softcap) in [(&[1, 4][..], 30.0), (&[1], 30.0), (&[1, 2], 0.0)] {
            assert!(softcapped_linear_cross_entropy(&hidden, &head, labels, softcap).is_err());
        }
        Ok(())
    }
}
