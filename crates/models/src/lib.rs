//! Models: configurations, weight files, tokenizers, frozen targets and trainable drafts.
//!
//! Shapes, everywhere the same: `T` packed tokens, `H` hidden, `N` query heads, `K` key-value
//! heads, `D` head dim, `I` MLP width, `V` target vocabulary, `G` draft length.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod bits_per_byte;
mod bounded;
pub mod config;
pub mod device;
pub mod disk;
pub mod draft;
pub mod error;
pub mod hub;
pub mod ids;
pub mod language_model;
pub mod paths;
pub mod published;
pub mod sha256;
mod side_files;
pub mod target_model;
pub mod tokenizer;
pub mod weights;

pub use config::TargetConfig;
pub use device::{DeviceChoice, Precision, StepProducts};
pub use error::{ModelError, Result};
pub use ids::{DraftTokenId, EnteredLayerId, LayerId, TargetTokenId};

#[cfg(test)]
mod test_support;

#[cfg(test)]
#[global_allocator]
static MEMORY: longdraft_kernels::memory::Allocator = longdraft_kernels::memory::Allocator::new();
