//! The lines that are written: answers in one file, failed rows in [another](super::failures) beside it.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use longdraft_data::conversation::VARIABLES;
use longdraft_models::paths::parent_of;
use longdraft_models::target_model::is_same_target;
use longdraft_train::TrainError;
use longdraft_train::checkpoint::{is_locked, lock_file};
use serde_json::{Value, json};

use super::dialogue::{asked_in, messages_of};
use super::failures::Failures;
use crate::failure::{Failure, Result};

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Success,
    Error,
    Skipped,
}

/// Rows by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(super) success: usize,
    pub(super) error: usize,
    pub(super) skipped: usize,
}

impl Counts {
    fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Success => self.success += 1,
            Outcome::Error => self.error += 1,
            Outcome::Skipped => self.skipped += 1,
        }
    }

    pub(crate) fn sum(self) -> usize {
        self.success + self.error + self.skipped
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} success + {} error + {} skipped", self.success, self.error, self.skipped)
    }
}

/// One row's line.
pub(super) struct Entry {
    /// From 0.
    pub(super) row: usize,
    /// `file:line` of the prompt.
    pub(super) id: String,
    /// Fingerprint of all that a failure follows from: the row, and how it is asked. `None` where it follows from
    /// more than that.
    pub(super) attempt: Option<String>,
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

/// A row that has its line.
struct Done {
    id: String,
    /// What the row asked when it was answered.
    asked: Option<blake3::Hash>,
}

/// Whether lines of two recipes may stand in one file; the first word is the target's fingerprint.
fn is_same_recipe(one: &str, other: &str) -> bool {
    match (one.split_once(' '), other.split_once(' ')) {
        (Some((one, its)), Some((other, others))) => its == others && is_same_target(one, other),
        _ => one == other,
    }
}

/// What of a recipe is another now, as options name it.
fn differences(written: &str, now: &str) -> String {
    let values = |recipe: &str| -> Vec<(String, String)> {
        let pairs = recipe.split(' ').filter_map(|word| word.split_once('='));
        pairs.map(|(name, value)| (name.replace('_', "-"), value.to_owned())).collect()
    };
    let target = |recipe: &str| recipe.split(' ').next().unwrap_or_default().to_owned();
    let mut all = Vec::new();
    if !is_same_target(&target(written), &target(now)) {
        all.push("another target".to_owned());
    }
    let (before, after) = (values(written), values(now));
    let of = |values: &[(String, String)], name: &String| {
        values.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    };
    for (name, value) in &after {
        match of(&before, name) {
            Some(before) if before == *value => {}
            Some(before) => all.push(format!("--{name} {before} (now {value})")),
            None => all.push(format!("another --{name}")),
        }
    }
    let left_out = before.iter().filter(|(name, _)| of(&after, name).is_none());
    all.extend(left_out.map(|(name, value)| format!("--{name} {value}")));
    if all.is_empty() { "other settings".to_owned() } else { all.join(", ") }
}

/// Both files, and which rows stand in them.
pub(super) struct Ledger {
    answers: (PathBuf, File),
    failures: Failures,
    recipe: String,
    /// Hash of tokenizer and chat template.
    form: String,
    done: HashMap<usize, Done>,
    pub(super) counts: Counts,
}

impl Ledger {
    /// Opens the files for appending, for this process alone; a torn last line is cut off. Failures of earlier
    /// calls stand until this one has tried their rows again, or has no such row.
    pub(super) fn open(output: &Path, (recipe, form): (&str, &str)) -> Result<Self> {
        let folder = parent_of(output);
        std::fs::create_dir_all(folder).map_err(Failure::unwritable(folder))?;
        let mut answers = for_appending(output)?;
        lock_file(&answers, output).map_err(|error| match error {
            TrainError::Locked { path, .. } => held(&path),
            other => other.into(),
        })?;
        let written = whole_lines(&mut answers, output)?;
        let mut ledger = Self {
            answers: (output.to_path_buf(), answers),
            failures: Failures::open(output)?,
            recipe: recipe.to_owned(),
            form: form.to_owned(),
            done: HashMap::new(),
            counts: Counts::default(),
        };
        for (number, line) in &written {
            ledger.take((*number, line), output)?;
            ledger.counts.success += 1;
        }
        Ok(ledger)
    }

    /// Notes a line of an earlier run.
    fn take(&mut self, (number, line): (usize, &Value), path: &Path) -> Result<()> {
        let (Some(row), Some(id)) = (line["row"].as_u64(), line["id"].as_str()) else {
            return Err(foreign(path, number));
        };
        if !line["recipe"].as_str().is_some_and(|known| is_same_recipe(known, &self.recipe)) {
            let written = line["recipe"].as_str().unwrap_or_default();
            let differ = differences(written, &self.recipe);
            let problem = format!("{}: was written with {differ}", path.display());
            return Err(
                Failure::work(problem).hint("give another --output, or the old values to go on")
            );
        }
        if line["form"] != self.form.as_str() {
            let problem =
                format!("{}: was written with another chat template or tokenizer", path.display());
            return Err(
                Failure::work(problem).hint("give another --output, or the old files to go on")
            );
        }
        let asked = messages_of(line).map(|messages| {
            let variables = line[VARIABLES].as_object();
            asked_in(messages.iter().filter_map(Value::as_object), (line.get("tools"), variables))
        });
        if self.done.insert(row as usize, Done { id: id.to_owned(), asked }).is_some() {
            return Err(Failure::work(format!("{}: row {row} stands twice", path.display())));
        }
        Ok(())
    }

