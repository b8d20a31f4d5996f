//! Chunked CPU implementation: logits of some rows, their loss and gradient in place, next rows.

use std::borrow::Cow;

use candle_core::{Result, Storage, Tensor, bail};
use rayon::prelude::*;

use super::row::{Row, row};
use super::teacher::{TeacherChunk, order_by_teacher};
use super::{Inputs, RowStatistics};
use crate::gemm::{BLOCK_ROWS, Mat, Threads, matmul};
use crate::linear::{Weight, product_nn, product_nt_into};
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
    /// `dW`, `[V, H]`
    pub(super) head: Option<Vec<f32>>,
}

/// `Σ ℓ`, statistics of every row, and the gradients of `Σ ℓ`.
pub(super) fn forward(inputs: &Inputs<'_>) -> Result<(f64, RowStatistics, Gradients)> {
    let (vocabulary, width) = inputs.head.dims2()?;
    let count = inputs.labels.len();
    let mut gradients = Gradients {
        hidden: inputs.hidden.track_op().then(|| vec![0.0; count * width]),
        head: inputs.head.track_op().then(|| vec![0.0; vocabulary * width]),
    };
    let want_grad = gradients.hidden.is_some() || gradients.head.is_some();
    let order = order_by_teacher(inputs);
    let rows: Vec<u32> = order.clone().unwrap_or_else(|| (0..count as u32).collect());
    let mut results = vec![Row::default(); count];
    with_f32(inputs.hidden, |all| {
        with_weight(inputs.head, |head| {
            let mut logits = Vec::new();
            for rows in rows.chunks(chunk_rows(vocabulary)) {
                let hidden = gather(all, rows, width, order.is_some());
                // One buffer for all chunks: every value is written before it is read.
                logits.resize(rows.len() * vocabulary, 0.0);
                product_nt_into(&mut logits, &hidden, head, (width, vocabulary), false);
                let teacher = TeacherChunk::new(inputs, rows, vocabulary)?;
                let of_chunk: Vec<Row> = logits
                    .par_chunks_mut(vocabulary)
                    .zip(rows)
                    .enumerate()
                    .map(|(i, (z, &index))| {
                        let teacher = teacher.as_ref().map(|teacher| teacher.row(i));
                        row(inputs, index as usize, z, teacher, want_grad)
                    })
                    .collect();
                for (&index, row) in rows.iter().zip(of_chunk) {
                    results[index as usize] = row;
                }
                if let Some(grad) = &mut gradients.hidden {
                    let of_chunk = product_nn(&logits, head, width, vocabulary);
                    for (&index, row) in rows.iter().zip(of_chunk.chunks_exact(width)) {
                        grad[index as usize * width..][..width].copy_from_slice(row);
                    }
                }
                if let Some(grad) = &mut gradients.head {
                    let dz = Mat::rows(&logits, rows.len(), vocabulary, vocabulary).t();
                    let hidden = Mat::rows(&hidden, rows.len(), width, width);
                    matmul(grad, width, dz, hidden, true, Threads::Pool);
                }
            }
            Ok(())
        })
    })?;
    let loss = results.iter().map(|row| row.loss).sum();
    Ok((loss, statistics(&results), gradients))
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

pub(super) fn with_weight<R>(
    tensor: &Tensor,
    f: impl FnOnce(Weight<'_>) -> Result<R>,
) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => f(Weight::from_storage(cpu, layout)?),
        _ => bail!("linear_cross_entropy: CPU head expected"),
    }
}
