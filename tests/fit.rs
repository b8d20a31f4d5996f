//! `fit` through the binary: on the shipped target, killed in every phase, with bad input.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{self, Workshop, fail, last_json, longdraft, run, stderr, stdout, succeed};

/// The phases of a fit in their order.
const PHASES: [&str; 5] = ["measure", "answers", "training", "proof", "delivery"];

fn demonstration() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("../../assets/target/demonstration.gguf").display().to_string()
}

fn state(output: &Path) -> Value {
    let text = std::fs::read_to_string(output.join("fit.json")).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

/// Prompts of one's own: many enough that no others are added.
fn own_prompts(folder: &Path, rows: impl Iterator<Item = Value>) -> String {
    let path = folder.join("mine.jsonl");
    let text: String = rows.map(|row| format!("{row}\n")).collect();
    std::fs::write(&path, text).expect("prompts");
    path.display().to_string()
}

fn output_of(folder: &tempfile::TempDir) -> (PathBuf, String) {
    let output = folder.path().join("fitted draft");
    let name = output.display().to_string();
    (output, name)
}

/// Runs the binary, and kills it as soon as a part of its work begins.
fn killed_when(arguments: &[&str], part: &str, begins: impl Fn() -> bool) {
    let mut child =
        longdraft(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let started = Instant::now();
    while !begins() {
        assert!(started.elapsed() < Duration::from_mins(5), "{part} never begins");
        assert!(child.try_wait().expect("wait").is_none(), "it ended before {part}");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("kill");
    child.wait().expect("reap");
}

#[test]
fn a_small_budget_goes_from_a_model_to_a_proven_draft() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let fit = |time: &str, engines: &str| {
        let arguments = [
            "fit",
            &target,
            "--time",
            time,
            "--for",
            engines,
            "--output",
            &name,
            "--max-tokens",
            "48",
            "--anyway",
            "--json",
        ];
        let output = run(&arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        output
    };
    let first = fit("30s", "llamacpp,longdraft");
    let told = stderr(&first);
    for phase in ["[prompts]", "[measure]", "[answers]", "[training]"] {
        assert!(told.contains(phase), "{phase} is missing: {told}");
    }
    let said = stdout(&first);
    let parts = [
        "expected: tau",
        "in full chains of",
        "longdraft serve",
        "--temperature 0",
        "longdraft generate",
        "llama",
    ];
    for part in parts {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
    let result = last_json(&said);
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
    let cells = result["record"]["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 4);
    // The phases share one budget.
    let round = &state(&output)["rounds"][0];
    let of = |key: &str| round["plan"][key].as_f64().expect("seconds");
    assert!(of("answering") + of("training") + of("proof") <= 1.05 * 30.0, "{round}");
    for file in [
        "report.html",
        "draft/README.md",
        "draft/draft_model_weights.safetensors",
        "data/held-out.jsonl",
    ] {
        assert!(output.join(file).is_file(), "{file} is missing");
    }
    let card = std::fs::read_to_string(output.join("draft/README.md")).expect("card");
    assert!(card.contains("equal outputs") && card.contains("--draft "), "{card}");
    assert!(output.join("exports/llamacpp").is_dir());

    // The same command has nothing to do; more time adds a round to the same draft.
    let before = std::fs::read(output.join("training-1/metrics.jsonl")).expect("metrics");
    let held_out = std::fs::read(output.join("data/held-out.jsonl")).expect("held out");
    assert!(stdout(&fit("30s", "llamacpp")).contains("already finished"));
    let again = fit("55s", "longdraft");
    let longer = last_json(&stdout(&again));
    assert_eq!(longer["finished"], true);
    assert_eq!(longer["state"]["rounds"].as_array().map(Vec::len), Some(2));
    // The better one of both drafts is the result, and was proved.
    let kept = longer["state"]["rounds"][1]["kept"].as_u64().expect("compared");
    assert!(
        stderr(&again).contains(&format!("that of round {kept} is kept")),
        "{}",
        stderr(&again)
    );
    // An export of an earlier call is of that draft, too.
    assert_eq!(longer["state"]["exported"]["llamacpp"]["round"], kept);
    assert!(output.join(format!("training-{kept}/decode.json")).is_file());
    assert_eq!(output.join("training-2/decode.json").is_file(), kept == 2);
    let config = std::fs::read_to_string(output.join("training-2/config.yaml")).expect("config");
    assert!(config.contains("training-1"), "the second round starts from the first: {config}");
    assert_eq!(std::fs::read(output.join("training-1/metrics.jsonl")).expect("metrics"), before);
    assert_eq!(std::fs::read(output.join("data/held-out.jsonl")).expect("held out"), held_out);
}

#[test]
fn killed_in_every_phase_it_goes_on_with_the_same_split() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let arguments = [
        "fit",
        &target,
        "--time",
        "40s",
        "--output",
        &name,
        "--max-tokens",
        "48",
        "--anyway",
        "--json",
    ];
    let mut held_out = None;
    let mut killed = Vec::new();
    for phase in PHASES {
        let mut child = longdraft(&arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let started = Instant::now();
        loop {
            if state(&output)["phase"] == phase {
                // Not at its very beginning.
                std::thread::sleep(Duration::from_millis(if phase == "delivery" {
                    0
                } else {
                    300
                }));
                if phase == "training" && child.try_wait().expect("wait").is_none() {
                    let refused = fail(&arguments, 1);
                    assert!(refused.contains("another process works in this folder"), "{refused}");
                }
                child.kill().expect("kill");
                killed.push(phase);
                break;
            }
            if let Some(status) = child.try_wait().expect("wait") {
                assert!(status.success(), "a fit that went on failed before {phase}");
                break;
            }
            assert!(started.elapsed() < Duration::from_mins(5), "{phase} never comes");
            std::thread::sleep(Duration::from_millis(2));
        }
        child.wait().expect("reap");
        if killed.last() == Some(&"training") {
            // A look at the plan changes nothing of what has begun.
            succeed(&[&arguments[..], &["--plan"]].concat());
            let rounds = &state(&output)["rounds"];
            assert!(rounds.as_array().is_some_and(|rounds| rounds.len() == 1), "{rounds}");
            assert!(rounds[0]["answers"].is_object() && rounds[0]["plan"].is_object(), "{rounds}");
        }
        let split = std::fs::read(output.join("data/held-out.jsonl")).expect("set aside");
        assert_eq!(*held_out.get_or_insert_with(|| split.clone()), split);
    }
    assert!(killed.len() >= 4, "only killed in {killed:?}");
    let result = last_json(&succeed(&arguments));
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
    assert_eq!(Some(std::fs::read(output.join("data/held-out.jsonl")).expect("split")), held_out);
    let draft = output.join("draft").display().to_string();
    succeed(&[
        "generate",
        "--target",
        &target,
        "--draft",
        &draft,
        "--prompt",
        "Once",
        "--max-tokens",
        "4",
    ]);
}

#[test]
fn a_plan_measures_and_stops() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let plan = |time: &str| {
        last_json(&succeed(&[
            "fit", &target, "--time", time, "--plan", "--output", &name, "--json",
        ]))
    };
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
    assert!(!output.join("training-1").exists() && !output.join("data/answers.jsonl").exists());
    let long = plan("2h");
    assert!(of(&long, "steps") > of(&short, "steps"), "{long}");
    // What was measured is kept.
    assert_eq!(long["machine"], short["machine"]);
    // As if an earlier call had had time for short rows alone: they say little of long ones.
    let mut known = state(&output);
    known["trial"]["row_tokens"] = json!(16);
    std::fs::write(output.join("fit.json"), known.to_string()).expect("state");
    let anew = plan("2h");
    assert!(anew["trial"]["row_tokens"].as_u64() >= Some(128), "{anew}");
    assert_eq!(plan("2h")["trial"], anew["trial"]);
}

#[test]
fn a_proof_goes_on_after_a_kill() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let arguments = [
        "fit",
        &target,
        "--time",
        "30s",
        "--output",
        &name,
        "--max-tokens",
        "32",
        "--anyway",
        "--json",
    ];
    let left = output.join("decode-unfinished.json");
    killed_when(&arguments, "the proof", || left.is_file());
    // As if the machine had been measured far too fast, and the time were over.
    let mut known = state(&output);
    known["machine"]["passes"] = json!([[1, 1e-9], [16, 1e-9]]);
    known["machine"]["prefill"] = json!(1e-12);
    known["rounds"][0]["plan"]["proof"] = json!(1.0);
    known["rounds"][0]["spent"] = json!(1e6);
    std::fs::write(output.join("fit.json"), known.to_string()).expect("state");
    let set_aside = std::fs::read_to_string(output.join("data/held-out.jsonl")).expect("set aside");
    let ended = run(&arguments);
    let told = stderr(&ended);
    assert!(ended.status.success(), "{told}");
    assert!(told.contains("going on after "), "{told}");
    let result = last_json(&stdout(&ended));
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
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let rows = (0..300).map(
        |i| json!({ "prompt": format!("¿Cuántas manzanas hay en {i} cajas? 苹果 {}", i % 290) }),
    );
    let prompts = own_prompts(folder.path(), rows);
    let told =
        run(&["fit", &target, "--prompts", &prompts, "--time", "1m", "--plan", "--output", &name]);
    assert!(told.status.success(), "{}", stderr(&told));
    let split = &state(&output)["split"];
    assert_eq!((&split["shipped"], &split["held_out"]), (&0.into(), &32.into()));
    // Some of the program's own are set aside beside them.
    assert_eq!(split["general"], 8);
    let held_out = std::fs::read_to_string(output.join("data/held-out.jsonl")).expect("set aside");
    let kinds = ["own prompts", "general mix"].map(|kind| held_out.matches(kind).count());
    assert_eq!(kinds, [32, 8]);
    // Another set of prompts is another fit.
    let others =
        own_prompts(folder.path(), (0..250).map(|i| json!({ "prompt": format!("other {i}") })));
    let error = fail(
        &["fit", &target, "--prompts", &others, "--time", "1m", "--plan", "--output", &name],
        2,
    );
    assert!(error.contains("the prompts"), "{error}");
}

#[test]
fn every_turn_of_a_conversation_is_planned() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (_, name) = output_of(&folder);
    let target = demonstration();
    let rows = (0..=255).map(|i: u8| {
        let subject: String = [i / 26, i % 26].map(|n| char::from(b'a' + n)).into_iter().collect();
        json!({ "turns": [format!("What is {subject}?"), "And why?", "Since when?"] })
    });
    let prompts = own_prompts(folder.path(), rows);
    let arguments = [
        "fit",
        &target,
        "--prompts",
        &prompts,
        "--time",
        "1m",
        "--plan",
        "--output",
        &name,
        "--json",
    ];
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
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let arguments = [
        "fit",
        &target,
        "--time",
        "40s",
        "--output",
        &name,
        "--max-tokens",
        "48",
        "--anyway",
        "--json",
    ];
    killed_when(&arguments, "the training", || state(&output)["rounds"][0]["training"].is_object());
    let _ = std::fs::remove_dir_all(output.join("training-1"));
    // As if it had been found best.
    let mut known = state(&output);
    let rate = &mut known["rounds"][0]["training"]["schedule"]["learning_rate"];
    let chosen = rate.as_f64().expect("a rate");
    *rate = json!(1e38);
    std::fs::write(output.join("fit.json"), known.to_string()).expect("state");
    let ended = run(&arguments);
    let told = stderr(&ended);
    assert!(ended.status.success(), "{told}");
    assert!(told.contains("the training diverged (") && told.contains("it begins anew"), "{told}");
    let round = &state(&output)["rounds"][0];
    let rate = round["training"]["schedule"]["learning_rate"].as_f64().expect("a rate");
    assert_eq!(round["lowered"], 1);
    assert!((3.0 * rate / chosen - 1.0).abs() < 1e-6, "{rate} {chosen}");
    let result = last_json(&stdout(&ended));
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
}

/// Prompts of so many words each: pieces of the shipped books that begin at different places.
fn long_prompts(folder: &Path, words: usize) -> String {
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
    own_prompts(folder, (0..260).map(|row| json!({ "prompt": piece(row) })))
}

/// Arguments of a fit of long prompts within a time.
fn long_fit<'a>(target: &'a str, prompts: &'a str, output: &'a str, time: &'a str) -> Vec<&'a str> {
    let asked = ["fit", target, "--prompts", prompts, "--time", time, "--output", output];
    [&asked[..], &["--max-tokens", "48", "--anyway", "--json"]].concat()
}

#[test]
fn long_prompts_are_learned_in_stages() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let (target, prompts) = (demonstration(), long_prompts(folder.path(), 900));
    let arguments = long_fit(&target, &prompts, &name, "60s");
    let ended = run(&arguments);
    assert!(ended.status.success(), "{}", stderr(&ended));
    let told = stdout(&ended);
    for part in ["2 stages, because rows are long", "base", "all text in whole rows"] {
        assert!(told.contains(part), "{part} is missing: {told}");
    }
    let result = last_json(&told);
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
    let round = &state(&output)["rounds"][0];
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
    let run = output.join("training-1");
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
    let page = std::fs::read_to_string(output.join("report.html")).expect("page");
    let page = page.replace("&#x2f;", "/");
    assert!(page.contains("fitted draft / base") && page.contains("fitted draft / long"));
    assert!(output.join("draft/draft_model_weights.safetensors").is_file());
    // The same command has nothing to do.
    assert!(succeed(&arguments).contains("already finished"));
}

#[test]
fn a_stage_that_diverges_leaves_the_one_before_as_it_was() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let (target, prompts) = (demonstration(), long_prompts(folder.path(), 900));
    // A busy machine reaches the second stage, too.
    let arguments = long_fit(&target, &prompts, &name, "90s");
    let run_folder = output.join("training-1");
    killed_when(&arguments, "the second stage", || run_folder.join("long").is_dir());
    let base = || std::fs::read(run_folder.join("base/metrics.jsonl")).expect("metrics");
    let before = base();
    std::fs::remove_dir_all(run_folder.join("long")).expect("removed");
    // As if a rate had been chosen that is far too high for it.
    let mut known = state(&output);
    known["rounds"][0]["training"]["stages"][1]["schedule"]["learning_rate"] = json!(1e38);
    std::fs::write(output.join("fit.json"), known.to_string()).expect("state");
    let ended = run(&arguments);
    let told = stderr(&ended);
    assert!(ended.status.success(), "{told}");
    assert!(told.contains("the training diverged (in stage long, "), "{told}");
    assert!(told.contains("[stage 1/2] base") && told.contains("already finished"), "{told}");
    // What was finished is not trained again.
    assert_eq!(base(), before);
    let round = &state(&output)["rounds"][0];
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
    let result = last_json(&stdout(&ended));
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
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
    let target = shop.target.display().to_string();
    let output = shop.path("out");
    let rows = (0..30).map(|i| json!({ "prompt": format!("say {i}") }));
    let prompts = own_prompts(shop.folder.path(), rows);
    let arguments = [
        "fit",
        &target,
        "--prompts",
        &prompts,
        "--time",
        "30s",
        "--max-tokens",
        "40",
        "--anyway",
        "--output",
        &output,
        "--json",
    ];
    let ended = run(&arguments);
    let told = stderr(&ended);
    assert!(ended.status.success(), "{told}");
    assert!(told.contains("no chat template") && told.contains("there are few"), "{told}");
    assert_eq!(last_json(&stdout(&ended))["lossless"], true);
    // A training with other settings is not gone on from, and the way out is one that `fit` has.
    let mut known = state(Path::new(&output));
    let round = &mut known["rounds"][0];
    for done in ["trained", "proved", "delivered"] {
        round[done] = json!(false);
    }
    round["lowered"] = json!(0);
    round["training"]["train"]["seed"] = json!(99);
    std::fs::write(Path::new(&output).join("fit.json"), known.to_string()).expect("state");
    let error = fail(&arguments, 1);
    assert!(error.contains("cannot resume: ") && error.contains("train.seed was 0"), "{error}");
    assert!(error.contains("move this folder away") && !error.contains("--force"), "{error}");
}

