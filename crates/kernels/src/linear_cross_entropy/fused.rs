//! Chunked CPU implementation: logits of some rows, their loss and gradient in place, next rows.

use std::borrow::Cow;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::row::{Row, TeacherRow, row};
use super::teacher::{TeacherChunk, order_by_teacher};
use super::{Inputs, LowRank, RowStatistics};
use crate::bend::Bend;
use crate::gemm::{BLOCK_ROWS, Mat, Threads, matmul};
use crate::linear::{Weight, product_nn, product_nt_into};
use crate::matrix::Head;
use crate::simd::zeros;
use crate::storage::with_f32;

/// Rows whose logits exist at the same time: few enough for 192 MiB of logits, and whole blocks of the
/// product, which reads the head once a chunk.
pub fn chunk_rows(vocabulary: usize) -> usize {
    let rows = CHUNK_BYTES / size_of::<f32>() / vocabulary.max(1);
    (rows / BLOCK_ROWS).clamp(1, 6) * BLOCK_ROWS
}

/// Bytes of a chunk's logits, as far as one block of rows allows.
const CHUNK_BYTES: usize = 192 << 20;

/// What was asked for by what trains.
pub(super) struct Gradients {
    /// `dh`, `[R, H]`
    pub(super) hidden: Option<Vec<f32>>,
    /// `dW`, `[V, H]`, or `dW₂`, `[V, r]`
    pub(super) head: Option<Vec<f32>>,
    /// `dm`, `[R, r]`
    pub(super) low_rank: Option<Vec<f32>>,
}

/// `Σ ℓ`, statistics of every row, and the gradients of `Σ ℓ`.
pub(super) fn forward(inputs: &Inputs<'_>) -> Result<(f64, RowStatistics, Gradients)> {
    let ((vocabulary, _), count) = (inputs.head.dims()?, inputs.labels.len());
    let order = order_by_teacher(inputs);
    let rows: Vec<u32> = order.clone().unwrap_or_else(|| (0..count as u32).collect());
    let mut results = vec![Row::default(); count];
    let gradients = with_parts(inputs, order.is_some(), |parts| {
        let want_grad = parts.iter().any(Part::trains);
        let Some((main, others)) = parts.split_first_mut() else { return Ok(()) };
        let alone = others.is_empty();
        let each = chunk_rows(vocabulary);
        // One buffer for all chunks: every value is written before it is read.
        let mut buffer = vec![0.0_f32; each.min(count) * vocabulary];
        for rows in rows.chunks(each) {
            let logits = &mut buffer[..rows.len() * vocabulary];
            main.add_logits(logits, rows, vocabulary, false);
            let bent =
                if alone { None } else { bend_rows(logits, vocabulary, inputs.bend, want_grad) };
            for part in others.iter() {
                part.add_logits(logits, rows, vocabulary, true);
            }
            let teacher = TeacherChunk::new(inputs, rows, vocabulary)?;
            let of_chunk: Vec<Row> = logits
                .par_chunks_mut(vocabulary)
                .zip(rows)
                .enumerate()
                .map(|(i, (z, &index))| {
                    let teacher = teacher.as_ref().map(|teacher| teacher.row(i));
                    let of_row = if alone { row_of_products } else { row };
                    of_row(inputs, index as usize, z, teacher, want_grad)
                })
                .collect();
            for (&index, row) in rows.iter().zip(of_chunk) {
                results[index as usize] = row;
            }
            for part in others.iter_mut() {
                part.add_gradients(logits, rows, vocabulary);
            }
            if let Some(bent) = bent {
                let gradients = logits.par_chunks_mut(vocabulary);
                gradients
                    .zip(bent.par_chunks(vocabulary))
                    .for_each(|(dz, z)| inputs.bend.back(dz, z));
            }
            main.add_gradients(logits, rows, vocabulary);
        }
        Ok(())
    })?;
    let loss = results.iter().map(|row| row.loss).sum();
    Ok((loss, statistics(&results), gradients))
}

/// As [`row`], of products that nothing is added to: `z` becomes the gradient of the products if `want_grad`. Only the
/// logits of this row are kept for the slopes.
fn row_of_products(
    inputs: &Inputs<'_>,
    index: usize,
    z: &mut [f32],
    teacher: Option<TeacherRow<'_>>,
    want_grad: bool,
) -> Row {
    inputs.bend.bend(z);
    let logits = (want_grad && !inputs.bend.is_plain()).then(|| z.to_vec());
    let row = row(inputs, index, z, teacher, want_grad);
    if let Some(logits) = logits {
        inputs.bend.back(z, &logits);
    }
    row
}