    /// Whether a row has its line; that line must answer what the row asks now, if it asks anything.
    pub(super) fn is_done(
        &self,
        row: usize,
        id: &str,
        asks: impl FnOnce() -> Option<blake3::Hash>,
    ) -> Result<bool> {
        let Some(Done { id: known, asked }) = self.done.get(&row) else { return Ok(false) };
        let file = self.answers.0.display();
        let problem = if known != id {
            format!("{file}: row {row} is {known} there, {id} in the prompts")
        } else if let (Some(asked), Some(asks)) = (asked, asks())
            && *asked != asks
        {
            format!("{file}: row {row} ({id}) answers another prompt than the row has now")
        } else {
            return Ok(true);
        };
        Err(Failure::work(problem).hint("the prompts or --field are others: give another --output"))
    }

    /// Whether an earlier call tried a row just as this one would, in vain; the row then counts as done.
    pub(super) fn failed_before(&mut self, row: usize, id: &str, attempt: &str) -> bool {
        let Some(outcome) = self.failures.confirm(row, id, attempt) else { return false };
        self.counts.add(outcome);
        self.done.insert(row, Done { id: id.to_owned(), asked: None });
        true
    }

    /// Writes a line with one call, so that a kill leaves whole lines or one torn one.
    pub(super) fn write(&mut self, entry: &Entry) -> Result<()> {
        let mut line = json!({ "row": entry.row, "id": entry.id });
        if let (Value::Object(line), Value::Object(body)) = (&mut line, &entry.body) {
            line.extend(body.clone());
        }
        line["recipe"] = self.recipe.as_str().into();
        line["form"] = self.form.as_str().into();
        match entry.outcome {
            Outcome::Success => {
                let (path, file) = &mut self.answers;
                file.write_all(format!("{line}\n").as_bytes()).map_err(Failure::at(path))?;
                self.failures.answered(entry.row);
            }
            failed => {
                line["attempt"] = entry.attempt.as_deref().into();
                self.failures.write(entry.row, failed, line)?;
            }
        }
        self.counts.add(entry.outcome);
        self.done.insert(entry.row, Done { id: entry.id.clone(), asked: None });
        Ok(())
    }

    /// Rows that have their line.
    pub(super) fn len(&self) -> usize {
        self.done.len()
    }

    /// Every row has its line, and there are no lines beyond.
    pub(super) fn check(&mut self, rows: usize) -> Result<()> {
        if self.counts.sum() == rows && self.done.len() == rows {
            return self.failures.forget_others();
        }
        Err(Failure::work(format!(
            "{}: {} is not {rows} rows",
            self.answers.0.display(),
            self.counts
        ))
        .hint("the prompts (or --limit) are others than before: give another --output"))
    }
}

/// How every line begins.
const LINE_START: &[u8] = b"{\"row\":";

/// Refuses a file of answers that another process writes, before anything large is read.
pub(super) fn require_free(output: &Path) -> Result<()> {
    if is_locked(output) { Err(held(output)) } else { Ok(()) }
}

fn held(output: &Path) -> Failure {
    Failure::work(format!("{}: another process works on this file", output.display()))
        .hint("wait for it, stop it, or give another --output")
}

pub(super) fn for_appending(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).map_err(Failure::unwritable(path))
}

/// Leaves the first bytes of a file, and stands at their end.
fn cut(file: &mut File, bytes: usize) -> std::io::Result<()> {
    file.set_len(bytes as u64)?;
    file.seek(SeekFrom::End(0)).map(|_| ())
}

/// A file's whole lines, each with its number from 1; it stands at the end of them. Nothing is cut from a file that holds
/// anything else.
pub(super) fn whole_lines(file: &mut File, path: &Path) -> Result<Vec<(usize, Value)>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(Failure::at(path))?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let (lines, torn) = bytes.split_at(whole);
    let (mut parsed, mut number) = (Vec::new(), 1);
    for line in lines.split_inclusive(|byte| *byte == b'\n') {
        if line.starts_with(LINE_START) {
            let text = serde_json::from_slice(line).map_err(|_| foreign(path, number))?;
            parsed.push((number, text));
        } else if line != b"\n" {
            return Err(foreign(path, number));
        }
        number += 1;
    }
    if !torn.starts_with(LINE_START) && !LINE_START.starts_with(torn) {
        return Err(foreign(path, number));
    }
    cut(file, whole).map_err(Failure::at(path))?;
    Ok(parsed)
}

