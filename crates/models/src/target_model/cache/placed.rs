//! A cache whose length lies on the device: what passes that repeat write to, and read whole.

use candle_core::{DType, Tensor};
use longdraft_kernels::rows::put_rows_at;

use super::{KvCache, Layer};
use crate::error::{Result, refused};
use crate::target_model::repeats::Repeats;

impl KvCache {
    /// Passes that repeat.
    pub(in crate::target_model) fn repeats(&mut self) -> &mut Repeats {
        &mut self.repeats
    }

    /// Keys and values of all layers, where each holds those of every token in bf16, and kernels write them anywhere.
    pub(in crate::target_model) fn whole_keys(&self) -> Option<impl Iterator<Item = &Tensor>> {
        let takes = |tensor: &Tensor| {
            let values: usize = tensor.dims().iter().skip(1).product();
            tensor.dtype() == DType::BF16 && values.is_multiple_of(8)
        };
        let is_whole = |layer: &Layer| match layer {
            Layer::Keys(k, v) => takes(k) && takes(v),
            _ => false,
        };
        let all = self.layers.iter().all(is_whole);
        all.then(|| self.layers.iter().flat_map(Layer::whole))
    }

    /// The same as [`Self::append`], where `place` is the committed length on the device, and the layer is one of
    /// [`Self::whole_keys`]. What comes back has the room of the whole cache, `[capacity, K, D]`.
    pub(in crate::target_model) fn append_at(
        &self,
        layer: usize,
        (k, v): (&Tensor, &Tensor),
        place: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let Some(Layer::Keys(all_k, all_v)) = self.layers.get(layer) else {
            return Err(refused("a layer without keys of every token"));
        };
        put_rows_at(all_k, k, place)?;
        put_rows_at(all_v, v, place)?;
        Ok((all_k.clone(), all_v.clone()))
    }
}
