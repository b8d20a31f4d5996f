//! A target whose matrices are quantised blocks, as a GGUF file holds them, with random codes.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::matrix::{BlockFormat, QuantisedMatrix};
use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetConfig;
use longdraft_models::error::{ModelError, Result};
use longdraft_models::target_model::tensor_specs;
use longdraft_models::weights::{TensorSpec, WeightSource};

use super::{Place, shape};

/// Bytes that are drawn. They repeat in larger matrices: drawing all bytes of a large model takes minutes.
const DRAWN: usize = 1_000_003;

/// Matrices of one type of blocks, and norms of 1. Matrices whose rows are no whole blocks are drawn as others are.
pub(super) struct Blocks<'a> {
    format: BlockFormat,
    deviation: f64,
    specs: BTreeMap<String, TensorSpec>,
    place: &'a Place,
    bytes: OnceCell<Vec<u8>>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(config: &TargetConfig, format: BlockFormat, place: &'a Place) -> Self {
        let specs = tensor_specs(config).into_iter().map(|spec| (spec.name.clone(), spec));
        let (deviation, bytes) = (config.initializer_range, OnceCell::new());
        Self { format, deviation, specs: specs.collect(), place, bytes }
    }

    /// Bytes below 64, one after the other: the scales among them are finite and at most 2.
    fn drawn(&self, count: usize) -> Vec<u8> {
        let period = self.bytes.get_or_init(|| {
            let mut random = CounterRng::new(0, self.format.name(), &[]);
            (0..DRAWN).map(|_| (random.uniform() * 64.0) as u8).collect()
        });
        period.iter().copied().cycle().take(count).collect()
    }

    fn spec(&self, name: &str) -> Result<&TensorSpec> {
        let missing = || ModelError::invalid(self.path(), format!("no tensor `{name}`"));
        self.specs.get(name).ok_or_else(missing)
    }
}

impl WeightSource for Blocks<'_> {
    fn path(&self) -> &Path {
        Path::new("(memory)")
    }

    fn names(&self) -> Vec<String> {
        self.specs.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.specs.get(name).map(|spec| spec.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let tensor = shape::drawn(self.spec(name)?, self.deviation, self.place)?;
        Ok(tensor.to_dtype(dtype)?)
    }

    /// Values are drawn at every call, so the rows alone are.
    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        let mut spec = self.spec(name)?.clone();
        spec.shape[0] = rows.len();
        Ok(shape::drawn(&spec, self.deviation, self.place)?.to_dtype(dtype)?)
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        let whole = |spec: &&TensorSpec| is_whole(spec, self.format);
        self.specs.get(name).filter(whole).map(|_| self.format.name())
    }

    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        let spec = self.spec(name)?;
        let &[outputs, inputs] = spec.shape.as_slice() else { return Ok(None) };
        if !is_whole(spec, self.format) {
            return Ok(None);
        }
        let bytes = self.drawn(bytes_of(spec, self.format));
        Ok(Some(QuantisedMatrix::new(self.format, outputs, inputs, &bytes)?))
    }
}

/// Whether it is a matrix whose rows are whole blocks.
fn is_whole(spec: &TensorSpec, format: BlockFormat) -> bool {
    matches!(spec.shape[..], [_, inputs] if inputs.is_multiple_of(format.values()))
}

fn bytes_of(spec: &TensorSpec, format: BlockFormat) -> usize {
    spec.shape.iter().product::<usize>() / format.values() * format.bytes()
}

/// Bytes of a matrix where matrices are held as blocks of `format`, or else as `dtype`.
pub(super) fn held_bytes(spec: &TensorSpec, format: Option<BlockFormat>, dtype: DType) -> usize {
    match format {
        Some(format) if is_whole(spec, format) => bytes_of(spec, format),
        _ => spec.shape.iter().product::<usize>() * dtype.size_in_bytes(),
    }
}
