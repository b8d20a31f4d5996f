//! `fit` through the binary: on the shipped target, killed in every phase, with bad input.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::files::{change_json, demonstration, json_so_far};
use crate::support::processes::{kill, killed_when, start, wait_until};
use crate::support::{self, Workshop, fail, last_json, longdraft, run, stderr, stdout, succeed};

/// The phases of a fit in their order.
const PHASES: [&str; 5] = ["measure", "answers", "training", "proof", "delivery"];

/// Keeps answers short, and goes on whatever is warned of.
const SHORT: [&str; 4] = ["--max-tokens", "48", "--anyway", "--json"];

/// A folder for a fit.
struct Bench {
    folder: tempfile::TempDir,
    target: String,
    output: PathBuf,
    name: String,
}

impl Bench {
    /// For the shipped target.
    fn new() -> Self {
        Self::of(demonstration())
    }

    fn of(target: String) -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let output = folder.path().join("fitted draft");
        let name = output.display().to_string();
        Self { folder, target, output, name }
    }

    /// Arguments of a fit within a time.
    fn within<'a>(&'a self, time: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let fit = ["fit", &self.target, "--time", time, "--output", &self.name];
        [&fit[..], more].concat()
    }

    /// Prompts of one's own: many enough, where they are some hundred, that no others are added.
    fn prompts(&self, rows: impl Iterator<Item = Value>) -> String {
        let path = self.folder.path().join("mine.jsonl");
        let text: String = rows.map(|row| format!("{row}\n")).collect();
        std::fs::write(&path, text).expect("prompts");
        path.display().to_string()
    }

    fn state(&self) -> Value {
        json_so_far(self.output.join("fit.json"))
    }

    /// As if an earlier call had found or done something else.
    fn change(&self, change: impl FnOnce(&mut Value)) {
        change_json(self.output.join("fit.json"), change);
    }

    fn held_out(&self) -> String {
        std::fs::read_to_string(self.output.join("data/held-out.jsonl")).expect("set aside")
    }
}

