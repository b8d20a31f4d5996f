//! `metrics.jsonl`: one line a logged step; a resumed run cuts what was written after its
//! checkpoint and writes it again.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::{Result, TrackerError};

/// The open file of a run.
pub struct MetricsLog {
    path: PathBuf,
    /// None in a process whose metrics another rank writes.
    file: Option<File>,
}

impl MetricsLog {
    /// Opens the log of a run directory and cuts it to `bytes`; the one process of a run that `writes` does it for all.
    ///
    /// # Errors
    /// - the file cannot be opened or cut
    pub fn open(run: &Path, bytes: u64, writes: bool) -> Result<Self> {
        let path = run.join("metrics.jsonl");
        if !writes {
            return Ok(Self { path, file: None });
        }
        let fail = |source| TrackerError::File { path: path.clone(), source };
        let file = OpenOptions::new().create(true).write(true).truncate(false).open(&path);
        let mut file = file.map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        file.set_len(bytes.min(length)).map_err(fail)?;
        file.seek(SeekFrom::End(0)).map_err(fail)?;
        Ok(Self { path, file: Some(file) })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// - the file is gone, was replaced, or cannot be written
    pub fn write(&mut self, record: &Value) -> Result<()> {
        self.require_place()?;
        let Some(file) = &mut self.file else { return Ok(()) };
        // One write call a line, so that a kill leaves whole lines or one torn one at the end.
        let line = format!("{record}\n");
        file.write_all(line.as_bytes()).map_err(TrackerError::file(&self.path))
    }

    /// Refuses to write on into a file that nobody can find: one that was deleted, or moved away with
    /// its folder.
    fn require_place(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let lost = |what| Err(TrackerError::Lost { path: self.path.clone(), what });
        match is_at(file, &self.path) {
            Ok(true) => Ok(()),
            Ok(false) => lost("was replaced"),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                lost("is gone, deleted or moved away")
            }
            Err(error) => Err(TrackerError::file(&self.path)(error)),
        }
    }

    /// Synced length in bytes.
    ///
    /// # Errors
    /// - the file is gone, was replaced, or cannot be synced
    pub fn position(&mut self) -> Result<u64> {
        self.require_place()?;
        let fail = |source| TrackerError::File { path: self.path.clone(), source };
        let Some(file) = &mut self.file else { return Ok(0) };
        file.sync_all().map_err(fail)?;
        file.stream_position().map_err(fail)
    }
}

/// Whether a path names an open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (open, named) = (file.metadata()?, std::fs::metadata(path)?);
    Ok((open.dev(), open.ino()) == (named.dev(), named.ino()))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> std::io::Result<bool> {
    std::fs::metadata(path).map(|_| true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_log_that_is_gone_or_replaced_is_told() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(folder.path(), 0, true).expect("a log");
        log.write(&json!({ "step": 1 })).expect("written");
        std::fs::remove_file(&path).expect("remove");
        let error = log.write(&json!({ "step": 2 })).expect_err("gone").to_string();
        assert!(error.contains("metrics.jsonl: is gone"), "{error}");
        assert!(log.position().is_err());
        std::fs::write(&path, "").expect("another file");
        let error = log.position().expect_err("replaced").to_string();
        assert!(error.contains("was replaced"), "{error}");
    }
}
