//! Keys and values of every layer for the tokens of one sequence.

use candle_core::{DType, Device, Tensor};

use crate::config::TargetConfig;
use crate::error::Result;

/// Tokens that a fresh cache has room for.
const INITIAL_CAPACITY: usize = 256;

/// A growing cache; rows beyond the committed length are scratch.
pub struct KvCache {
    /// Keys and values of each layer, `[capacity, K, D]`.
    layers: Vec<(Tensor, Tensor)>,
    length: usize,
    capacity: usize,
}

impl KvCache {
    pub(super) fn new(config: &TargetConfig, device: &Device) -> Result<Self> {
        let shape = (INITIAL_CAPACITY, config.num_key_value_heads, config.head_dim);
        let layers = (0..config.num_hidden_layers)
            .map(|_| {
                Ok((
                    Tensor::zeros(shape, DType::F32, device)?,
                    Tensor::zeros(shape, DType::F32, device)?,
                ))
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, length: 0, capacity: INITIAL_CAPACITY })
    }

    /// Committed tokens.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no token is committed.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets every token from `length` on.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// The last layer's committed keys and values, `[len, K, D]` each.
    ///
    /// # Errors
    /// - the model has no layers
    pub fn last_layer(&self) -> Result<(Tensor, Tensor)> {
        let Some((k, v)) = self.layers.last() else {
            return Err(candle_core::Error::Msg("a cache without layers".into()).into());
        };
        Ok((k.narrow(0, 0, self.length)?, v.narrow(0, 0, self.length)?))
    }

    /// Makes room for `tokens` more.
    pub(super) fn reserve(&mut self, tokens: usize) -> Result<()> {
        let needed = self.length + tokens;
        if needed <= self.capacity {
            return Ok(());
        }
        let capacity = needed.max(2 * self.capacity);
        for (k, v) in &mut self.layers {
            for tensor in [k, v] {
                let (_, heads, head_dim) = tensor.dims3()?;
                let larger =
                    Tensor::zeros((capacity, heads, head_dim), tensor.dtype(), tensor.device())?;
                if self.length > 0 {
                    larger.slice_set(&tensor.narrow(0, 0, self.length)?.contiguous()?, 0, 0)?;
                }
                *tensor = larger;
            }
        }
        self.capacity = capacity;
        Ok(())
    }

    /// Writes the keys and values of new tokens behind the committed ones, and returns all of
    /// them, `[len + new, K, D]`.
    pub(super) fn append(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.dim(0)?;
        let (all_k, all_v) = &self.layers[layer];
        all_k.slice_set(&k.contiguous()?, 0, self.length)?;
        all_v.slice_set(&v.contiguous()?, 0, self.length)?;
        Ok((all_k.narrow(0, 0, self.length + new)?, all_v.narrow(0, 0, self.length + new)?))
    }

    pub(super) fn commit(&mut self, tokens: usize) {
        self.length += tokens;
    }
}
