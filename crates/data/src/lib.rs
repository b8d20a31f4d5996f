//! From text rows to packed training batches.
//!
//! ```text
//! source (rows with file:line, aligned) -> template (text + learned spans)
//!   -> document (ids + loss mask; malformed rows into quarantine) -> packing (rows of T tokens) -> batch (positions, documents, learned rows)
//! ```
//!
//! This crate knows tokens, never a model: the tokenizer comes in through [`TextEncoder`].

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod batch;
pub mod conversation;
pub mod document;
pub mod encoder;
pub mod error;
pub mod packing;
pub mod prepare;
pub mod quarantine;
pub mod reader;
mod report;
mod row;
pub mod sampler;
pub mod shards;
pub mod source;
pub mod template;
pub mod token_stream;

pub use batch::{AnchorOffset, Batch};
pub use document::Document;
pub use encoder::{GeneratedText, TextEncoder};
pub use error::{DataError, Result};
pub use source::SourceConfig;
