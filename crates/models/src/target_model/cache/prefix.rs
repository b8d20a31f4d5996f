//! The first tokens of a cache in another one.
//!
//! What a token has in a cache depends on it and on the tokens before it alone. So a copy of the first rows is what
//! a pass over these tokens would write.

use std::mem::discriminant;

use candle_core::Tensor;

use super::{KvCache, Layer};
use crate::error::{Result, refused};

impl KvCache {
    /// Whether [`Self::copy_prefix`] takes tokens of another cache of the same target: each layer holds the same kind
    /// of thing in both ([`Self::keep_last_layer`] changes that), and both are of long sequences or both are not.
    pub fn is_like(&self, other: &Self) -> bool {
        let kinds = |cache: &Self| cache.layers.iter().map(discriminant).collect::<Vec<_>>();
        self.long == other.long && kinds(self) == kinds(other)
    }

    /// Holds the first `length` tokens of another cache of the same target in place of its own, or as many as
    /// [`Self::reusable`] tells of the other, which stays as it is. The rows have the same bits.
    ///
    /// # Errors
    /// - the other is not like this one, or the device has no memory for the rows; then this one holds no token
    pub fn copy_prefix(&mut self, other: &Self, length: usize) -> Result<()> {
        self.truncate(0);
        if !self.is_like(other) {
            return Err(refused("tokens of a cache with other layers were to be copied"));
        }
        let length = other.reusable(length);
        if length == 0 {
            return Ok(());
        }
        self.reserve_whole(length)?;
        let pairs = self.layers.iter().zip(&other.layers);
        let layers = pairs.map(|(own, theirs)| own.holding(theirs, length));
        self.layers = layers.collect::<Result<_>>()?;
        // States share what they remember until one of them steps. They are cut from where the other one ends.
        self.states.clone_from(&other.states);
        self.length = other.length;
        self.truncate(length);
        Ok(())
    }
}

impl Layer {
    /// This layer with the first `length` tokens of `theirs`, in the room that it has; a state comes as it is.
    fn holding(&self, theirs: &Self, length: usize) -> Result<Self> {
        let copied = |own: &Tensor, theirs: &Tensor| -> Result<Tensor> {
            own.slice_set(&theirs.narrow(0, 0, length)?, 0, 0)?;
            Ok(own.clone())
        };
        Ok(match (self, theirs) {
            (Self::Keys(k, v), Self::Keys(their_k, their_v)) => {
                Self::Keys(copied(k, their_k)?, copied(v, their_v)?)
            }
            (Self::Rows(rows), Self::Rows(theirs)) => Self::Rows(copied(rows, theirs)?),
            (Self::Windowed(_), Self::Windowed(theirs)) => Self::Windowed(theirs.up_to(length)?),
            (Self::State(_), Self::State(theirs)) => Self::State(theirs.clone()),
            (Self::Shared, Self::Shared) => Self::Shared,
            _ => return Err(refused("a layer of another kind was to be copied")),
        })
    }
}
