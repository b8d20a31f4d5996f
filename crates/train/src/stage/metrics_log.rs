//! `metrics.jsonl`: one line a logged step; a resumed run cuts what was written after its
//! checkpoint and writes it again.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::parallel::World;

pub(crate) struct MetricsLog {
    path: PathBuf,
    /// None in a process whose metrics another rank writes.
    file: Option<File>,
}

impl MetricsLog {
    /// Opens the log and cuts it to `bytes`; the first rank writes for all.
    pub(crate) fn open(path: &Path, bytes: u64, world: &World) -> Result<Self> {
        let fail = |error: std::io::Error| TrainError::checkpoint(path, error);
        let path = path.to_path_buf();
        if !world.is_first() {
            return Ok(Self { path, file: None });
        }
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(false)
            .open(&path)
            .map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        file.set_len(bytes.min(length)).map_err(fail)?;
        file.seek(SeekFrom::End(0)).map_err(fail)?;
        Ok(Self { path, file: Some(file) })
    }

    pub(crate) fn write(&mut self, record: &Value) -> Result<()> {
        self.require_place()?;
        let Some(file) = &mut self.file else { return Ok(()) };
        // One write call a line, so that a kill leaves whole lines or one torn one at the end.
        let line = format!("{record}\n");
        file.write_all(line.as_bytes()).map_err(|error| TrainError::checkpoint(&self.path, error))
    }

    /// Refuses to write on into a file that nobody can find: one that was deleted, or moved away with
    /// its folder.
    fn require_place(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let problem = match is_at(file, &self.path) {
            Ok(true) => return Ok(()),
            Ok(false) => "was replaced while the run wrote to it".to_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                "is gone, deleted or moved away while the run wrote to it".to_owned()
            }
            Err(error) => error.to_string(),
        };
        Err(TrainError::checkpoint(&self.path, problem))
    }

    /// Synced length in bytes.
    pub(crate) fn position(&mut self) -> Result<u64> {
        self.require_place()?;
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.path, error);
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
        let mut log = MetricsLog::open(&path, 0, &World::single()).expect("a log");
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
