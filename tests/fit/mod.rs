//! `fit` through the binary: on the shipped target, killed in every phase, with bad input.

mod refused;
mod stages;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::files::{Changes, change_json, demonstration, json_so_far, read_rows};
use crate::support::processes::{kill, killed_when, start, wait_until};
use crate::support::{
    self, fail, fail_with, finished, last_json, longdraft, require_words, run, stderr, stdout,
    succeed, succeeded, told_by,
};

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
    let output = succeeded(run(arguments));
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
    require_words(&told, &["[prompts]", "[measure]", "[answers]", "[training]"]);
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
    succeed(&bench.within("2m", &[&SHORT[..], &["--plan"]].concat()));
    assert_eq!(bench.state()["phase"], "finished");
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

    // A further round that cannot pay is not begun, and the draft that is there is told. Its method stays.
    bench.change(|known| known["machine"]["passes"] = json!([[1, 1e-3], [16, 1.0]]));
    let other = if bench.state()["trial"]["method"] == "glide" { "eagle3" } else { "glide" };
    let more = ["--max-tokens", "48", "--json", "--method", other];
    let (said, told) = ended(&bench.within("3m", &more));
    assert!(said.contains("no draft is expected to pay here"), "{said}");
    assert!(told.contains(&format!("--method {other} is not followed")), "{told}");
    assert_eq!(last_json(&said)["state"]["rounds"].as_array().map(Vec::len), Some(2));
    assert_eq!(bench.state()["phase"], "finished");
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
                let mut changes = Changes::of(&bench.output);
                wait_until("work", || {
                    changes.count() >= 5
                        || bench.state()["phase"] != phase
                        || child.try_wait().expect("wait").is_some()
                });
            }
            if phase == "training" && child.try_wait().expect("wait").is_none() {
                fail_with(&arguments, 1, &["another process works in this folder"]);
            }
            kill(child);
            killed.push(phase);
        }
        if killed.last() == Some(&"training") {
            // A look at the plan changes nothing of what has begun.
            let phase_before = bench.state()["phase"].clone();
            succeed(&[&arguments[..], &["--plan"]].concat());
            let rounds = &bench.state()["rounds"];
            assert!(rounds.as_array().is_some_and(|rounds| rounds.len() == 1), "{rounds}");
            assert!(rounds[0]["answers"].is_object() && rounds[0]["plan"].is_object(), "{rounds}");
            assert_eq!(bench.state()["phase"], phase_before);
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
fn a_call_that_trains_nothing_is_told_to_have_stopped_once() {
    let bench = Bench::new();
    let stops = || {
        let events = read_rows(bench.output.join("events.jsonl"));
        events.iter().filter(|line| line["event"] == "stopped").count()
    };
    let arguments = bench.within("1m", &["--max-tokens", "48"]);
    succeed(&[&arguments[..], &["--plan"]].concat());
    assert_eq!(stops(), 1);
    // As if no round with a draft could pay.
    bench.change(|known| known["machine"]["passes"] = json!([[1, 1e-3], [16, 1.0]]));
    fail_with(&arguments, 1, &["nothing was trained"]);
    assert_eq!(stops(), 2);
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
    fail_with(&bench.within("1m", &["--prompts", &others, "--plan"]), 2, &["the prompts"]);
}

#[test]
fn tools_of_prompts_reach_the_template() {
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]\
                    {{ m.content }}\n{% endfor %}[answer]";
    let shop = support::Workshop::with_chat(template);
    let tools = json!([{ "name": "weather", "description": "What the sky is like. ".repeat(5) }]);
    let planned = |tools: &Value| {
        let bench = Bench::of(shop.target());
        let row = |i: u32| json!({ "messages": [{ "role": "user", "content": format!("say {i}") }], "tools": tools });
        let prompts = bench.prompts((0..30).map(row));
        let more = ["--prompts", &prompts, "--max-tokens", "40", "--plan", "--json"];
        let planned = last_json(&succeed(&bench.within("30s", &more)));
        ["prompt", "first_prompt"].map(|key| planned["machine"][key].as_f64().expect("tokens"))
    };
    // Tokens are bytes. Of ten prompts that are set aside three are the program's own.
    let least = 0.5 * tools.to_string().len() as f64;
    let ([whole, first], [plain, first_plain]) = (planned(&tools), planned(&json!([])));
    assert!(whole > plain + least && first > first_plain + least, "{whole} {first} {plain}");
}

#[test]
fn variables_of_the_template_are_a_part_of_a_fit() {
    let off = "So be brief. ".repeat(6);
    let template = [
        "{% if enable_thinking is false %}",
        &off,
        "{% endif %}{% for m in messages %}[{{ m.role }}]\
                    {{ m.content }}\n{% endfor %}[answer]",
    ]
    .concat();
    let shop = support::Workshop::with_chat(&template);
    let given = ["--chat-template-kwargs", r#"{"enable_thinking": false}"#];
    let planned = |bench: &Bench, given: &[&str]| {
        let prompts = bench.prompts((0..30).map(|i| json!({ "prompt": format!("say {i}") })));
        let more = ["--prompts", &prompts, "--max-tokens", "40", "--plan", "--json"];
        let planned = last_json(&succeed(&bench.within("30s", &[&more[..], given].concat())));
        planned["machine"]["prompt"].as_f64().expect("tokens")
    };
    let (plain, with) = (Bench::of(shop.target()), Bench::of(shop.target()));
    // Tokens are bytes.
    let tokens = (planned(&plain, &[]), planned(&with, &given));
    assert!(tokens.1 > tokens.0 + 0.9 * off.len() as f64, "{tokens:?}");
    let known = with.state()["settings"]["chat_template_kwargs"].clone();
    assert_eq!(known, json!({ "enable_thinking": false }));
    assert!(plain.state()["settings"].get("chat_template_kwargs").is_none());
    // What was answered otherwise is not gone on with.
    let error = fail(&plain.within("30s", &[&["--plan"][..], &given].concat()), 2);
    assert!(error.contains("--chat-template-kwargs"), "{error}");
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
