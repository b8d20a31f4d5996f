//! Keys and values, or states, of every layer for the tokens of one sequence.

mod states;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::quantised_keys;
use longdraft_kernels::recurrence::Walk;

use super::recurrent::{CachedState, Rule, State};
use super::refused;
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

/// What a layer holds of its tokens in a cache.
pub(super) enum Layout {
    /// Keys and values of so many heads of such a dim.
    Keys(usize, usize),
    /// Nothing: an earlier layer's keys and values are read.
    Shared,
    /// One row of so many values, which is key and value of all heads.
    Rows(usize),
    /// A state that steps so.
    State(Arc<Rule>),
}

/// One layer's part of a cache.
enum Layer {
    /// Keys and values, `[capacity, K, D]` each; as u8 a head is `D / 32` blocks of 34 bytes.
    Keys(Tensor, Tensor),
    Shared,
    /// Rows that are both, `[capacity, 1, D]`.
    Rows(Tensor),
    /// The state before and after the last pass.
    State(Box<CachedState>),
}

/// A growing cache; rows beyond the committed length are scratch.
///
/// Layers with a state hold that before the last pass and what the pass brought: tokens of that pass are taken
/// back exactly. Further back only lengths at which a state was put aside can be had.
pub struct KvCache {
    layers: Vec<Layer>,
    length: usize,
    capacity: usize,
    /// Whether it is of a long sequence, where that has been decided.
    long: Option<bool>,
    states: Option<States>,
    /// Layers up to the one whose keys and values are those of [`Self::last_layer`].
    last: usize,
}

/// What layers with a state have in common.
#[derive(Default)]
struct States {
    /// Tokens before the last pass.
    base: usize,
    /// How the rows of the last pass go on from one another.
    walk: Option<Walk>,
    /// Whether a pass began and did not end.
    broken: bool,
    /// States put aside, the oldest first.
    aside: Vec<Aside>,
}

/// The states of all layers at a length.
struct Aside {
    length: usize,
    states: Vec<State>,
}

