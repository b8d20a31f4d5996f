//! Products of every row with its own choice of rows of a table: logits of a few candidates without
//! those of all others.
//!
//! ```text
//! out[r, j] = ⟨x_r, table[ids[r, j]]⟩
//! dx_r = Σ_j g[r, j] · table[ids[r, j]]        dtable_v = Σ_{ids[r, j] = v} g[r, j] · x_r
//! ```
//!
//! A frozen table takes no gradient. Terms of `dtable` are added in the order of `r`, then `j`.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::composed::CHUNK_VALUES;
use crate::dispatch::fused;
use crate::graph::differentiable;
use crate::matrix::{Head, Matrix, QuantisedMatrix};
use crate::rows::{scatter_rows, select_rows};
use crate::simd::{axpy, dot};
use crate::storage::{with_each_f32, with_f32};
use crate::sums::Sums;

/// Products of rows `x` with the rows `ids` of a table, as many of them for each row. Of a table of quantised blocks
/// the chosen rows alone are widened, each when it is multiplied.
///
/// # Shapes
/// - `x`: `[R, N]`, `table`: `[V, N]`, `ids`: `R·K` of them, those of a row side by side → `[R, K]` of
///   the type of `x`
///
/// # Errors
/// - shapes do not fit, or an id is `V` or more
pub fn chosen_products<'a>(x: &Tensor, table: impl Into<Head<'a>>, ids: &[u32]) -> Result<Tensor> {
    let table: Head<'_> = table.into();
    let choice = Choice::new(x, table, ids)?;
    let x = x.contiguous()?;
    if choice.each == 0 {
        return Tensor::zeros((choice.rows, 0), x.dtype(), x.device());
    }
    match table {
        Head::Stored(Matrix::Quantised(blocks)) if fused(&[&x]) => of_blocks(choice, &x, blocks),
        table => of_tensor(choice, &x, &table.to_tensor()?.contiguous()?),
    }
}

/// With rows of frozen blocks.
fn of_blocks(choice: Choice, x: &Tensor, blocks: &Arc<QuantisedMatrix>) -> Result<Tensor> {
    let shape = (choice.rows, choice.each);
    let out = with_f32(x, |x| Ok(choice.products_with(x, |row| blocks.row(row))))?;
    let out = Tensor::from_vec(out, shape, x.device())?;
    let blocks = Arc::clone(blocks);
    differentiable("chosen_products", [x; 3], out, move |gradient| {
        let dx = with_f32(gradient, |g| Ok(choice.sums_with(g, |row| blocks.row(row))))?;
        let dx = Tensor::from_vec(dx, (choice.rows, choice.width), gradient.device())?;
        Ok([Some(dx), None, None])
    })
}

/// With rows of a tensor; both are contiguous.
fn of_tensor(choice: Choice, x: &Tensor, table: &Tensor) -> Result<Tensor> {
    let (of_x, of_table) = (x.detach(), table.detach());
    let fast = fused(&[x, table]);
    let out = if fast {
        choice.products(&of_x, &of_table)?
    } else {
        choice.by_chunks(|rows, ids| reference(&of_x.narrow(0, rows.0, rows.1)?, &of_table, ids))?
    };
    let wants = [x.track_op(), table.track_op()];
    differentiable("chosen_products", [x, table, x], out, move |gradient| {
        let gradient = gradient.contiguous()?;
        let dx = || choice.dx(&gradient, &of_table, fast);
        let dtable = || choice.dtable(&gradient, &of_x, fast);
        Ok([wants[0].then(dx).transpose()?, wants[1].then(dtable).transpose()?, None])
    })
}

/// [`chosen_products`] from plain tensor ops, for any device and float type: the table's rows are
/// gathered whole.
fn reference(x: &Tensor, table: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let Choice { rows, each, width, .. } = Choice::new(x, table, ids)?;
    let chosen = select_rows(table, ids)?.to_dtype(x.dtype())?.reshape((rows, each, width))?;
    chosen.broadcast_mul(&x.reshape((rows, 1, width))?)?.sum(2)
}

/// Which rows of a table every row takes.
struct Choice {
    ids: Vec<u32>,
    rows: usize,
    each: usize,
    width: usize,
    /// Rows of the table.
    table: usize,
}

