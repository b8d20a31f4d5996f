//! `metrics.jsonl`: one line a logged step; a resumed run cuts what was written after its
//! checkpoint and writes it again.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
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
        let Some(file) = &mut self.file else { return Ok(()) };
        // One write call a line, so that a kill leaves whole lines or one torn one at the end.
        let line = format!("{record}\n");
        file.write_all(line.as_bytes()).map_err(|error| TrainError::checkpoint(&self.path, error))
    }

    /// Synced length in bytes.
    pub(crate) fn position(&mut self) -> Result<u64> {
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.path, error);
        let Some(file) = &mut self.file else { return Ok(0) };
        file.sync_all().map_err(fail)?;
        file.stream_position().map_err(fail)
    }
}
