//! Tracked files keep the bytes that TensorBoard, W&B and SwanLab read (`scripts/check-readers`
//! reads `tests/fixtures/tracked` with each of them).

use std::path::{Path, PathBuf};

use longdraft_tracking::{
    Environment, Moment, Outcome, Row, Run, SwanLab, TensorBoard, Tracker, TrackingConfig, Wandb,
    scalars,
};
use serde_json::{Value, json};

const STARTED: u64 = 1_700_000_000;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tracked")
}

/// The run of the fixture: everything that clocks and chance decide is given.
fn run(directory: &Path) -> Run {
    Run {
        directory: directory.to_path_buf(),
        name: "tracked".to_owned(),
        tracking: TrackingConfig {
            tags: vec!["glide".to_owned(), "fixture".to_owned()],
            group: Some("fixtures".to_owned()),
            notes: Some("two steps, for readers".to_owned()),
            ..TrackingConfig::default()
        },
        config: json!({
            "target": "org/name", "output": "runs/tracked", "draft": {"from": null},
            "schedule": {"learning_rate": 1e-6, "kind": "warmup_cosine"},
            "optimizer": {"betas": [0.9, 0.95]}
        }),
        resumed_step: 0,
        started: Moment { seconds: STARTED, nanos: 250_000_000 },
        host: "host".to_owned(),
        pid: 42,
        id: "l0ngdr4f".to_owned(),
        environment: Environment::default(),
    }
}

/// The rows of the fixture's `metrics.jsonl`, a second apart.
fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(fixture().join("metrics.jsonl")).expect("metrics");
    let mut rows: Vec<Row> = Vec::new();
    for line in text.lines() {
        let record: Value = serde_json::from_str(line).expect("a record");
        let step = record["step"].as_u64().expect("a step");
        match (record.get("held_out"), rows.last_mut()) {
            (Some(held_out), Some(row)) => row.scalars.extend(scalars("held_out", held_out)),
            _ => rows.push(Row {
                step,
                time: Moment { seconds: STARTED + step, nanos: 0 },
                scalars: scalars("train", &record),
            }),
        }
    }
    rows
}

#[test]
fn tracked_files_keep_the_bytes_that_their_readers_read() {
    let dir = tempfile::tempdir().expect("tempdir");
    let run = run(dir.path());
    let board = TensorBoard::new(&run);
    let wandb = Wandb::open(&run).expect("W&B");
    let swanlab = SwanLab::open(&run).expect("SwanLab");
    let paths = [board.path(), wandb.path(), swanlab.path()].map(Path::to_path_buf);
    let trackers: [Box<dyn Tracker>; 3] = [Box::new(board), Box::new(wandb), Box::new(swanlab)];
    let mut notes = Vec::new();
    for mut tracker in trackers {
        for row in rows() {
            tracker.log(&row).expect("log");
        }
        let end = Moment { seconds: STARTED + 3, nanos: 0 };
        notes.extend(tracker.finish(Outcome::Finished, end).expect("finish"));
    }
    for (note, told) in notes.iter().zip(["-20231114_221320-l0ngdr4f", "sync --id l0ngdr4f "]) {
        assert!(note.contains(told) && note.contains(" sync "), "{note}");
    }
    assert_eq!(notes.len(), 2, "TensorBoard reads files as they are");
    let config = paths[2].with_file_name("files").join("config.yaml");
    let changed: Vec<PathBuf> = paths
        .into_iter()
        .chain([config])
        .filter_map(|path| {
            let name = path.strip_prefix(dir.path()).expect("inside").to_path_buf();
            let same = std::fs::read(&path).ok() == std::fs::read(fixture().join(&name)).ok();
            (!same).then_some(name)
        })
        .collect();
    if !changed.is_empty() {
        let kept = dir.keep();
        panic!(
            "the writers' bytes changed: {changed:?}; if that is wanted, copy them from {} to \
             tests/fixtures/tracked and run scripts/check-readers",
            kept.display()
        );
    }
}
