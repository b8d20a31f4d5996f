//! Several stages through the binary: handing on, resuming, killing, refusing, and full disks.

mod configurations;
mod interrupted;

use std::path::Path;

use crate::support::files::read_json;
use crate::support::runs::{draft_bytes, metrics};
use crate::support::{
    Workshop, fail, fail_with, last_json, longdraft, noted, require_words, run, stderr, stdout,
    succeed,
};
use serde_json::Value;

const STAGES: [&str; 3] = ["base", "long", "answers"];

/// Three stages over the workshop's text.
fn curriculum(shop: &Workshop) -> String {
    let text = std::fs::read_to_string(&shop.config).expect("config");
    let stages = "stages:\n- name: base\n- name: long\n  data: {row_tokens: 256}\n  \
                  train: {rows_per_step: 1}\n- name: answers\n  start_from: best\n  \
                  train: {evaluate_every: 5, keep_best: true}\n";
    let text = text.replace("epochs: 3", "epochs: 2\n  evaluate_every: 6");
    shop.write("curriculum.yaml", format!("{text}{stages}"))
}

/// A figure over no rows is none, and what was not measured is not compared.
#[test]
fn drafts_are_not_compared_on_a_stage_without_held_out_rows() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let changes = ["stages.long.data.held_out_rows=0", "stages.answers.start_from=last"];
    let args = [&["train", &config, "train.epochs=1"][..], &changes[..]].concat();
    let told = succeed(&args);
    let table = read_json(shop.path("run/held_out.json"));
    for row in table["by_draft"].as_array().expect("table") {
        assert!(row[0]["interval"].is_array() && row[1].is_null(), "{row}");
    }
    let gains = table["gains_on_own_text"].as_array().expect("gains");
    assert_eq!(gains.iter().map(|gain| &gain["stage"]).collect::<Vec<_>>(), ["answers"]);
    assert!(told.contains("no rows"), "{told}");
}

/// Every file that must be equal after a kill: drafts, optimizers, metrics without clocks.
fn fingerprint(output: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for stage in STAGES {
        for file in
            ["last/draft.safetensors", "last/optimizer.safetensors", "best/draft.safetensors"]
        {
            let path = format!("{output}/{stage}/checkpoints/{file}");
            let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            all.push((format!("{stage}/{file}"), blake3_of(&bytes)));
        }
        let records = metrics(&format!("{output}/{stage}")).into_iter();
        all.extend(records.map(|record| (stage.to_owned(), record.to_string())));
    }
    all
}

