//! Memory of the linear cross-entropy.

use super::{F32, Row};

/// Bytes of a chunk of `c` rows: the draft's logits and, with a whole teacher, the teacher's,
/// `4 c V` each, and the gradients of their states, `4 c H`.
pub fn chunk_bytes(row: &Row, width: u64, vocabulary: u64, teacher: bool) -> u64 {
    let distributions = if teacher { 2 } else { 1 };
    F32 * row.chunk(vocabulary) * (distributions * vocabulary + width)
}

/// Bytes of the results and factors of `rows` rows, numbers that are no tensors: 40 in results, 25
/// in statistics, 40 in plans, factors, labels and normalisers.
pub fn row_bytes(rows: u64) -> u64 {
    (40 + 25 + 40) * rows
}
