//! Affine map `y = x Wᵀ + b`, weights `[O, I]` as published.
//!
//! Backward: `dx = g W`, `dW = gᵀ x`, `db = Σ_rows g`; only for arguments that train. Weights
//! may be f32, bf16 or f16 (frozen ones): they are widened tile by tile and every product
//! accumulates in f32.
//!
//! Two code paths, chosen by the number of rows alone. Up to [`FEW_ROWS`] rows (decoding) each
//! weight row is read once and every output is a dot product in a fixed order, so that a row's
//! bits do not depend on its neighbours. Beyond that, blocked matrix products.

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::gemm::{Mat, Threads, matmul};
use crate::simd::dot_rows;
use crate::storage::{f32_slice, with_f32};

/// Most rows for which a row's result is independent of the rows computed beside it.
pub const FEW_ROWS: usize = 16;

/// Weight rows widened to f32 at a time, when the weight is stored in 16 bits.
const WIDEN_ROWS: usize = 256;

/// `x Wᵀ + b`.
///
/// # Shapes
/// - `x`: `[R, I]`, `weight`: `[O, I]`, `bias`: `[O]` → `[R, O]`
///
/// # Errors
/// - shapes do not fit, or `weight` is neither f32, bf16 nor f16 on the fused path
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (_, inputs) = x.dims2()?;
    let (outputs, weight_inputs) = weight.dims2()?;
    if inputs != weight_inputs {
        bail!("linear: input {:?} does not fit weight {:?}", x.shape(), weight.shape());
    }
    if let Some(bias) = bias
        && bias.dims() != [outputs]
    {
        bail!("linear: bias [{outputs}] expected, found {:?}", bias.shape());
    }
    if !matches!(x.device(), Device::Cpu) || x.dtype() != DType::F32 {
        return reference(x, weight, bias);
    }
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    if let Some(bias) = bias {
        x.apply_op3(&weight, &bias.contiguous()?, Linear { with_bias: true })
    } else {
        let empty = Tensor::zeros(0, DType::F32, x.device())?;
        x.apply_op3(&weight, &empty, Linear { with_bias: false })
    }
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`linear`]
pub fn reference(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let out = x.matmul(&weight.to_dtype(x.dtype())?.t()?)?;
    match bias {
        Some(bias) => out.broadcast_add(&bias.to_dtype(x.dtype())?),
        None => Ok(out),
    }
}

/// A frozen or trained `[O, I]` matrix in one of the storage types that products accept.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Weight<'a> {
    pub(crate) fn from_storage(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("linear: contiguous weight expected, found strides {:?}", layout.stride())
        };
        match storage {
            CpuStorage::F32(w) => Ok(Self::F32(&w[start..end])),
            CpuStorage::BF16(w) => Ok(Self::Bf16(&w[start..end])),
            CpuStorage::F16(w) => Ok(Self::F16(&w[start..end])),
            _ => bail!("linear: weight of f32, bf16 or f16 expected"),
        }
    }

    /// Rows `first..first + rows` as f32, widened into `buffer` if stored narrower.
    fn rows(self, first: usize, rows: usize, inputs: usize, buffer: &'a mut Vec<f32>) -> &'a [f32] {
        let range = first * inputs..(first + rows) * inputs;
        match self {
            Self::F32(w) => &w[range],
            Self::Bf16(w) => widen(&w[range], buffer, bf16::to_f32),
            Self::F16(w) => widen(&w[range], buffer, f16::to_f32),
        }
    }

    fn tile_rows(self, outputs: usize) -> usize {
        if matches!(self, Self::F32(_)) { outputs } else { WIDEN_ROWS }
    }
}

fn widen<'b, T: Copy + Sync>(
    values: &[T],
    buffer: &'b mut Vec<f32>,
    to_f32: fn(T) -> f32,
) -> &'b [f32] {
    buffer.resize(values.len(), 0.0);
    for (wide, &narrow) in buffer.iter_mut().zip(values) {
        *wide = to_f32(narrow);
    }
    buffer
}

/// `out[R, O] = x[R, I] · Wᵀ`.
pub(crate) fn product_nt(x: &[f32], weight: Weight<'_>, inputs: usize, outputs: usize) -> Vec<f32> {
    let rows = x.len() / inputs.max(1);
    if inputs == 0 || rows == 0 {
        return vec![0.0; rows * outputs];
    }
    if rows <= FEW_ROWS {
        return few_rows(x, weight, rows, inputs, outputs);
    }
    let mut out = vec![0.0; rows * outputs];
    let step = weight.tile_rows(outputs);
    let mut buffer = Vec::new();
    for first in (0..outputs).step_by(step.max(1)) {
        let count = step.min(outputs - first);
        let w = weight.rows(first, count, inputs, &mut buffer);
        let (a, b) = (Mat::rows(x, rows, inputs, inputs), Mat::rows(w, count, inputs, inputs).t());
        matmul(&mut out[first..], outputs, a, b, false, Threads::Pool);
    }
    out
}

