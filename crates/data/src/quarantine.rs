//! Malformed rows: counted, written aside, tolerated up to a share.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};

/// Share of malformed rows that a source may have by default.
pub const MAX_BAD_ROWS: f64 = 0.01;

/// So many malformed rows never stop a run, however small the source (unless the share is 0).
const ALWAYS_TOLERATED: usize = 3;

/// Problems that an error shows.
const SHOWN: usize = 3;

/// A source is given up early when this many rows are malformed and most of it is.
const HOPELESS: usize = 1000;

/// A row that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRow {
    /// `file:line`.
    pub origin: String,
    /// What is wrong.
    pub problem: String,
    /// The row as it was found.
    pub raw: String,
}

/// Takes malformed rows; writes them to a file if it has one.
#[derive(Debug)]
pub struct Quarantine {
    path: Option<PathBuf>,
    file: Option<BufWriter<File>>,
    max_share: f64,
    first: Vec<String>,
    bad: usize,
}

impl Quarantine {
    /// Tolerates a share of `max_share` of a source's rows. With a `path` malformed rows are
    /// written there, one JSON object a line; the file is made with the first of them, and an old
    /// one of that name is removed.
    ///
    /// # Errors
    /// - the old file cannot be removed
    pub fn new(path: Option<PathBuf>, max_share: f64) -> Result<Self> {
        if let Some(path) = &path {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(DataError::io(path)(error));
                }
                _ => {}
            }
        }
        Ok(Self { path, file: None, max_share, first: Vec::new(), bad: 0 })
    }

    /// Where malformed rows of any source were written, if there were some.
    pub fn written(&self) -> Option<&Path> {
        self.file.as_ref().and(self.path.as_deref())
    }

    /// A new source: its rows are counted anew.
    pub fn begin_source(&mut self) {
        self.first.clear();
        self.bad = 0;
    }

    /// Takes some rows; `rows` have been read of the source so far, these among them.
    ///
    /// # Errors
    /// - the file cannot be written, or the source is malformed for its greater part
    pub fn take(&mut self, bad: &[BadRow], source: &Path, rows: usize) -> Result<()> {
        let mut read = (rows.saturating_sub(bad.len()) + 1..).zip(bad);
        read.try_for_each(|(read, row)| self.take_one(row, source, read))
    }

    fn take_one(&mut self, row: &BadRow, source: &Path, rows: usize) -> Result<()> {
        self.bad += 1;
        if self.first.len() < SHOWN {
            self.first.push(format!("{}: {}", row.origin, row.problem));
        }
        if let Some(path) = &self.path {
            let fail = || DataError::io(path.clone());
            let file = if let Some(file) = &mut self.file {
                file
            } else {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(fail())?;
                }
                self.file.insert(BufWriter::new(File::create(path).map_err(fail())?))
            };
            let line = serde_json::to_string(row).map_err(|error| fail()(error.into()))?;
            writeln!(file, "{line}").map_err(fail())?;
        }
        if self.bad >= HOPELESS
            && self.bad * 2 > rows
            && self.bad as f64 > self.max_share * rows as f64
        {
            return Err(self.too_many(source, rows));
        }
        Ok(())
    }

    /// Judges a source that was read to its end (or to its limit), by its rows and the labels that are learned.
    ///
    /// # Errors
    /// - more of its rows are malformed than is tolerated, or nothing is learned
    pub fn end_source(&mut self, source: &Path, (rows, learned): (usize, usize)) -> Result<()> {
        self.flush()?;
        let tolerated = if self.max_share > 0.0 { ALWAYS_TOLERATED } else { 0 };
        let limit = (self.max_share * rows as f64).max(tolerated as f64);
        if self.bad as f64 > limit {
            return Err(self.too_many(source, rows));
        }
        if learned == 0 {
            let (path, first_problem) = (source.to_path_buf(), self.first.first().cloned());
            return Err(DataError::Empty { path, rows, first_problem });
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        match (&mut self.file, &self.path) {
            (Some(file), Some(path)) => file.flush().map_err(DataError::io(path.clone())),
            _ => Ok(()),
        }
    }

    fn too_many(&mut self, source: &Path, rows: usize) -> DataError {
        // What is written is a help only: failing to write it must not hide the real error.
        let _ = self.flush();
        DataError::TooManyBadRows {
            path: source.to_path_buf(),
            bad: self.bad,
            rows,
            share: self.max_share,
            first: self.first.clone(),
            quarantine: self.written().map(Path::to_path_buf),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(share: f64, bad: usize, rows: usize) -> Result<()> {
        let mut quarantine = Quarantine::new(None, share)?;
        let source = Path::new("rows.jsonl");
        for line in 0..bad {
            let origin = format!("rows.jsonl:{line}");
            let row = BadRow { origin, problem: "no".into(), raw: String::new() };
            quarantine.take(&[row], source, rows)?;
        }
        quarantine.end_source(source, (rows, 1))
    }

    #[test]
    fn the_share_counts_but_a_few_rows_always_pass_unless_it_is_zero() {
        assert!(judge(0.01, 3, 5).is_ok());
        assert!(judge(0.01, 4, 5).is_err());
        assert!(judge(0.01, 10, 1000).is_ok());
        let message = judge(0.01, 11, 1000).expect_err("one more").to_string();
        assert!(message.contains("11 of 1000 rows") && message.contains("rows.jsonl:2: no"));
        assert!(judge(0.0, 1, 1000).is_err() && judge(0.0, 0, 1000).is_ok());
        assert!(judge(0.5, 2000, 2001).is_err(), "hopeless");
    }

    #[test]
    fn rows_are_written_with_place_problem_and_text_and_old_ones_removed() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("run/quarantine.jsonl");
        let row = BadRow { origin: "a:1".into(), problem: "p".into(), raw: "{\"x\n".into() };
        let mut quarantine = Quarantine::new(Some(path.clone()), 1.0)?;
        assert_eq!(quarantine.written(), None);
        quarantine.take(std::slice::from_ref(&row), Path::new("a"), 1)?;
        quarantine.end_source(Path::new("a"), (1, 1))?;
        let text = std::fs::read_to_string(&path).expect("written");
        assert_eq!(serde_json::from_str::<BadRow>(&text).expect("a row"), row);
        Quarantine::new(Some(path.clone()), 1.0)?;
        assert!(!path.exists());
        Ok(())
    }
}
