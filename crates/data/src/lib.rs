//! From text rows to packed training batches.
//!
//! ```text
//! source (rows with file:line) -> template (text + learned spans) -> document (ids + loss mask)
//!   -> packing (rows of T tokens) -> batch (positions, delays, learned rows)
//! ```
//!
//! This crate knows tokens, never a model: the tokenizer comes in through [`TextEncoder`].

#![forbid(unsafe_code)]

pub mod batch;
pub mod document;
pub mod error;
pub mod packing;
pub mod sampler;
pub mod source;
pub mod template;

pub use batch::{AnchorOffset, Batch};
pub use document::{Document, TextEncoder};
pub use error::{DataError, Result};
