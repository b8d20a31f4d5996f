//! Targets in GGUF files: which stored tensor is which published one, and how it is read.

mod experts;
mod heads;
mod names;
mod source;
mod unread;

pub(crate) use names::PLAIN_MODULES;
pub use names::gguf_name;
pub use source::GgufSource;
pub(super) use unread::unread;
