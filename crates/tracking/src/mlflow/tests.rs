//! Against a server that runs on this machine for the test and keeps what it is told.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::super::run::test_support::{row, run};
use super::*;
use crate::MlflowConfig;

/// A request: path with its query, `Authorization`, body.
type Request = (String, String, Value);

/// Keeps requests and answers them like a server that holds one run at step 2.
struct Server {
    uri: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(refuse: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let uri = format!("http://{}", listener.local_addr().expect("address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = Self::answer(stream, &kept, refuse);
            }
        });
        Self { uri, requests }
    }

    fn answer(stream: TcpStream, kept: &Mutex<Vec<Request>>, refuse: &str) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let path = line.split_whitespace().nth(1).unwrap_or("/").to_owned();
        let (mut length, mut authorization) = (0, String::new());
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            let (name, value) = header.trim().split_once(": ").unwrap_or_default();
            match name.to_ascii_lowercase().as_str() {
                "" => break,
                "content-length" => length = value.parse().unwrap_or(0),
                "authorization" => value.clone_into(&mut authorization),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let path = path.trim_start_matches("/api/2.0/mlflow/").to_owned();
        let (status, answer) = if path.starts_with(refuse) && !refuse.is_empty() {
            ("401 Unauthorized", json!({}))
        } else {
            Self::respond(path.split('?').next().unwrap_or_default())
        };
        if let Ok(mut kept) = kept.lock() {
            kept.push((path, authorization, body));
        }
        let answer = answer.to_string();
        let mut stream = stream;
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
            answer.len()
        )
    }

    fn respond(call: &str) -> (&'static str, Value) {
        let missing = json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none" });
        match call {
            "experiments/get-by-name" => ("404 Not Found", missing),
            "experiments/create" => ("200 OK", json!({ "experiment_id": "5" })),
            "runs/create" => ("200 OK", json!({ "run": { "info": { "run_id": "r1" } } })),
            "runs/get" => {
                let metrics = json!([{ "key": "train/loss", "value": 1.0, "step": "2" }]);
                ("200 OK", json!({ "run": { "data": { "metrics": metrics } } }))
            }
            _ => ("200 OK", json!({})),
        }
    }

    fn bodies(&self, call: &str) -> Vec<Value> {
        let requests = self.requests.lock().expect("no panic");
        let of = requests.iter().filter(|(path, ..)| path.starts_with(call));
        of.map(|(_, _, body)| body.clone()).collect()
    }
}

fn run_at(uri: &str, directory: &std::path::Path, resumed_step: u64) -> Run {
    let mut run = run(directory, resumed_step);
    run.tracking.mlflow = MlflowConfig { uri: Some(uri.to_owned()), experiment: None };
    run
}

/// Keys and steps of all metrics that were sent.
fn metrics(server: &Server) -> Vec<(String, u64)> {
    let batches = server.bodies("runs/log-batch");
    let metrics = batches.iter().filter_map(|body| body["metrics"].as_array()).flatten();
    let pair = |metric: &Value| {
        let key = metric["key"].as_str().unwrap_or_default().to_owned();
        (key, metric["step"].as_u64().unwrap_or_default())
    };
    metrics.map(pair).collect()
}

#[test]
fn a_run_is_created_filled_and_ended() {
    let (dir, server) = (tempfile::tempdir().expect("tempdir"), Server::start(""));
    let mut run = run_at(&server.uri, dir.path(), 0);
    run.environment =
        [("MLFLOW_TRACKING_USERNAME", "me"), ("MLFLOW_TRACKING_PASSWORD", "secret")].into();
    let mut mlflow = Mlflow::open(&run).expect("open");
    mlflow.log(&row(1)).expect("log");
    mlflow.log(&row(2)).expect("log");
    let note = mlflow.finish(Outcome::Finished, row(3).time).expect("finish").expect("a note");
    assert_eq!(note, format!("MLflow: {}/#/experiments/5/runs/r1", server.uri));

    assert_eq!(server.bodies("experiments/create"), [json!({ "name": "longdraft" })]);
    let created = &server.bodies("runs/create")[0];
    assert_eq!((&created["run_name"], &created["experiment_id"]), (&json!("first"), &json!("5")));
    let params = &server.bodies("runs/log-batch")[0]["params"];
    assert_eq!(params[1], json!({ "key": "train.steps", "value": "2" }));
    let sent = [("train/loss", 1), ("held_out/acceptance_1", 1), ("train/loss", 2)];
    assert_eq!(metrics(&server)[..3], sent.map(|(key, step)| (key.to_owned(), step)));
    let end = json!({ "run_id": "r1", "status": "FINISHED", "end_time": 1_700_000_003_000_u64 });
    assert_eq!(server.bodies("runs/update"), [end]);

    let requests = server.requests.lock().expect("no panic");
    assert!(requests.iter().all(|(_, authorization, _)| authorization == "Basic bWU6c2VjcmV0"));
    let state = std::fs::read_to_string(dir.path().join("mlflow.json")).expect("state");
    assert!(state.contains("r1") && !state.contains("secret"));
}