/// What a fit said that came to its end.
#[track_caller]
fn ended(arguments: &[&str]) -> (String, String) {
    let output = run(arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    (stdout(&output), stderr(&output))
}

#[track_caller]
fn assert_proved(result: &Value) {
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
}

#[test]
fn a_small_budget_goes_from_a_model_to_a_proven_draft() {
    let bench = Bench::new();
    let fit = |time: &str, engines: &str| {
        ended(&bench.within(time, &[&SHORT[..], &["--for", engines]].concat()))
    };
    let (said, told) = fit("30s", "llamacpp,longdraft");
    for phase in ["[prompts]", "[measure]", "[answers]", "[training]"] {
        assert!(told.contains(phase), "{phase} is missing: {told}");
    }
    let parts = ["expected: tau", "in full chains of", "longdraft serve", "--temperature 0"];
    for part in parts.into_iter().chain(["longdraft generate", "llama"]) {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
    let result = last_json(&said);
    assert_proved(&result);
    let cells = result["record"]["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 4);
    // The phases share one budget.
    let round = &bench.state()["rounds"][0];
    let of = |key: &str| round["plan"][key].as_f64().expect("seconds");
    assert!(of("answering") + of("training") + of("proof") <= 1.05 * 30.0, "{round}");
    let output = &bench.output;
    for file in ["report.html", "draft/README.md", "draft/draft_model_weights.safetensors"] {
        assert!(output.join(file).is_file(), "{file} is missing");
    }
    let card = std::fs::read_to_string(output.join("draft/README.md")).expect("card");
    assert!(card.contains("equal outputs") && card.contains("--draft "), "{card}");
    assert!(output.join("exports/llamacpp").is_dir());

    // The same command has nothing to do; more time adds a round to the same draft.
    let before = std::fs::read(output.join("training-1/metrics.jsonl")).expect("metrics");
    let held_out = bench.held_out();
    assert!(fit("30s", "llamacpp").0.contains("already finished"));
    let (said, told) = fit("55s", "longdraft");
    let longer = last_json(&said);
    assert_eq!(longer["finished"], true);
    assert_eq!(longer["state"]["rounds"].as_array().map(Vec::len), Some(2));
    // The better one of both drafts is the result, and was proved.
    let kept = longer["state"]["rounds"][1]["kept"].as_u64().expect("compared");
    assert!(told.contains(&format!("that of round {kept} is kept")), "{told}");
    // An export of an earlier call is of that draft, too.
    assert_eq!(longer["state"]["exported"]["llamacpp"]["round"], kept);
    assert!(output.join(format!("training-{kept}/decode.json")).is_file());
    assert_eq!(output.join("training-2/decode.json").is_file(), kept == 2);
    let config = std::fs::read_to_string(output.join("training-2/config.yaml")).expect("config");
    assert!(config.contains("training-1"), "the second round starts from the first: {config}");
    assert_eq!(std::fs::read(output.join("training-1/metrics.jsonl")).expect("metrics"), before);
    assert_eq!(bench.held_out(), held_out);
}

#[test]
fn killed_in_every_phase_it_goes_on_with_the_same_split() {
    let bench = Bench::new();
    let arguments = bench.within("40s", &SHORT);
    let mut held_out = None;
    let mut killed = Vec::new();
    for phase in PHASES {
        let mut child = start(&mut longdraft(&arguments));
        let mut status = None;
        wait_until(phase, || {
            status = child.try_wait().expect("wait");
            status.is_some() || bench.state()["phase"] == phase
        });
        if let Some(status) = status {
            assert!(status.success(), "a fit that went on failed before {phase}");
        } else {
            if phase != "delivery" {
                // Not at its very beginning.
                std::thread::sleep(Duration::from_millis(300));
            }
            if phase == "training" && child.try_wait().expect("wait").is_none() {
                let refused = fail(&arguments, 1);
                assert!(refused.contains("another process works in this folder"), "{refused}");
            }
            kill(child);
            killed.push(phase);
        }
        if killed.last() == Some(&"training") {
            // A look at the plan changes nothing of what has begun.
            succeed(&[&arguments[..], &["--plan"]].concat());
            let rounds = &bench.state()["rounds"];
            assert!(rounds.as_array().is_some_and(|rounds| rounds.len() == 1), "{rounds}");
            assert!(rounds[0]["answers"].is_object() && rounds[0]["plan"].is_object(), "{rounds}");
        }
        let split = bench.held_out();
        assert_eq!(*held_out.get_or_insert_with(|| split.clone()), split);
    }
    assert!(killed.len() >= 4, "only killed in {killed:?}");
    let result = last_json(&succeed(&arguments));
    assert_proved(&result);
    assert_eq!(Some(bench.held_out()), held_out);
    let draft = bench.output.join("draft").display().to_string();
    let generate = ["generate", "--target", &bench.target, "--draft", &draft, "--prompt", "Once"];
    succeed(&[&generate[..], &["--max-tokens", "4"]].concat());
}

#[test]
fn a_plan_measures_and_stops() {
    let bench = Bench::new();
    let plan = |time: &str| last_json(&succeed(&bench.within(time, &["--plan", "--json"])));
    let short = plan("1m");
    let of = |plan: &Value, key: &str| plan["plan"][key].as_f64().expect("a number");
    for key in ["answering", "training", "proof", "disk", "memory", "steps"] {
        assert!(of(&short, key) > 0.0, "{key}: {short}");
    }
    for speed in ["step", "capture"] {
        assert!(short["trial"][speed].as_f64().is_some_and(|seconds| seconds > 0.0), "{short}");
    }
    let lookup = short["machine"]["lookup_interval"].as_array().expect("measured");
    let of_lookup = short["machine"]["lookup"].as_f64();
    assert!(lookup[0].as_f64() <= of_lookup && of_lookup <= lookup[1].as_f64(), "{short}");
    for range in ["tau", "full_tau", "speed_up", "with_lookup"] {
        let range = &short["plan"][range];
        assert!(
            range["low"].as_f64() <= range["middle"].as_f64()
                && range["middle"].as_f64() <= range["high"].as_f64()
        );
    }
    let begun = |name: &str| bench.output.join(name).exists();
    assert!(!begun("training-1") && !begun("data/answers.jsonl"));
    let long = plan("2h");
    assert!(of(&long, "steps") > of(&short, "steps"), "{long}");
    // What was measured is kept.
    assert_eq!(long["machine"], short["machine"]);
    // As if an earlier call had had time for short rows alone: they say little of long ones.
    bench.change(|known| known["trial"]["row_tokens"] = json!(16));
    let anew = plan("2h");
    assert!(anew["trial"]["row_tokens"].as_u64() >= Some(128), "{anew}");
    assert_eq!(plan("2h")["trial"], anew["trial"]);
}

#[test]
fn a_proof_goes_on_after_a_kill() {
    let bench = Bench::new();
    let arguments = bench.within("30s", &["--max-tokens", "32", "--anyway", "--json"]);
    let left = bench.output.join("decode-unfinished.json");
    killed_when(&mut longdraft(&arguments), "the proof", || left.is_file());
    // As if the machine had been measured far too fast, and the time were over.
    bench.change(|known| {
        known["machine"]["passes"] = json!([[1, 1e-9], [16, 1e-9]]);
        known["machine"]["prefill"] = json!(1e-12);
        known["rounds"][0]["plan"]["proof"] = json!(1.0);
        known["rounds"][0]["spent"] = json!(1e6);
    });
    let set_aside = bench.held_out();
    let (said, told) = ended(&arguments);
    assert!(told.contains("going on after "), "{told}");
    let result = last_json(&said);
    let cells = result["record"]["cells"].as_array().expect("cells");
    assert_eq!((cells.len(), &result["lossless"]), (4, &true.into()));
    for cell in cells {
        let prompts = cell["figures"]["prompts"].as_u64().expect("a number") as usize;
        assert!((2..=set_aside.lines().count()).contains(&prompts), "{cell}");
    }
    assert!(!left.exists());
}

#[test]
fn prompts_of_ones_own_in_any_language_are_taken() {
    let bench = Bench::new();
    let rows = (0..300).map(
        |i| json!({ "prompt": format!("¿Cuántas manzanas hay en {i} cajas? 苹果 {}", i % 290) }),
    );
    let prompts = bench.prompts(rows);
    succeed(&bench.within("1m", &["--prompts", &prompts, "--plan"]));
    let split = &bench.state()["split"];
    assert_eq!((&split["shipped"], &split["held_out"]), (&0.into(), &32.into()));
    // Some of the program's own are set aside beside them.
    assert_eq!(split["general"], 8);
    let held_out = bench.held_out();
    let kinds = ["own prompts", "general mix"].map(|kind| held_out.matches(kind).count());
    assert_eq!(kinds, [32, 8]);
    // Another set of prompts is another fit.
    let others = bench.prompts((0..250).map(|i| json!({ "prompt": format!("other {i}") })));
    let error = fail(&bench.within("1m", &["--prompts", &others, "--plan"]), 2);
    assert!(error.contains("the prompts"), "{error}");
}

#[test]
fn every_turn_of_a_conversation_is_planned() {
    let bench = Bench::new();
    let rows = (0..=255).map(|i: u8| {
        let subject: String = [i / 26, i % 26].map(|n| char::from(b'a' + n)).into_iter().collect();
        json!({ "turns": [format!("What is {subject}?"), "And why?", "Since when?"] })
    });
    let prompts = bench.prompts(rows);
    let arguments = bench.within("1m", &["--prompts", &prompts, "--plan", "--json"]);
    let planned = last_json(&succeed(&arguments));
    let of = |part: &str, key: &str| planned[part][key].as_f64().expect("a number");
    // 32 of three turns, and 8 of the program's own.
    let turns = of("machine", "turns");
    assert!((turns - (32.0 * 3.0 + 8.0) / 40.0).abs() < 1e-9, "{planned}");
    assert!((of("machine", "long_turns") - 3.0).abs() < 1e-9);
    assert!(of("machine", "prompt") > of("machine", "first_prompt"), "{planned}");
    let of_answer = 0.6 * 256.0;
    let tokens = of("plan", "answers") * turns * of_answer;
    assert!((of("plan", "answer_tokens") - tokens).abs() < 1e-6 * tokens, "{planned}");
}

#[test]
fn a_training_that_diverges_begins_anew_at_a_lower_rate() {
    let bench = Bench::new();
    let arguments = bench.within("40s", &SHORT);
    let begins = || bench.state()["rounds"][0]["training"].is_object();
    killed_when(&mut longdraft(&arguments), "the training", begins);
    let _ = std::fs::remove_dir_all(bench.output.join("training-1"));
    // As if it had been found best.
    let mut chosen = 0.0;
    bench.change(|known| {
        let rate = &mut known["rounds"][0]["training"]["schedule"]["learning_rate"];
        chosen = rate.as_f64().expect("a rate");
        *rate = json!(1e38);
    });
    let (said, told) = ended(&arguments);
    assert!(told.contains("the training diverged (") && told.contains("it begins anew"), "{told}");
    let round = &bench.state()["rounds"][0];
    let rate = round["training"]["schedule"]["learning_rate"].as_f64().expect("a rate");
    assert_eq!(round["lowered"], 1);
    assert!((3.0 * rate / chosen - 1.0).abs() < 1e-6, "{rate} {chosen}");
    assert_proved(&last_json(&said));
}

/// Prompts of so many words each: pieces of the shipped books that begin at different places.
fn long_prompts(bench: &Bench, words: usize) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let books = root.join("../../assets/corpus/books-excerpt.jsonl");
    let text = std::fs::read_to_string(books).expect("the shipped text");
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let text: Vec<String> =
        rows.map(|row| row["text"].as_str().expect("text").to_owned()).collect();
    let text = text.join(" ");
    let all: Vec<&str> = text.split_whitespace().collect();
    let piece = |row: usize| {
        let from = all.iter().cycle().skip(31 * row);
        from.take(words).copied().collect::<Vec<_>>().join(" ")
    };
    bench.prompts((0..260).map(|row| json!({ "prompt": piece(row) })))
}

#[test]
fn long_prompts_are_learned_in_stages() {
    let bench = Bench::new();
    let prompts = long_prompts(&bench, 900);
    let arguments = bench.within("60s", &[&SHORT[..], &["--prompts", &prompts]].concat());
    let (told, _) = ended(&arguments);
    for part in ["2 stages, because rows are long", "base", "all text in whole rows"] {
        assert!(told.contains(part), "{part} is missing: {told}");
    }
    let result = last_json(&told);
    assert_proved(&result);
    let round = &bench.state()["rounds"][0];
    let (plan, trained) = (&round["plan"], &round["training"]["stages"]);
    let of = |stage: &Value, key: &str| stage[key].as_f64().expect("a number");
    let planned = plan["stages"].as_array().expect("stages");
    let names: Vec<&str> = planned.iter().filter_map(|stage| stage["name"].as_str()).collect();
    // The target has no chat template, so that nothing tells answers from prompts.
    assert_eq!(names, ["base", "long"]);
    assert_eq!(
        (&planned[0]["row_tokens"], &planned[1]["row_tokens"]),
        (&512.into(), &plan["row_tokens"])
    );
    assert!(of(&planned[1], "row_tokens") >= 2048.0, "{plan}");
    let seconds: f64 = planned.iter().map(|stage| of(stage, "seconds")).sum();
    assert!((seconds - of(plan, "training")).abs() < 1e-6, "{plan}");
    assert!(of(plan, "answering") + of(plan, "training") + of(plan, "proof") <= 1.05 * 60.0);
    // Texts are cut into the rows of the first stage, and lose nothing.
    assert_eq!(trained[0]["data"]["row_tokens"], 512);
    let run = bench.output.join("training-1");
    for file in [
        "curriculum.json",
        "decode.json",
        "base/metrics.jsonl",
        "base/checkpoints/last/state.json",
        "long/checkpoints/last/state.json",
    ] {
        assert!(run.join(file).is_file(), "{file} is missing");
    }
    assert!(!run.join("metrics.jsonl").exists() && !run.join("held_out.json").exists());
    let config = std::fs::read_to_string(run.join("long/config.yaml")).expect("config");
    assert!(config.contains("base/checkpoints/last"), "it goes on from the first stage: {config}");
    let page = std::fs::read_to_string(bench.output.join("report.html")).expect("page");
    let page = page.replace("&#x2f;", "/");
    assert!(page.contains("fitted draft / base") && page.contains("fitted draft / long"));
    assert!(bench.output.join("draft/draft_model_weights.safetensors").is_file());
    // The same command has nothing to do.
    assert!(succeed(&arguments).contains("already finished"));
}

#[test]
fn a_stage_that_diverges_leaves_the_one_before_as_it_was() {
    let bench = Bench::new();
    let prompts = long_prompts(&bench, 900);
    // A busy machine reaches the second stage, too.
    let arguments = bench.within("90s", &[&SHORT[..], &["--prompts", &prompts]].concat());
    let run_folder = bench.output.join("training-1");
    let begins = || run_folder.join("long").is_dir();
    killed_when(&mut longdraft(&arguments), "the second stage", begins);
    let base = || std::fs::read(run_folder.join("base/metrics.jsonl")).expect("metrics");
    let before = base();
    std::fs::remove_dir_all(run_folder.join("long")).expect("removed");
    // As if a rate had been chosen that is far too high for it.
    bench.change(|known| {
        known["rounds"][0]["training"]["stages"][1]["schedule"]["learning_rate"] = json!(1e38);
    });
    let (said, told) = ended(&arguments);
    assert!(told.contains("the training diverged (in stage long, "), "{told}");
    assert!(told.contains("[stage 1/2] base") && told.contains("already finished"), "{told}");
    // What was finished is not trained again.
    assert_eq!(base(), before);
    let round = &bench.state()["rounds"][0];
    let stages = round["training"]["stages"].as_array().expect("stages");
    if round["lowered"] == 0 {
        // There was no time for it.
        assert!(told.contains("the draft of the stage before is taken"), "{told}");
        assert_eq!(stages.len(), 1);
    } else {
        assert!(told.contains("it begins anew") && stages.len() == 2, "{told}");
        // The rate that is told is the stage's own.
        let rate = stages[1]["schedule"]["learning_rate"].as_f64().expect("a rate");
        assert!(told.contains(&format!("a lower learning rate, {rate:.2e}")), "{told}");
    }
    assert_proved(&last_json(&said));
}

#[test]
fn what_cannot_work_is_refused_before_any_work() {
    let shop = Workshop::new();
    let (target, output) = (shop.target.display().to_string(), shop.path("out"));
    let empty = shop.path("empty.jsonl");
    std::fs::write(&empty, "{\"prompt\": \"\"}\n{\"x\": 1}\n").expect("rows");
    let file = shop.path("a-file");
    std::fs::write(&file, "x").expect("file");
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
        let error = fail(&arguments, 2);
        assert!(error.contains(words), "{more:?}: {error}");
    }
    assert!(!Path::new(&output).join("training-1").exists());
    // Trainings name the folder in their configurations, which are text.
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt;
        let odd = shop.folder.path().join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
        let output = longdraft(&["fit", &target]).arg("--output").arg(&odd).output();
        let output = output.expect("the binary starts");
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("this name is not UTF-8") && !odd.exists());
    }
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
    let error = fail(&arguments, 1);
    assert!(error.contains("cannot resume: ") && error.contains("train.seed was 0"), "{error}");
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
    let error = fail(&[&arguments[..], &["--for", "longspec"]].concat(), 2);
    assert!(
        error.contains("--for longspec: ") && error.contains("leave out this engine"),
        "{error}"
    );
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
            "budget": 40.0, "spent": 39.5, "plan": null, "answers": null, "training": null,
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
