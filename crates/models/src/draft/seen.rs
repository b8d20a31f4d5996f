//! Attention in passes whose rows are those of several sequences.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::{KeyRanges, attention};
use longdraft_kernels::graph::{cat, narrow};

use crate::error::Result;
use crate::target_model::KeyValues;

/// The keys that a sequence's rows of a pass see.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Keys and values, `[S, K, D]` each.
    pub keys: KeyValues,
    /// Which of them each row sees; it has a query for every row of the sequence, of which there may be none beside
    /// others.
    pub ranges: Arc<KeyRanges>,
}

/// Attention of the rows of some sequences, one sequence after the other, each over its own keys. A row's bits do
/// not depend on the sequences beside its own.
///
/// # Shapes
/// - `q`: `[T, N, D]`, `T` rows of all sequences → `[T, N, D]`
pub(super) fn attention_each(q: &Tensor, sequences: &[Seen]) -> Result<Tensor> {
    if let [Seen { keys, ranges }] = sequences {
        return Ok(attention(q, &keys.k, &keys.v, ranges)?);
    }
    let mut first = 0;
    let mut attended = Vec::with_capacity(sequences.len());
    for Seen { keys, ranges } in sequences {
        let rows = ranges.queries();
        if rows == 0 {
            continue;
        }
        attended.push(attention(&narrow(q, 0, first, rows)?, &keys.k, &keys.v, ranges)?);
        first += rows;
    }
    Ok(cat(&attended, 0)?)
}