#[test]
fn a_resumed_run_goes_on_where_the_server_stands() {
    let (dir, server) = (tempfile::tempdir().expect("tempdir"), Server::start(""));
    let mut first = Mlflow::open(&run_at(&server.uri, dir.path(), 0)).expect("open");
    first.finish(Outcome::Stopped, row(1).time).expect("finish");
    assert_eq!(server.bodies("runs/update")[0]["status"], "KILLED");
    // The server has the loss up to step 2; it missed that of step 3 and the evaluation.
    let records = [
        json!({ "step": 1, "loss": 4.0 }),
        json!({ "step": 1, "held_out": { "acceptance_by_delay": [0.25] } }),
        json!({ "step": 2, "loss": 2.0 }),
        json!({ "step": 3, "loss": 1.5 }),
        json!({ "step": 4, "loss": 1.0 }),
    ];
    let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
    std::fs::write(dir.path().join("metrics.jsonl"), lines).expect("metrics");
    let mut again = Mlflow::open(&run_at(&server.uri, dir.path(), 3)).expect("open");
    again.log(&row(4)).expect("log");
    again.finish(Outcome::Finished, row(4).time).expect("finish");
    assert_eq!(server.bodies("runs/create").len(), 1);
    assert_eq!(server.bodies("runs/update")[1]["status"], "RUNNING");
    let (loss, acceptance) = ("train/loss", "held_out/acceptance_1");
    let sent = [(acceptance, 1), (loss, 3), (loss, 4), (acceptance, 4)];
    assert_eq!(metrics(&server), sent.map(|(key, step)| (key.to_owned(), step)));
}

#[test]
fn a_server_that_is_not_there_is_an_error_at_the_end_and_no_delay_before() {
    let dir = tempfile::tempdir().expect("tempdir");
    // Bound for a moment, so that nothing listens there.
    let address = TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address");
    let mut mlflow =
        Mlflow::open(&run_at(&format!("http://{address}"), dir.path(), 0)).expect("open");
    mlflow.log(&row(1)).expect("the row only waits");
    let error = mlflow.finish(Outcome::Finished, row(1).time).expect_err("nobody took it");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[test]
fn a_refusal_says_what_to_set() {
    let (dir, server) = (tempfile::tempdir().expect("tempdir"), Server::start("runs/create"));
    let mut mlflow = Mlflow::open(&run_at(&server.uri, dir.path(), 0)).expect("open");
    let error = mlflow.finish(Outcome::Finished, row(1).time).expect_err("refused");
    assert!(error.to_string().contains("MLFLOW_TRACKING_USERNAME"), "{error}");
}

#[test]
fn addresses_that_cannot_work_are_refused_without_repeating_passwords() {
    let dir = tempfile::tempdir().expect("tempdir");
    let open =
        |uri: &str| Mlflow::open(&run_at(uri, dir.path(), 0)).err().expect("refused").to_string();
    assert!(open("file:///runs").contains("mlflow server"));
    assert!(!open("http://me:secret@host").contains("secret"));
    let unset = run(dir.path(), 0);
    assert!(
        Mlflow::open(&unset).err().expect("refused").to_string().contains("MLFLOW_TRACKING_URI")
    );
}