fn blake3_of(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

#[test]
fn stages_run_in_order_each_from_the_draft_before_and_are_compared() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let out = last_json(&succeed(&["train", &config, "--json"]));
    assert_eq!(out["finished"], true);
    let cells = out["held_out"]["by_draft"].as_array().expect("table");
    assert_eq!((cells.len(), cells[0].as_array().map(Vec::len)), (3, Some(3)));
    for cell in cells.iter().flat_map(|row| row.as_array().expect("row")) {
        let (low, high) = (&cell["interval"][0], &cell["interval"][1]);
        let length = cell["simulated_length"].as_f64().expect("length");
        assert!(low.as_f64() <= Some(length) && Some(length) <= high.as_f64(), "{cell}");
    }
    let gain = &out["held_out"]["gains_on_own_text"][1];
    let length = |draft: usize| cells[draft][2]["simulated_length"].as_f64().expect("length");
    assert_eq!(gain["stage"], "answers");
    assert_eq!(gain["gain"].as_f64(), Some(length(2) - length(1)));
    assert!(Path::new(&shop.path("run/report.html")).is_file());
    // The same drafts measured on their own, on the second stage's text.
    let [base, long] = ["run/base", "run/long"].map(|run| shop.path(run));
    let both = ["eval", "held-out", &config, "stage=long", "--draft", &base, "--draft", &long];
    let measured = last_json(&succeed(&[&both[..], &["--json"]].concat()));
    for (draft, row) in cells.iter().take(2).enumerate() {
        let found = &measured["drafts"][draft];
        assert_eq!(found["simulated_acceptance_length"], row[1]["simulated_length"]);
        assert_eq!(found["interval"], row[1]["interval"]);
    }
    let gains: Vec<&Value> =
        (0..2).map(|draft| &measured["drafts"][draft]["gain_over_first"]["gain"]).collect();
    assert_eq!(gains, [&serde_json::json!(0.0), &out["held_out"]["gains_on_own_text"][0]["gain"]]);
    a_curve_over_the_context(&config, &base, &long);
    // The curriculum stands for the draft of its last stage.
    let whole = shop.path("run");
    let answers = shop.path("run/answers");
    let both = ["eval", "held-out", &config, "stage=long", "--draft", &whole, "--draft", &answers];
    let both = last_json(&succeed(&[&both[..], &["--json"]].concat()));
    assert_eq!(both["drafts"][1]["gain_over_first"]["gain"], 0.0);
    let extracted = last_json(&succeed(&["extract", &whole, "--json"]));
    assert_eq!(extracted["output"], shop.path("run/draft"));
    assert_eq!(extracted["checkpoint"], shop.path("run/answers/checkpoints/last"));
    let best = last_json(&succeed(&["extract", &whole, "--best", "--json"]));
    assert_eq!(best["checkpoint"], shop.path("run/answers/checkpoints/best"));
    let told = succeed(&["extract", &answers]);
    assert!(told.contains("took ") && told.contains("next:\n  longdraft generate "), "{told}");
    let nothing = fail(
        &["eval", "held-out", &config, "--draft", &base, "stage=base", "data.held_out_rows=0"],
        2,
    );
    assert!(nothing.contains("held-out rows"), "{nothing}");
    let file = read_json(shop.path("run/curriculum.json"));
    assert_eq!(file["stages"][1], serde_json::json!({"name": "long", "output": "long"}));
    // The second stage began where the first one ended: its loss is far below the first's start.
    let first_loss = |stage: &str| {
        metrics(&shop.path(&format!("run/{stage}")))[0]["hard_loss"].as_f64().expect("loss")
    };
    assert!(first_loss("long") < first_loss("base"));
    // A second call finds everything done and changes nothing.
    let before = fingerprint(&shop.path("run"));
    let again = run(&["train", &config]);
    assert!(again.status.success() && !stderr(&again).contains("step 1/"), "{}", stderr(&again));
    assert_eq!(before, fingerprint(&shop.path("run")));
}

/// The closing comparison of a curriculum, trained with some arguments more.
fn compared(shop: &Workshop, config: &str, output: &str, more: &[&str]) -> Value {
    let output = format!("output={}", shop.path(output));
    let arguments = ["train", config, &output, "device=cpu", "--json"];
    last_json(&succeed(&[&arguments[..], more].concat()))["held_out"].clone()
}

#[test]
fn stages_that_open_their_targets_otherwise_are_compared_all_the_same() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let text = std::fs::read_to_string(&config).expect("curriculum");
    // On a CPU what is the default; the target is opened twice more, and once more in the end.
    let text = text.replace("- name: long\n", "- name: long\n  precision: f32\n");
    let otherwise = shop.write("otherwise.yaml", text);
    let (once, again) =
        (compared(&shop, &config, "once", &[]), compared(&shop, &otherwise, "again", &[]));
    assert_eq!(once, again);
}

#[test]
fn ranks_that_share_rows_compare_whole_rows() {
    let shop = Workshop::new();
    let config = curriculum(&shop);
    let more = ["--ranks", "2", "parallel.sequence=2"];
    let table = compared(&shop, &config, "parts", &more);
    let [base, long] = ["parts/base", "parts/long"].map(|run| shop.path(run));
    let arguments = ["eval", "held-out", &config, "stage=long", "device=cpu", "--json"];
    let drafts = ["--draft", &base, "--draft", &long];
    let alone = last_json(&succeed(&[&arguments[..], &drafts].concat()));
    for draft in 0..2 {
        let length = table["by_draft"][draft][1]["simulated_length"].as_f64().expect("length");
        let whole = alone["drafts"][draft]["simulated_acceptance_length"].as_f64();
        // Sums of parts are rounded otherwise.
        assert!((length - whole.expect("length")).abs() < 0.02, "{table} {alone}");
    }
}

