//! The file of rows that have no answer, beside the one of answers.
//!
//! A failure follows from the row and from how it is asked (`attempt`). So a row that failed is tried again only
//! where one of them changed. Lines are appended; what a later line or an answer replaced leaves the file when
//! all rows are done.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically;
use serde_json::Value;

use super::ledger::{Outcome, for_appending, foreign, whole_lines};
use crate::failure::{Failure, Result};

/// Where rows without an answer stand, beside the file of answers.
pub(crate) fn failures_file(answers: &Path) -> PathBuf {
    let mut name = answers.as_os_str().to_owned();
    name.push(".failed.jsonl");
    PathBuf::from(name)
}

/// The file and its lines.
pub(super) struct Failures {
    path: PathBuf,
    file: File,
    /// The last line of every row.
    lines: BTreeMap<u64, Line>,
    /// Whether the file holds lines that do not stand any more, or not in order.
    is_stale: bool,
}

struct Line {
    text: Value,
    /// Whether it is of this call, or was found to be what this call would do.
    stands: bool,
}

impl Failures {
    /// Opens the file beside the one of answers; a torn last line is cut off.
    pub(super) fn open(answers: &Path) -> Result<Self> {
        let path = failures_file(answers);
        let mut file = for_appending(&path)?;
        let (mut lines, mut is_stale) = (BTreeMap::new(), false);
        for (number, text) in whole_lines(&mut file, &path)? {
            let (Some(row), Some(_)) = (text["row"].as_u64(), text["status"].as_str()) else {
                return Err(foreign(&path, number));
            };
            is_stale |= lines.insert(row, Line { text, stands: false }).is_some();
        }
        Ok(Self { path, file, lines, is_stale })
    }

    /// What became of a row in an earlier call that tried it just as this one would.
    pub(super) fn confirm(&mut self, row: usize, id: &str, attempt: &str) -> Option<Outcome> {
        let line = self.lines.get_mut(&(row as u64))?;
        if line.text["id"] != id || line.text["attempt"] != attempt {
            return None;
        }
        line.stands = true;
        Some(if line.text["status"] == "error" { Outcome::Error } else { Outcome::Skipped })
    }

    /// The row has an answer now.
    pub(super) fn answered(&mut self, row: usize) {
        self.is_stale |= self.lines.remove(&(row as u64)).is_some();
    }

    /// Writes a row's line with one call.
    pub(super) fn write(&mut self, row: usize, outcome: Outcome, mut text: Value) -> Result<()> {
        let status = if outcome == Outcome::Error { "error" } else { "skipped" };
        text["status"] = status.into();
        self.file.write_all(format!("{text}\n").as_bytes()).map_err(Failure::at(&self.path))?;
        let line = Line { text, stands: true };
        self.is_stale |= self.lines.insert(row as u64, line).is_some();
        Ok(())
    }

    /// Leaves the lines of this call, and earlier ones that it would write again, in the order of rows.
    pub(super) fn forget_others(&mut self) -> Result<()> {
        let before = self.lines.len();
        self.lines.retain(|_, line| line.stands);
        if self.is_stale || self.lines.len() < before {
            let text: String = self.lines.values().map(|line| format!("{}\n", line.text)).collect();
            write_atomically(&self.path, text.as_bytes())?;
            self.is_stale = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(row: usize, attempt: &str) -> Value {
        json!({ "row": row, "id": format!("p.jsonl:{row}"), "problem": "x", "attempt": attempt })
    }

    fn rows(answers: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(failures_file(answers)).expect("failures");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        lines.filter_map(|line| line["row"].as_u64()).collect()
    }

    #[test]
    fn only_a_row_that_would_be_tried_alike_keeps_its_failure() {
        let folder = tempfile::tempdir().expect("folder");
        let answers = folder.path().join("answers.jsonl");
        let mut first = Failures::open(&answers).expect("new");
        for row in 0..5 {
            first.write(row, Outcome::Skipped, line(row, "a")).expect("written");
        }
        first.forget_others().expect("all stand");
        let mut second = Failures::open(&answers).expect("again");
        assert_eq!(second.confirm(0, "p.jsonl:0", "a"), Some(Outcome::Skipped));
        assert_eq!(second.confirm(1, "p.jsonl:1", "b"), None, "another prompt or field");
        assert_eq!(second.confirm(2, "q.jsonl:2", "a"), None, "of another file");
        assert_eq!(second.confirm(9, "p.jsonl:9", "a"), None, "never tried");
        second.write(1, Outcome::Error, line(1, "b")).expect("failed again");
        second.answered(2);
        assert_eq!(rows(&answers), [0, 1, 2, 3, 4, 1], "what is killed here loses nothing");
        // Its last line counts.
        let mut killed = Failures::open(&answers).expect("after a kill");
        assert_eq!(killed.confirm(1, "p.jsonl:1", "b"), Some(Outcome::Error));
        // Rows 3 and 4 are none of this call's.
        second.forget_others().expect("written anew");
        assert_eq!(rows(&answers), [0, 1]);
    }

    #[test]
    fn a_failure_that_does_not_say_how_it_was_tried_is_tried_again() {
        let folder = tempfile::tempdir().expect("folder");
        let answers = folder.path().join("answers.jsonl");
        let line = "{\"row\":0,\"id\":\"p.jsonl:0\",\"status\":\"skipped\",\"attempt\":null}\n";
        std::fs::write(failures_file(&answers), line).expect("written");
        let mut failures = Failures::open(&answers).expect("readable");
        assert_eq!(failures.confirm(0, "p.jsonl:0", "a"), None);
        std::fs::write(failures_file(&answers), "{\"row\":0}\n").expect("foreign");
        assert!(Failures::open(&answers).is_err());
    }
}
