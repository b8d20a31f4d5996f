//! Tensors that are in memory already.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::random::CounterRng;

use super::{TensorSpec, WeightSource, other_type, rows_of};
use crate::error::{ModelError, Result};

/// Named tensors.
#[derive(Debug, Default)]
pub struct MemorySource {
    tensors: BTreeMap<String, Tensor>,
}

impl MemorySource {
    /// These tensors.
    pub fn new(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        Self { tensors: tensors.into_iter().collect() }
    }

    /// Normal values with the given deviation; norms are 1.
    ///
    /// # Errors
    /// - a tensor cannot be made
    pub fn random(specs: &[TensorSpec], deviation: f64, seed: u64) -> Result<Self> {
        let mut source = Self::default();
        for spec in specs {
            let mut rng = CounterRng::new(seed, &spec.name, &[]);
            let norm = spec.name.ends_with("norm.weight");
            let value = |rng: &mut CounterRng| {
                if norm { 1.0 } else { (rng.normal() * deviation) as f32 }
            };
            let count = spec.shape.iter().product::<usize>();
            let values: Vec<f32> = (0..count).map(|_| value(&mut rng)).collect();
            let tensor = Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)?;
            source.tensors.insert(spec.name.clone(), tensor);
        }
        Ok(source)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        let found = self.tensors.get(name);
        found.ok_or_else(|| ModelError::invalid(self.path(), format!("no tensor `{name}`")))
    }
}

impl WeightSource for MemorySource {
    fn path(&self) -> &Path {
        Path::new("(memory)")
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.get(name).map(|tensor| tensor.dims().to_vec())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        Ok(self.tensor(name)?.to_dtype(dtype)?)
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        Ok(rows_of(self.tensor(name)?, rows)?.to_dtype(dtype)?)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        let tensor = self.tensor(name)?;
        match tensor.dtype() {
            DType::I64 | DType::U32 | DType::U8 => {
                Ok(tensor.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?)
            }
            other => Err(other_type(self.path(), name, other, "integers")),
        }
    }
}