/// `eval held-out --contexts` shares the learned rows of the second stage out by what stands before them.
fn a_curve_over_the_context(config: &str, base: &str, long: &str) {
    let ask = |contexts: &'static str| {
        let drafts = ["--draft", base, "--draft", long, "--contexts", contexts, "--json"];
        [&["eval", "held-out", config, "stage=long"][..], &drafts].concat()
    };
    let told = succeed(&ask("40,128,100000"));
    assert!(told.contains("  40 to 128 ("), "{told}");
    let measured = last_json(&told);
    let contexts = measured["by_context"].as_array().expect("contexts");
    let bounds: Vec<_> = contexts.iter().map(|one| (&one["from"], &one["to"])).collect();
    assert_eq!(serde_json::json!(bounds), serde_json::json!([[0, 40], [40, 128], [128, 100_000]]));
    for draft in 0..2 {
        let rows = |of: &Value| of["drafts"][draft]["rows"].as_u64().expect("rows");
        let agreeing = |of: &Value| {
            let first = of["drafts"][draft]["top1_by_delay"][0].as_f64().expect("share");
            first * rows(of) as f64
        };
        assert_eq!(contexts.iter().map(rows).sum::<u64>(), rows(&measured));
        let together: f64 = contexts.iter().map(agreeing).sum();
        assert!((together - agreeing(&measured)).abs() < 1e-3, "{measured}");
        let length = |of: &Value| of["drafts"][draft]["simulated_acceptance_length"].as_f64();
        assert!(contexts.iter().all(|one| length(one) >= Some(1.0)), "{measured}");
    }
    fail_with(&ask("128,40"), 2, &["do not rise"]);
    fail_with(&ask("100000,200000"), 2, &["no row reaches 100000 tokens"]);
}

#[test]
fn changed_settings_are_refused_and_can_be_forced() {
    let (shop, config) = Workshop::new().with_config();
    succeed(&["train", &config, "train.steps=4"]);
    let text = fail(&["train", &config, "train.steps=8", "draft.soft_weight=0.5"], 1);
    assert!(text.contains("train.steps was 4, now 8") && text.contains("soft_weight"), "{text}");
    let text = noted(&["train", &config, "train.steps=8", "--force-resume"]);
    assert!(text.contains("resumed although train.steps was 4, now 8"), "{text}");
    let lines = std::fs::read_to_string(shop.path("run/metrics.jsonl")).expect("metrics");
    assert_eq!(lines.lines().filter(|line| !line.contains("held_out")).count(), 8);
}

#[test]
fn patience_ends_a_run_and_the_best_draft_is_kept() {
    let (shop, config) = Workshop::new().with_config();
    // A rate of next to nothing: no evaluation is better than the first.
    let patience = ["train.epochs=50", "train.evaluate_every=2", "train.patience=3"];
    let train = ["train", &config, "schedule.learning_rate=1e-12", "--json"];
    let arguments = [&train[..], &patience].concat();
    let out = last_json(&succeed(&arguments));
    assert_eq!((&out["finished"], &out["steps"]), (&true.into(), &8.into()));
    assert_eq!(read_json(shop.path("run/checkpoints/best/state.json"))["step"], 2);
    // It stays ended.
    let again = last_json(&succeed(&arguments));
    assert_eq!(again["steps"], 8);
    // Forced to go on otherwise, it has its patience again.
    let others = ["train.patience=2", "schedule.learning_rate=1e-11", "--force-resume"];
    let output = run(&[&arguments[..], &others].concat());
    let forced = last_json(&stdout(&output));
    assert_eq!((&forced["finished"], &forced["steps"]), (&true.into(), &12.into()));
    let told = stderr(&output);
    assert!(told.contains("(train.patience: 2): the run ends after step 12 of "), "{told}");
}

