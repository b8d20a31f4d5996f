//! Layers with a window in a cache: they hold the tokens that a later pass can still see.
//!
//! A pass that begins after `n` tokens sees, in such a layer, nothing before the first place that its first row
//! sees; what it appends may be taken back, but not those `n`. So rows in front of that place are dropped: by whole
//! tiles of keys, which leaves the bits of every sum, and only when room runs out, so that rows move rarely.

use candle_core::Tensor;
use longdraft_kernels::attention::TILE_KEYS;

use super::{KvCache, Layer};
use crate::config::cached::most_held;
use crate::error::{Result, refused};

/// Keys and values of the tokens from `first` on, `[capacity, K, D]` each.
pub(super) struct Windowed {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    /// A multiple of [`TILE_KEYS`].
    pub(super) first: usize,
}

impl Windowed {
    /// The same without the rows of the tokens from `length` on, in tensors of its own.
    pub(super) fn up_to(&self, length: usize) -> Result<Self> {
        let (k, v) = self.copied(0, length.saturating_sub(self.first), self.capacity())?;
        Ok(Self { k, v, first: self.first })
    }

    fn capacity(&self) -> usize {
        self.k.dims().first().copied().unwrap_or(0)
    }

    /// Copies of the rows from place `from` on, `count` of them, in tensors with room for `capacity`.
    fn copied(&self, from: usize, count: usize, capacity: usize) -> Result<(Tensor, Tensor)> {
        let copy = |tensor: &Tensor| -> Result<Tensor> {
            let (_, heads, dim) = tensor.dims3()?;
            let copy = Tensor::zeros((capacity, heads, dim), tensor.dtype(), tensor.device())?;
            if count > 0 {
                copy.slice_set(&tensor.narrow(0, from, count)?, 0, 0)?;
            }
            Ok(copy)
        };
        Ok((copy(&self.k)?, copy(&self.v)?))
    }

    /// Drops rows in front of `first`, where `kept` rows are held from there on, and makes room for `needed`.
    /// On an error nothing is changed.
    fn hold_from(&mut self, first: usize, kept: usize, needed: usize, most: usize) -> Result<()> {
        let (capacity, dropped) = (self.capacity(), first - self.first);
        let wanted = if capacity > 2 * most {
            most
        } else if needed + TILE_KEYS <= capacity || (dropped == 0 && needed <= capacity) {
            capacity
        } else {
            (2 * capacity).min(most).max(needed)
        };
        if wanted != capacity {
            (self.k, self.v) = self.copied(dropped, kept, wanted)?;
        } else if dropped > 0 && kept > 0 {
            let (k, v) = self.copied(dropped, kept, kept)?;
            self.k.slice_set(&k, 0, 0)?;
            self.v.slice_set(&v, 0, 0)?;
        }
        self.first = first;
        Ok(())
    }
}

impl KvCache {
    fn windows(&self) -> impl Iterator<Item = &Windowed> {
        self.layers.iter().filter_map(|layer| match layer {
            Layer::Windowed(window) => Some(window),
            _ => None,
        })
    }

    fn windows_mut(&mut self) -> impl Iterator<Item = &mut Windowed> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            Layer::Windowed(window) => Some(window),
            _ => None,
        })
    }

    /// The first token that layers with a window hold.
    pub(in crate::target_model) fn first_held(&self) -> usize {
        self.windows().map(|window| window.first).max().unwrap_or(0)
    }

    /// The same of layer `index`.
    pub(in crate::target_model) fn first_held_by(&self, index: usize) -> usize {
        match self.layers.get(index) {
            Some(Layer::Windowed(window)) => window.first,
            _ => 0,
        }
    }

    /// Whether a sequence that is cut to `length` can go on: what it sees is held.
    pub(super) fn is_held(&self, length: usize) -> bool {
        self.reach.first(length + 1) >= self.first_held()
    }

    /// Makes room for `tokens` more in layers with a window, and drops what nobody will see.
    pub(super) fn reserve_windows(&mut self, tokens: usize) -> Result<()> {
        let (length, held) = (self.length, self.first_held());
        let most = most_held(self.reach, tokens);
        let fits = |window: &Windowed| {
            let capacity = window.capacity();
            let needed = length + tokens - window.first;
            // Room that a much larger pass took is given back.
            window.first == held && needed <= capacity && capacity <= 2 * most
        };
        if self.windows().all(fits) {
            return Ok(());
        }
        let seen = self.reach.first(length + 1) / TILE_KEYS * TILE_KEYS;
        let first = seen.max(held);
        let kept = length - first;
        self.windows_mut().try_for_each(|window| window.hold_from(first, kept, kept + tokens, most))
    }

    /// Forgets what layers with a window hold, of a cache that holds no token.
    pub(super) fn restart_windows(&mut self) {
        self.windows_mut().for_each(|window| window.first = 0);
    }

    /// Lets the layer of [`Self::last_layer`] hold all of its tokens although it has a window, for drafts that read
    /// them.
    ///
    /// # Errors
    /// - it has dropped some, or the device has no memory for them
    pub fn keep_last_layer(&mut self) -> Result<()> {
        let Some(index) = self.last_with_keys() else { return Ok(()) };
        let Layer::Windowed(window) = &self.layers[index] else { return Ok(()) };
        if window.first > 0 {
            return Err(refused("a layer with a window has dropped tokens that a draft reads"));
        }
        let (k, v) = window.copied(0, self.length, self.capacity)?;
        self.layers[index] = Layer::Keys(k, v);
        Ok(())
    }

    /// Moves rows to places from `to` on, where layers with a window hold these.
    pub(super) fn move_windowed(&self, moved: &[u32], to: usize) -> Result<()> {
        for window in self.windows() {
            let skipped = window.first.saturating_sub(to).min(moved.len());
            let rows = moved[skipped..].iter().map(|row| row - window.first as u32);
            let rows: Vec<u32> = rows.collect();
            if rows.is_empty() {
                continue;
            }
            for tensor in [&window.k, &window.v] {
                let at = Tensor::from_slice(&rows, rows.len(), tensor.device())?;
                let to = to + skipped - window.first;
                tensor.slice_set(&tensor.index_select(&at, 0)?, 0, to)?;
            }
        }
        Ok(())
    }
}
