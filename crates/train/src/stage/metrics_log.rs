//! `metrics.jsonl`: one line a logged step; a resumed run cuts what was written after its
//! checkpoint and writes it again.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Result, TrainError};

pub(crate) struct MetricsLog {
    path: PathBuf,
    file: File,
}

impl MetricsLog {
    /// Opens the log and cuts it to `bytes`.
    pub(crate) fn open(path: &Path, bytes: u64) -> Result<Self> {
        let fail = |error: std::io::Error| TrainError::checkpoint(path, error);
        let mut file =
            OpenOptions::new().create(true).write(true).truncate(false).open(path).map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        file.set_len(bytes.min(length)).map_err(fail)?;
        file.seek(SeekFrom::End(0)).map_err(fail)?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    pub(crate) fn write(&mut self, record: &Value) -> Result<()> {
        // One write call a line, so that a kill leaves whole lines or one torn one at the end.
        let line = format!("{record}\n");
        self.file
            .write_all(line.as_bytes())
            .map_err(|error| TrainError::checkpoint(&self.path, error))
    }

    /// Synced length in bytes.
    pub(crate) fn position(&mut self) -> Result<u64> {
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.path, error);
        self.file.sync_all().map_err(fail)?;
        self.file.stream_position().map_err(fail)
    }
}