/// `out[R, I] = g[R, O] · W`.
pub(crate) fn product_nn(g: &[f32], weight: Weight<'_>, inputs: usize, outputs: usize) -> Vec<f32> {
    let rows = g.len() / outputs.max(1);
    let mut out = vec![0.0; rows * inputs];
    let step = weight.tile_rows(outputs);
    let mut buffer = Vec::new();
    for first in (0..outputs).step_by(step.max(1)) {
        let count = step.min(outputs - first);
        let w = weight.rows(first, count, inputs, &mut buffer);
        let (a, b) =
            (Mat::rows(&g[first..], rows, count, outputs), Mat::rows(w, count, inputs, inputs));
        matmul(&mut out, inputs, a, b, first > 0, Threads::Pool);
    }
    out
}

/// One pass over the weight: each task takes some of its rows and dots them with every input.
fn few_rows(x: &[f32], weight: Weight<'_>, rows: usize, inputs: usize, outputs: usize) -> Vec<f32> {
    const OUTPUTS_PER_TASK: usize = 64;
    let inputs_by_row: Vec<&[f32]> = x.chunks_exact(inputs).collect();
    // [O, R]: a task's outputs are contiguous; turned around below.
    let mut by_output = vec![0.0; outputs * rows];
    by_output.par_chunks_mut(OUTPUTS_PER_TASK * rows).enumerate().for_each(|(task, out)| {
        let mut buffer = Vec::new();
        for (i, out) in out.chunks_exact_mut(rows).enumerate() {
            let w = weight.rows(task * OUTPUTS_PER_TASK + i, 1, inputs, &mut buffer);
            dot_all(&inputs_by_row, w, out);
        }
    });
    if rows == 1 {
        return by_output;
    }
    let mut out = vec![0.0; rows * outputs];
    out.par_chunks_mut(outputs).enumerate().for_each(|(r, out)| {
        for (o, value) in out.iter_mut().enumerate() {
            *value = by_output[o * rows + r];
        }
    });
    out
}

fn dot_all(rows: &[&[f32]], w: &[f32], out: &mut [f32]) {
    let mut done = 0;
    while rows.len() - done >= 4 {
        let group = [rows[done], rows[done + 1], rows[done + 2], rows[done + 3]];
        let mut sums = [0.0; 4];
        dot_rows(&group, w, &mut sums);
        out[done..done + 4].copy_from_slice(&sums);
        done += 4;
    }
    while done < rows.len() {
        let mut sum = [0.0];
        dot_rows(&[rows[done]], w, &mut sum);
        out[done] = sum[0];
        done += 1;
    }
}

