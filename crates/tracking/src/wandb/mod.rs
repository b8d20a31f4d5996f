//! Weights & Biases offline runs: `wandb/offline-run-<time>-<id>/run-<id>.wandb`, a record log of
//! `wandb_internal.Record` messages that `wandb sync` uploads.
//!
//! A resumed run goes on in its file, cut after the resumed step, so that one upload makes one run
//! without double points.

mod messages;
mod upload;

use std::path::{Path, PathBuf};

use prost::Message;
use serde_json::{Value, json};

use super::error::{Result, TrackerError};
use super::record_log::{Header, RecordLog, Records};
use super::replay::replay;
use super::run::newest_run;
use super::timestamp::Timestamp;
use super::{Moment, Outcome, Row, Run, Tracker};
use messages::{
    Config, Exit, HeaderRecord, History, Item, Record, RunRecord, Step, Summary, Version,
};

const HEADER: Header = *b":W&B\xe1\xbe\x00";

/// What W&B shows for a run that Ctrl-C ended.
const INTERRUPTED: i32 = 255;

/// Writes an offline run.
pub struct Wandb {
    path: PathBuf,
    log: Log,
    records: i64,
    started: f64,
    /// Newest values, for the run's summary.
    summary: Vec<(String, Value)>,
    upload: bool,
}

/// The file that is written.
enum Log {
    Open(RecordLog),
    /// The run came to its end there, with this code: the file is cut to this length at the first row.
    Ended {
        exit_code: i32,
        keep: u64,
    },
}

impl Wandb {
    /// Starts an offline run, or goes on with that of the run directory after the resumed step.
    ///
    /// # Errors
    /// - a file or folder cannot be written
    pub fn open(run: &Run) -> Result<Self> {
        let mode = run.environment.get("WANDB_MODE").unwrap_or_default();
        let upload = run.tracking.wandb.sync
            && run.environment.get("WANDB_API_KEY").is_some()
            && !matches!(mode, "offline" | "dryrun");
        let parent = run.directory.join("wandb");
        if run.resumed_step > 0
            && let Some(path) = newest_run(&parent, "offline-run-", "wandb")
            && let Some(resumed) = Self::resume(&path, run, upload)?
        {
            return Ok(resumed);
        }
        let folder = parent.join(format!("offline-run-{}-{}", run.started.stamp(), run.id));
        let files = folder.join("files");
        std::fs::create_dir_all(&files).map_err(TrackerError::file(&files))?;
        let path = folder.join(format!("run-{}.wandb", run.id));
        let log = Log::Open(RecordLog::create(&path, HEADER)?);
        let started = run.started.as_f64();
        let mut wandb = Self { path, log, records: 0, started, summary: Vec::new(), upload };
        let start = Record { run: Some(run_record(run)), ..Record::default() };
        wandb.append([header_record(), start])?;
        replay(run, 0, |row| wandb.log(row))?;
        Ok(wandb)
    }

    /// Cuts a file after the last record up to the resumed step; `None` if it is no run's file.
    fn resume(path: &Path, run: &Run, upload: bool) -> Result<Option<Self>> {
        let Some(records) = Records::open(path, HEADER)? else {
            return Ok(None);
        };
        let (mut keep, mut last, mut last_step, mut started) = (Records::START, 0, 0, None);
        let mut exit_code = None;
        for (bytes, end) in records {
            let Ok(record) = Record::decode(&bytes[..]) else { break };
            let step = record.history.and_then(|history| history.step).map_or(0, |step| step.num);
            if record.exit.is_some() || step > run.resumed_step as i64 {
                exit_code = record.exit.map(|exit| exit.exit_code);
                break;
            }
            let start = record.run.and_then(|run| run.start_time);
            started = started.or(start.map(Timestamp::as_f64));
            (keep, last, last_step) = (end, record.num, last_step.max(step));
        }
        let Some(started) = started else { return Ok(None) };
        let log = match exit_code {
            Some(exit_code) => Log::Ended { exit_code, keep },
            None => Log::Open(reopen(path, keep)?),
        };
        let path = path.to_path_buf();
        let mut wandb = Self { path, log, records: last, started, summary: Vec::new(), upload };
        replay(run, last_step as u64, |row| wandb.log(row))?;
        Ok(Some(wandb))
    }

