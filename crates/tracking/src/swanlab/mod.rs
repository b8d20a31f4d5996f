//! SwanLab offline runs: `swanlog/run-<time>-<id>/run-<id>.swanlab`, a record log of SwanLab's
//! `Record` messages that `swanlab sync` uploads.
//!
//! A resumed run goes on in its file, cut after the resumed step.

mod config_file;
mod messages;

use std::path::{Path, PathBuf};

use prost::Message;

use super::error::{Result, TrackerError};
use super::record_log::{Header, RecordLog, Records};
use super::replay::replay;
use super::run::{newest_run, shell};
use super::{Moment, Outcome, Row, Run, Tracker};
use messages::{
    CONFIG, Column, FINISH, Finish, Record, SCALAR, START, Save, Scalar, ScalarValue, Start,
};

const HEADER: Header = *b":SWL\xd6\xe1\x02";

/// Writes an offline run.
pub struct SwanLab {
    path: PathBuf,
    log: RecordLog,
    records: i64,
    columns: Vec<String>,
}

impl SwanLab {
    /// Starts an offline run, or goes on with that of the run directory after the resumed step.
    ///
    /// # Errors
    /// - a file or folder cannot be written
    pub fn open(run: &Run) -> Result<Self> {
        let parent = run.directory.join("swanlog");
        if run.resumed_step > 0
            && let Some(path) = newest_run(&parent, "run-", "swanlab")
            && let Some(resumed) = Self::resume(&path, run)?
        {
            return Ok(resumed);
        }
        let folder = parent.join(format!("run-{}-{}", run.started.stamp(), run.id));
        let files = folder.join("files");
        std::fs::create_dir_all(&files).map_err(TrackerError::file(&files))?;
        let config = config_file::config_file(&run.config);
        let config_path = files.join("config.yaml");
        std::fs::write(&config_path, &config).map_err(TrackerError::file(&config_path))?;
        let path = folder.join(format!("run-{}.swanlab", run.id));
        let log = RecordLog::create(&path, HEADER)?;
        let mut swanlab = Self { path, log, records: 0, columns: Vec::new() };
        let timestamp = Some(run.started.into());
        let save = Save {
            name: "config".to_owned(),
            source_path: "files/config.yaml".to_owned(),
            kind: 1,
            payload: Some(config),
        };
        swanlab.append(vec![
            Record { num: START, timestamp, start: Some(start(run)), ..Record::default() },
            Record { num: CONFIG, timestamp, save: Some(save), ..Record::default() },
        ])?;
        replay(run, 0, |row| swanlab.log(row))?;
        Ok(swanlab)
    }

    /// Cuts a file after the last record up to the resumed step; `None` if it is no run's file.
    fn resume(path: &Path, run: &Run) -> Result<Option<Self>> {
        let Some(records) = Records::open(path, HEADER)? else {
            return Ok(None);
        };
        let (mut keep, mut last, mut last_step) = (Records::START, 0, 0);
        let (mut columns, mut started) = (Vec::new(), false);
        for (bytes, end) in records {
            let Ok(record) = Record::decode(&bytes[..]) else { break };
            let step = record.scalar.map_or(0, |scalar| scalar.step);
            if record.finish.is_some() || step > run.resumed_step as i64 {
                break;
            }
            started |= record.start.is_some();
            columns.extend(record.column.map(|column| column.key));
            (keep, last, last_step) = (end, record.num.max(last), last_step.max(step));
        }
        if !started {
            return Ok(None);
        }
        let log = RecordLog::reopen(path, keep)?;
        let mut swanlab = Self { path: path.to_path_buf(), log, records: last, columns };
        replay(run, last_step as u64, |row| swanlab.log(row))?;
        Ok(Some(swanlab))
    }

    /// The `.swanlab` file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&mut self, records: Vec<Record>) -> Result<()> {
        let records: Vec<_> = records.into_iter().map(|record| record.encode_to_vec()).collect();
        self.log.append(&records)
    }

    fn numbered(&mut self, time: Moment) -> Record {
        self.records += 1;
        Record { num: self.records, timestamp: Some(time.into()), ..Record::default() }
    }
}

