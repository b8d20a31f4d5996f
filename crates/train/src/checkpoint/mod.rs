//! Checkpoints: complete or absent.
//!
//! A save writes a folder beside the others, syncs it, then renames: `last` becomes `last_2`, the
//! new one `last`. `manifest.json` holds size and blake3 hash of every file. A `last` that does
//! not match its manifest is passed over for `last_2`, with a warning that names the bad file.

mod manifest;
mod state;
mod store;

pub use state::{CheckpointState, RunIdentity};
pub use store::{Checkpointer, LAST, PREVIOUS, read_draft, read_state};
