//! The lines that are written: answers in one file, failed rows in another beside it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::failure::{Failure, Result};

/// Where rows without an answer stand, beside the file of answers.
pub(crate) fn failures_file(answers: &Path) -> PathBuf {
    let mut name = answers.as_os_str().to_owned();
    name.push(".failed.jsonl");
    PathBuf::from(name)
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Success,
    Error,
    Skipped,
}

/// One row's line.
pub(super) struct Entry {
    /// From 0.
    pub(super) row: usize,
    /// `file:line` of the prompt.
    pub(super) id: String,
    pub(super) outcome: Outcome,
    /// Further fields.
    pub(super) body: Value,
}

impl Entry {
    /// The row has no answer.
    pub(super) fn fail(&mut self, outcome: Outcome, problem: &str) {
        self.outcome = outcome;
        self.body = json!({ "problem": problem });
    }
}

/// Both files, and which rows stand in them.
pub(super) struct Ledger {
    answers: (PathBuf, File),
    failures: (PathBuf, File),
    recipe: String,
    done: HashMap<usize, String>,
    success: usize,
    error: usize,
    skipped: usize,
}

impl Ledger {
    /// Opens the files for appending; a torn last line is cut off.
    pub(super) fn open(output: &Path, recipe: &str) -> Result<Self> {
        if let Some(folder) = output.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|error| fail(folder, error))?;
        }
        let name = failures_file(output);
        let (answers, written) = open(output)?;
        let (failures, failed) = open(&name)?;
        let mut ledger = Self {
            answers: (output.to_path_buf(), answers),
            failures: (name, failures),
            recipe: recipe.to_owned(),
            done: HashMap::new(),
            success: 0,
            error: 0,
            skipped: 0,
        };
        for line in &written {
            ledger.take(line, &ledger.answers.0.clone())?;
            ledger.success += 1;
        }
        for line in &failed {
            ledger.take(line, &ledger.failures.0.clone())?;
            match line["status"].as_str() {
                Some("skipped") => ledger.skipped += 1,
                _ => ledger.error += 1,
            }
        }
        Ok(ledger)
    }

    /// Notes a line of an earlier run.
    fn take(&mut self, line: &Value, path: &Path) -> Result<()> {
        let (Some(row), Some(id)) = (line["row"].as_u64(), line["id"].as_str()) else {
            return Err(foreign(path));
        };
        if line["recipe"] != *self.recipe {
            return Err(Failure::work(format!(
                "{}: was written with {}, now {}",
                path.display(),
                line["recipe"],
                self.recipe
            ))
            .hint("give another --output, or the old values to go on"));
        }
        if self.done.insert(row as usize, id.to_owned()).is_some() {
            return Err(Failure::work(format!("{}: row {row} stands twice", path.display())));
        }
        Ok(())
    }

    /// Whether a row has its line; that line must be of the same prompt.
    pub(super) fn is_done(&self, row: usize, id: &str) -> Result<bool> {
        match self.done.get(&row) {
            None => Ok(false),
            Some(known) if known == id => Ok(true),
            Some(known) => Err(Failure::work(format!(
                "{}: row {row} is {known} there, {id} in the prompts",
                self.answers.0.display()
            ))
            .hint("the prompts are others: give another --output")),
        }
    }

    /// Writes a line with one call, so that a kill leaves whole lines or one torn one.
    pub(super) fn write(&mut self, entry: &Entry) -> Result<()> {
        let mut line = json!({ "row": entry.row, "id": entry.id });
        let (path, file) = match entry.outcome {
            Outcome::Success => &mut self.answers,
            Outcome::Error | Outcome::Skipped => &mut self.failures,
        };
        let count = match entry.outcome {
            Outcome::Success => &mut self.success,
            Outcome::Error => {
                line["status"] = "error".into();
                &mut self.error
            }
            Outcome::Skipped => {
                line["status"] = "skipped".into();
                &mut self.skipped
            }
        };
        if let (Value::Object(line), Value::Object(body)) = (&mut line, &entry.body) {
            line.extend(body.clone());
        }
        line["recipe"] = self.recipe.as_str().into();
        file.write_all(format!("{line}\n").as_bytes()).map_err(|error| fail(path, error))?;
        *count += 1;
        self.done.insert(entry.row, entry.id.clone());
        Ok(())
    }

    /// Rows that have their line.
    pub(super) fn len(&self) -> usize {
        self.done.len()
    }

    /// Success, error, skipped.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.success, self.error, self.skipped)
    }

    pub(super) fn summary(&self) -> String {
        format!("{} success + {} error + {} skipped", self.success, self.error, self.skipped)
    }

    /// Every row has its line, and there are no lines beyond.
    pub(super) fn check(&self, rows: usize) -> Result<()> {
        if self.success + self.error + self.skipped == rows && self.done.len() == rows {
            return Ok(());
        }
        Err(Failure::work(format!(
            "{}: {} is not {rows} rows",
            self.answers.0.display(),
            self.summary()
        ))
        .hint("the prompts (or --limit) are others than before: give another --output"))
    }
}

