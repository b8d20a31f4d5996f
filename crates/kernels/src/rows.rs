//! Some rows of a tensor, and sums of them.
//!
//! Rows come by [`select_rows`]; its gradient, and what [`scatter_rows`] computes, are sums of the rows
//! that go to the same place, in the order of their ids. A GPU forms each of them by threads of its own:
//! the rows are sorted by place beforehand, and nothing is added atomically.

use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;

use crate::cuda;
use crate::cuda::repeat::spoil;
use crate::cuda::rows::{put_halves, put_halves_at, some_rows, some_wide_rows};
use crate::graph::{add_to, cat, differentiable_new};
use crate::settings::composed_only;
use crate::storage::{change_f32, with_f32};
use crate::sums::Sums;

/// The rows `ids` of `x`, `[T, ...]` → `[R, ...]`; gradients flow into them.
///
/// No ids give `[0, ...]` without a kernel: a GPU's driver refuses to start one that has no blocks.
///
/// # Errors
/// - an id is `T` or more (on the CPU), or the device has no memory
pub fn select_rows(x: &Tensor, ids: &[u32]) -> Result<Tensor> {
    if ids.is_empty() {
        let mut shape = x.dims().to_vec();
        shape[0] = 0;
        return Tensor::zeros(shape, x.dtype(), x.device());
    }
    let on_cpu = crate::dispatch::fused(&[x]);
    if x.track_op() && !on_cpu && !cuda::takes(&[x]) {
        return rows_by_ops(x, ids);
    }
    let by_kernel = cuda::runs_on(x.device()) && !composed_only();
    let own = if by_kernel { some_rows(&x.detach(), ids)? } else { None };
    let out = match own {
        Some(rows) => rows,
        None => rows_by_ops(&x.detach(), ids)?,
    };
    if !x.track_op() {
        return Ok(out);
    }
    let (back, values) = (Sums::by_id(ids, x.dim(0)?)?, x.elem_count());
    let shape = x.shape().clone();
    differentiable_new("select_rows", [x; 3], out, move |gradient| {
        if !on_cpu {
            return Ok([Some(cuda::rows::sum_rows(gradient, None, &back)?), None, None]);
        }
        with_f32(gradient, |rows| {
            add_to(0, |sum| {
                if let Some(sum) = sum {
                    change_f32(sum, |sum| {
                        back.add_rows(rows, sum);
                        Ok(())
                    })?;
                    return Ok(sum.clone());
                }
                let mut sum = vec![0.0; values];
                back.add_rows(rows, &mut sum);
                Tensor::from_vec(sum, &shape, gradient.device())
            })
        })?;
        Ok([None, None, None])
    })
}

/// [`select_rows`] in f32, in one start where `x` is bf16 and does not train.
pub(crate) fn wide_rows(x: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let by_kernel = !x.track_op() && cuda::runs_on(x.device()) && !composed_only();
    match if by_kernel { some_wide_rows(x, ids)? } else { None } {
        Some(rows) => Ok(rows),
        None => select_rows(x, ids)?.to_dtype(DType::F32),
    }
}

fn rows_by_ops(x: &Tensor, ids: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::from_slice(ids, ids.len(), x.device())?, 0)
}

/// `[rows, ...]` in which row `ids[i]` holds row `i` of `x`, `[R, ...]`; several at one place are added in
/// their order, and all other rows are 0. Gradients flow into `x`.
///
/// # Errors
/// - there is not an id a row, one is `rows` or more, or the device has no memory
pub fn scatter_rows(x: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    if x.dim(0)? != ids.len() {
        bail!("scatter_rows: {} ids for {:?}", ids.len(), x.shape());
    }
    let sums = Sums::by_id(ids, rows)?;
    if ids.is_empty() {
        let mut shape = x.dims().to_vec();
        shape[0] = rows;
        return Tensor::zeros(shape, x.dtype(), x.device());
    }
    if !cuda::takes(&[x]) {
        return reference(x, ids, rows);
    }
    let out = cuda::rows::sum_rows(&x.detach(), None, &sums)?;
    let ids = ids.to_vec();
    differentiable_new("scatter_rows", [x; 3], out, move |gradient| {
        Ok([Some(select_rows(gradient, &ids)?), None, None])
    })
}