#[test]
fn a_best_draft_of_other_held_out_rows_is_chosen_anew() {
    let shop = Workshop::new();
    let (config, held_out) = (shop.config(), shop.path("held.jsonl"));
    let texts = |word: &str| -> String {
        (0..40).map(|i| format!("{{\"text\": \"{word} {i} {}\"}}\n", word.repeat(9))).collect()
    };
    let source = format!("data.held_out=[{{path: {held_out}}}]");
    let rate = "schedule.learning_rate=1e-12";
    let arguments = ["train", &config, &source, rate, "train.evaluate_every=2", "--json"];
    let train = |more: &[&str]| {
        let told = noted(&[&arguments[..], more].concat());
        let state = read_json(shop.path("run/checkpoints/best/state.json"));
        (state["step"].as_u64(), told.contains("the best draft is chosen anew"))
    };
    std::fs::write(&held_out, texts("one")).expect("held-out text");
    assert_eq!(train(&["train.steps=4"]), (Some(2), false));
    assert_eq!(train(&["train.steps=6", "--extend"]), (Some(2), false), "the same rows");
    std::fs::write(&held_out, texts("another")).expect("held-out text");
    assert_eq!(train(&["train.steps=8", "--extend"]), (Some(8), true));
}

#[test]
fn rows_that_a_run_trained_on_are_warned_about_when_they_are_held_out() {
    let shop = Workshop::new();
    let (config, output) = (shop.config(), shop.path("run"));
    succeed(&["train", &config, "train.steps=2"]);
    let told = |rows: &str| {
        let told = noted(&["eval", "held-out", &config, "--draft", &output, rows]);
        told.contains("may have been trained on some of these")
    };
    assert!(!told("data.row_tokens=128") && !told("data.row_tokens=64"));
    assert!(told("data.row_tokens=256") && told("data.held_out_rows=3"));
}

#[test]
fn budgets_in_tokens_and_minutes() {
    let (shop, config) = Workshop::new().with_config();
    let steps = |arguments: &[&str], output: &str| {
        let output = format!("output={}", shop.path(output));
        let all = [&["train", &config, &output, "--json"], arguments].concat();
        last_json(&succeed(&all))["steps"].as_u64().expect("steps")
    };
    assert_eq!(steps(&["train.tokens=2000", "train.tokens_per_step=500"], "tokens"), 5);
    assert_eq!(steps(&["train.steps=100000", "train.max_minutes=1e-6"], "minutes"), 1);
    let (limit, output) = ("train.max_minutes=1e-6", format!("output={}", shop.path("timed")));
    let told = noted(&["train", &config, &output, "train.steps=100000", limit]);
    assert!(told.contains("train.max_minutes is over: the run ends after step 1 of"), "{told}");
    let text = fail(&["train", &config, "train.tokens=5", "train.steps=5"], 2);
    assert!(text.contains("`train.tokens` is a second budget beside `train.steps`"), "{text}");
}

#[test]
fn a_stage_starts_from_any_kind_of_draft() {
    let (shop, config) = Workshop::new().with_config();
    succeed(&["train", &config, "train.steps=6"]);
    succeed(&["extract", &shop.path("run")]);
    let mut drafts = Vec::new();
    for (index, from) in [
        "run",
        "run/checkpoints/last",
        "run/draft",
        "run/draft/draft_model_weights.pth",
        "run/draft/draft_model_weights.safetensors",
        "run/checkpoints/last/draft.safetensors",
    ]
    .into_iter()
    .enumerate()
    {
        let output = shop.path(&format!("next{index}"));
        let from = format!("draft_model_name_or_path={}", shop.path(from));
        succeed(&["train", &config, &format!("output={output}"), "train.steps=2", &from]);
        drafts.push(draft_bytes(&output));
    }
    assert!(drafts.iter().all(|draft| *draft == drafts[0]));
}