#[test]
fn an_engine_that_does_not_compute_the_draft_is_told_before_the_time_is_spent() {
    let shop = Workshop::new();
    support::write_target(&shop.target, &support::tiny_config("qwen3"));
    let (target, output) = (shop.target.display().to_string(), shop.path("out"));
    let rows = (0..30).map(|i| json!({ "prompt": format!("say {i}") }));
    let prompts = own_prompts(shop.folder.path(), rows);
    let arguments = [
        "fit",
        &target,
        "--prompts",
        &prompts,
        "--time",
        "30s",
        "--max-tokens",
        "40",
        "--method",
        "glide",
        "--anyway",
        "--output",
        &output,
    ];
    let error = fail(&[&arguments[..], &["--for", "longspec"]].concat(), 2);
    assert!(
        error.contains("--for longspec: ") && error.contains("leave out this engine"),
        "{error}"
    );
    assert!(!Path::new(&output).join("data/answers.jsonl").exists());
    // Without it the same folder serves.
    succeed(&[&arguments[..], &["--plan"]].concat());
}

/// The binary where files may not grow beyond so many KiB, as on a full disk.
#[cfg(unix)]
fn on_a_full_disk(kib: usize, arguments: &[&str]) -> std::process::Output {
    let script = format!("trap '' XFSZ; ulimit -f {kib}; exec \"$@\" --threads 1");
    let mut command = std::process::Command::new("bash");
    command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_longdraft")]).args(arguments);
    command.env("NO_COLOR", "1").output().expect("bash")
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_told_and_the_same_command_goes_on() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let rows = (0..300).map(|i| json!({ "prompt": format!("What is {i} and {}?", i + 1) }));
    let prompts = own_prompts(folder.path(), rows);
    let arguments = [
        "fit",
        &target,
        "--prompts",
        &prompts,
        "--time",
        "40s",
        "--output",
        &name,
        "--max-tokens",
        "48",
        "--anyway",
    ];
    // Too little for the prompts: nothing was begun.
    let ended = on_a_full_disk(4, &arguments);
    let told = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains(".jsonl") && !told.contains("panicked"), "{told}");
    // Enough for these, and too little for a checkpoint: found out by the trial, before the time is spent.
    let ended = on_a_full_disk(64, &arguments);
    let told = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("[measure]") && !told.contains("panicked"), "{told}");
    assert!(!output.join("work").exists() && !output.join("training-1").exists());
    // The disk fills up while the target answers.
    killed_when(&arguments, "answering", || state(&output)["phase"] == "answers");
    let ended = on_a_full_disk(48, &arguments);
    let told = stderr(&ended);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("error: ") && told.contains("the same command goes on"), "{told}");
    assert!(!told.contains("panicked"), "{told}");
    // With room it goes on.
    let result = last_json(&succeed(&[&arguments[..], &["--json"]].concat()));
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
}

#[test]
fn a_time_that_the_measurement_takes_is_refused_and_the_measurement_kept() {
    let folder = tempfile::tempdir().expect("tempdir");
    let (output, name) = output_of(&folder);
    let target = demonstration();
    let arguments =
        ["fit", &target, "--time", "40s", "--output", &name, "--max-tokens", "48", "--anyway"];
    succeed(&[&arguments[..], &["--plan"]].concat());
    // As if that had taken long.
    let mut known = state(&output);
    let machine = known["machine"].clone();
    known["rounds"] = json!([{
        "budget": 40.0, "spent": 39.5, "plan": null, "answers": null, "training": null, "trained": false,
        "proved": false, "delivered": false,
    }]);
    std::fs::write(output.join("fit.json"), known.to_string()).expect("state");
    let error = fail(&arguments, 2);
    assert!(error.contains("--time 40s is too short: measuring this machine took"), "{error}");
    assert!(error.contains("the same command has all of its time now"), "{error}");
    assert_eq!((&state(&output)["machine"], &state(&output)["rounds"]), (&machine, &json!([])));
    let told = run(&arguments);
    assert!(
        told.status.success() && stderr(&told).contains("40s is little time"),
        "{}",
        stderr(&told)
    );
}
