//! EAGLE-3 drafts through the binary: train, kill, resume, start from another draft, extract.

use std::path::Path;

use crate::support::files::{change_tensors, demonstration, read_json, read_rows, repository};
use crate::support::runs::{killed_alike, metrics};
use crate::support::{
    self, Workshop, fail, fail_with, last_json, require_words, run, shared, stderr, succeed,
    succeeded,
};
use serde_json::{Value, json};

/// Arguments that turn the workshop's configuration into an EAGLE-3 run.
const EAGLE3: [&str; 6] = [
    "draft.method=eagle3",
    "draft.target_layers=[0,1,2]",
    "draft.draft_vocab_size=40",
    "draft.ttt_steps=3",
    "data.anchor.enabled=false",
    "schedule.learning_rate=0.002",
];

fn arguments<'a>(config: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", config], &EAGLE3[..], more].concat()
}

#[test]
fn train_evaluate_extract_and_report() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let more = ["train.evaluate_every=20", "train.epochs=6", "--json"];
    let output = succeeded(run(&arguments(&config, &more)));
    let said = stderr(&output);
    assert!(said.contains("draft vocabulary: 40 of 258 tokens, 100.00 %"), "{said}");
    let out = last_json(&support::stdout(&output));
    assert_eq!(out["finished"], true);
    for rates in ["top1_by_delay", "acceptance_by_delay", "loss_by_step"] {
        assert_eq!(out["held_out"][rates].as_array().map(Vec::len), Some(3), "{rates}");
    }
    let accuracy = |i: usize| out["held_out"]["top1_by_delay"][i].as_f64().expect("accuracy");
    let length = 1.0 + accuracy(0) * (1.0 + accuracy(1) * (1.0 + accuracy(2)));
    let reported = out["held_out"]["simulated_acceptance_length"].as_f64().expect("length");
    assert!((length - reported).abs() < 1e-9);
    let records = metrics(&shop.path("run"));
    let steps: Vec<&Value> = records.iter().filter(|r| r["held_out"].is_null()).collect();
    let loss = |record: &Value| record["loss"].as_f64().expect("loss");
    // L = Σ 0.8^i · loss_i
    for record in &steps {
        let of_step = |i: usize| record["loss_by_step"][i].as_f64().expect("loss");
        let sum = of_step(0) + 0.8 * of_step(1) + 0.64 * of_step(2);
        assert!((loss(record) - sum).abs() < 1e-9 * sum);
    }
    assert!(loss(steps[steps.len() - 1]) < 0.9 * loss(steps[0]), "the loss does not fall");
    assert!(Path::new(&shop.path("run/checkpoints/best/draft.safetensors")).is_file());

    let extracted = last_json(&succeed(&["extract", &shop.path("run"), "--json"]));
    assert_eq!(extracted["tensors"], 15, "13 trained tensors, d2t, t2d");
    let config = read_json(shop.path("run/draft/config.json"));
    assert_eq!(config["architectures"][0], "LlamaForCausalLMEagle3");
    assert_eq!(config["draft_vocab_size"], 40);
    let page = std::fs::read_to_string(succeed_report(&shop)).expect("page");
    assert!(page.contains("Loss by step"), "the report lacks the method's chart");
}

fn succeed_report(shop: &Workshop) -> String {
    succeed(&["report", &shop.path("run")]);
    shop.path("run/report.html")
}

#[test]
fn a_run_killed_at_any_moment_ends_like_an_uninterrupted_one() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let train = arguments(&config, &["train.evaluate_every=7", "train.epochs=2"]);
    let [whole, killed] = killed_alike(&shop, "run", &train);
    assert_eq!(metrics(&whole), metrics(&killed));
}

#[test]
fn the_vocabulary_of_a_trained_draft_stays_unless_it_is_remapped() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    succeed(&arguments(&config, &["train.steps=3"]));
    let from = format!("draft.from={}", shop.path("run"));
    let output = format!("output={}", shop.path("next"));
    let warm = ["train.steps=2", &from, &output];
    // 41 tokens are asked for, 40 were trained.
    let more = [&warm[..], &["draft.draft_vocab_size=41"]].concat();
    let text = fail(&arguments(&config, &more), 1);
    require_words(&text, &["the draft proposes 40 tokens", "draft.remap"]);
    succeed(&arguments(&config, &warm));
    let more = [&more[..], &["draft.remap=true"]].concat();
    let output = format!("output={}", shop.path("remapped"));
    succeed(&arguments(&config, &[&more[..], &[&output]].concat()));
    // Text with other counts: the vocabulary of a resumed run would be another one.
    let rows = "{\"text\": \"0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ\"}\n".repeat(60);
    shop.write("rows.jsonl", rows);
    fail_with(&arguments(&config, &["train.steps=3"]), 1, &["draft d2t was"]);
    let text = fail(&arguments(&config, &["train.steps=5", "--force-resume"]), 1);
    assert!(text.contains("the saved draft has another `d2t`"), "{text}");
}

