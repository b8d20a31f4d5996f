//! `--log-file`: what is told on stderr, in a file, with times.
//!
//! It also holds what `--quiet` leaves out and `--verbose` would add. Bars are not in it.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use longdraft_tracking::Moment;

static LOG: Mutex<Option<Log>> = Mutex::new(None);

struct Log {
    path: PathBuf,
    file: File,
    /// What was told of a line that is not ended.
    begun: String,
}

/// From here on everything that is told goes to the end of a file, too. It fails where it cannot be opened.
pub(crate) fn open(path: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let log = Log { path: path.to_path_buf(), file, begun: String::new() };
    *LOG.lock().unwrap_or_else(PoisonError::into_inner) = Some(log);
    Ok(())
}

/// Whether there is a file.
pub(crate) fn is_open() -> bool {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Adds a text; its last line waits for its end. A file that takes no more is left alone, and that is told
/// once.
pub(crate) fn add(text: &str) {
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(open) = &mut *log else { return };
    let Err(error) = open.add(text) else { return };
    let path = open.path.display().to_string();
    *log = None;
    // Telling it asks for the lock.
    drop(log);
    errln!("warning: {path}: {error}: nothing more is logged");
}

impl Log {
    /// Writes every line at once: several processes may share the file.
    fn add(&mut self, text: &str) -> std::io::Result<()> {
        self.begun.push_str(text);
        let Some((whole, rest)) = self.begun.rsplit_once('\n') else { return Ok(()) };
        let time = Moment::now().rfc3339();
        let lines = whole.lines().filter(|line| !line.is_empty());
        let lines: String = lines.map(|line| format!("{time} {line}\n")).collect();
        let rest = rest.to_owned();
        self.file.write_all(lines.as_bytes())?;
        self.begun = rest;
        Ok(())
    }
}
