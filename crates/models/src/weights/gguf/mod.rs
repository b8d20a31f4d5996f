//! GGUF files: whole models dequantised tensor by tensor, headers read within the file's bounds,
//! and files of our own.

pub mod header;
mod names;
mod source;
pub mod write;

pub use names::gguf_name;
pub use source::GgufSource;
pub(crate) use source::gguf_files;
