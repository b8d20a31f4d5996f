//! Where a forward pass gets the decoder layers from.

use std::ops::Range;

use super::layer::DecoderLayer;
use crate::error::Result;

/// What a pass does with layer `index`.
pub(super) type Visit<'a> = &'a mut dyn FnMut(usize, &DecoderLayer) -> Result<()>;

/// Layers in order, each whole while it is visited.
pub(super) trait LayerSource: Send + Sync {
    /// Layers that were loaded: all, the last one, or none.
    fn len(&self) -> usize;

    /// Visits layers by their place among the loaded ones. It fails as a visit does, or where a layer cannot be made.
    fn visit(&self, layers: Range<usize>, visit: Visit<'_>) -> Result<()>;
}

/// Layers that are all in memory.
pub(super) struct ResidentLayers(pub(super) Vec<DecoderLayer>);

impl LayerSource for ResidentLayers {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn visit(&self, layers: Range<usize>, visit: Visit<'_>) -> Result<()> {
        layers.clone().zip(&self.0[layers]).try_for_each(|(index, layer)| visit(index, layer))
    }
}
