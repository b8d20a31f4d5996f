//! Keys and values of every layer for the tokens of one sequence.

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::quantised_keys;

use crate::error::Result;

/// Tokens that a fresh cache has room for.
const INITIAL_CAPACITY: usize = 256;

/// What keys and values are cached as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheType {
    /// f16 beside quantised blocks, as llama.cpp does, which halves what a long context costs; else f32.
    #[default]
    Auto,
    /// f32.
    F32,
    /// f16; on the CPU only.
    F16,
    /// Blocks of 32 values of 8 bits with an f16 scale (GGML's Q8_0); on the CPU only.
    Q8,
}

impl CacheType {
    /// The type of the cache's tensors; `U8` for blocks.
    pub(super) fn dtype(self, has_blocks: bool) -> DType {
        match self {
            Self::Auto if has_blocks => DType::F16,
            Self::Auto | Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Q8 => DType::U8,
        }
    }
}

/// A growing cache; rows beyond the committed length are scratch.
pub struct KvCache {
    /// Keys and values of each layer, `[capacity, K, D]`; as u8 a head is `D / 32` blocks of 34 bytes.
    layers: Vec<(Tensor, Tensor)>,
    length: usize,
    capacity: usize,
    /// Whether it is of a long sequence, where that has been decided.
    long: Option<bool>,
}

impl KvCache {
    /// An empty cache of `layers` layers with `kv_heads` heads of `head_dim`, whose values are f32.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Result<Self> {
        Self::of(layers, (kv_heads, head_dim), DType::F32, device)
    }

    /// The same of values of a type, to which keys and values are rounded when they are written: f32,
    /// f16, or u8 for blocks of 8 bits.
    ///
    /// # Errors
    /// - the device has no memory for it, or heads do not consist of blocks
    pub fn of(
        layers: usize,
        (kv_heads, head_dim): (usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let empty = || -> Result<Tensor> {
            let floats = if dtype == DType::U8 { DType::F32 } else { dtype };
            let empty = Tensor::zeros((INITIAL_CAPACITY, kv_heads, head_dim), floats, device)?;
            Ok(if dtype == DType::U8 { quantised_keys(&empty)? } else { empty })
        };
        let layers = (0..layers).map(|_| Ok((empty()?, empty()?))).collect::<Result<_>>()?;
        Ok(Self { layers, length: 0, capacity: INITIAL_CAPACITY, long: None })
    }

    /// Committed tokens.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no token is committed.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether keys are turned as those of long sequences, where there is a difference.
    pub(super) fn is_long(&self) -> bool {
        self.long.unwrap_or(false)
    }

    /// Whether the sequence is long: as it was decided before, else as its first tokens say.
    pub(super) fn decide_length(&mut self, first_tokens_say: bool) -> bool {
        *self.long.get_or_insert(first_tokens_say)
    }

    /// Decides, and forgets the tokens that were cached under another decision.
    pub(super) fn set_length(&mut self, long: bool) {
        if self.long.replace(long).is_some_and(|before| before != long) {
            self.length = 0;
        }
    }

    /// Forgets every token from `length` on.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// The last layer's committed keys and values, `[len, K, D]` each, as they are held.
    ///
    /// # Errors
    /// - the model has no layers
    pub fn last_layer(&self) -> Result<(Tensor, Tensor)> {
        let Some((k, v)) = self.layers.last() else {
            return Err(
                candle_core::Error::Msg("a cache of no layers has no last one".into()).into()
            );
        };
        Ok((k.narrow(0, 0, self.length)?, v.narrow(0, 0, self.length)?))
    }

    /// Keeps, of the rows from `first` on, only `rows` (counted from `first`, ascending), in their
    /// order: the accepted path of a token tree. Keys carry the angle of their token index, which
    /// for a tree is the root's plus the depth, so a move leaves them right.
    ///
    /// # Errors
    /// - a row is not in the cache, or rows do not ascend; the cache is left as it was
    pub fn compact(&mut self, first: usize, rows: &[usize]) -> Result<()> {
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|row| first + row >= self.length) {
            let message = format!("rows {rows:?} from {first} on of a cache of {}", self.length);
            return Err(candle_core::Error::Msg(message).into());
        }
        let in_place = rows.iter().enumerate().take_while(|(i, row)| i == *row).count();
        let moved: Vec<u32> = rows[in_place..].iter().map(|row| (first + row) as u32).collect();
        if !moved.is_empty() {
            for tensor in self.layers.iter().flat_map(|(k, v)| [k, v]) {
                let at = Tensor::from_slice(&moved, moved.len(), tensor.device())?;
                tensor.slice_set(&tensor.index_select(&at, 0)?, 0, first + in_place)?;
            }
        }
        self.length = first + rows.len();
        Ok(())
    }

    /// Makes room for `tokens` more.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
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

    /// Writes the keys and values of new tokens after the committed ones, and returns all of
    /// them, `[len + new, K, D]`. [`Self::reserve`] comes before it, [`Self::commit`] after the last
    /// layer.
    ///
    /// # Errors
    /// - there is no room, or the shapes do not fit
    pub fn append(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.dim(0)?;
        let (all_k, all_v) = &self.layers[layer];
        let own = |tensor: &Tensor| match all_k.dtype() {
            DType::U8 => quantised_keys(&tensor.contiguous()?.to_dtype(DType::F32)?),
            dtype => tensor.contiguous()?.to_dtype(dtype),
        };
        all_k.slice_set(&own(k)?, 0, self.length)?;
        all_v.slice_set(&own(v)?, 0, self.length)?;
        Ok((all_k.narrow(0, 0, self.length + new)?, all_v.narrow(0, 0, self.length + new)?))
    }

    /// Counts `tokens` appended to every layer as the cache's.
    pub fn commit(&mut self, tokens: usize) {
        self.length += tokens;
    }
}
