//! What an evaluation has measured so far, beside where its figures will stand: one that was killed
//! goes on from there.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use longdraft_decode::evaluate::Progress;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_records::decode::Cell;
use longdraft_train::TrainError;
use longdraft_train::checkpoint::lock_file;
use serde::{Deserialize, Serialize};

use crate::failure::Result;
use crate::terminal::counted;

/// File in the folder of the figures.
const FILE: &str = "decode-unfinished.json";
/// File there that an evaluation holds. It is not a run's own, which may be measured while it trains.
const LOCK_FILE: &str = ".decode.lock";
/// Time between two saves, in times of the last one.
const REST: u32 = 50;

#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    /// All that figures depend on.
    settings: String,
    /// Temperatures, or ways to decode, that are done.
    cells: Vec<Cell>,
    progress: Progress,
    seconds: f64,
}

/// Takes a folder for figures, which is made when needed, until the file is closed: two evaluations would throw
/// each other's figures away. It fails where another process measures there, or it cannot be written.
pub(super) fn take(folder: &Path) -> Result<File> {
    let fail = TrainError::unwritable(folder);
    std::fs::create_dir_all(folder).map_err(fail)?;
    let file = OpenOptions::new().create(true).append(true).open(folder.join(LOCK_FILE));
    let file = file.map_err(fail)?;
    lock_file(&file, folder)?;
    Ok(file)
}

pub(crate) struct Unfinished {
    /// Without a folder nothing is kept.
    path: Option<PathBuf>,
    state: State,
    /// End of the last save, and how long it took.
    saved: (Instant, Duration),
    /// Since when this call measures, and the seconds of earlier ones.
    began: (Instant, f64),
}

impl Unfinished {
    /// What an evaluation of so many prompts with the same settings left in `folder`, or nothing; `what` names its cells.
    pub(crate) fn open(
        folder: Option<&Path>,
        settings: String,
        (prompts, what): (usize, &str),
    ) -> Self {
        let path = folder.map(|folder| folder.join(FILE));
        let left = path.as_ref().and_then(|path| {
            let bytes = std::fs::read(path).ok()?;
            match serde_json::from_slice::<State>(&bytes) {
                Ok(state) if state.settings == settings && state.progress.fits(prompts) => {
                    Some(state)
                }
                Ok(_) => {
                    errln!("{}: of another evaluation; this one begins anew", path.display());
                    None
                }
                Err(error) => {
                    errln!("{}: {error}; the evaluation begins anew", path.display());
                    None
                }
            }
        });
        if let Some(State { cells, progress, .. }) = &left {
            errln!(
                "going on after {}, {} and {}",
                counted(cells.len(), what),
                counted(progress.runs, "run"),
                counted(progress.prompts, "prompt")
            );
        }
        let state = left.unwrap_or_else(|| State { settings, ..State::default() });
        let (now, seconds) = (Instant::now(), state.seconds.max(0.0));
        Self { path, state, saved: (now, Duration::ZERO), began: (now, seconds) }
    }

    /// Seconds of this call and of earlier ones.
    pub(crate) fn seconds(&self) -> f64 {
        let (began, before) = self.began;
        before + began.elapsed().as_secs_f64()
    }

    /// Figures of the cell at this place, if it is done.
    pub(crate) fn cell(&self, index: usize) -> Option<&Cell> {
        self.state.cells.get(index)
    }

    /// Where the cell under way stands.
    pub(crate) fn progress(&self) -> Progress {
        self.state.progress.clone()
    }

    /// Keeps it, not more often than saving is cheap unless it is the `last` chance.
    pub(crate) fn keep(&mut self, progress: &Progress, last: bool) {
        if self.path.is_some() && (last || self.saved.0.elapsed() >= REST * self.saved.1) {
            self.state.progress = progress.clone();
            self.save();
        }
    }

    pub(crate) fn end_cell(&mut self, cell: &Cell) {
        self.state.cells.push(cell.clone());
        self.state.progress = Progress::default();
        self.save();
    }

    /// Everything is done and written.
    pub(crate) fn remove(self) {
        if let Some(path) = self.path {
            // It may never have been written.
            let _ = std::fs::remove_file(path);
        }
    }

    /// The evaluation goes on where this fails: only a later kill would miss it.
    fn save(&mut self) {
        self.state.seconds = self.seconds();
        let Some(path) = &self.path else { return };
        let started = Instant::now();
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let bytes = serde_json::to_vec(&self.state).map_err(std::io::Error::other);
        let written = folder.and(bytes).map_err(|error| error.to_string());
        let written = written
            .and_then(|bytes| write_atomically(path, &bytes).map_err(|error| error.to_string()));
        if let Err(problem) = written {
            errln!("{}: {problem}; what is measured is not kept", path.display());
            self.path = None;
        }
        self.saved = (Instant::now(), started.elapsed());
    }
}
