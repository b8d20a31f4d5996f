//! Training and captures, with their events as JSON.

use std::path::PathBuf;

use longdraft::{CaptureOptions, Configuration, Event, Observer, ResumePolicy, Stop, TrainOptions};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::errors::{raised, refused};
use crate::running::{Reporter, run_heard};

/// A configuration: a file, or its text.
fn configuration(file: Option<PathBuf>, text: Option<String>) -> Configuration {
    file.map_or_else(|| Configuration::Text(text.unwrap_or_default()), Configuration::File)
}

/// Hands a stage's events on.
struct Listener<'a, T> {
    reporter: &'a Reporter<T>,
    is_heard: bool,
}

impl<T> Observer for Listener<'_, T> {
    fn on_event(&mut self, event: Event<'_>) {
        if self.is_heard {
            self.reporter.tell(record(event).to_string());
        }
    }
}

/// An event for Python.
fn record(event: Event<'_>) -> Value {
    match event {
        Event::Resumed(step) => json!({ "kind": "resumed", "step": step }),
        Event::Measured(done, all) => json!({ "kind": "measured", "done": done, "all": all }),
        Event::Captured(done, all) => json!({ "kind": "captured", "done": done, "all": all }),
        Event::Note(text) => json!({ "kind": "note", "text": text }),
        Event::Warning(text) => json!({ "kind": "warning", "text": text }),
        Event::Saved(path) => json!({ "kind": "saved", "path": path }),
        Event::Step(report) => {
            let mut record = report.to_json(report.metrics.by_delay.len());
            record["kind"] = json!("step");
            record["steps"] = json!(report.steps);
            record["seconds"] = json!(report.seconds);
            record["step_tokens"] = json!(report.tokens);
            record
        }
        Event::Evaluated(step, metrics) => {
            let figures = Value::Object(metrics.to_json(metrics.by_delay.len()));
            json!({ "kind": "evaluated", "step": step, "figures": figures })
        }
    }
}

/// Trains; returns what the run left, as JSON. `hear` gets every event, and ends the run with `False`.
#[pyfunction]
pub(crate) fn train(
    py: Python<'_>,
    file: Option<PathBuf>,
    text: Option<String>,
    changes: Vec<String>,
    resume: &str,
    hear: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let policy = match resume {
        "strict" => ResumePolicy::Strict,
        "force" => ResumePolicy::Force,
        "extend" => ResumePolicy::Extend,
        other => {
            let problem = format!("resume `{other}`");
            return Err(refused(py, &problem, "give `strict`, `extend` or `force`"));
        }
    };
    let configuration = configuration(file, text);
    let options = TrainOptions { changes, policy };
    let (stop, is_heard) = (Stop::new(), hear.is_some());
    let asked = stop.clone();
    run_heard(py, &stop, hear.as_ref(), move |reporter| {
        let mut listener = Listener { reporter, is_heard };
        let run = longdraft::train(&configuration, &options, &mut listener, &asked)?;
        let record = json!({
            "output": run.output, "last_run": run.last_run, "steps": run.steps,
            "finished": run.finished, "held_out": run.held_out,
        });
        Ok(record.to_string())
    })
}

/// Captures features; returns what the store holds, as JSON.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each is one of Python's")]
pub(crate) fn capture(
    py: Python<'_>,
    file: Option<PathBuf>,
    text: Option<String>,
    changes: Vec<String>,
    also: Vec<(Option<PathBuf>, Option<String>)>,
    dry_run: bool,
    verify: bool,
    records: Option<PathBuf>,
    hear: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let configuration = configuration(file, text);
    let also = also.into_iter().map(|(file, text)| self::configuration(file, text)).collect();
    let options = CaptureOptions { changes, also, dry_run, verify, records };
    let (stop, is_heard) = (Stop::new(), hear.is_some());
    let asked = stop.clone();
    run_heard(py, &stop, hear.as_ref(), move |reporter| {
        let mut listener = Listener { reporter, is_heard };
        let captured = longdraft::capture(&configuration, &options, &mut listener, &asked)?;
        Ok(captured.to_json().to_string())
    })
}

/// The run directory that a configuration names.
#[pyfunction]
pub(crate) fn output_of(
    file: Option<PathBuf>,
    text: Option<String>,
    changes: Vec<String>,
) -> PyResult<PathBuf> {
    configuration(file, text).output(&changes).map_err(raised)
}