struct Linear {
    with_bias: bool,
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = f32_slice(s1, l1, "linear")?;
        let weight = Weight::from_storage(s2, l2)?;
        let (rows, inputs) = l1.shape().dims2()?;
        let (outputs, _) = l2.shape().dims2()?;
        let mut out = product_nt(x, weight, inputs, outputs);
        if self.with_bias {
            let bias = f32_slice(s3, l3, "linear bias")?;
            out.par_chunks_mut(outputs.max(1)).for_each(|row| {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            });
        }
        Ok((CpuStorage::F32(out), (rows, outputs).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (rows, inputs) = x.dims2()?;
        let (outputs, _) = weight.dims2()?;
        let dx = if x.track_op() {
            let (storage, layout) = weight.storage_and_layout();
            let candle_core::Storage::Cpu(storage) = &*storage else {
                bail!("linear: CPU weight expected")
            };
            let w = Weight::from_storage(storage, layout)?;
            let dx = with_f32(grad, |g| Ok(product_nn(g, w, inputs, outputs)))?;
            Some(Tensor::from_vec(dx, x.shape(), x.device())?)
        } else {
            None
        };
        let dw = if weight.track_op() {
            let mut dw = vec![0.0; outputs * inputs];
            with_f32(x, |x| {
                with_f32(grad, |g| {
                    let g = Mat::rows(g, rows, outputs, outputs).t();
                    let x = Mat::rows(x, rows, inputs, inputs);
                    matmul(&mut dw, inputs, g, x, false, Threads::Pool);
                    Ok(())
                })
            })?;
            Some(Tensor::from_vec(dw, weight.shape(), weight.device())?)
        } else {
            None
        };
        let db = if self.with_bias && bias.track_op() {
            let db = with_f32(grad, |g| Ok(column_sums(g, outputs)))?;
            Some(Tensor::from_vec(db, bias.shape(), bias.device())?)
        } else {
            None
        };
        Ok((dx, dw, db))
    }
}

fn column_sums(g: &[f32], columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0_f32; columns];
    sums.par_chunks_mut(256).enumerate().for_each(|(block, sums)| {
        for row in g.chunks_exact(columns) {
            for (sum, g) in sums.iter_mut().zip(&row[block * 256..]) {
                *sum += g;
            }
        }
    });
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close, gradcheck};

    #[test]
    fn fused_matches_reference_forward_and_backward() -> Result<()> {
        for (seed, rows, inputs, outputs) in
            [(1, 1, 1, 1), (2, 3, 7, 5), (3, 16, 33, 70), (4, 17, 33, 70), (5, 90, 64, 300)]
        {
            let mut noise = Noise::new(seed);
            let (x, w, b) =
                (noise.var(&[rows, inputs]), noise.var(&[outputs, inputs]), noise.var(&[outputs]));
            let direction = noise.tensor(&[rows, outputs]);
            let fused = linear(&x, &w, Some(&b))?;
            let plain = reference(&x, &w, Some(&b))?;
            assert_close("forward", &fused, &plain, 1e-6);
            let fused = (fused * &direction)?.sum_all()?.backward()?;
            let plain = (plain * &direction)?.sum_all()?.backward()?;
            for (name, var) in [("x", &x), ("weight", &w), ("bias", &b)] {
                let (a, b) = (fused.get(var).expect("fused"), plain.get(var).expect("plain"));
                assert_close(name, a, b, 1e-5);
            }
        }
        Ok(())
    }

    #[test]
    fn few_rows_have_the_same_bits_alone_and_together() -> Result<()> {
        let mut noise = Noise::new(7);
        let (x, w) = (noise.tensor(&[FEW_ROWS, 577]), noise.tensor(&[130, 577]));
        let together = linear(&x, &w, None)?.to_vec2::<f32>()?;
        for rows in 1..=FEW_ROWS {
            let start = FEW_ROWS - rows;
            let part = linear(&x.narrow(0, start, rows)?, &w, None)?.to_vec2::<f32>()?;
            for (a, b) in part.iter().flatten().zip(together[start..].iter().flatten()) {
                assert_eq!(a.to_bits(), b.to_bits());
            }
        }
        Ok(())
    }

    #[test]
    fn sixteen_bit_weights_equal_their_widened_selves() -> Result<()> {
        let mut noise = Noise::new(8);
        for rows in [2, 40] {
            let (x, w) = (noise.var(&[rows, 24]), noise.tensor(&[600, 24]));
            for dtype in [DType::BF16, DType::F16] {
                let narrow = w.to_dtype(dtype)?;
                let wide = narrow.to_dtype(DType::F32)?;
                let (a, b) = (linear(&x, &narrow, None)?, linear(&x, &wide, None)?);
                assert_close("forward", &a, &b, 1e-6);
                let (a, b) = (a.sqr()?.sum_all()?.backward()?, b.sqr()?.sum_all()?.backward()?);
                assert_close("x", a.get(&x).expect("grad"), b.get(&x).expect("grad"), 1e-5);
            }
        }
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(9);
        let inputs = [noise.tensor(&[3, 4]), noise.tensor(&[2, 4]), noise.tensor(&[2])];
        gradcheck(&inputs, |t| reference(&t[0], &t[1], Some(&t[2])));
    }

    #[test]
    fn frozen_weight_gets_no_gradient() -> Result<()> {
        let mut noise = Noise::new(10);
        let (x, w) = (noise.var(&[3, 4]), noise.tensor(&[2, 4]));
        let grads = linear(&x, &w, None)?.sum_all()?.backward()?;
        assert!(grads.get(&x).is_some() && grads.get(&w).is_none());
        Ok(())
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let mut noise = Noise::new(11);
        let x = noise.tensor(&[3, 4]);
        assert!(linear(&x, &noise.tensor(&[2, 5]), None).is_err());
        assert!(linear(&x, &noise.tensor(&[2, 4]), Some(&noise.tensor(&[3]))).is_err());
    }
}