    /// The `.wandb` file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append<const N: usize>(&mut self, records: [Record; N]) -> Result<()> {
        let records = records.map(|mut record| {
            self.records += 1;
            record.num = self.records;
            record.encode_to_vec()
        });
        if let Log::Ended { keep, .. } = self.log {
            self.log = Log::Open(reopen(&self.path, keep)?);
        }
        match &mut self.log {
            Log::Open(log) => log.append(&records),
            Log::Ended { .. } => Ok(()),
        }
    }

    fn sync(&self) -> Result<()> {
        match &self.log {
            Log::Open(log) => log.sync(),
            Log::Ended { .. } => Ok(()),
        }
    }

    fn write_summary(&mut self) -> Result<()> {
        if self.summary.is_empty() {
            return Ok(());
        }
        let update = self.summary.iter().map(|(key, value)| item(key, value)).collect();
        self.append([Record { summary: Some(Summary { update }), ..Record::default() }])
    }
}

impl Tracker for Wandb {
    fn log(&mut self, row: &Row) -> Result<()> {
        let time = row.time.as_f64();
        let own = [
            ("_step", json!(row.step)),
            ("_timestamp", json!(time)),
            ("_runtime", json!((time - self.started).max(0.0))),
        ];
        let scalars = row.scalars.iter().map(|(key, value)| (key.as_str(), json!(value)));
        let values: Vec<(&str, Value)> = scalars.chain(own).collect();
        for (key, value) in &values {
            match self.summary.iter_mut().find(|(known, _)| known == key) {
                Some((_, newest)) => newest.clone_from(value),
                None => self.summary.push(((*key).to_owned(), value.clone())),
            }
        }
        let item = values.iter().map(|(key, value)| item(key, value)).collect();
        let step = Some(Step { num: row.step as i64 });
        self.append([Record { history: Some(History { item, step }), ..Record::default() }])
    }

    fn flush(&mut self) -> Result<()> {
        self.write_summary()?;
        self.sync()
    }

    fn finish(&mut self, outcome: Outcome, time: Moment) -> Result<Option<String>> {
        self.write_summary()?;
        let exit_code = match outcome {
            Outcome::Finished => 0,
            Outcome::Stopped => INTERRUPTED,
            Outcome::Failed => 1,
        };
        if matches!(self.log, Log::Ended { exit_code: before, .. } if before == exit_code) {
            return Ok(None);
        }
        let runtime = (time.as_f64() - self.started).max(0.0) as i32;
        self.append([Record { exit: Some(Exit { exit_code, runtime }), ..Record::default() }])?;
        self.sync()?;
        let folder = self.path.parent().unwrap_or(&self.path);
        // Who pressed Ctrl-C wants to go, and will perhaps go on with this run.
        let upload = self.upload && outcome != Outcome::Stopped;
        Ok(Some(if upload { upload::upload(folder) } else { upload::by_hand(folder) }))
    }
}

/// Cuts a file, which is longer soon than what was uploaded of it.
fn reopen(path: &Path, keep: u64) -> Result<RecordLog> {
    let log = RecordLog::reopen(path, keep)?;
    let mark = path.with_extension("wandb.synced");
    if mark.exists() {
        std::fs::remove_file(&mark).map_err(TrackerError::file(&mark))?;
    }
    Ok(log)
}

fn header_record() -> Record {
    let version = Version {
        producer: "longdraft".to_owned(),
        // Readers older than this know no records of this kind.
        min_consumer: "0.8.0".to_owned(),
    };
    Record { header: Some(HeaderRecord { version: Some(version) }), ..Record::default() }
}

fn run_record(run: &Run) -> RunRecord {
    let tracking = &run.tracking;
    let config = run.config.as_object().into_iter().flatten();
    RunRecord {
        run_id: run.id.clone(),
        entity: tracking.wandb.entity.clone().unwrap_or_default(),
        project: tracking.project.clone(),
        config: Some(Config { update: config.map(|(key, value)| item(key, value)).collect() }),
        run_group: tracking.group.clone().unwrap_or_default(),
        display_name: run.name.clone(),
        notes: tracking.notes.clone().unwrap_or_default(),
        tags: tracking.tags.clone(),
        host: run.host.clone(),
        start_time: Some(run.started.into()),
    }
}

