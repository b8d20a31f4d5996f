//! Layers that are put together from the ranks' slices right before their use.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;

use super::Ranks;
use super::slice::Slice;
use crate::config::TargetConfig;
use crate::error::{ModelError, Result};
use crate::target_model::build::{self, Weights};
use crate::target_model::layer::DecoderLayer;
use crate::target_model::layers::{LayerSource, Visit};
use crate::target_model::tensor_parallel::LayerShare;

/// A layer's slices and vectors, by published name.
struct SpreadLayer {
    index: usize,
    slices: Vec<(String, Slice)>,
    vectors: BTreeMap<String, Tensor>,
}

/// `1/N` of every layer.
pub(in crate::target_model) struct SpreadLayers {
    config: TargetConfig,
    ranks: Arc<dyn Ranks>,
    layers: Vec<SpreadLayer>,
    gathers_ahead: bool,
}

impl SpreadLayers {
    /// Reads layer by layer and keeps this rank's slices: one whole layer is in memory at a time.
    pub(in crate::target_model) fn read(
        config: &TargetConfig,
        weights: &dyn Weights,
        layers: Range<usize>,
        ranks: &Arc<dyn Ranks>,
    ) -> Result<Self> {
        let layers = layers.map(|index| {
            let slicer = Slicer {
                weights,
                ranks: ranks.as_ref(),
                slices: RefCell::default(),
                vectors: RefCell::default(),
            };
            build::layer(config, &slicer, index, &LayerShare::default())?;
            let Slicer { slices, vectors, .. } = slicer;
            Ok(SpreadLayer { index, slices: slices.into_inner(), vectors: vectors.into_inner() })
        });
        let layers = layers.collect::<Result<_>>()?;
        let (config, ranks) = (config.clone(), Arc::clone(ranks));
        Ok(Self { config, ranks, layers, gathers_ahead: true })
    }

    /// The same, with or without a thread that gathers the next layer.
    #[must_use]
    pub(in crate::target_model) fn gathering_ahead(self, gathers_ahead: bool) -> Self {
        Self { gathers_ahead, ..self }
    }

    /// The whole layer at a place; all ranks call it.
    fn gather(&self, place: usize) -> Result<DecoderLayer> {
        let SpreadLayer { index, slices, vectors } = &self.layers[place];
        let mut matrices = BTreeMap::new();
        for (name, slice) in slices {
            matrices.insert(name.as_str(), slice.gather(self.ranks.as_ref())?);
        }
        let weights = Gathered { matrices, vectors };
        build::layer(&self.config, &weights, *index, &LayerShare::default())
    }
}

impl LayerSource for SpreadLayers {
    fn len(&self) -> usize {
        self.layers.len()
    }

    /// A thread gathers the next layer while one is visited; both are joined before anything else
    /// happens, so that the ranks are called from one thread at a time.
    fn visit(&self, layers: Range<usize>, visit: Visit<'_>) -> Result<()> {
        let mut next: Option<DecoderLayer> = None;
        for place in layers.clone() {
            let layer = match next.take() {
                Some(layer) => layer,
                None => self.gather(place)?,
            };
            next = std::thread::scope(|scope| -> Result<Option<DecoderLayer>> {
                let ahead = self.gathers_ahead && layers.contains(&(place + 1));
                let ahead = ahead.then(|| scope.spawn(move || self.gather(place + 1)));
                let visited = visit(place, &layer);
                let ahead = ahead.map(|thread| thread.join().unwrap_or_else(|e| resume_unwind(e)));
                visited?;
                ahead.transpose()
            })?;
        }
        Ok(())
    }
}

/// Weights that a layer is built of for its slices alone.
struct Slicer<'a> {
    weights: &'a dyn Weights,
    ranks: &'a dyn Ranks,
    slices: RefCell<Vec<(String, Slice)>>,
    vectors: RefCell<BTreeMap<String, Tensor>>,
}

impl Weights for Slicer<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let matrix = self.weights.matrix(name)?;
        let slice = Slice::of(&matrix, self.ranks)?;
        self.slices.borrow_mut().push((name.to_owned(), slice));
        Ok(matrix)
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        let vector = self.weights.vector(name)?;
        self.vectors.borrow_mut().insert(name.to_owned(), vector.clone());
        Ok(vector)
    }
}

/// What the ranks' slices came to.
struct Gathered<'a> {
    matrices: BTreeMap<&'a str, Matrix>,
    vectors: &'a BTreeMap<String, Tensor>,
}

impl Weights for Gathered<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        self.matrices.get(name).cloned().ok_or_else(|| missing(name))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        self.vectors.get(name).cloned().ok_or_else(|| missing(name))
    }
}

fn missing(name: &str) -> ModelError {
    ModelError::Tensor(candle_core::Error::Msg(format!("`{name}` was not spread")))
}