/// A line that `data regenerate` does not write.
pub(super) fn foreign(path: &Path, line: usize) -> Failure {
    let place = path.display();
    Failure::work(format!("{place}:{line}: a line of another kind than `data regenerate` writes"))
        .hint("give another --output")
}

#[cfg(test)]
mod tests {
    use super::super::failures_file;
    use super::*;

    fn entry(row: usize, outcome: Outcome) -> Entry {
        let (id, attempt) = (format!("p.jsonl:{}", row + 1), Some("a".to_owned()));
        Entry { row, id, attempt, outcome, body: json!({"problem": "x"}) }
    }

    #[test]
    fn every_row_has_one_line_and_a_torn_one_is_cut() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("out/answers.jsonl");
        let mut ledger = Ledger::open(&path, ("r", "f")).expect("new");
        ledger.write(&entry(0, Outcome::Success)).expect("write");
        ledger.write(&entry(1, Outcome::Skipped)).expect("write");
        ledger.write(&entry(2, Outcome::Error)).expect("write");
        ledger.check(3).expect("complete");
        drop(ledger);
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::write(&path, format!("{text}{{\"row\": 3, \"id")).expect("torn");
        let mut ledger = Ledger::open(&path, ("r", "f")).expect("again");
        let counts = Counts { success: 1, ..Counts::default() };
        assert_eq!((ledger.len(), ledger.counts), (1, counts));
        let nothing = || None;
        assert!(ledger.is_done(0, "p.jsonl:1", nothing).expect("same"));
        assert!(ledger.is_done(0, "q.jsonl:1", nothing).is_err());
        let lines = |path: &Path| std::fs::read_to_string(path).expect("read").lines().count();
        assert_eq!(lines(&failures_file(&path)), 2, "prompts that are others take nothing away");
        for row in [1, 2, 3] {
            assert!(!ledger.is_done(row, "", nothing).expect("tried again or new"));
        }
        ledger.write(&entry(1, Outcome::Success)).expect("write");
        ledger.write(&entry(2, Outcome::Error)).expect("write");
        ledger.write(&entry(3, Outcome::Success)).expect("write");
        ledger.check(4).expect("complete");
        assert!(ledger.check(3).is_err());
        assert_eq!((lines(&path), lines(&failures_file(&path))), (3, 1));
        drop(ledger);
        assert!(Ledger::open(&path, ("other", "f")).is_err());
        assert!(Ledger::open(&path, ("r", "g")).is_err());
        let whole = text.lines().next().expect("an answer");
        for (text, line) in [
            ("{\"text\": 1}\n".to_owned(), 1),
            ("no newline".to_owned(), 1),
            (format!("{whole}\n\n{{\"text\": 1}}\n{whole}\n"), 3),
            (format!("{whole}\n{{\"row\": 3, \"id\n"), 2),
            (format!("{whole}\n{{\"row\":3}}\n"), 2),
            (format!("{whole}\nno newline"), 2),
        ] {
            std::fs::write(&path, &text).expect("foreign");
            let failure = Ledger::open(&path, ("r", "f")).map(|_| ()).expect_err("foreign");
            let place = format!("answers.jsonl:{line}: a line of another kind");
            assert!(failure.message().contains(&place), "{failure:?}");
            assert_eq!(std::fs::read_to_string(&path).expect("untouched"), text);
        }
    }

    #[test]
    fn only_what_is_another_is_told() {
        let recipe =
            |target: &str, seed: u64| format!("{target} temperature=0 seed={seed} max_tokens=8");
        let told = differences(&recipe("a", 1), &recipe("a", 2));
        assert_eq!(told, "--seed 1 (now 2)");
        assert_eq!(differences(&recipe("a", 1), &recipe("b", 1)), "another target");
        let told = differences("a temperature=0 seed=1 max_tokens=16", &recipe("b", 1));
        assert_eq!(told, "another target, --max-tokens 16 (now 8)");
        assert_eq!(differences("", "r"), "another target");
        let (plain, own) = (recipe("a", 1), recipe("a", 1) + r#" chat_template_kwargs={"b":1}"#);
        assert_eq!(differences(&plain, &own), "another --chat-template-kwargs");
        assert_eq!(differences(&own, &plain), r#"--chat-template-kwargs {"b":1}"#);
    }

    #[test]
    fn one_process_at_a_time_writes_to_a_file() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("answers.jsonl");
        require_free(&path).expect("nothing is there");
        let mut first = Ledger::open(&path, ("r", "f")).expect("new");
        first.write(&entry(0, Outcome::Success)).expect("write");
        let text = "another process works on this file";
        for refused in [Ledger::open(&path, ("r", "f")).map(|_| ()), require_free(&path)] {
            let failure = refused.expect_err("held");
            assert!(failure.message().contains(text), "{failure:?}");
            assert!(failure.hint.as_ref().is_some_and(|hint| hint.contains("--output")));
        }
        first.write(&entry(1, Outcome::Success)).expect("still whole");
        drop(first);
        require_free(&path).expect("let go");
        assert_eq!(Ledger::open(&path, ("r", "f")).expect("free").len(), 2);
    }
}