fn item(key: &str, value: &Value) -> Item {
    Item { key: key.to_owned(), value_json: value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::run::test_support::{row, run};
    use super::*;

    fn records(path: &Path) -> Vec<Record> {
        let records = Records::open(path, HEADER).expect("file").expect("header");
        records.map(|(bytes, _)| Record::decode(&bytes[..]).expect("a record")).collect()
    }

    fn steps(records: &[Record]) -> Vec<i64> {
        let step = |record: &Record| record.history.as_ref()?.step.as_ref().map(|step| step.num);
        records.iter().filter_map(step).collect()
    }

    #[test]
    fn a_resumed_run_goes_on_in_its_file_up_to_its_step() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut wandb = Wandb::open(&run(dir.path(), 0)).expect("open");
        for step in 1..=5 {
            wandb.log(&row(step)).expect("log");
        }
        wandb.finish(Outcome::Stopped, row(5).time).expect("finish");
        let path = wandb.path().to_path_buf();
        let mark = path.with_extension("wandb.synced");
        std::fs::write(&mark, "").expect("mark");
        // Another process: other time, other id.
        let again = Run { id: "zzzz9999".to_owned(), ..run(dir.path(), 3) };
        let mut wandb = Wandb::open(&again).expect("open");
        assert_eq!(wandb.path(), path);
        assert!(!mark.exists());
        wandb.log(&row(4)).expect("log");
        assert_eq!(steps(&records(&path)), [1, 2, 3, 4]);
        assert!(records(&path).iter().map(|record| record.num).eq(1..=6));
    }

    #[test]
    fn a_run_that_ended_stays_as_it_is_until_it_goes_on() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut wandb = Wandb::open(&run(dir.path(), 0)).expect("open");
        (1..=3).for_each(|step| wandb.log(&row(step)).expect("log"));
        wandb.finish(Outcome::Finished, row(3).time).expect("finish");
        let path = wandb.path().to_path_buf();
        let mark = path.with_extension("wandb.synced");
        std::fs::write(&mark, "").expect("mark");
        let before = std::fs::read(&path).expect("file");
        let mut again = Wandb::open(&run(dir.path(), 3)).expect("open");
        again.flush().expect("flush");
        let later = Moment { seconds: row(3).time.seconds + 1000, ..row(3).time };
        assert_eq!(again.finish(Outcome::Finished, later).expect("finish"), None);
        assert!(mark.exists() && std::fs::read(&path).expect("file") == before);
        // It is extended.
        let mut on = Wandb::open(&run(dir.path(), 3)).expect("open");
        on.log(&row(4)).expect("log");
        on.finish(Outcome::Finished, later).expect("finish");
        assert!(!mark.exists());
        assert_eq!(steps(&records(&path)), [1, 2, 3, 4]);
        assert_eq!(records(&path).iter().filter(|record| record.exit.is_some()).count(), 1);
    }

    #[test]
    fn a_run_without_a_checkpoint_or_a_usable_file_starts_anew() {
        let dir = tempfile::tempdir().expect("tempdir");
        let first = Wandb::open(&run(dir.path(), 0)).expect("open").path().to_path_buf();
        std::fs::write(&first, ":W&B").expect("tear");
        let other = |step| Run { id: format!("other{step:03}"), ..run(dir.path(), step) };
        assert_ne!(Wandb::open(&other(4)).expect("open").path(), first);
        assert_ne!(Wandb::open(&other(0)).expect("open").path(), first);
    }

    #[test]
    fn a_key_is_never_written() {
        let dir = tempfile::tempdir().expect("tempdir");
        let environment = [("WANDB_API_KEY", "secret-key"), ("WANDB_MODE", "offline")].into();
        let mut wandb = Wandb::open(&Run { environment, ..run(dir.path(), 0) }).expect("open");
        wandb.log(&row(1)).expect("log");
        let note = wandb.finish(Outcome::Finished, row(1).time).expect("finish").expect("note");
        let bytes = std::fs::read(wandb.path()).expect("file");
        assert!(!note.contains("secret-key"));
        assert!(!String::from_utf8_lossy(&bytes).contains("secret-key"));
    }
}
