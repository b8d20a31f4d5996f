//! Checkpoints: complete or absent.
//!
//! A save writes a folder beside the others, syncs it, then renames: `last` becomes `last_2`, the
//! new one `last`. `manifest.json` holds size and blake3 hash of every file and is written last. A
//! `last` that does not match its manifest is passed over for `last_2`, with a warning that names
//! the bad file. `best` is replaced in the same way. One job at a time holds a run directory.
//!
//! Over several ranks the first one writes what all of them hold, each its part of the optimizer's
//! state, all at the same time; the folder lies on a file system that they share.

mod agreement;
mod contents;
mod curriculum;
mod due;
mod locate;
mod lock;
mod manifest;
pub mod optimizer_shards;
mod state;
mod store;

pub(crate) use agreement::require_same_network;
pub use agreement::{ResumePolicy, require_same_run, time_is_used_up};
pub use contents::{
    Contents, add_token_counts, load, open_draft_file, read_draft, read_json, read_state,
};
pub use curriculum::{CURRICULUM_FILE, CurriculumFile, StageEntry, StartFrom};
pub use due::SaveClock;
pub use locate::{Located, Wanted, draft_file, saved_draft, stages};
pub use lock::{RunLock, is_locked, lock_file};
pub use state::{Best, CheckpointState, Progress, RunIdentity};
pub(crate) use state::{STEPS, TARGET};
pub use store::{BEST, Checkpointer, LAST, PREVIOUS, Place, verify};