impl KvCache {
    /// An empty cache of `layers` layers with `kv_heads` heads of `head_dim`, whose values are f32.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Result<Self> {
        let layouts = (0..layers).map(|_| Layout::Keys(kv_heads, head_dim));
        Self::of(layouts, DType::F32, device)
    }

    /// The same with layers of their own kinds and values of a type, to which keys and values are rounded when
    /// they are written: f32, f16, or u8 for blocks of 8 bits.
    ///
    /// # Errors
    /// - the device has no memory for it, or heads do not consist of blocks
    pub(super) fn of(
        layouts: impl Iterator<Item = Layout>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let empty = |kv_heads: usize, head_dim: usize| -> Result<Tensor> {
            let floats = if dtype == DType::U8 { DType::F32 } else { dtype };
            let empty = Tensor::zeros((INITIAL_CAPACITY, kv_heads, head_dim), floats, device)?;
            Ok(if dtype == DType::U8 { quantised_keys(&empty)? } else { empty })
        };
        let layer = |layout| match layout {
            Layout::Keys(heads, dim) => Ok(Layer::Keys(empty(heads, dim)?, empty(heads, dim)?)),
            Layout::Shared => Ok(Layer::Shared),
            Layout::Rows(dim) => Ok(Layer::Rows(empty(1, dim)?)),
            Layout::State(rule) => Ok(Layer::State(Box::new(CachedState::new(&rule)))),
        };
        let layers: Vec<Layer> = layouts.map(layer).collect::<Result<_>>()?;
        let has_states = layers.iter().any(|layer| matches!(layer, Layer::State(_)));
        let states = has_states.then(States::default);
        let last = layers.len();
        Ok(Self { layers, length: 0, capacity: INITIAL_CAPACITY, states, last, long: None })
    }

    /// The same with the keys and values of layer `index` as those of [`Self::last_layer`].
    #[must_use]
    pub(super) fn ending_with(self, index: Option<usize>) -> Self {
        let last = index.map_or(self.last, |index| index + 1);
        Self { last, ..self }
    }

    /// The keys and values of a layer that appended `rows` in this pass, `[len + rows, K, D]`.
    ///
    /// # Errors
    /// - the layer holds no keys
    pub(super) fn appended(&self, layer: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let Some(Layer::Keys(k, v)) = self.layers.get(layer) else {
            return Err(refused("a layer without keys was to be read by another"));
        };
        let all = self.length + rows;
        Ok((k.narrow(0, 0, all)?, v.narrow(0, 0, all)?))
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

    /// Forgets every token from `length` on. Where layers carry states, those before are forgotten too unless
    /// there is a state for that length: the cache may be shorter afterwards than was asked for.
    pub fn truncate(&mut self, length: usize) {
        if self.states.is_some() {
            self.truncate_states(length);
        } else {
            self.length = self.length.min(length);
        }
    }

    /// The last attending layer's committed keys and values, `[len, K, D]` each, as they are held.
    ///
    /// # Errors
    /// - the model has no layer with keys
    pub fn last_layer(&self) -> Result<(Tensor, Tensor)> {
        let layers = &self.layers[..self.last.min(self.layers.len())];
        let keys = layers.iter().rev().find_map(|layer| match layer {
            Layer::Keys(k, v) => Some((k, v)),
            Layer::Rows(_) | Layer::Shared | Layer::State(_) => None,
        });
        let Some((k, v)) = keys else { return Err(refused("a cache of no keys has no last ones")) };
        Ok((k.narrow(0, 0, self.length)?, v.narrow(0, 0, self.length)?))
    }

    /// Keeps, of the rows from `first` on, only `rows` (counted from `first`, ascending), in their
    /// order: the accepted path of a token tree. Keys carry the angle of their token index, which
    /// for a tree is the root's plus the depth, so a move leaves them right. States are made again
    /// from that before the last pass.
    ///
    /// # Errors
    /// - a row is not in the cache, or rows do not ascend; the cache is left as it was
    /// - layers carry states and `first` is not where the last pass began, or `rows` do not follow one another
    pub fn compact(&mut self, first: usize, rows: &[usize]) -> Result<()> {
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|row| first + row >= self.length) {
            let message = format!("rows {rows:?} from {first} on of a cache of {}", self.length);
            return Err(refused(&message));
        }
        self.keep_states(first, rows)?;
        let in_place = rows.iter().enumerate().take_while(|(i, row)| i == *row).count();
        let moved: Vec<u32> = rows[in_place..].iter().map(|row| (first + row) as u32).collect();
        if !moved.is_empty() {
            for tensor in self.layers.iter().flat_map(Layer::tensors) {
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
        for layer in &mut self.layers {
            for tensor in layer.tensors_mut() {
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
    /// - there is no room, the shapes do not fit, or the layer holds no keys
    pub fn append(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.dim(0)?;
        let (all_k, all_v) = match &self.layers[layer] {
            Layer::Keys(k, v) => (k, v),
            Layer::Rows(rows) => (rows, rows),
            Layer::State(_) | Layer::Shared => {
                return Err(refused("a layer without keys of its own holds none"));
            }
        };
        let own = |tensor: &Tensor| match all_k.dtype() {
            DType::U8 => quantised_keys(&tensor.contiguous()?.to_dtype(DType::F32)?),
            dtype => tensor.contiguous()?.to_dtype(dtype),
        };
        all_k.slice_set(&own(k)?, 0, self.length)?;
        if matches!(self.layers[layer], Layer::Keys(..)) {
            all_v.slice_set(&own(v)?, 0, self.length)?;
        }
        Ok((all_k.narrow(0, 0, self.length + new)?, all_v.narrow(0, 0, self.length + new)?))
    }

    /// Counts `tokens` appended to every layer as the cache's.
    pub fn commit(&mut self, tokens: usize) {
        self.length += tokens;
    }
}

impl Layer {
    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Keys(k, v) => vec![k, v],
            Self::Rows(rows) => vec![rows],
            Self::State(_) | Self::Shared => Vec::new(),
        }
    }

    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        match self {
            Self::Keys(k, v) => vec![k, v],
            Self::Rows(rows) => vec![rows],
            Self::State(_) | Self::Shared => Vec::new(),
        }
    }
}
