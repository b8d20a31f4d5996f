//! Reading `metrics.jsonl`.
//!
//! A kill can tear the last line, so one that does not end is passed over in silence; every other
//! line that cannot be read is named with its number and skipped.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use longdraft_train::metrics::Quantities;
use serde::Deserialize;
use serde_json::Value;

use super::axes::Place;

/// What a run logged.
#[derive(Debug, Clone, Default)]
pub(crate) struct MetricsLog {
    /// One record a logged step, steps rising.
    pub(crate) steps: Vec<StepRecord>,
    /// One record an evaluation, steps rising.
    pub(crate) held_out: Vec<HeldOutRecord>,
    /// `file:line: cause` of every skipped line.
    pub(crate) problems: Vec<String>,
}

/// How well draft and target agree on some rows. A figure that is no finite number is absent.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Agreement {
    /// What is minimised, nats per learned row.
    pub(crate) loss: Option<f64>,
    /// EAGLE-3: the loss of every test-time step before its weight.
    pub(crate) loss_by_step: Vec<Option<f64>>,
    /// Nats per learned row.
    pub(crate) hard_loss: Option<f64>,
    /// Nats per learned row.
    pub(crate) soft_loss: Option<f64>,
    /// Index 0 is delay 1.
    pub(crate) top1_by_delay: Vec<Option<f64>>,
    /// Index 0 is delay 1.
    pub(crate) acceptance_by_delay: Vec<Option<f64>>,
    /// Nats per row whose label is a candidate: a selector's.
    pub(crate) selector_loss: Option<f64>,
    /// Share of rows whose label is a candidate.
    pub(crate) candidate_recall: Option<f64>,
    /// Tokens per target pass, greedy.
    pub(crate) simulated_acceptance_length: Option<f64>,
    /// Tokens per target pass, sampling.
    pub(crate) simulated_acceptance_length_sampling: Option<f64>,
    /// Tokens per target pass, greedy, of decoding rounds replayed over the text.
    pub(crate) replayed_acceptance_length: Option<f64>,
    /// What all of these are measured against, where that is said.
    pub(crate) measured_against: Option<Quantities>,
    /// Held-out rows measured against what training rows are, where that is something else.
    pub(crate) as_trained: Option<Box<Agreement>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct StepRecord {
    /// From 1.
    pub(crate) step: u64,
    /// Since the start of the run.
    pub(crate) tokens: u64,
    /// The target's own loss on the same rows.
    pub(crate) target_loss: Option<f64>,
    /// Before clipping.
    pub(crate) grad_norm: Option<f64>,
    /// As used.
    pub(crate) learning_rate: Option<f64>,
    /// Learned rows by tokens.
    pub(crate) learned_share: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
    /// Peak resident set.
    pub(crate) memory_mib: Option<f64>,
    /// Time in steps since the start of the run: tokens between two records by the speed that the
    /// later one states.
    #[serde(skip)]
    pub(crate) seconds: f64,
    /// On the step's rows.
    #[serde(flatten)]
    pub(crate) agreement: Agreement,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct HeldOutRecord {
    /// Steps done.
    pub(crate) step: u64,
    /// On every held-out row.
    pub(crate) held_out: Agreement,
}

enum Record {
    Step(Box<StepRecord>),
    HeldOut(Box<HeldOutRecord>),
}

impl MetricsLog {
    /// Reads a file. It fails where the file cannot be opened or read; lines that make no sense are no error.
    pub(crate) fn read(path: &Path) -> std::io::Result<Self> {
        let mut reader = BufReader::new(File::open(path)?);
        let mut log = Self::default();
        let mut line = Vec::new();
        for number in 1_usize.. {
            line.clear();
            if reader.read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let whole = line.last() == Some(&b'\n');
            if line.trim_ascii().is_empty() {
                continue;
            }
            match parse(&line).and_then(|record| log.push(record)) {
                Err(cause) if whole => {
                    log.problems.push(format!("{}:{number}: {cause}", path.display()));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(log)
    }

    fn push(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Step(mut record) => {
                let none = StepRecord::default();
                let last = self.steps.last().unwrap_or(&none);
                if record.step <= last.step || record.tokens < last.tokens {
                    return Err(format!(
                        "step {} at {} tokens after step {} at {}",
                        record.step, record.tokens, last.step, last.tokens
                    ));
                }
                let speed = record.tokens_per_second.filter(|speed| *speed > 0.0);
                let tokens = (record.tokens - last.tokens) as f64;
                record.seconds = last.seconds + speed.map_or(0.0, |speed| tokens / speed);
                self.steps.push(*record);
            }
            Record::HeldOut(record) => {
                if let Some(last) = self.held_out.last()
                    && record.step <= last.step
                {
                    return Err(format!(
                        "evaluation after step {} follows that after step {}",
                        record.step, last.step
                    ));
                }
                self.held_out.push(*record);
            }
        }
        Ok(())
    }

    /// The end of the logged steps.
    pub(crate) fn end(&self) -> Place {
        self.steps.last().map_or_else(Place::default, StepRecord::place)
    }

    /// Where training is after `step` steps: between logged steps by linear interpolation, after
    /// them as far as they lead to expect.
    pub(crate) fn place_at(&self, step: u64) -> Place {
        let next = self.steps.partition_point(|record| record.step < step);
        let place = |index: usize| self.steps.get(index).map(StepRecord::place);
        let (from, to) = match (next.checked_sub(1).and_then(place), place(next)) {
            (before, Some(after)) => (before.unwrap_or_default(), after),
            (_, None) => (Place::default(), self.end()),
        };
        from.towards(to, (step as f64 - from.steps) / (to.steps - from.steps).max(1.0))
    }

    /// Time spent in steps.
    pub(crate) fn seconds(&self) -> f64 {
        self.end().seconds
    }
}

impl StepRecord {
    /// Where training is after the step.
    pub(crate) fn place(&self) -> Place {
        Place { tokens: self.tokens as f64, steps: self.step as f64, seconds: self.seconds }
    }
}

fn parse(line: &[u8]) -> Result<Record, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| bare(&error))?;
    if !value.is_object() {
        return Err("no JSON object".into());
    }
    let record = if value.get("held_out").is_some() {
        serde_json::from_value(value).map(|record| Record::HeldOut(Box::new(record)))
    } else {
        serde_json::from_value(value).map(|record| Record::Step(Box::new(record)))
    };
    record.map_err(|error| bare(&error))
}

/// Cause without `at line 1`, which would be taken for the file's line.
fn bare(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((cause, _)) if error.column() > 0 => format!("{cause} at column {}", error.column()),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> MetricsLog {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, text).expect("write");
        let mut log = MetricsLog::read(&path).expect("readable");
        let folder = format!("{}", dir.path().display());
        log.problems.iter_mut().for_each(|p| *p = p.replace(&folder, "").replace(['/', '\\'], ""));
        log
    }

    #[test]
    fn a_torn_last_line_is_silent_and_other_bad_lines_are_named() {
        let log = read(
            b"{\"step\":1,\"tokens\":10,\"loss\":2.5}\n\
              {\"step\":2,\"tok\n\
              \xff\xfe\n\
              [1]\n\
              {\"step\":\"3\",\"tokens\":30}\n\
              {\"step\":4}\n\
              \n\
              {\"step\":5,\"tokens\":50,\"loss\":null,\"top1_by_delay\":[0.5,null]}\n\
              {\"step\":6,\"tokens\":60,\"lo",
        );
        let steps: Vec<u64> = log.steps.iter().map(|record| record.step).collect();
        assert_eq!(steps, [1, 5]);
        assert_eq!(log.steps[0].agreement.loss, Some(2.5));
        assert_eq!(log.steps[1].agreement.top1_by_delay, [Some(0.5), None]);
        let lines: Vec<&str> = log.problems.iter().map(|p| &p[..16]).collect();
        let want = [2, 3, 4, 5, 6].map(|line| format!("metrics.jsonl:{line}:"));
        assert_eq!(lines, want, "{:?}", log.problems);
        assert!(log.problems[3].contains("expected u64"), "{:?}", log.problems);
        assert!(log.problems[4].contains("missing field `tokens`"), "{:?}", log.problems);
    }

    #[test]
    fn a_whole_last_line_counts_without_its_newline() {
        assert_eq!(read(b"{\"step\":1,\"tokens\":10}").steps.len(), 1);
    }

    #[test]
    fn steps_that_go_back_are_named() {
        let log = read(
            b"{\"step\":5,\"tokens\":50}\n{\"step\":4,\"tokens\":40}\n{\"step\":6,\"tokens\":5}\n",
        );
        assert_eq!((log.steps.len(), log.problems.len()), (1, 2));
        assert!(log.problems[0].ends_with("2: step 4 at 40 tokens after step 5 at 50"));
    }

    #[test]
    fn evaluations_find_their_places() {
        let log = read(
            b"{\"step\":10,\"tokens\":100}\n{\"step\":20,\"tokens\":300}\n\
              {\"step\":20,\"held_out\":{\"hard_loss\":1.5,\"top1_by_delay\":[0.25]}}\n",
        );
        assert_eq!(log.held_out[0].held_out.hard_loss, Some(1.5));
        let places = [5, 10, 15, 20, 30].map(|step| log.place_at(step));
        let places = places.map(|place| (place.tokens, place.steps));
        let want = [(50.0, 5.0), (100.0, 10.0), (200.0, 15.0), (300.0, 20.0), (450.0, 30.0)];
        assert_eq!(places, want);
    }

    #[test]
    fn time_is_the_sum_of_tokens_by_their_speed() {
        let log = read(
            b"{\"step\":1,\"tokens\":100,\"tokens_per_second\":50}\n\
              {\"step\":2,\"tokens\":400,\"tokens_per_second\":100}\n\
              {\"step\":3,\"tokens\":500,\"tokens_per_second\":0}\n",
        );
        assert!((log.seconds() - 5.0).abs() < 1e-12);
        assert_eq!(log.steps[0].place(), Place { tokens: 100.0, steps: 1.0, seconds: 2.0 });
    }
}
