//! Sources whose tensors are asked for under other names than their files have.

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::QuantisedMatrix;

use super::WeightSource;
use crate::error::Result;

/// Other names for a source's tensors.
pub(crate) trait Aliases {
    /// With the file's names.
    fn source(&self) -> &dyn WeightSource;

    /// The file's name of a tensor.
    fn stored(&self, name: &str) -> String;

    /// Every name under which a tensor is asked for.
    fn names(&self) -> Vec<String>;
}

/// A source under other names.
pub(crate) struct Aliased<A>(pub(crate) A);

impl<A: Aliases> WeightSource for Aliased<A> {
    fn path(&self) -> &Path {
        self.0.source().path()
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.source().shape(&self.0.stored(name))
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.0.source().load(&self.0.stored(name), dtype)
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        self.0.source().stored_type(&self.0.stored(name))
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        self.0.source().load_quantised(&self.0.stored(name))
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        self.0.source().load_rows(&self.0.stored(name), rows, dtype)
    }

    fn load_bytes(&self, name: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        self.0.source().load_bytes(&self.0.stored(name), rows)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.0.source().load_integers(&self.0.stored(name))
    }
}
