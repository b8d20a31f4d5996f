//! Tracked runs through the binary: killed and resumed, without a server, with a secret.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{Workshop, longdraft, stderr, succeed};

/// All files below a folder.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn tensorboard_shows_every_step_of_a_killed_run_once() {
    let shop = Workshop::new();
    let config = shop.config();
    let mut child = longdraft(&["train", &config, "train.epochs=15", "train.evaluate_every=5"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let run = shop.folder.path().join("run");
    let lines =
        || std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count();
    while lines() < 12 {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().expect("kill");
    child.wait().expect("reap");
    succeed(&["train", &config, "train.epochs=15", "train.evaluate_every=5"]);
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let events = files(&run).iter().filter(|path| name(path).starts_with("events.out")).count();
    assert_eq!(events, 2, "one file for each process");

    let Some(python) = std::env::var_os("LONGDRAFT_READERS") else {
        eprintln!("skipped: LONGDRAFT_READERS names no Python (scripts/test sets it)");
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/readers/tracking.py");
    let read = Command::new(python).arg(script).arg(&run).arg("tensorboard").output();
    let read = read.expect("python runs");
    assert!(read.status.success(), "{}", stderr(&read));
    assert!(support::stdout(&read).contains("points equal metrics.jsonl"));
}

#[test]
fn trackers_that_fail_do_not_stop_training() {
    let shop = Workshop::new();
    // A file where W&B wants its folder; nobody listens on port 1.
    std::fs::create_dir(shop.folder.path().join("run")).expect("run");
    std::fs::write(shop.path("run/wandb"), "").expect("file");
    let output = longdraft(&["train", &shop.config(), "train.steps=3"])
        .args(["tracking.report_to=[mlflow, wandb]", "tracking.mlflow.uri=http://127.0.0.1:1"])
        .output()
        .expect("the binary starts");
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let warnings: Vec<&str> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert_eq!(warnings.len(), 2, "{said}");
    assert!(
        warnings[0].contains("not tracked by W&B") && warnings[0].contains("run/wandb"),
        "{said}"
    );
    assert!(warnings[1].contains("MLflow is switched off") && warnings[1].contains("127.0.0.1:1"));
}

#[test]
fn a_key_uploads_the_run_and_is_written_nowhere() {
    let shop = Workshop::new();
    let key = "0123456789abcdef0123456789abcdef01234567";
    // Stands in for W&B's program: keeps what it is called with.
    let bin = shop.folder.path().join("bin");
    std::fs::create_dir(&bin).expect("bin");
    let called = shop.path("called");
    let program = bin.join("wandb");
    std::fs::write(&program, format!("#!/bin/sh\necho \"$1 $2\" >> '{called}'\n"))
        .expect("program");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&program, executable).expect("permissions");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let train = |mode: &str| {
        let output = longdraft(&["train", &shop.config(), "train.steps=3"])
            .args(["tracking.report_to=[wandb, swanlab]", &format!("output={}", shop.path(mode))])
            .env("PATH", &path)
            .env("WANDB_API_KEY", key)
            .env("WANDB_MODE", mode)
            .output()
            .expect("the binary starts");
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let said = train("online");
    assert!(said.contains("W&B: uploaded"), "{said}");
    let arguments = std::fs::read_to_string(&called).expect("it was called");
    let folder = arguments.trim().strip_prefix("sync ").expect("sync");
    assert!(Path::new(folder).is_dir(), "{arguments}");

    let offline = train("offline");
    assert!(offline.contains("wandb sync "), "{offline}");
    assert_eq!(std::fs::read_to_string(&called).expect("calls").lines().count(), 1);
    assert!(!train("disabled").contains("W&B"));
    assert!(!Path::new(&shop.path("disabled/wandb")).exists());

    assert!(!said.contains(key) && !offline.contains(key));
    for file in files(shop.folder.path()) {
        let bytes = std::fs::read(&file).expect("file");
        assert!(!contains(&bytes, key.as_bytes()), "the key is in {}", file.display());
    }
}

#[test]
fn a_password_in_the_configuration_is_refused() {
    let shop = Workshop::new();
    let uri = "tracking.mlflow.uri=http://me:secret@host";
    let said = support::fail(&["train", &shop.config(), uri, "tracking.project=a/b"], 2);
    assert!(
        said.contains("MLFLOW_TRACKING_PASSWORD") && said.contains("tracking.project"),
        "{said}"
    );
    assert!(!said.contains("secret"), "{said}");
}