impl Choice {
    fn new<'a>(x: &Tensor, table: impl Into<Head<'a>>, ids: &[u32]) -> Result<Self> {
        let ((rows, width), (all, table_width)) = (x.dims2()?, table.into().dims()?);
        if width != table_width || (rows == 0 && !ids.is_empty()) {
            bail!("chosen products: {:?} with rows of [{all}, {table_width}]", x.shape());
        }
        let each = ids.len() / rows.max(1);
        if each * rows != ids.len() {
            bail!("chosen products: {} ids for {rows} rows", ids.len());
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= all) {
            bail!("chosen products: row {id} of {all}");
        }
        Ok(Self { ids: ids.to_vec(), rows, each, width, table: all })
    }

    /// Calls `part` with first row, number of rows and ids of chunks whose gathered rows fit into
    /// memory, and joins what it returns.
    fn by_chunks(&self, part: impl Fn((usize, usize), &[u32]) -> Result<Tensor>) -> Result<Tensor> {
        let at_once = (CHUNK_VALUES / (self.each * self.width).max(1)).max(1);
        let firsts = (0..self.rows).step_by(at_once);
        let parts = firsts.map(|first| {
            let count = at_once.min(self.rows - first);
            part((first, count), &self.ids[first * self.each..(first + count) * self.each])
        });
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        if parts.len() == 1 { Ok(parts[0].clone()) } else { Tensor::cat(&parts, 0) }
    }

    fn dx(&self, gradient: &Tensor, table: &Tensor, fast: bool) -> Result<Tensor> {
        if fast { self.sums_of_table(gradient, table) } else { self.composed_dx(gradient, table) }
    }

    fn dtable(&self, gradient: &Tensor, x: &Tensor, fast: bool) -> Result<Tensor> {
        if fast { self.sums_of_rows(gradient, x) } else { self.composed_dtable(gradient, x) }
    }

    fn composed_dx(&self, gradient: &Tensor, table: &Tensor) -> Result<Tensor> {
        self.by_chunks(|(first, count), ids| {
            let chosen = select_rows(table, ids)?.to_dtype(gradient.dtype())?;
            let chosen = chosen.reshape((count, self.each, self.width))?;
            let gradient = gradient.narrow(0, first, count)?.unsqueeze(2)?;
            chosen.broadcast_mul(&gradient)?.sum(1)
        })
    }

    fn composed_dtable(&self, gradient: &Tensor, x: &Tensor) -> Result<Tensor> {
        let terms = self.by_chunks(|(first, count), _| {
            let x = x.narrow(0, first, count)?.unsqueeze(1)?;
            let terms = gradient.narrow(0, first, count)?.unsqueeze(2)?.broadcast_mul(&x)?;
            terms.reshape((count * self.each, self.width))
        })?;
        scatter_rows(&terms, &self.ids, self.table)
    }

    fn products(&self, x: &Tensor, table: &Tensor) -> Result<Tensor> {
        let width = self.width;
        let out = with_each_f32([x, table], |[x, table]| {
            Ok(self.products_with(x, |row| &table[row * width..][..width]))
        })?;
        Tensor::from_vec(out, (self.rows, self.each), x.device())
    }

    /// Products with the rows of a table that `row_of` reads.
    fn products_with<R: AsRef<[f32]>>(
        &self,
        x: &[f32],
        row_of: impl Fn(usize) -> R + Sync,
    ) -> Vec<f32> {
        let (each, width) = (self.each, self.width);
        let mut out = vec![0.0_f32; self.ids.len()];
        out.par_chunks_mut(each).zip(self.ids.par_chunks(each)).enumerate().for_each(
            |(row, (out, ids))| {
                let x = &x[row * width..(row + 1) * width];
                for (out, id) in out.iter_mut().zip(ids) {
                    *out = dot(x, row_of(*id as usize).as_ref());
                }
            },
        );
        out
    }

    fn sums_of_table(&self, gradient: &Tensor, table: &Tensor) -> Result<Tensor> {
        let width = self.width;
        let dx = with_each_f32([gradient, table], |[gradient, table]| {
            Ok(self.sums_with(gradient, |row| &table[row * width..][..width]))
        })?;
        Tensor::from_vec(dx, (self.rows, width), gradient.device())
    }

    /// Sums of the rows of a table that `row_of` reads, `[rows, width]`.
    fn sums_with<R: AsRef<[f32]>>(
        &self,
        gradient: &[f32],
        row_of: impl Fn(usize) -> R + Sync,
    ) -> Vec<f32> {
        let (each, width) = (self.each, self.width);
        let mut dx = vec![0.0_f32; self.rows * width];
        dx.par_chunks_mut(width.max(1)).enumerate().for_each(|(row, dx)| {
            let entries = row * each..(row + 1) * each;
            for (g, id) in gradient[entries.clone()].iter().zip(&self.ids[entries]) {
                axpy(*g, row_of(*id as usize).as_ref(), dx);
            }
        });
        dx
    }

    fn sums_of_rows(&self, gradient: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (each, width) = (self.each, self.width);
        let sums = Sums::by_id(&self.ids, self.table)?;
        let mut dtable = vec![0.0_f32; self.table * width];
        with_each_f32([gradient, x], |[gradient, x]| {
            dtable.par_chunks_mut(width.max(1)).enumerate().for_each(|(id, out)| {
                let entries = sums.from[id] as usize..sums.from[id + 1] as usize;
                for entry in sums.places[entries].iter().map(|entry| *entry as usize) {
                    axpy(gradient[entry], &x[entry / each * width..][..width], out);
                }
            });
            Ok(())
        })?;
        Tensor::from_vec(dtable, (self.table, width), gradient.device())
    }
}

