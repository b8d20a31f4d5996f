//! Trainings in stages, and trainings that diverge.

use super::*;
use crate::support::files::repository;

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
    let books = read_rows(repository("assets/corpus/books-excerpt.jsonl"));
    let text: Vec<&str> = books.iter().map(|row| row["text"].as_str().expect("text")).collect();
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
    require_words(&told, &["2 stages, because rows are long", "base", "all text in whole rows"]);
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