/// Turns products into logits, which another part is added to; hands out a copy of them where gradients take their
/// slopes from them.
fn bend_rows(logits: &mut [f32], vocabulary: usize, bend: Bend, kept: bool) -> Option<Vec<f32>> {
    if bend.is_plain() {
        return None;
    }
    logits.par_chunks_mut(vocabulary).for_each(|row| bend.bend(row));
    kept.then(|| logits.to_vec())
}

/// Calls `f` with the parts of the logits and returns their gradients.
fn with_parts(
    inputs: &Inputs<'_>,
    reordered: bool,
    f: impl FnOnce(&mut [Part<'_>]) -> Result<()>,
) -> Result<Gradients> {
    let Inputs { hidden, head, low_rank, .. } = inputs;
    with_f32(hidden, |all| {
        head.with_weight(|weight| {
            let main = Part::new((hidden, all), (*head, weight), reordered)?;
            let Some(LowRank { hidden, head }) = low_rank else {
                let mut parts = [main];
                f(&mut parts)?;
                let [Part { d_hidden, d_weight, .. }] = parts;
                return Ok(Gradients { hidden: d_hidden, head: d_weight, low_rank: None });
            };
            let head = Head::from(*head);
            with_f32(hidden, |all| {
                head.with_weight(|weight| {
                    let mut parts = [main, Part::new((hidden, all), (head, weight), reordered)?];
                    f(&mut parts)?;
                    let [main, Part { d_hidden, d_weight, .. }] = parts;
                    Ok(Gradients { hidden: main.d_hidden, head: d_weight, low_rank: d_hidden })
                })
            })
        })
    })
}

/// A product that the logits are a sum of, `x Wᵀ`, with the gradients of what trains.
struct Part<'a> {
    /// `x`, `[R, K]`
    all: &'a [f32],
    /// `W`, `[V, K]`
    weight: Weight<'a>,
    width: usize,
    /// Whether rows do not come in their order.
    reordered: bool,
    d_hidden: Option<Vec<f32>>,
    d_weight: Option<Vec<f32>>,
}

impl<'a> Part<'a> {
    fn new(
        (hidden, all): (&Tensor, &'a [f32]),
        (head, weight): (Head<'_>, Weight<'a>),
        reordered: bool,
    ) -> Result<Self> {
        let (vocabulary, width) = head.dims()?;
        let d_hidden = hidden.track_op().then(|| zeros(hidden.elem_count()));
        let d_weight = head.trains().then(|| zeros(vocabulary * width));
        Ok(Self { all, weight, width, reordered, d_hidden, d_weight })
    }

    fn trains(&self) -> bool {
        self.d_hidden.is_some() || self.d_weight.is_some()
    }

    /// Writes the logits `[rows, V]`, or adds to them.
    fn add_logits(&self, logits: &mut [f32], rows: &[u32], vocabulary: usize, accumulate: bool) {
        let hidden = gather(self.all, rows, self.width, self.reordered);
        product_nt_into(logits, &hidden, self.weight, (self.width, vocabulary), accumulate);
    }

    /// From the gradient of the logits of some rows.
    fn add_gradients(&mut self, dz: &[f32], rows: &[u32], vocabulary: usize) {
        let width = self.width;
        if let Some(grad) = &mut self.d_hidden {
            let of_chunk = product_nn(dz, self.weight, width, vocabulary);
            for (&index, row) in rows.iter().zip(of_chunk.chunks_exact(width)) {
                grad[index as usize * width..][..width].copy_from_slice(row);
            }
        }
        if let Some(grad) = &mut self.d_weight {
            let hidden = gather(self.all, rows, width, self.reordered);
            let dz = Mat::rows(dz, rows.len(), vocabulary, vocabulary).t();
            let hidden = Mat::rows(&hidden, rows.len(), width, width);
            matmul(grad, width, dz, hidden, true, Threads::Pool);
        }
    }
}

/// Rows of `[R, H]`: a copy, or the part itself where they lie one after the other.
fn gather<'a>(all: &'a [f32], rows: &[u32], width: usize, reordered: bool) -> Cow<'a, [f32]> {
    if reordered {
        let of = |&row: &u32| &all[row as usize * width..][..width];
        rows.iter().flat_map(of).copied().collect()
    } else {
        let first = rows.first().map_or(0, |&row| row as usize);
        Cow::Borrowed(&all[first * width..][..rows.len() * width])
    }
}

fn statistics(rows: &[Row]) -> RowStatistics {
    RowStatistics {
        hard: rows.iter().map(|row| row.hard).collect(),
        soft: rows.iter().map(|row| row.soft).collect(),
        agrees: rows.iter().map(|row| row.agrees).collect(),
        acceptance: rows.iter().map(|row| row.acceptance).collect(),
    }
}