#[test]
fn a_draft_without_a_head_of_its_own_decodes_and_trains() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let whole = ["draft.draft_vocab_size=258", "train.steps=3"];
    succeed(&arguments(&config, &whole));
    succeed(&["extract", &shop.path("run")]);
    let draft = shop.path("run/draft");
    change_tensors(format!("{draft}/draft_model_weights.safetensors"), |tensors| {
        let before = tensors.len();
        tensors.retain(|(name, _)| name != "lm_head.weight");
        assert_eq!(tensors.len() + 1, before);
    });
    // Output is that of plain decoding, whoever has the head.
    let target = shop.target();
    let common = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "24"];
    let tokens = |how: &[&str]| {
        let told = last_json(&succeed(&[&common[..], &["--ignore-eos", "--json"], how].concat()));
        told["tokens"].clone()
    };
    assert_eq!(tokens(&["--draft", &draft]), tokens(&["--no-draft"]));
    // What trains is a copy, which is saved.
    let (from, output) = (format!("draft.from={draft}"), format!("output={}", shop.path("next")));
    succeed(&arguments(&config, &[&whole[..], &[&from, &output]].concat()));
    let extracted = last_json(&succeed(&["extract", &shop.path("next"), "--json"]));
    assert_eq!(extracted["tensors"], 13, "the head among them");
}

#[test]
fn every_objective_and_draft_option_trains() {
    let (shop, config) = Workshop::with_four_layers().with_config();
    let options: [&[&str]; 6] = [
        &["draft.loss=lk_alpha"],
        &["draft.loss=lk_lambda", "draft.kl_decay=3"],
        &["draft.mask_rule=input", "draft.oov_rows=keep"],
        &["draft.compat=specforge", "train.rows_per_step=3"],
        &["draft.fc_norm=true", "draft.norm_output=true"],
        &[
            "draft.hidden_size=16",
            "draft.embed_proj=true",
            "draft.attention_window=9",
            "draft.step_weights=[1,0.5,0]",
            "train.features=memory",
        ],
    ];
    for (index, options) in options.into_iter().enumerate() {
        let output = format!("output={}", shop.path(&format!("run{index}")));
        let more = [options, &[&output, "train.steps=2"]].concat();
        succeed(&arguments(&config, &more));
        succeed(&["extract", &shop.path(&format!("run{index}"))]);
    }
}

#[test]
fn keys_of_another_method_and_unfit_targets_are_refused() {
    let (_shop, config) = Workshop::with_four_layers().with_config();
    let more = ["draft.gamma=4", "draft.soft_weight=0.5", "draft.ttt_steps=0"];
    let gamma = "`draft.gamma` is a key of `draft.method: glide`";
    let words = [gamma, "soft_weight", "`draft.ttt_steps` is 0"];
    fail_with(&arguments(&config, &more), 2, &words);
    let text = fail(&["train", &config, "draft.fc_norm=true"], 2);
    assert!(text.contains("`draft.fc_norm` is a key of `draft.method: eagle3`"), "{text}");
    let words = ["unknown key `objective`", "`train.patience` counts"];
    fail_with(&["train", &config, "objective.ttt_steps=3", "train.patience=2"], 2, &words);
    fail_with(&["train", &config, "draft.method=eagle3"], 2, &["set `draft.target_layers`"]);
    let more = ["draft.target_layers=[0,1,9]"];
    fail_with(&arguments(&config, &more), 2, &["tapped layer 9 of a target with 4 layers"]);
}

#[test]
fn stages_of_a_curriculum_hand_the_draft_on() {
    let shop = Workshop::with_four_layers();
    let path = shop.with_stages("- name: one\n- name: two\n  data: {row_tokens: 256}\n");
    let out = last_json(&succeed(&arguments(&path, &["train.epochs=1", "--json"])));
    assert_eq!(out["held_out"]["by_draft"].as_array().map(Vec::len), Some(2));
    let first = |stage: &str| {
        metrics(&shop.path(&format!("run/{stage}")))[0]["loss"].as_f64().expect("loss")
    };
    assert!(first("two") < first("one"));
}