impl Tracker for SwanLab {
    fn log(&mut self, row: &Row) -> Result<()> {
        let mut records = Vec::new();
        for (key, number) in &row.scalars {
            if !self.columns.contains(key) {
                self.columns.push(key.clone());
                let column = Some(column(key));
                records.push(Record { column, ..self.numbered(row.time) });
            }
            let scalar = Some(Scalar {
                key: key.clone(),
                step: row.step as i64,
                kind: SCALAR,
                timestamp: Some(row.time.into()),
                value: Some(ScalarValue { number: *number }),
            });
            records.push(Record { scalar, ..self.numbered(row.time) });
        }
        self.append(records)
    }

    fn flush(&mut self) -> Result<()> {
        self.log.sync()
    }

    fn finish(&mut self, outcome: Outcome, time: Moment) -> Result<Option<String>> {
        let (state, error) = match outcome {
            Outcome::Finished => (1, ""),
            Outcome::Failed => (2, "training failed"),
            Outcome::Stopped => (3, "stopped by the user"),
        };
        let finished_at = Some(time.into());
        let finish = Some(Finish { state, error: error.to_owned(), finished_at });
        let record = Record { num: FINISH, timestamp: finished_at, finish, ..Record::default() };
        self.append(vec![record])?;
        self.log.sync()?;
        let folder = self.path.parent().unwrap_or(&self.path);
        let id = self.path.file_stem().unwrap_or_default().to_string_lossy();
        // Without the id every upload would become a run of its own.
        let command = shell(&["swanlab", "sync", "--id", id.trim_start_matches("run-")], folder);
        Ok(Some(format!("SwanLab: an offline run; upload it with\n  {command}")))
    }
}

fn start(run: &Run) -> Start {
    let tracking = &run.tracking;
    Start {
        project: tracking.project.clone(),
        workspace: tracking.swanlab.workspace.clone().unwrap_or_default(),
        name: run.name.clone(),
        description: tracking.notes.clone().unwrap_or_default(),
        tags: tracking.tags.clone(),
        group: tracking.group.clone().unwrap_or_default(),
        id: run.id.clone(),
        started_at: Some(run.started.into()),
    }
}

fn column(key: &str) -> Column {
    let section = key.split_once('/').map_or("", |(section, _)| section);
    Column {
        class: 1,
        kind: SCALAR,
        key: key.to_owned(),
        section_name: section.to_owned(),
        section_type: 3,
    }
}

#[cfg(test)]
mod tests {
    use super::super::run::test_support::{row, run};
    use super::*;

    fn records(path: &Path) -> Vec<Record> {
        let records = Records::open(path, HEADER).expect("file").expect("header");
        records.map(|(bytes, _)| Record::decode(&bytes[..]).expect("a record")).collect()
    }

    #[test]
    fn a_resumed_run_goes_on_in_its_file_up_to_its_step() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut swanlab = SwanLab::open(&run(dir.path(), 0)).expect("open");
        for step in 1..=5 {
            swanlab.log(&row(step)).expect("log");
        }
        swanlab.finish(Outcome::Stopped, row(5).time).expect("finish");
        let again = Run { id: "zzzz9999".to_owned(), ..run(dir.path(), 3) };
        let mut again = SwanLab::open(&again).expect("open");
        assert_eq!(again.path(), swanlab.path());
        again.log(&row(4)).expect("log");
        let records = records(swanlab.path());
        let scalars = records.iter().filter_map(|record| record.scalar.as_ref());
        let steps: Vec<i64> = scalars.map(|scalar| scalar.step).collect();
        assert_eq!(steps, [1, 1, 2, 2, 3, 3, 4, 4]);
        assert!(records.iter().all(|record| record.finish.is_none()));
        assert_eq!(records.iter().filter(|record| record.column.is_some()).count(), 2);
        assert!(records[2..].iter().map(|record| record.num).eq(1..=10));
    }
}
