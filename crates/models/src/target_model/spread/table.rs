//! Embedding table and head: whole, or spread and put together where they are held.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;

use super::Ranks;
use super::slice::Slice;
use crate::error::Result;

/// A `[V, H]` weight that some readers want as a tensor even if it is held quantised.
pub(in crate::target_model) enum Table {
    /// In memory.
    Whole {
        matrix: Matrix,
        /// A quantised one's values, from the first time that somebody asks for them.
        widened: OnceLock<Tensor>,
    },
    /// `1/N` of it.
    Spread(Box<SpreadTable>),
}

/// A rank's part of a table.
pub(in crate::target_model) struct SpreadTable {
    slice: Slice,
    ranks: Arc<dyn Ranks>,
    /// The whole while somebody holds it.
    whole: Mutex<Weak<Matrix>>,
}

/// A table that is whole as long as this lives.
pub(in crate::target_model) enum Held<'a> {
    /// It always is.
    Whole { matrix: &'a Matrix, widened: &'a OnceLock<Tensor> },
    /// It was put together.
    Gathered(Arc<Matrix>),
}

impl Table {
    /// All of it.
    pub(in crate::target_model) fn whole(matrix: Matrix) -> Self {
        Self::Whole { matrix, widened: OnceLock::new() }
    }

    /// This rank's part of it.
    pub(in crate::target_model) fn spread(matrix: &Matrix, ranks: &Arc<dyn Ranks>) -> Result<Self> {
        let slice = Slice::of(matrix, ranks.as_ref())?;
        let (ranks, whole) = (Arc::clone(ranks), Mutex::default());
        Ok(Self::Spread(Box::new(SpreadTable { slice, ranks, whole })))
    }

    /// Puts a spread table together unless somebody holds it; all ranks call it.
    /// It fails where it cannot be put together.
    pub(in crate::target_model) fn hold(&self) -> Result<Held<'_>> {
        match self {
            Self::Whole { matrix, widened } => Ok(Held::Whole { matrix, widened }),
            Self::Spread(table) => table.hold().map(Held::Gathered),
        }
    }
}

impl SpreadTable {
    fn hold(&self) -> Result<Arc<Matrix>> {
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = whole.upgrade() {
            return Ok(held);
        }
        let gathered = Arc::new(self.slice.gather(self.ranks.as_ref())?);
        *whole = Arc::downgrade(&gathered);
        Ok(gathered)
    }
}

impl Held<'_> {
    /// The whole, as it is held.
    pub(in crate::target_model) fn matrix(&self) -> &Matrix {
        match self {
            Self::Whole { matrix, .. } => matrix,
            Self::Gathered(matrix) => matrix,
        }
    }

    /// The whole as a tensor. It fails where it is quantised and there is no memory for its values.
    pub(in crate::target_model) fn tensor(&self) -> Result<Tensor> {
        let (matrix, widened) = match self {
            Self::Whole { matrix, widened } => (*matrix, widened),
            Self::Gathered(matrix) => return Ok(matrix.to_dense()?),
        };
        if let Some(tensor) = matrix.dense().or_else(|| widened.get()) {
            return Ok(tensor.clone());
        }
        let tensor = matrix.to_dense()?;
        Ok(widened.get_or_init(|| tensor).clone())
    }
}
