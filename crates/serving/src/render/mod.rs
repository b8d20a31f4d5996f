//! A draft under the names, keys and conventions of each profile.

pub mod compatibility;
pub mod eagle3_config;
pub mod gguf;
pub mod longspec;
pub mod tensors;
