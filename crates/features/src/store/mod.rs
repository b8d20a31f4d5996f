//! Features on disk or in an object store: captured once, trained from many times.
//!
//! ```text
//! recipe.json                what the store is made of: target, tokenizer, text, layers, positions
//! train-00000.safetensors    the features of some packed rows, unpadded   (`record.rs`)
//! train-00000.json           its size, blake3 hash and rows; written when the shard is complete
//! claims/train-00000.0       who works on it                              (`claim.rs`)
//! index.json                 recipe and all shards, written last
//! ```
//!
//! A shard is a function of the recipe. So a capture that was killed goes on after its complete
//! shards, several processes share the work, a damaged shard is captured again alone, and the bytes
//! are the same in every case. Nothing read here runs code: JSON and safetensors only.

mod background;
mod claim;
mod encode;
mod int8;
mod location;
mod open_shards;
mod read;
mod recipe;
mod record;
mod write;

use std::path::Path;

pub use background::BackgroundWriter;
pub(super) use read::Missing;
pub use read::StoredFeatures;
pub use recipe::{Compression, Contents, Part, PartRecipe, Recipe, StoreDtype, StoredTeacher};
pub use record::Record;
pub use write::{Estimate, ShardPlan, StoreWriter, Turn, Work};

/// Whether a store was begun in a folder.
pub(super) fn is_begun(folder: &Path) -> bool {
    [write::RECIPE, write::INDEX].iter().any(|name| folder.join(name).exists())
}
