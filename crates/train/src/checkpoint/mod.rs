//! Checkpoints: complete or absent.
//!
//! A save writes a folder beside the others, syncs it, then renames: `last` becomes `last_2`, the
//! new one `last`. `manifest.json` holds size and blake3 hash of every file. A `last` that does
//! not match its manifest is passed over for `last_2`, with a warning that names the bad file.
//! `best` is replaced in the same way. One process at a time holds a run directory.

mod lock;
mod manifest;
mod state;
mod store;

pub use lock::RunLock;
pub use state::{Best, CheckpointState, RunIdentity};
pub(crate) use store::seal;
pub use store::{BEST, Checkpointer, LAST, PREVIOUS, Place, draft_file, read_draft, read_state};
