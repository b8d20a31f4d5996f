//! Tracked runs through the binary: killed and resumed, without a server, with a secret.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::support::files::{lines_so_far, repository};
use crate::support::processes::killed_when;
use crate::support::{
    self, Workshop, finished, longdraft, noted, require_words, stderr, succeed, succeeded, told_by,
};

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
    let (shop, config) = Workshop::new().with_config();
    let mut train = longdraft(&["train", &config, "train.epochs=15", "train.evaluate_every=5"]);
    let run = shop.folder.path().join("run");
    killed_when(&mut train, "steps", || lines_so_far(run.join("metrics.jsonl")) >= 12);
    succeed(&["train", &config, "train.epochs=15", "train.evaluate_every=5"]);
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    let events = files(&run).iter().filter(|path| name(path).starts_with("events.out")).count();
    assert_eq!(events, 2, "one file for each process");

    let Some(python) = std::env::var_os("LONGDRAFT_READERS") else {
        eprintln!("skipped: LONGDRAFT_READERS names no Python (scripts/test sets it)");
        return;
    };
    let script = repository("scripts/readers/tracking.py");
    let read = Command::new(python).arg(script).arg(&run).arg("tensorboard").output();
    let read = succeeded(read.expect("python runs"));
    assert!(support::stdout(&read).contains("points equal metrics.jsonl"));
}

#[test]
fn trackers_that_fail_do_not_stop_training() {
    let shop = Workshop::new();
    // A file where W&B wants its folder; nobody listens on port 1.
    std::fs::create_dir(shop.folder.path().join("run")).expect("run");
    shop.write("run/wandb", "");
    let more = ["tracking.report_to=[mlflow, wandb]", "tracking.mlflow.uri=http://127.0.0.1:1"];
    let said = noted(&[&["train", &shop.config(), "train.steps=3"], &more[..]].concat());
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
        let mut command = longdraft(&["train", &shop.config(), "train.steps=3"]);
        command.arg("tracking.report_to=[wandb, swanlab]");
        command.arg(format!("output={}", shop.path(mode))).env("PATH", &path);
        command.env("WANDB_API_KEY", key).env("WANDB_MODE", mode);
        stderr(&succeeded(finished(&mut command)))
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
    require_words(&said, &["MLFLOW_TRACKING_PASSWORD", "tracking.project"]);
    assert!(!said.contains("secret"), "{said}");
}

#[test]
fn values_of_the_environment_stay_out_of_everything_that_a_run_writes() {
    let shop = Workshop::new();
    // A target and rows in a place that nobody shall know.
    let secret = "s3cret-place";
    let hidden = shop.folder.path().join(secret);
    std::fs::create_dir(&hidden).expect("folder");
    std::fs::rename(&shop.target, hidden.join("target")).expect("target");
    std::fs::rename(shop.path("rows.jsonl"), hidden.join("rows.jsonl")).expect("rows");
    let text = format!(
        "target: '${{oc.env:MY_SECRET}}/target'\noutput: {}\ndata:\n  train:\n    \
         - path: '${{oc.env:MY_SECRET}}/rows.jsonl'\n  held_out_rows: 2\n  row_tokens: 128\n\
         train: {{rows_per_step: 2, steps: '${{oc.env:STEPS,4}}', save_every: 2}}\n\
         tracking:\n  report_to: [tensorboard, wandb, swanlab]\n  name: 'job-${{oc.env:JOB}}'\n",
        shop.path("run")
    );
    let config = shop.write("secret.yaml", text);
    let run_with = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = longdraft(arguments);
        command.env_remove("MY_SECRET").env_remove("STEPS").env("JOB", "7");
        command.envs(variables.iter().copied()).output().expect("the binary starts")
    };
    let place = hidden.display().to_string();
    let known = [("MY_SECRET", place.as_str())];
    let succeed = |arguments: &[&str]| {
        let output = run_with(arguments, &known);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        support::stdout(&output)
    };
    succeed(&["train", &config]);
    let recorded = std::fs::read_to_string(shop.path("run/config.yaml")).expect("record");
    for part in ["${oc.env:MY_SECRET}/target", "${oc.env:STEPS,4}", "job-${oc.env:JOB}"] {
        assert!(recorded.contains(part), "{part} not in {recorded}");
    }
    // The record composes to the run again, which is finished.
    let again = succeed(&["train", &shop.path("run/config.yaml")]);
    assert!(again.starts_with("already finished"), "{again}");
    assert_eq!(std::fs::read_to_string(shop.path("run/config.yaml")).expect("record"), recorded);
    let shown = succeed(&["config", "show", &config]);
    assert!(shown.contains("${oc.env:MY_SECRET}/rows.jsonl") && !shown.contains(secret), "{shown}");

    let store = format!("train.features={}", shop.path("features"));
    succeed(&["capture", &config, &store]);
    succeed(&["extract", &shop.path("run")]);
    succeed(&["report", &shop.path("run"), "--output", &shop.path("report.html")]);
    let export =
        ["export", &shop.path("run"), "--to", "longspec", "--output", &shop.path("export")];
    let export = [&export[..], &["--target-name", "some-org/tiny"]].concat();
    succeed(&export);
    // The page of a tracker bears the name that was asked for.
    let written: Vec<_> =
        files(shop.folder.path()).into_iter().filter(|path| !path.starts_with(&hidden)).collect();
    let named = |file: &&std::path::PathBuf| {
        contains(&std::fs::read(file).expect("file"), b"job-7")
            && file.extension().is_some_and(|ending| ending == "wandb")
    };
    assert_eq!(written.iter().filter(named).count(), 1);
    for file in &written {
        let bytes = std::fs::read(file).expect("file");
        assert!(!contains(&bytes, secret.as_bytes()), "the value is in {}", file.display());
        assert!(!file.display().to_string().contains(secret), "{}", file.display());
    }

    let output = run_with(&export, &[]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("`MY_SECRET` is not set"), "{}", stderr(&output));
    for key in ["tracking.notes=${oc.env:MY_SECRET}", "output=runs/${oc.env:MY_SECRET}"] {
        let said = told_by(&run_with(&["train", &config, key], &known), 2);
        assert!(
            said.contains("`MY_SECRET` looks like a secret") && !said.contains(secret),
            "{said}"
        );
    }
    // An innocent name does not make the value one.
    let with_job = [("MY_SECRET", place.as_str()), ("JOB", place.as_str())];
    let output = run_with(&["train", &config, "tracking.tags=['${oc.env:JOB}']"], &with_job);
    let said = told_by(&output, 2);
    for part in ["`tracking.tags.0` is shown", "the value of `JOB` holds that of `MY_SECRET`"] {
        assert!(said.contains(part) && !said.contains(secret), "{part} not in {said}");
    }
}
