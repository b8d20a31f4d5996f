//! What trackers lack after a resume, from `metrics.jsonl`: the stage keeps that file in step with
//! its checkpoints, so it has every row up to the resumed step.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};

use serde_json::Value;

use super::error::{Result, TrackerError};
use super::{Row, Run, scalars};

/// Hands over the rows after step `after` up to the resumed one. Their times are not known any
/// more; they get that of the resume. It fails where the file cannot be read; whatever `log` returns.
pub(super) fn replay(run: &Run, after: u64, mut log: impl FnMut(&Row) -> Result<()>) -> Result<()> {
    if after >= run.resumed_step {
        return Ok(());
    }
    let path = run.directory.join("metrics.jsonl");
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        file => file.map_err(TrackerError::file(&path))?,
    };
    let mut pending: Option<Row> = None;
    for line in BufReader::new(file).lines() {
        let line = line.map_err(TrackerError::file(&path))?;
        // The stage may be writing the last line.
        let Ok(record) = serde_json::from_str::<Value>(&line) else { break };
        let step = record["step"].as_u64().unwrap_or_default();
        if step > run.resumed_step {
            break;
        }
        if step <= after {
            continue;
        }
        let scalars = match record.get("held_out") {
            Some(held_out) => scalars("held_out", held_out),
            None => scalars("train", &record),
        };
        match &mut pending {
            Some(row) if row.step == step => row.scalars.extend(scalars),
            other => {
                if let Some(row) = other.replace(Row { step, time: run.started, scalars }) {
                    log(&row)?;
                }
            }
        }
    }
    pending.map_or(Ok(()), |row| log(&row))
}

#[cfg(test)]
mod tests {
    use super::super::run::test_support::run;
    use super::*;

    fn rows(lines: &str, after: u64, resumed: u64) -> Vec<(u64, usize)> {
        let dir = tempfile::tempdir().expect("tempdir");
        std::fs::write(dir.path().join("metrics.jsonl"), lines).expect("metrics");
        let mut rows = Vec::new();
        let mut log = |row: &Row| {
            rows.push((row.step, row.scalars.len()));
            Ok(())
        };
        replay(&run(dir.path(), resumed), after, &mut log).expect("replay");
        rows
    }

    #[test]
    fn rows_between_the_trackers_step_and_the_resumed_one_are_handed_over() {
        let lines = "{\"step\":1,\"loss\":4,\"grad_norm\":1}\n{\"step\":2,\"loss\":3}\n\
                     {\"step\":2,\"held_out\":{\"top1_by_delay\":[0.5,0.25]}}\n\
                     {\"step\":3,\"loss\":2}\n{\"step\":4,\"lo";
        assert_eq!(rows(lines, 0, 3), [(1, 2), (2, 3), (3, 1)]);
        assert_eq!(rows(lines, 1, 2), [(2, 3)]);
        assert_eq!(rows(lines, 3, 9), []);
        assert_eq!(rows(lines, 2, 2), []);
    }

    #[test]
    fn a_run_without_metrics_has_nothing_to_hand_over() {
        let dir = tempfile::tempdir().expect("tempdir");
        replay(&run(dir.path(), 5), 0, |_| Err(TrackerError::Setup("a row".to_owned())))
            .expect("no row");
    }
}