fn fail(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::work(format!("{}: {error}", path.display()))
}

/// How every line begins.
const LINE_START: &[u8] = b"{\"row\":";

/// A file and its whole lines; it stands at the end of them. Nothing is cut from a file that holds
/// anything else.
fn open(path: &Path) -> Result<(File, Vec<Value>)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(path).map_err(|error| fail(path, error))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|error| fail(path, error))?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let (lines, torn) = bytes.split_at(whole);
    let mut parsed = Vec::new();
    for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        if !line.starts_with(LINE_START) {
            return Err(foreign(path));
        }
        parsed.push(serde_json::from_slice(line).map_err(|error| fail(path, error))?);
    }
    if !torn.starts_with(LINE_START) && !LINE_START.starts_with(torn) {
        return Err(foreign(path));
    }
    file.set_len(whole as u64).map_err(|error| fail(path, error))?;
    file.seek(SeekFrom::End(0)).map_err(|error| fail(path, error))?;
    Ok((file, parsed))
}

fn foreign(path: &Path) -> Failure {
    Failure::work(format!("{}: holds lines of another kind", path.display()))
        .hint("give another --output")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(row: usize, outcome: Outcome) -> Entry {
        Entry { row, id: format!("p.jsonl:{}", row + 1), outcome, body: json!({"problem": "x"}) }
    }

    #[test]
    fn every_row_has_one_line_and_a_torn_one_is_cut() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("out/answers.jsonl");
        let mut ledger = Ledger::open(&path, "r").expect("new");
        ledger.write(&entry(0, Outcome::Success)).expect("write");
        ledger.write(&entry(1, Outcome::Skipped)).expect("write");
        ledger.write(&entry(2, Outcome::Error)).expect("write");
        ledger.check(3).expect("complete");
        drop(ledger);
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::write(&path, format!("{text}{{\"row\": 3, \"id")).expect("torn");
        let mut ledger = Ledger::open(&path, "r").expect("again");
        assert_eq!((ledger.len(), ledger.counts()), (3, (1, 1, 1)));
        assert!(
            ledger.is_done(2, "p.jsonl:3").expect("same") && !ledger.is_done(3, "").expect("new")
        );
        assert!(ledger.is_done(2, "q.jsonl:3").is_err());
        ledger.write(&entry(3, Outcome::Success)).expect("write");
        ledger.check(4).expect("complete");
        assert!(ledger.check(3).is_err());
        assert_eq!(std::fs::read_to_string(&path).expect("read").lines().count(), 2);
        assert!(Ledger::open(&path, "other").is_err());
        for text in ["{\"text\": 1}\n", "no newline"] {
            std::fs::write(&path, text).expect("foreign");
            assert!(Ledger::open(&path, "r").is_err());
            assert_eq!(std::fs::read_to_string(&path).expect("untouched"), text);
        }
    }
}