/// Writes `rows`, `[R, ...]`, over the rows of `into` from `first` on, rounded to its type, without gradients. On an
/// NVIDIA GPU f32 is rounded to bf16 while it is written.
///
/// # Errors
/// - `into` is not contiguous or too short, or rows differ in shape
pub fn put_rows(into: &Tensor, rows: &Tensor, first: usize) -> Result<()> {
    let rounds = into.dtype() == DType::BF16 && into.is_contiguous() && cuda::takes(&[rows]);
    if rounds && rows.elem_count() > 0 && rows.dims().get(1..) == into.dims().get(1..) {
        let place = into.narrow(0, first, rows.dim(0)?)?;
        if put_halves(&rows.detach(), &place)? {
            return Ok(());
        }
    }
    spoil("rows were written otherwise than by a kernel of ours");
    into.slice_set(&rows.contiguous()?.to_dtype(into.dtype())?, 0, first)
}

/// The same where kernels for NVIDIA GPUs take both: `rows` in f32, over contiguous bf16 rows of a multiple of 8 values. The first row
/// lies on the device, a u32; whoever gives it answers for the room after it.
///
/// # Errors
/// - the kernels do not take them, or rows differ in shape
pub fn put_rows_at(into: &Tensor, rows: &Tensor, first: &Tensor) -> Result<()> {
    if !cuda::takes(&[rows]) || rows.dims().get(1..) != into.dims().get(1..) {
        bail!("put_rows_at: {rows:?} over {into:?}");
    }
    put_halves_at(&rows.detach(), into, first)
}

/// The columns of both side by side, `[R, A]` and `[R, B]` → `[R, A + B]`.
///
/// # Errors
/// - the rows are not equally many, or the device has no memory
pub fn beside(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let ((rows, left), (_, right)) = (a.dims2()?, b.dims2()?);
    if rows == 0 || !cuda::takes(&[a, b]) {
        return cat(&[a, b], 1);
    }
    let out = Tensor::cat(&[a.detach(), b.detach()], 1)?;
    let want = [a.track_op(), b.track_op()];
    // candle's own gradients are views of columns, which its sums read value by value.
    differentiable_new("beside", [a, b, b], out, move |gradient| {
        let of = |from: usize, columns: usize, wanted: bool| {
            wanted.then(|| cuda::rows::some_columns(gradient, from, columns)).transpose()
        };
        Ok([of(0, left, want[0])?, of(left, right, want[1])?, None])
    })
}

/// [`scatter_rows`] from plain tensor ops, for any device and type.
fn reference(x: &Tensor, ids: &[u32], rows: usize) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    shape[0] = rows;
    let zeros = Tensor::zeros(shape, x.dtype(), x.device())?;
    let ids = Tensor::from_slice(ids, ids.len(), x.device())?;
    zeros.index_add(&ids, &x.contiguous()?, 0)
}

impl Sums {
    /// Adds rows to those of `sum` that they belong to, each sum in the order of its terms.
    fn add_rows(&self, rows: &[f32], sum: &mut [f32]) {
        let width = sum.len() / self.rows().max(1);
        if width == 0 {
            return;
        }
        sum.par_chunks_mut(width).zip(self.from.par_windows(2)).with_min_len(64).for_each(
            |(sum, range)| {
                for &place in &self.places[range[0] as usize..range[1] as usize] {
                    let row = &rows[place as usize * width..][..width];
                    sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                }
            },
        );
    }

    /// `base` plus the weighted rows of `x`, both `[.., H]` in f32 without gradients: by the kernel where
    /// it takes them, else from plain tensor ops, where every row must sum equally many.
    pub(crate) fn of(&self, x: &Tensor, base: &Tensor) -> Result<Tensor> {
        if cuda::takes(&[x, base]) {
            return cuda::rows::sum_rows(x, Some(base), self);
        }
        self.composed(x, base)
    }

    /// The same from plain tensor ops.
    pub(crate) fn composed(&self, x: &Tensor, base: &Tensor) -> Result<Tensor> {
        let (rows, terms) = (self.rows(), self.places.len());
        let each = terms / rows.max(1);
        if !(0..=rows).all(|row| self.from[row] as usize == row * each) {
            bail!("sums of rows: not every row sums {each}");
        }
        let mut terms = select_rows(x, &self.places)?;
        if let Some(weights) = &self.weights {
            let weights = Tensor::from_slice(weights, (weights.len(), 1), x.device())?;
            terms = terms.broadcast_mul(&weights.to_dtype(x.dtype())?)?;
        }
        terms.reshape((rows, each, x.dim(1)?))?.sum(1)? + base
    }
}

