//! What cannot work, and what is too little: input, disk and time.

use super::*;
use crate::support::Workshop;

#[test]
fn what_cannot_work_is_refused_before_any_work() {
    let shop = Workshop::new();
    let (target, output) = (shop.target.display().to_string(), shop.path("out"));
    let empty = shop.write("empty.jsonl", "{\"prompt\": \"\"}\n{\"x\": 1}\n");
    let file = shop.write("a-file", "x");
    let inside = format!("{file}/out");
    let cases: [(&[&str], &str); 8] = [
        (&["--prompts", &empty], "there is no prompt in it"),
        (&["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (&["--time", "5s"], "at least 10s"),
        (&["--time", "soon"], "is not a time"),
        (&["--for", "tensorrt"], "is not an engine"),
        (&["--method", "medusa"], "[possible values: glide, "),
        (&["--max-tokens", "0"], "--max-tokens"),
        (&["--output", &inside], "nothing can be written there"),
    ];
    for (more, words) in cases {
        let mut arguments = vec!["fit", &target];
        if !more.contains(&"--output") {
            arguments.extend(["--output", &output]);
        }
        arguments.extend(more);
        fail_with(&arguments, 2, &[words]);
    }
    assert!(!Path::new(&output).join("training-1").exists());
    // Trainings name the folder in their configurations, which are text.
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt;
        let odd = shop.folder.path().join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
        let output = finished(longdraft(&["fit", &target]).arg("--output").arg(&odd));
        assert!(told_by(&output, 2).contains("this name is not UTF-8") && !odd.exists());
        std::fs::create_dir(&odd).expect("a folder");
        let output = finished(longdraft(&["fit", &target]).arg("--from").arg(&odd));
        require_words(&told_by(&output, 2), &["--from", "not UTF-8"]);
    }
}

#[test]
fn a_draft_of_another_target_is_not_gone_on_from() {
    let (shop, bench) = (Workshop::new(), Bench::new());
    let run = shop.path("run");
    succeed(&["train", &shop.config(), &format!("output={run}")]);
    fail_with(&bench.within("30s", &["--from", &run]), 2, &["--from: ", "a draft of this target"]);
    assert!(!bench.output.exists());
    // Of its own target it is one to go on from.
    let own = Bench::of(shop.target());
    let prompts = own.prompts((0..30).map(|i| json!({ "prompt": format!("say {i}") })));
    let more = ["--prompts", &prompts, "--max-tokens", "40", "--from", &run, "--plan"];
    succeed(&own.within("30s", &more));
}

#[test]
fn a_model_that_never_ends_and_has_no_template_still_gets_the_best_that_can_be_done() {
    let shop = Workshop::new();
    let bench = Bench::of(shop.target());
    let prompts = bench.prompts((0..30).map(|i| json!({ "prompt": format!("say {i}") })));
    let more = ["--prompts", &prompts, "--max-tokens", "40", "--anyway", "--json"];
    let arguments = bench.within("30s", &more);
    let (said, told) = ended(&arguments);
    assert!(told.contains("no chat template") && told.contains("there are few"), "{told}");
    assert_eq!(last_json(&said)["lossless"], true);
    // A training with other settings is not gone on from, and the way out is one that `fit` has.
    bench.change(|known| {
        let round = &mut known["rounds"][0];
        for done in ["trained", "proved", "delivered"] {
            round[done] = json!(false);
        }
        round["lowered"] = json!(0);
        round["training"]["train"]["seed"] = json!(99);
    });
    let error = fail_with(&arguments, 1, &["cannot resume: ", "train.seed was 0"]);
    assert!(error.contains("move this folder away") && !error.contains("--force"), "{error}");
}

#[test]
fn an_engine_that_does_not_compute_the_draft_is_told_before_the_time_is_spent() {
    let shop = Workshop::new();
    support::write_target(&shop.target, &support::tiny_config("qwen3"));
    let bench = Bench::of(shop.target());
    let prompts = bench.prompts((0..30).map(|i| json!({ "prompt": format!("say {i}") })));
    let more = ["--prompts", &prompts, "--max-tokens", "40", "--method", "glide", "--anyway"];
    let arguments = bench.within("30s", &more);
    let words = ["--for longspec: ", "leave out this engine"];
    fail_with(&[&arguments[..], &["--for", "longspec"]].concat(), 2, &words);
    assert!(!bench.output.join("data/answers.jsonl").exists());
    // Without it the same folder serves.
    succeed(&[&arguments[..], &["--plan"]].concat());
}

/// What the binary says where files may not grow beyond so many KiB, as on a full disk: it fails.
#[cfg(unix)]
#[track_caller]
fn on_a_full_disk(kib: usize, arguments: &[&str]) -> String {
    let script = format!("trap '' XFSZ; ulimit -f {kib}; exec \"$@\" --threads 1");
    let mut command = std::process::Command::new("bash");
    command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_longdraft")]).args(arguments);
    let output = command.env("NO_COLOR", "1").output().expect("bash");
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(!told.contains("panicked"), "{told}");
    told
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_told_and_the_same_command_goes_on() {
    let bench = Bench::new();
    let rows = (0..300).map(|i| json!({ "prompt": format!("What is {i} and {}?", i + 1) }));
    let prompts = bench.prompts(rows);
    let more = ["--prompts", &prompts, "--max-tokens", "48", "--anyway"];
    let arguments = bench.within("40s", &more);
    // Too little for the prompts: nothing was begun.
    let told = on_a_full_disk(4, &arguments);
    assert!(told.contains(".jsonl"), "{told}");
    // Enough for these, and too little for a checkpoint: found out by the trial, before the time is spent.
    let told = on_a_full_disk(64, &arguments);
    assert!(told.contains("[measure]"), "{told}");
    assert!(!bench.output.join("work").exists() && !bench.output.join("training-1").exists());
    // The disk fills up while the target answers.
    let answers = || bench.state()["phase"] == "answers";
    killed_when(&mut longdraft(&arguments), "answering", answers);
    let told = on_a_full_disk(48, &arguments);
    assert!(told.contains("error: ") && told.contains("the same command goes on"), "{told}");
    // With room it goes on.
    let result = last_json(&succeed(&[&arguments[..], &["--json"]].concat()));
    assert_proved(&result);
}

#[test]
fn a_time_that_the_measurement_takes_is_refused_and_the_measurement_kept() {
    let bench = Bench::new();
    let arguments = bench.within("40s", &["--max-tokens", "48", "--anyway"]);
    succeed(&[&arguments[..], &["--plan"]].concat());
    // As if that had taken long.
    let machine = bench.state()["machine"].clone();
    bench.change(|known| {
        known["rounds"] = json!([{
            "budget": 40.0, "spent": 39.5, "plan": null, "answers": null, "tried": [], "training": null,
            "lowered": 0,
            "trained": false, "proved": false, "delivered": false,
        }]);
    });
    let error = fail(&arguments, 2);
    assert!(error.contains("--time 40s is too short: measuring this machine took"), "{error}");
    assert!(error.contains("the same command has all of its time now"), "{error}");
    assert_eq!((&bench.state()["machine"], &bench.state()["rounds"]), (&machine, &json!([])));
    let (_, told) = ended(&arguments);
    assert!(told.contains("40s is little time"), "{told}");
}