#[cfg(test)]
mod tests {
    use crate::graph::Backward;
    use candle_core::DType;

    use super::*;
    use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

    #[test]
    fn values_and_gradients_are_those_of_plain_tensor_ops() -> Result<()> {
        for (seed, rows, each, width, table) in
            [(1, 1, 1, 1, 1), (2, 5, 3, 7, 4), (3, 60, 16, 130, 300), (4, 9, 40, 64, 11)]
        {
            let mut noise = Noise::new(seed);
            let (x, table) = (noise.var(&[rows, width]), noise.var(&[table, width]));
            let (direction, all) = (noise.tensor(&[rows, each]), table.dim(0)?);
            let ids: Vec<u32> = (0..rows * each).map(|_| noise.below(all) as u32).collect();
            let (fast, plain) = (chosen_products(&x, &table, &ids)?, reference(&x, &table, &ids)?);
            let variables = [("x", &x), ("table", &table)];
            assert_alike(&variables, &direction, [&fast, &plain], (1e-5, 1e-5));
        }
        Ok(())
    }

    /// Other types and devices, in several chunks.
    #[test]
    fn composed_gradients_are_the_same() -> Result<()> {
        let mut noise = Noise::new(5);
        let (x, table) = (noise.tensor(&[6, 5]), noise.tensor(&[4, 5]));
        let ids: Vec<u32> = (0..18).map(|_| noise.below(4) as u32).collect();
        let choice = Choice::new(&x, &table, &ids)?;
        let gradient = noise.tensor(&[6, 3]);
        let (dx, dtable) =
            (choice.composed_dx(&gradient, &table)?, choice.composed_dtable(&gradient, &x)?);
        assert_close("x", &dx, &choice.sums_of_table(&gradient, &table)?, 1e-6);
        assert_close("table", &dtable, &choice.sums_of_rows(&gradient, &x)?, 1e-6);
        let half = chosen_products(&x, &table.to_dtype(DType::BF16)?, &ids)?;
        assert_eq!(half.dtype(), DType::F32);
        assert_close("bf16", &half, &chosen_products(&x, &table, &ids)?, 2e-2);
        Ok(())
    }

    #[test]
    fn gradients_match_differences_and_a_frozen_table_takes_none() -> Result<()> {
        let mut noise = Noise::new(6);
        let inputs = [noise.tensor(&[3, 4]), noise.tensor(&[5, 4])];
        let ids = [1, 1, 0, 4, 3, 1];
        gradcheck(&inputs, |t| reference(&t[0], &t[1], &ids));
        let (x, table) = (noise.var(&[3, 4]), noise.tensor(&[5, 4]));
        let gradients = chosen_products(&x, &table, &ids)?.sum_all()?.gradients()?;
        assert!(gradients.get(&x).is_some() && gradients.get(&table).is_none());
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let mut noise = Noise::new(7);
        let (x, table) = (noise.tensor(&[2, 4]), noise.tensor(&[5, 4]));
        assert!(chosen_products(&x, &table, &[0, 5]).is_err(), "no such row");
        assert!(chosen_products(&x, &table, &[0, 1, 2]).is_err(), "not the same number for each");
        assert!(chosen_products(&noise.tensor(&[2, 3]), &table, &[0, 1]).is_err(), "widths");
        let none = chosen_products(&x, &table, &[]).expect("none");
        assert_eq!(none.dims(), [2, 0]);
    }
}
