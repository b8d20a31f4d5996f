//! Layers that carry a state from token to token in place of keys: the gated delta rule and the causal short
//! convolution.
//!
//! However many rows a call has, a row's result is made of its ancestors' rows by the same operations in the same
//! order, so that it has the bits that it would have if it came alone. Decoding without loss rests on it. The delta
//! rule takes rows in by chunks of 64, counted from the first token of a text, and of a chunk that is not complete the
//! state holds the rows: a prompt runs as products, a single row costs two products with the state, and both have
//! the same bits (`chunk.rs`).
//!
//! A [`Walk`] says which row goes on from which: a chain, a token tree, or documents laid end to end. At a
//! branch the state is copied for every child but the last. Inputs are read on the host, states live there:
//! tensors of other devices are fetched and brought back.

mod chunk;
mod convolution;
mod delta;
mod walk;

pub use chunk::DeltaState;
pub use convolution::{Convolution, causal_convolution};
pub(crate) use delta::reference;
pub use delta::{DeltaRows, DeltaSizes, gated_delta_rule};
pub use walk::Walk;

#[cfg(test)]
mod tests;
