//! The life of a run: readers that go away, signals, saving, a later end, folders that are lost.

mod extended;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output};

use crate::support::files::{json_so_far, lines_so_far, read_json};
use crate::support::processes::{signal, start_kept, wait_until};
use crate::support::runs::{draft_bytes, metrics};
use crate::support::{
    Workshop, borrowed, fail, fail_with, finished, last_json, longdraft, noted, require_words, run,
    stderr, stdout, succeed, succeeded, told_by,
};
use serde_json::Value;

/// A run of some hundred steps.
const LONG: &str = "train.epochs=12";

/// Nothing while one checkpoint takes the place of another.
fn last_state(run: &str) -> Value {
    json_so_far(format!("{run}/checkpoints/last/state.json"))
}

/// Whether this process, and those that it starts, do not notice when their terminal goes.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask & 1 == 1)
}

/// Runs a line of the shell, in which `$L` is the program and `$1`, `$2` are arguments.
fn shell(line: &str, arguments: &[&str]) -> Output {
    Command::new("bash")
        .args(["-c", line, "bash"])
        .args(arguments)
        .envs([("L", env!("CARGO_BIN_EXE_longdraft")), ("NO_COLOR", "1")])
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .expect("bash")
}

#[test]
fn training_outlives_the_reader_of_its_log() {
    let shop = Workshop::new();
    let whole = shop.path("whole");
    succeed(&["train", &shop.config(), &format!("output={whole}")]);
    // Both streams go to a reader that leaves after some lines, or at once.
    for (name, line) in [
        ("piped", "\"$L\" train \"$1\" \"$2\" --threads 1 2>&1 | head -n 2; exit ${PIPESTATUS[0]}"),
        ("deaf", "\"$L\" train \"$1\" \"$2\" --threads 1 2>&1 | true; exit ${PIPESTATUS[0]}"),
        ("closed", "\"$L\" train \"$1\" \"$2\" --threads 1 >&- 2>&-"),
    ] {
        let output = shop.path(name);
        let ended = shell(line, &[&shop.config(), &format!("output={output}")]);
        assert_eq!(ended.status.code(), Some(0), "{name}: {}", stderr(&ended));
        assert!(!stdout(&ended).contains("panicked"), "{name}: {}", stdout(&ended));
        assert_eq!(draft_bytes(&output), draft_bytes(&whole), "{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_stdout_is_told_when_the_work_is_done() {
    let shop = Workshop::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let ended = finished(longdraft(&["train", &shop.config(), "--json"]).stdout(full()));
    let said = told_by(&ended, 1);
    assert!(said.contains("error: stdout: No space left"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    assert!(shop.folder.path().join("run/checkpoints/last/manifest.json").is_file());
    // Without stderr nothing can be told, but the exit code tells it.
    let ended = longdraft(&["config", "schema"]).stdout(full()).stderr(full()).status();
    assert_eq!(ended.expect("runs").code(), Some(1));
    let ended = longdraft(&["train", &shop.config(), "train.stepz=1"]).stderr(full()).status();
    assert_eq!(ended.expect("runs").code(), Some(2));
}

#[test]
fn what_only_prints_ends_quietly_with_its_reader() {
    let shop = Workshop::new();
    let text = format!("{{\"text\": \"{}\"}}\n", "the cat sat on the mat. ".repeat(40));
    let rows = shop.write("many.jsonl", text.repeat(200));
    let (config, target) = (shop.config(), shop.target());
    let inspect = ["data", "inspect", &rows, "--target", &target, "--rows", "200"];
    let generate =
        ["generate", "--target", &target, "--no-draft", "--prompt", "a", "--max-tokens", "400"];
    let show = ["config", "show", &config];
    for arguments in [&["config", "schema"][..], &show, &inspect, &generate] {
        let mut child = start_kept(&mut longdraft(arguments));
        // Nobody reads from here on.
        drop(child.stdout.take());
        let mut said = String::new();
        let mut errors = child.stderr.take().expect("a pipe");
        errors.read_to_string(&mut said).expect("text");
        assert_eq!(child.wait().expect("wait").code(), Some(141), "{arguments:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("error"), "{arguments:?}: {said}");
    }
}

#[test]
fn signals_save_and_end_with_their_own_exit_code() {
    let shop = Workshop::new();
    let whole = shop.path("whole");
    succeed(&["train", &shop.config(), &format!("output={whole}"), LONG]);
    for (name, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        if name == "-HUP" && ignores_hangups() {
            eprintln!("skipped: SIGHUP is ignored here");
            continue;
        }
        let stopped = shop.path(name);
        let (output, config) = (format!("output={stopped}"), shop.config());
        let train = ["train", &config, &output, LONG, "--json"];
        let child = start_kept(&mut longdraft(&train));
        wait_until("steps", || lines_so_far(format!("{stopped}/metrics.jsonl")) >= 5);
        signal(&child, name);
        let ended = child.wait_with_output().expect("wait");
        assert_eq!(ended.status.code(), Some(code), "{name}: {}", stderr(&ended));
        let said = last_json(&stdout(&ended));
        assert_eq!(said["finished"], false, "{name}");
        assert_eq!(said["steps"], last_state(&stopped)["step"], "{name}: not saved");
        assert!(!stderr(&ended).contains("error:"), "{name}: {}", stderr(&ended));
        assert_eq!(last_json(&succeed(&train))["finished"], true);
        assert_eq!(draft_bytes(&whole), draft_bytes(&stopped), "{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_under_nohup_goes_on_when_its_terminal_goes() {
    let shop = Workshop::new();
    let output = shop.path("run");
    let mut nohup = Command::new("nohup");
    nohup.arg(env!("CARGO_BIN_EXE_longdraft"));
    let child = start_kept(nohup.args(["train", &shop.config(), LONG, "--threads", "1"]));
    wait_until("steps", || lines_so_far(format!("{output}/metrics.jsonl")) >= 3);
    signal(&child, "-HUP");
    let ended = child.wait_with_output().expect("wait");
    assert_eq!(ended.status.code(), Some(0));
}

#[test]
fn every_command_that_works_for_long_tells_its_signal() {
    let shop = Workshop::of_four_layers();
    let curriculum = shop.with_stages("- name: one\n- name: two\n");
    let rows = "data.row_tokens=128";
    let store = format!("train.features={}", shop.path("store"));
    let prompts = shop.write("prompts.jsonl", "{\"prompt\": \"the cat\"}\n".repeat(300));
    let (config, target, answers) = (shop.config(), shop.target(), shop.path("answers.jsonl"));
    let measured = shop.path("eval");
    let eval = [
        &["eval", "decode", "--target", &target, "--lookup", "--prompts", &prompts][..],
        &["--max-tokens", "60", "--output", &measured],
    ]
    .concat();
    let regenerate = ["data", "regenerate", &prompts, "--target", &target, "--output", &answers];
    // The command, and what it says once it is at work.
    let cases: [(&[&str], &str); 4] = [
        (&["train", &curriculum, LONG], "step "),
        (
            &["capture", &config, &store, rows, "capture.shard_mib=1", "data.train=[{path: ROWS}]"],
            "",
        ),
        (&eval, "300 prompts"),
        (&[&regenerate[..], &["--max-tokens", "50", "--batch", "2"]].concat(), ""),
    ];
    let row = format!("{{\"text\": \"{}\"}}\n", "the cat sat on the mat. ".repeat(5));
    let many = shop.write("many.jsonl", row.repeat(4000));
    for (arguments, sign) in cases {
        let arguments: Vec<String> =
            arguments.iter().map(|argument| argument.replace("ROWS", &many)).collect();
        let mut arguments = borrowed(&arguments);
        arguments.push("--json");
        let mut child = start_kept(&mut longdraft(&arguments));
        let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut said = String::new();
        if sign.is_empty() {
            wait_until("work", || {
                let claims = std::fs::read_dir(shop.path("store/claims"));
                claims.is_ok_and(|mut claims| claims.next().is_some()) || lines_so_far(&answers) > 0
            });
        } else {
            while !said.contains(sign) {
                assert!(errors.read_line(&mut said).expect("text") > 0, "{arguments:?}: {said}");
            }
        }
        signal(&child, "-TERM");
        errors.read_to_string(&mut said).expect("text");
        let ended = child.wait_with_output().expect("wait");
        assert_eq!(ended.status.code(), Some(143), "{arguments:?}: {said}");
        assert_eq!(last_json(&stdout(&ended))["finished"], false, "{arguments:?}");
        // What follows is not taken for work that has begun.
        let _ = std::fs::remove_dir_all(shop.path("store"));
    }
    assert!(std::path::Path::new(&measured).join("decode-unfinished.json").is_file());
    assert!(lines_so_far(&answers) < 300);
}

#[test]
fn checkpoints_come_by_minutes_too() {
    let (shop, config) = Workshop::new().with_config();
    let saves = |minutes: &str| {
        let output = format!("output={}", shop.path(minutes));
        let every = format!("train.save_minutes={minutes}");
        let train = ["train", &config, &output, "train.steps=6", "train.save_every=1000", &every];
        noted(&train).matches("checkpoints/last\n").count()
    };
    assert_eq!(saves("0.000000001"), 6);
    assert_eq!(saves("0"), 1);
    assert_eq!(saves("60"), 1);
    fail_with(&["train", &config, "train.save_minutes=-1"], 2, &["train.save_minutes"]);
}

#[test]
fn the_time_that_is_said_to_be_left_ends_with_the_minutes_of_the_run() {
    let (shop, config) = Workshop::new().with_config();
    let left = |minutes: &str, more: &[&str]| {
        let arguments =
            ["train", &config, "train.steps=1000000", "train.save_every=1000000", minutes];
        let told = noted(&[&arguments[..], more].concat());
        let first = told.lines().find(|line| line.contains(" tok/s  ")).expect("a step");
        first.rsplit("  ").next().unwrap_or_default().to_owned()
    };
    let at_most = ["3s left", "2s left", "1s left", "0s left"];
    let told = left("train.max_minutes=0.05", &[]);
    assert!(at_most.contains(&told.as_str()), "{told}");
    // What was used before counts, too.
    let used = last_state(&shop.path("run"))["seconds"].as_f64().expect("seconds");
    let rest = left(&format!("train.max_minutes={}", (used + 3.0) / 60.0), &["--extend"]);
    assert!(at_most.contains(&rest.as_str()), "{rest}");
}

#[test]
fn an_evaluation_that_is_lost_at_the_end_is_done_again_without_a_step() {
    let shop = Workshop::new();
    let run = shop.path("run");
    let train = || succeed(&["train", &shop.config(), "train.steps=6"]);
    train();
    let (wanted, draft) = (metrics(&run), draft_bytes(&run));
    // What a process leaves that ends during its last evaluation.
    let folder = shop.folder.path().join("run/checkpoints");
    std::fs::remove_dir_all(folder.join("last")).expect("remove");
    std::fs::rename(folder.join("last_2"), folder.join("last")).expect("rename");
    let before = last_state(&run);
    assert_eq!((&before["step"], &before["unjudged"]), (&6.into(), &true.into()));
    train();
    assert_eq!(metrics(&run), wanted);
    assert_eq!(draft_bytes(&run), draft);
    let after = last_state(&run);
    assert!(after["unjudged"].is_null() && after["best"].is_object(), "{after}");
    assert!(train().starts_with("already finished"));
}

#[test]
fn a_best_checkpoint_that_is_lost_is_chosen_anew() {
    let (shop, config) = Workshop::new().with_config();
    // A rate of next to nothing: no evaluation is better than the first.
    let rate = "schedule.learning_rate=1e-12";
    succeed(&["train", &config, rate, "train.evaluate_every=2", "train.steps=4"]);
    let best = shop.folder.path().join("run/checkpoints/best");
    std::fs::remove_dir_all(&best).expect("remove");
    let words = ["train", &config, rate, "train.evaluate_every=2", "train.steps=6", "--extend"];
    require_words(&noted(&words), &["the best draft is chosen anew"]);
    assert_eq!(read_json(best.join("state.json"))["step"], 6);
}

#[test]
fn checkpoints_of_which_none_can_be_used_leave_a_way_on() {
    let (shop, config) = Workshop::new().with_config();
    let train = ["train", &config, "train.steps=2"];
    succeed(&train);
    let folder = shop.folder.path().join("run/checkpoints");
    for name in ["last", "last_2"] {
        std::fs::write(folder.join(name).join("draft.safetensors"), "half").expect("write");
    }
    let words = ["no checkpoint can be used", "hint: move the folder `checkpoints`", "draft.from"];
    fail_with(&train, 1, &words);
    // What the hint says.
    let away = shop.folder.path().join("away");
    std::fs::rename(&folder, &away).expect("rename");
    let from = format!("draft.from={}", away.join("best").display());
    succeed(&[&train[..], &[from.as_str()]].concat());
    assert_eq!(last_state(&shop.path("run"))["step"], 2);
}

#[test]
fn a_finished_run_tells_its_figures_without_its_target() {
    let shop = Workshop::new();
    let first = last_json(&succeed(&["train", &shop.config(), "--json"]));
    assert!(first["held_out"].is_object());
    std::fs::rename(shop.target(), shop.path("away")).expect("rename");
    let again = last_json(&succeed(&["train", &shop.config(), "--json"]));
    assert_eq!((&again["held_out"], &again["steps"]), (&first["held_out"], &first["steps"]));
    assert_eq!(again["finished"], true);
    assert!(again["median_tokens_per_second"].as_f64() > Some(0.0));
    assert!(succeed(&["train", &shop.config()]).starts_with("already finished, after"));
    // Where something changed since, the run is looked at closely: its target is missed.
    let rows = shop.path("rows.jsonl");
    let text = std::fs::read_to_string(&rows).expect("rows");
    std::fs::write(&rows, text.replacen("row 0", "now 0", 1)).expect("rows");
    fail(&["train", &shop.config()], 2);
    std::fs::rename(shop.path("away"), shop.target()).expect("rename");
    fail_with(&["train", &shop.config()], 1, &["data was "]);
}

#[test]
fn a_run_directory_that_is_lost_ends_the_run() {
    let shop = Workshop::new();
    for (name, lose) in [("deleted", true), ("unlinked", false)] {
        let output = shop.path(name);
        let child = start_kept(&mut longdraft(&[
            "train",
            &shop.config(),
            &format!("output={output}"),
            LONG,
        ]));
        wait_until("steps", || lines_so_far(format!("{output}/metrics.jsonl")) >= 3);
        // A file that is written at the same moment may bring its folder back.
        wait_until("removal", || {
            let removed = if lose {
                std::fs::remove_dir_all(&output)
            } else {
                std::fs::remove_file(format!("{output}/metrics.jsonl"))
            };
            removed.is_ok()
        });
        let ended = child.wait_with_output().expect("wait");
        let said = told_by(&ended, 1);
        assert!(said.contains("error: ") && said.contains(name), "{said}");
        assert!(!stdout(&ended).contains("done"), "{}", stdout(&ended));
    }
}

#[cfg(unix)]
#[test]
fn checkpoints_that_cannot_be_looked_at_are_not_taken_for_none() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=2"]);
    // Also for a user who may read everything: a link that leads to itself.
    let (checkpoints, away) = (shop.path("run/checkpoints"), shop.path("run/away"));
    std::fs::rename(&checkpoints, &away).expect("rename");
    std::os::unix::fs::symlink("checkpoints", &checkpoints).expect("link");
    for arguments in
        [&["train", &shop.config(), "train.steps=2"][..], &["extract", &shop.path("run")]]
    {
        let text = fail_with(arguments, 1, &["symbolic links"]);
        assert!(!text.contains("no checkpoint is there"), "{text}");
    }
    std::fs::remove_file(&checkpoints).expect("remove");
    fail_with(&["extract", &shop.path("run")], 2, &["no checkpoint is there"]);
}
