//! Packed tokens without documents or masks: the published `.bin` shards of pretraining.
//!
//! ```text
//! shard: 256 i32 (1024 bytes): 20240520, 1, tokens, zeros; then one u16 a token
//! stream: shards in the order of their paths -> loader (sequential or shuffled) -> [B, S]
//! ```
//!
//! A document is the start token and its ids; documents follow one another without padding.

mod loader;
mod overlap;
mod shard;

pub use loader::{Batch, LoaderKind, Position};
pub use overlap::{Overlap, overlap};
pub use shard::{ShardWriter, TokenStream, sidecar_path, write_shard};

/// Start of a document in the published vocabulary.
pub const START_OF_DOCUMENT: u16 = 1;