#[test]
fn a_real_target_trains() {
    let Some(target) = shared("models/stories260K") else { return };
    let (shop, config) = Workshop::new().with_config();
    let target = format!("target={}", target.display());
    let more = [
        &target,
        "draft.draft_vocab_size=200",
        "draft.target_layers=[0,2,3]",
        "train.steps=12",
        "--json",
    ];
    let out = last_json(&succeed(&arguments(&config, &more)));
    assert_eq!(out["steps"], 12);
    let records = metrics(&shop.path("run"));
    let loss = |index: usize| records[index]["loss"].as_f64().expect("loss");
    assert!(loss(11) < loss(0), "{} then {}", loss(0), loss(11));
}

/// Questions without answers, for a target to write them.
fn questions(path: &Path, range: std::ops::Range<usize>) {
    let corpus = repository("assets/corpus/gsm8k-train-excerpt.jsonl");
    let question = |row: &Value| format!("{}\n", json!({ "question": row["question"] }));
    let text: String = read_rows(corpus)[range].iter().map(question).collect();
    std::fs::write(path, text).expect("questions");
}

/// What a draft promises on held-out text that its target wrote is what decoding reaches.
#[test]
fn held_out_lengths_are_those_of_decoding() {
    let shop = Workshop::new();
    let target = demonstration();
    let path = |name: &str| shop.path(name);
    let source_target = json!({"kind": "source_target", "with_source": true});
    let set = |name: &str, range| {
        let (questions_file, answers) =
            (path(&format!("{name}-q.jsonl")), path(&format!("{name}-a.jsonl")));
        questions(Path::new(&questions_file), range);
        let answer = ["data", "regenerate", &questions_file, "--field", "question"];
        let into = ["--target", &target, "--output", &answers];
        succeed(&[&answer[..], &into, &["--max-tokens", "64", "--batch", "16"]].concat());
        let rows = read_rows(answers);
        let text = rows.iter().map(|row| {
            let turn = |index: usize| row["dialogue"][index]["content"].clone();
            format!("{}\n", json!({ "source": turn(0), "target": turn(1) }))
        });
        let pairs = path(&format!("{name}.jsonl"));
        std::fs::write(&pairs, text.collect::<String>()).expect("pairs");
        json!([{"path": pairs, "template": source_target, "learn": "assistant"}])
    };
    let (train, held_out) = (set("train", 0..96), set("held-out", 96..120));
    let config = json!({
        "target": target, "output": path("run"),
        "draft": {"method": "eagle3", "draft_vocab_size": 2048, "ttt_steps": 4},
        "data": {"train": train, "held_out": held_out, "row_tokens": 256, "anchor": {"enabled": false}},
        "schedule": {"learning_rate": 3e-3},
        "train": {"rows_per_step": 1, "epochs": 2, "features": "memory", "evaluate_every": 0}
    });
    let file = path("eagle3.yaml");
    std::fs::write(&file, config.to_string()).expect("configuration");
    succeed(&["train", &file]);
    let records = metrics(&path("run"));
    let promised = &records.last().expect("records")["held_out"];
    let promised = |name: &str| promised[name].as_f64().expect("a length");
    succeed(&["extract", &path("run")]);
    let (draft, prompts) = (path("run/draft"), path("held-out-q.jsonl"));
    let measure = ["eval", "decode", "--target", &target, "--draft", &draft, "--draft-len", "4"];
    let set = ["--prompts", &prompts, "--field", "question", "--max-tokens", "64"];
    let more = ["--runs", "1", "--json"];
    let decoded = last_json(&succeed(&[&measure[..], &set, &more].concat()));
    let tau = decoded["tau"].as_f64().expect("tau");
    let (replayed, simulated) =
        (promised("replayed_acceptance_length"), promised("simulated_acceptance_length"));
    eprintln!("decoded {tau:.4}, replayed {replayed:.4}, simulated {simulated:.4}");
    assert_eq!(decoded["lossless"], true);
    assert!(tau > 1.3, "the draft learned nothing: {tau}");
    assert!((replayed / tau - 1.0).abs() < 0.02, "{replayed} promised, {tau} decoded");
    // It counts every position alike; decoding has rounds where the one before ended.
    assert!((simulated / tau - 1.0).abs() < 0.08, "{simulated} promised, {tau} decoded");
}
