//! `scripts/gpu-check` reads what its steps leave; the steps themselves need a GPU.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/gpu-check")
}

fn python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: there is no python3");
    }
    found
}

fn step(folder: &Path, name: &str, code: i32, out: &str, err: &str) {
    for (kind, text) in [("status", code.to_string().as_str()), ("out", out), ("err", err)] {
        std::fs::write(folder.join(format!("{name}.{kind}")), text).expect("file");
    }
}

fn summarise(folder: &Path) -> (Output, Value) {
    let mut command = Command::new("python3");
    let output = command.arg(script()).arg("--summarise").arg(folder).output().expect("python");
    let text = std::fs::read_to_string(folder.join("gpu-check.json")).expect("report");
    (output, serde_json::from_str(&text).expect("JSON"))
}

fn case(name: &str, error: Option<f64>) -> String {
    let pass = error.is_some_and(|error| error <= 1e-4);
    let check = json!({"name": "loss", "error": error, "tolerance": 1e-4, "pass": pass});
    json!({"case": name, "kind": "glide", "pass": pass, "checks": [check]}).to_string()
}

#[test]
fn figures_of_all_steps_come_together() {
    if !python() {
        return;
    }
    let folder = tempfile::tempdir().expect("tempdir");
    let lines = [case("a", Some(5e-5)), case("b", Some(2e-5))].join("\n");
    step(folder.path(), "parity", 0, &format!("{lines}\n{{\"cases\":2}}\n"), "");
    let err = "on --device cuda\nglide_online_1024: ours {\"tokens_per_s\":300.0} PyTorch \
               {\"tokens_per_s\":100.0,\"peak_gpu_mib\":900}\n";
    step(folder.path(), "steps", 0, "{\"glide_online_1024\":3.0}", err);
    let decoded = json!({"tau": 2.5, "speculative_tokens_per_second": 900.0, "speed_up": 1.8,
                         "lossless": true, "record": {}});
    step(folder.path(), "quickstart", 0, &format!("text\n{decoded}"), "");
    std::fs::write(
        folder.path().join("memory.csv"),
        "steps,100\nsteps,700\nparity,30\nsteps,[N/A]\n",
    )
    .expect("samples");
    let (output, report) = summarise(folder.path());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(report["steps"]["steps"]["glide_online_1024"]["ratio"], 3.0);
    assert_eq!(report["steps"]["steps"]["glide_online_1024"]["pytorch_gpu_mib"], 900);
    assert_eq!(report["memory_mib"], json!({"steps": 700, "parity": 30}));
    assert_eq!(report["quickstart"]["tau"], 2.5);
    let share = &report["parity"]["largest_share_of_tolerance"]["glide"];
    assert!((share.as_f64().expect("a number") - 0.5).abs() < 1e-9);
    let table = String::from_utf8_lossy(&output.stdout);
    for row in
        ["| glide_online_1024, tok/s | 300.00 | 100.00 | 3.00 |", "| reference cases | 2 of 2"]
    {
        assert!(table.contains(row), "{table}");
    }
}

#[test]
fn a_failed_case_or_step_fails_the_whole() {
    if !python() {
        return;
    }
    let folder = tempfile::tempdir().expect("tempdir");
    let report = || summarise(folder.path());
    // Nothing was computed.
    assert_eq!(report().0.status.code(), Some(1));
    // An error that is no number.
    step(folder.path(), "parity", 1, &[case("a", Some(1e-5)), case("b", None)].join("\n"), "");
    let (output, value) = report();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(value["parity"]["failed"], json!({"b": ["loss"]}));
    assert_eq!(value["parity"]["largest_share_of_tolerance"]["glide"], Value::Null);
    // A step that crashed before its first figure.
    step(folder.path(), "parity", 0, &case("a", Some(1e-5)), "");
    assert_eq!(report().0.status.code(), Some(0));
    step(folder.path(), "steps", 101, "", "thread 'main' panicked");
    let (output, value) = report();
    assert_eq!((output.status.code(), &value["steps"]["pass"]), (Some(1), &json!(false)));
}
