//! The thread that speaks to the server: finds or creates the run, then sends rows in batches.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;

use serde_json::{Map, Value, json};

use super::client::Client;
use crate::error::{Result, TrackerError};
use crate::replay::replay;
use crate::{Moment, Outcome, Row, Run};

/// Limits of one `log-batch` call.
const METRICS: usize = 1000;
const PARAMS: usize = 100;
/// Longest parameter value.
const VALUE: usize = 6000;

/// What the training thread hands over.
pub(super) enum Message {
    Row(Row),
    Finish(Outcome, Moment),
}

/// Works until the run is finished; returns where it is to be seen.
pub(super) fn work(client: &Client, run: &Run, messages: &Receiver<Message>) -> Result<String> {
    let experiment = experiment(client, run)?;
    let Session { run_id, seen } = session(client, run, &experiment)?;
    let mut metrics = missed(run, &seen)?;
    while let Ok(first) = messages.recv() {
        // Whatever came in meanwhile goes into the same call.
        let mut end = None;
        for message in std::iter::once(first).chain(messages.try_iter()) {
            match message {
                Message::Row(row) => metrics.extend(metrics_of(&row, &seen)),
                Message::Finish(outcome, time) => end = Some((outcome, time)),
            }
            if end.is_some() || metrics.len() >= METRICS {
                break;
            }
        }
        for metrics in metrics.chunks(METRICS) {
            client.post("runs/log-batch", &json!({ "run_id": run_id, "metrics": metrics }))?;
        }
        metrics.clear();
        if let Some((outcome, time)) = end {
            let status = match outcome {
                Outcome::Finished => "FINISHED",
                Outcome::Stopped => "KILLED",
                Outcome::Failed => "FAILED",
            };
            let end =
                json!({ "run_id": run_id, "status": status, "end_time": time.milliseconds() });
            client.post("runs/update", &end)?;
            break;
        }
    }
    Ok(format!("MLflow: {}/#/experiments/{experiment}/runs/{run_id}", client.base()))
}

/// The experiment's id; it is created if it does not exist.
fn experiment(client: &Client, run: &Run) -> Result<String> {
    let environment = run.environment.get("MLFLOW_EXPERIMENT_NAME");
    let name = run.tracking.mlflow.experiment.as_deref().or(environment);
    let name = name.unwrap_or(&run.tracking.project);
    let found = || client.get("experiments/get-by-name", ("experiment_name", name));
    if let Some(found) = found()? {
        let experiment = &found["experiment"];
        if experiment["lifecycle_stage"] == "deleted" {
            return Err(client.error(&format!(
                "experiment `{name}` is deleted: restore it or set tracking.mlflow.experiment"
            )));
        }
        return text(client, &experiment["experiment_id"], "experiments/get-by-name");
    }
    match client.post("experiments/create", &json!({ "name": name })) {
        Ok(created) => text(client, &created["experiment_id"], "experiments/create"),
        // Another run may have created it in between.
        Err(error) => match found()? {
            Some(found) => text(client, &found["experiment"]["experiment_id"], "get-by-name"),
            None => Err(error),
        },
    }
}

/// A run on the server, and the last step that it has of each metric.
struct Session {
    run_id: String,
    seen: HashMap<String, u64>,
}

/// Goes on with the run that the run directory names, or creates one.
fn session(client: &Client, run: &Run, experiment: &str) -> Result<Session> {
    let file = State::path(run);
    if run.resumed_step > 0
        && let Some(run_id) = State::read(&file, client.base())
        && let Some(found) = client.get("runs/get", ("run_id", &run_id))?
    {
        let metrics = found["run"]["data"]["metrics"].as_array().cloned().unwrap_or_default();
        let last = |metric: &Value| {
            let key = metric["key"].as_str()?.to_owned();
            // 64-bit numbers may come as texts.
            let step = &metric["step"];
            Some((key, step.as_u64().or_else(|| step.as_str()?.parse().ok())?))
        };
        let seen = metrics.iter().filter_map(last).collect();
        client.post("runs/update", &json!({ "run_id": run_id, "status": "RUNNING" }))?;
        return Ok(Session { run_id, seen });
    }
    let tracking = &run.tracking;
    let mut tags = vec![
        json!({ "key": "mlflow.source.name", "value": "longdraft" }),
        json!({ "key": "mlflow.source.type", "value": "LOCAL" }),
    ];
    let notes = tracking.notes.iter().map(|notes| ("mlflow.note.content", notes.as_str()));
    let group = tracking.group.iter().map(|group| ("group", group.as_str()));
    let labels = tracking.tags.iter().map(|tag| (tag.as_str(), "true"));
    let more = notes.chain(group).chain(labels);
    tags.extend(more.map(|(key, value)| json!({ "key": key, "value": value })));
    let created = client.post(
        "runs/create",
        &json!({
            "experiment_id": experiment, "run_name": run.name,
            "start_time": run.started.milliseconds(), "tags": tags
        }),
    )?;
    let run_id = text(client, &created["run"]["info"]["run_id"], "runs/create")?;
    State::write(&file, client.base(), &run_id)?;
    for params in params_of(&run.config).chunks(PARAMS) {
        client.post("runs/log-batch", &json!({ "run_id": run_id, "params": params }))?;
    }
    Ok(Session { run_id, seen: HashMap::new() })
}

/// The run's id in the run directory, for a resumed run to find it.
struct State;

impl State {
    fn path(run: &Run) -> PathBuf {
        run.directory.join("mlflow.json")
    }

    /// The id that was given out by this server.
    fn read(path: &PathBuf, server: &str) -> Option<String> {
        let state: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
        (state["server"] == server).then(|| state["run_id"].as_str().map(str::to_owned))?
    }

    fn write(path: &PathBuf, server: &str, run_id: &str) -> Result<()> {
        let state = json!({ "server": server, "run_id": run_id });
        std::fs::write(path, format!("{state}\n")).map_err(TrackerError::file(path))
    }
}

/// Metrics up to the resumed step that the server did not get: it was away, or had less when the
/// process was killed.
fn missed(run: &Run, seen: &HashMap<String, u64>) -> Result<Vec<Value>> {
    let mut metrics = Vec::new();
    replay(run, 0, |row| {
        metrics.extend(metrics_of(row, seen));
        Ok(())
    })?;
    Ok(metrics)
}

/// Metrics of a row that the server does not have yet: a resumed run repeats steps exactly.
fn metrics_of(row: &Row, seen: &HashMap<String, u64>) -> Vec<Value> {
    let new = |(key, _): &&(String, f64)| seen.get(key).is_none_or(|last| row.step > *last);
    let metric = |(key, value): &(String, f64)| {
        json!({
            "key": key, "value": value, "timestamp": row.time.milliseconds(), "step": row.step
        })
    };
    row.scalars.iter().filter(new).map(metric).collect()
}

/// A configuration as parameters with dotted keys.
fn params_of(config: &Value) -> Vec<Value> {
    fn flatten(prefix: &str, map: &Map<String, Value>, params: &mut Vec<Value>) {
        for (key, value) in map {
            let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            let text = match value {
                Value::Object(map) => {
                    flatten(&key, map, params);
                    continue;
                }
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let text: String = text.chars().take(VALUE).collect();
            params.push(json!({ "key": key, "value": text }));
        }
    }
    let mut params = Vec::new();
    if let Value::Object(config) = config {
        flatten("", config, &mut params);
    }
    params
}

/// A field that every answer has.
fn text(client: &Client, value: &Value, call: &str) -> Result<String> {
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| {
        client.error(&format!("`{call}` was answered by something else than MLflow"))
    })
}