#[cfg(test)]
mod tests {
    use crate::graph::Backward;
    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

    #[test]
    fn rows_come_in_the_order_of_their_ids() -> Result<()> {
        let x = Tensor::arange(0.0_f32, 6.0, &Device::Cpu)?.reshape((3, 2))?;
        let rows = select_rows(&x, &[2, 0, 2])?;
        assert_eq!(rows.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]);
        assert!(select_rows(&x, &[3]).is_err());
        Ok(())
    }

    #[test]
    fn no_ids_give_no_rows_and_start_nothing() -> Result<()> {
        let x = Tensor::zeros((3, 2, 5), DType::BF16, &Device::Cpu)?;
        let none = select_rows(&x, &[])?;
        assert_eq!((none.dims(), none.dtype()), ([0, 2, 5].as_slice(), DType::BF16));
        // A kernel's result would hang on what it was computed from.
        let variable = Var::zeros((3, 2), DType::F32, &Device::Cpu)?;
        assert!(!select_rows(variable.as_tensor(), &[])?.track_op());
        Ok(())
    }

    #[test]
    fn a_gpu_gives_the_same_rows_of_every_type_and_width() -> Result<()> {
        let mut noise = Noise::new(2);
        for shape in [vec![9, 8], vec![9, 3], vec![5, 2, 12], vec![300, 4]] {
            let rows = shape[0] as u32;
            let ids: Vec<u32> = (0..40).map(|i| (i * 7 + 3) % rows).collect();
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let x = noise.tensor(&shape).to_dtype(dtype)?;
                let part = x.narrow(0, 1, shape[0] - 1)?;
                let inside: Vec<u32> = ids.iter().map(|id| id % (rows - 1)).collect();
                for (x, ids) in [(&x, &ids), (&part, &inside)] {
                    let (own, want) = (emulated(|| select_rows(x, ids))?, select_rows(x, ids)?);
                    assert_eq!(own.dtype(), dtype);
                    let wide = |t: &Tensor| t.to_dtype(DType::F32);
                    assert_close("rows", &wide(&own)?, &wide(&want)?, 0.0);
                    let own = emulated(|| wide_rows(x, ids))?;
                    assert_eq!(own.dtype(), DType::F32);
                    assert_close("rows in f32", &own, &wide(&want)?, 0.0);
                }
                assert!(emulated(|| select_rows(&x, &[rows])).is_err());
            }
        }
        Ok(())
    }

    #[test]
    fn columns_beside_each_other_give_each_its_gradient() -> Result<()> {
        let mut noise = Noise::new(3);
        for (rows, left, right) in [(3, 4, 8), (5, 3, 4), (70, 12, 12), (1, 1, 1)] {
            let (a, b) = (noise.var(&[rows, left]), noise.var(&[rows, right]));
            let direction = noise.tensor(&[rows, left + right]);
            let plain = beside(&a, &b)?;
            emulated(|| -> Result<()> {
                let own = beside(&a, &b)?;
                assert_alike(&[("a", &a), ("b", &b)], &direction, [&own, &plain], (0.0, 0.0));
                Ok(())
            })?;
            let alone =
                emulated(|| (beside(&a.detach(), &b)? * &direction)?.sum_all()?.gradients())?;
            assert!(alone.get(&a).is_none() && alone.get(&b).is_some());
        }
        assert!(emulated(|| beside(&noise.tensor(&[2, 3]), &noise.tensor(&[3, 3]))).is_err());
        Ok(())
    }

    #[test]
    fn rows_go_to_their_places_and_add_up() -> Result<()> {
        let x = Tensor::arange(1.0_f32, 7.0, &Device::Cpu)?.reshape((3, 2))?;
        let want = [[0.0, 0.0], [6.0, 8.0], [0.0, 0.0], [3.0, 4.0]];
        for emulate in [false, true] {
            let run = || scatter_rows(&x, &[1, 3, 1], 4)?.to_vec2::<f32>();
            assert_eq!(if emulate { emulated(run) } else { run() }?, want);
            let none = || scatter_rows(&select_rows(&x, &[])?, &[], 2)?.to_vec2::<f32>();
            assert_eq!(if emulate { emulated(none) } else { none() }?, [[0.0; 2]; 2]);
        }
        assert!(scatter_rows(&x, &[0, 1], 4).is_err());
        assert!(scatter_rows(&x, &[0, 1, 4], 4).is_err());
        Ok(())
    }

    #[test]
    fn gradients_follow_the_rows() {
        let mut noise = Noise::new(17);
        gradcheck(&[noise.tensor(&[4, 3])], |t| scatter_rows(&t[0], &[1, 0, 1, 5], 6));
        gradcheck(&[noise.tensor(&[4, 3])], |t| select_rows(&t[0], &[1, 0, 1, 3, 1]));
    }

    /// Values and gradients have the bits of one addition after the other, however often a row is asked for.
    #[test]
    fn the_gpus_sums_have_the_bits_of_additions_in_order() -> Result<()> {
        let mut noise = Noise::new(18);
        for (rows, chosen, shape) in
            [(1, 1, vec![1]), (5, 40, vec![7]), (300, 90, vec![2, 150]), (3, 700, vec![33])]
        {
            let ids: Vec<u32> = (0..chosen).map(|_| noise.below(rows) as u32).collect();
            let shaped = |count: usize| [&[count], &shape[..]].concat();
            let (x, picked) = (noise.var(&shaped(rows)), noise.var(&shaped(chosen)));
            let direction = noise.tensor(&shaped(chosen));
            let onto = noise.tensor(&shaped(rows));
            let run = || -> Result<Vec<Vec<f32>>> {
                let selected = select_rows(&x, &ids)?;
                let scattered = scatter_rows(&picked, &ids, rows)?;
                let loss = (&selected * &direction)?.sum_all()?;
                let loss = (loss + (&scattered * &onto)?.sum_all()?)?;
                let gradients = loss.gradients()?;
                let of = |variable: &Var| gradients.get(variable).expect("a gradient").clone();
                let all = [selected, scattered, of(&x), of(&picked)];
                all.iter().map(|t| t.flatten_all()?.to_vec1()).collect()
            };
            assert_eq!(emulated(run)?, run()?, "{chosen} of {rows}");
        }
        Ok(())
    }

    #[test]
    fn weighted_sums_onto_a_base_match_plain_tensor_ops() -> Result<()> {
        let mut noise = Noise::new(19);
        for (rows, each, width) in [(1, 1, 1), (9, 3, 40), (70, 8, 300)] {
            let (x, base) = (noise.tensor(&[rows * each, width]), noise.tensor(&[rows, width]));
            let weights = (0..rows * each).map(|_| noise.next() as f32).collect();
            let sums = Sums {
                from: (0..=rows as u32).map(|row| row * each as u32).collect(),
                places: (0..rows * each).map(|_| noise.below(rows * each) as u32).collect(),
                weights: Some(weights),
            };
            let own = emulated(|| sums.of(&x, &base))?;
            assert_close("sums", &own, &sums.composed(&x, &base)?, 1e-6);
        }
        Ok(())
    }

    #[test]
    fn rows_are_written_over_others_in_their_type() -> Result<()> {
        let mut noise = Noise::new(21);
        for (width, first) in [(8, 3), (16, 0), (5, 2)] {
            let rows = noise.tensor(&[4, 2, width]);
            for dtype in [DType::BF16, DType::F32] {
                let start = noise.tensor(&[9, 2, width]).to_dtype(dtype)?;
                let wide = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                let want = start.copy()?;
                want.slice_set(&rows.to_dtype(dtype)?, 0, first)?;
                let (own, plain) = (start.copy()?, start.copy()?);
                emulated(|| put_rows(&own, &rows, first))?;
                put_rows(&plain, &rows, first)?;
                assert_eq!(wide(&own)?, wide(&want)?, "{width} values, {dtype:?}");
                assert_eq!(wide(&plain)?, wide(&want)?);
            }
        }
        let held = Tensor::zeros((3, 8), DType::BF16, &Device::Cpu)?;
        assert!(emulated(|| put_rows(&held, &noise.tensor(&[2, 8]), 2)).is_err(), "too long");
        assert!(emulated(|| put_rows(&held, &noise.tensor(&[2, 4]), 0)).is_err(), "other rows");
        Ok(())
    }
}
