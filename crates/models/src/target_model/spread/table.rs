//! Embedding table and head: whole, or spread and put together where they are held.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;

use super::Ranks;
use super::slice::Slice;
use crate::error::{ModelError, Result};

/// A `[V, H]` weight that training wants as a tensor even if it is held quantised.
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
    gathered: Mutex<Gathered>,
}

/// The table while somebody holds it.
#[derive(Default)]
struct Gathered {
    holders: usize,
    matrix: Option<Matrix>,
}

impl Table {
    /// All of it.
    pub(in crate::target_model) fn whole(matrix: Matrix) -> Self {
        Self::Whole { matrix, widened: OnceLock::new() }
    }

    /// This rank's part of it.
    pub(in crate::target_model) fn spread(matrix: &Matrix, ranks: &Arc<dyn Ranks>) -> Result<Self> {
        let slice = Slice::of(matrix, ranks.as_ref())?;
        let (ranks, gathered) = (Arc::clone(ranks), Mutex::default());
        Ok(Self::Spread(Box::new(SpreadTable { slice, ranks, gathered })))
    }

    /// The whole, as it is held.
    ///
    /// # Errors
    /// - it is spread and nobody holds it
    pub(in crate::target_model) fn matrix(&self) -> Result<Matrix> {
        match self {
            Self::Whole { matrix, .. } => Ok(matrix.clone()),
            Self::Spread(table) => table.lock().matrix.clone().ok_or_else(|| {
                let problem = "the target's embedding or head is spread over ranks and not held";
                ModelError::Tensor(candle_core::Error::Msg(problem.into()))
            }),
        }
    }

    /// The whole as a tensor.
    ///
    /// # Errors
    /// - as [`Self::matrix`]; it is quantised and there is no memory for its values
    pub(in crate::target_model) fn tensor(&self) -> Result<Tensor> {
        let Self::Whole { matrix, widened } = self else {
            return Ok(self.matrix()?.to_dense()?);
        };
        if let Some(tensor) = matrix.dense().or_else(|| widened.get()) {
            return Ok(tensor.clone());
        }
        let tensor = matrix.to_dense()?;
        Ok(widened.get_or_init(|| tensor).clone())
    }

    /// Puts a spread table together until the guard goes; all ranks call it.
    ///
    /// # Errors
    /// - it cannot be put together
    pub(in crate::target_model) fn hold(&self) -> Result<Held<'_>> {
        if let Self::Spread(table) = self {
            let mut gathered = table.lock();
            if gathered.matrix.is_none() {
                gathered.matrix = Some(table.slice.gather(table.ranks.as_ref())?);
            }
            gathered.holders += 1;
        }
        Ok(Held { table: self })
    }
}

impl SpreadTable {
    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a table whole.
pub(in crate::target_model) struct Held<'a> {
    table: &'a Table,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Table::Spread(table) = self.table {
            let mut gathered = table.lock();
            gathered.holders -= 1;
            if gathered.holders == 0 {
                gathered.matrix = None;
            }
        }
    }
}
