//! Keys and values, or states, of every layer for the tokens of one sequence.

mod placed;
mod prefix;
mod states;
mod windows;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::{Reach, half_keys, quantised_keys};
use longdraft_kernels::dispatch::multiplies_halves;
use longdraft_kernels::recurrence::Walk;
use longdraft_kernels::rows::put_rows;

use super::recurrent::{CachedState, Rule, State};
use super::repeats::Repeats;
use crate::error::{Result, refused};
use windows::Windowed;

/// Tokens that a fresh cache has room for.
const INITIAL_CAPACITY: usize = 256;

/// What keys and values are cached as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheType {
    /// f16 beside quantised blocks on the CPU, as llama.cpp does, and bf16 on a GPU beside blocks and where products
    /// take it: half of what a long context costs; else f32.
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
    /// The type of the cache's tensors; `U8` for blocks. `of_blocks`: whether a CPU multiplies blocks; `reads_bf16`: whether
    /// attention reads bf16 as it lies.
    pub(super) fn dtype(self, of_blocks: bool, reads_bf16: bool) -> DType {
        match self {
            Self::Auto if of_blocks => DType::F16,
            Self::Auto if reads_bf16 => DType::BF16,
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
    /// The same of the tokens that its window leaves.
    Windowed(usize, usize),
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
    Windowed(Windowed),
    Shared,
    /// Rows that are both, `[capacity, 1, D]`.
    Rows(Tensor),
    /// The state before and after the last pass.
    State(Box<CachedState>),
}

/// A growing cache; rows beyond the committed length are scratch.
///
/// Layers with a state hold that before the last pass and what the pass brought: tokens of that pass are taken
/// back exactly. Further back only lengths at which a state was put aside can be had. Layers with a window hold the
/// tokens that a later pass can see: those of the last pass can be taken back, and more where they are still held.
pub struct KvCache {
    layers: Vec<Layer>,
    length: usize,
    capacity: usize,
    /// Whether it is of a long sequence, where that has been decided.
    long: Option<bool>,
    /// How far back layers with a window see.
    reach: Reach,
    states: Option<States>,
    /// Layers up to the one whose keys and values are those of [`Self::last_layer`].
    last: usize,
    /// Passes that start the same again and again.
    repeats: Repeats,
}

/// What layers with a state have in common.
#[derive(Clone, Default)]
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
#[derive(Clone)]
struct Aside {
    length: usize,
    states: Vec<State>,
}

impl KvCache {
    /// An empty cache of `layers` layers with `kv_heads` heads of `head_dim`, whose values are bf16 where an NVIDIA GPU
    /// multiplies them so, else f32.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Result<Self> {
        let layouts = (0..layers).map(|_| Layout::Keys(kv_heads, head_dim));
        let dtype = CacheType::Auto.dtype(false, multiplies_halves(device));
        Self::of(layouts, Reach::All, dtype, device)
    }

    /// The same with layers of their own kinds, of which those with a window see as far as `reach`, and values of a
    /// type, to which keys and values are rounded when they are written: f32, bf16, f16, or u8 for blocks of 8 bits.
    /// It fails where the device has no memory for it, or heads do not consist of blocks.
    pub(super) fn of(
        layouts: impl Iterator<Item = Layout>,
        reach: Reach,
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
            Layout::Windowed(heads, dim) => {
                let (k, v) = (empty(heads, dim)?, empty(heads, dim)?);
                Ok(Layer::Windowed(Windowed { k, v, first: 0 }))
            }
            Layout::Shared => Ok(Layer::Shared),
            Layout::Rows(dim) => Ok(Layer::Rows(empty(1, dim)?)),
            Layout::State(rule) => Ok(Layer::State(Box::new(CachedState::new(&rule)))),
        };
        let layers: Vec<Layer> = layouts.map(layer).collect::<Result<_>>()?;
        let has_states = layers.iter().any(|layer| matches!(layer, Layer::State(_)));
        let states = has_states.then(States::default);
        let last = layers.len();
        let repeats = Repeats::default();
        let (length, capacity, long) = (0, INITIAL_CAPACITY, None);
        Ok(Self { layers, length, capacity, long, reach, states, last, repeats })
    }

    /// The same with the keys and values of layer `index` as those of [`Self::last_layer`].
    #[must_use]
    pub(super) fn ending_with(self, index: Option<usize>) -> Self {
        let last = index.map_or(self.last, |index| index + 1);
        Self { last, ..self }
    }

    /// The keys and values of a layer that appended `rows` in this pass, `[len + rows, K, D]`; with a window those
    /// that it holds. It fails where the layer holds no keys.
    pub(super) fn appended(&self, layer: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let (k, v, first) = match self.layers.get(layer) {
            Some(Layer::Keys(k, v)) => (k, v, 0),
            Some(Layer::Windowed(Windowed { k, v, first })) => (k, v, *first),
            _ => return Err(refused("a layer without keys was to be read by another")),
        };
        let all = self.length + rows - first;
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
            self.restart_windows();
        }
    }

    /// Forgets every token from `length` on. Where layers carry states or windows, those before are forgotten too
    /// unless there is a state for that length and what the next token sees is held: the cache may be shorter
    /// afterwards than was asked for ([`Self::reusable`]).
    pub fn truncate(&mut self, length: usize) {
        let length = if self.is_held(length.min(self.length)) { length } else { 0 };
        if self.states.is_some() {
            self.truncate_states(length);
        } else {
            self.length = self.length.min(length);
        }
        if self.length > 0 && !self.is_held(self.length) {
            self.truncate_states(0);
        }
        if self.length == 0 {
            self.restart_windows();
        }
    }

    /// How many tokens [`Self::truncate`] to `length` leaves.
    pub fn reusable(&self, length: usize) -> usize {
        let length = self.with_state(length.min(self.length));
        if self.is_held(length) { length } else { 0 }
    }

    /// Elements of the tensors that hold keys and values: bytes where they are blocks of 8 bits.
    #[cfg(test)]
    pub(super) fn elements(&self) -> usize {
        self.layers.iter().flat_map(Layer::tensors).map(Tensor::elem_count).sum()
    }

    /// The layer of [`Self::last_layer`].
    fn last_with_keys(&self) -> Option<usize> {
        let layers = &self.layers[..self.last.min(self.layers.len())];
        layers.iter().rposition(|layer| matches!(layer, Layer::Keys(..) | Layer::Windowed(_)))
    }

    /// The last attending layer's committed keys and values, `[len, K, D]` each, as they are held.
    ///
    /// # Errors
    /// - the model has no layer with keys, or that layer has dropped some ([`Self::keep_last_layer`])
    pub fn last_layer(&self) -> Result<(Tensor, Tensor)> {
        let Some(index) = self.last_with_keys() else {
            return Err(refused("a cache of no keys has no last ones"));
        };
        if self.first_held_by(index) > 0 {
            let problem = "the last layer has a window and dropped tokens that were to be read";
            return Err(refused(problem));
        }
        self.appended(index, 0)
    }

    /// Keeps, of the rows from `first` on, only `rows` (counted from `first`, ascending), in their
    /// order: the accepted path of a token tree. Keys carry the angle of their token index, which
    /// for a tree is the root's plus the depth, so a move leaves them right. States are made again
    /// from that before the last pass.
    ///
    /// # Errors
    /// - a row is not in the cache, or rows do not ascend; the cache is left as it was
    /// - layers carry states and `first` is not where the last pass began, or `rows` do not follow one another
    /// - layers have windows and have dropped what the next token would see
    pub fn compact(&mut self, first: usize, rows: &[usize]) -> Result<()> {
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|row| first + row >= self.length) {
            let length = self.length;
            return Err(refused(format!("rows {rows:?} from {first} on of a cache of {length}")));
        }
        if !self.is_held(first + rows.len()) {
            return Err(refused(format!(
                "layers with a window hold tokens from {} on, too few to go on from {}",
                self.first_held(),
                first + rows.len()
            )));
        }
        self.keep_states(first, rows)?;
        let in_place = rows.iter().enumerate().take_while(|(i, row)| i == *row).count();
        let moved: Vec<u32> = rows[in_place..].iter().map(|row| (first + row) as u32).collect();
        if !moved.is_empty() {
            for tensor in self.layers.iter().flat_map(Layer::whole) {
                let at = Tensor::from_slice(&moved, moved.len(), tensor.device())?;
                tensor.slice_set(&tensor.index_select(&at, 0)?, 0, first + in_place)?;
            }
            self.move_windowed(&moved, first + in_place)?;
        }
        self.length = first + rows.len();
        Ok(())
    }

    /// Makes room for `tokens` more. Layers with a window drop what no later token sees.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn reserve(&mut self, tokens: usize) -> Result<()> {
        self.reserve_windows(tokens)?;
        self.reserve_whole(tokens)
    }

    /// The same in layers that hold every token.
    fn reserve_whole(&mut self, tokens: usize) -> Result<()> {
        let needed = self.length + tokens;
        if needed <= self.capacity {
            return Ok(());
        }
        let capacity = needed.max(2 * self.capacity);
        for layer in &mut self.layers {
            for tensor in layer.whole_mut() {
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
        self.forget_passes();
        Ok(())
    }

    /// Lets go of what passes that repeat hold, among it the memory of a smaller room.
    pub fn forget_passes(&mut self) {
        self.repeats = Repeats::default();
    }

    /// Writes the keys and values of new tokens after the committed ones, and returns all of
    /// them, `[len + new, K, D]`, or those that a window leaves. [`Self::reserve`] comes before it, [`Self::commit`] after the last
    /// layer.
    ///
    /// # Errors
    /// - there is no room, the shapes do not fit, or the layer holds no keys
    pub fn append(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = k.dim(0)?;
        let (all_k, all_v, first) = match &self.layers[layer] {
            Layer::Keys(k, v) => (k, Some(v), 0),
            Layer::Windowed(Windowed { k, v, first }) => (k, Some(v), *first),
            Layer::Rows(rows) => (rows, None, 0),
            Layer::State(_) | Layer::Shared => {
                return Err(refused("a layer without keys of its own holds none"));
            }
        };
        let at = self.length - first;
        let put = |all: &Tensor, own: &Tensor| {
            let wide = || own.to_dtype(DType::F32);
            match all.dtype() {
                DType::U8 => all.slice_set(&quantised_keys(&wide()?)?, 0, at),
                DType::F16 if all.device().is_cpu() => all.slice_set(&half_keys(&wide()?)?, 0, at),
                _ => put_rows(all, own, at),
            }
        };
        put(all_k, k)?;
        if let Some(all_v) = all_v {
            put(all_v, v)?;
        }
        let all_v = all_v.unwrap_or(all_k);
        Ok((all_k.narrow(0, 0, at + new)?, all_v.narrow(0, 0, at + new)?))
    }

    /// Counts `tokens` appended to every layer as the cache's.
    pub fn commit(&mut self, tokens: usize) {
        self.length += tokens;
    }
}

impl Layer {
    /// What holds every token.
    fn whole(&self) -> Vec<&Tensor> {
        match self {
            Self::Keys(k, v) => vec![k, v],
            Self::Rows(rows) => vec![rows],
            Self::Windowed(_) | Self::State(_) | Self::Shared => Vec::new(),
        }
    }

    fn whole_mut(&mut self) -> Vec<&mut Tensor> {
        match self {
            Self::Keys(k, v) => vec![k, v],
            Self::Rows(rows) => vec![rows],
            Self::Windowed(_) | Self::State(_) | Self::Shared => Vec::new(),
        }
    }

    #[cfg(test)]
    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Windowed(Windowed { k, v, .. }) => vec![k, v],
            _ => self.whole(),
        }
    }
}
