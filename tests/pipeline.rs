//! Train, interrupt, resume, extract, decode: through the binary, on a tiny random target.

use crate::support::files::{demonstration, lines_so_far, read_json};
use crate::support::processes::{signal, start_kept, wait_until};
use crate::support::runs::{draft_bytes, metrics, run_with_kills};
use crate::support::{
    self, Workshop, fail, fail_with, last_json, longdraft, require_words, succeed,
};
use serde_json::Value;

#[test]
fn train_extract_generate_and_measure() {
    let shop = Workshop::new();
    let out = last_json(&succeed(&["train", &shop.config(), "--json"]));
    assert_eq!(out["finished"], true);
    let agreement = out["held_out"]["top1_by_delay"].as_array().expect("per delay");
    assert_eq!(agreement.len(), 5);
    let mut records = metrics(&shop.path("run"));
    let held_out = records.pop().expect("the record of the held-out rows");
    assert_eq!(held_out["held_out"]["top1_by_delay"], out["held_out"]["top1_by_delay"]);
    assert_eq!(records.len() as u64, out["steps"].as_u64().expect("steps"));
    let loss = |record: &Value| record["loss"].as_f64().expect("loss");
    assert!(loss(&records[records.len() - 1]) < loss(&records[0]), "the loss does not fall");

    let extracted = last_json(&succeed(&["extract", &shop.path("run"), "--json"]));
    assert_eq!(extracted["tensors"], 16);
    let weights = ["draft_model_weights.safetensors", "draft_model_weights.pth"];
    for file in weights.into_iter().chain(["config.json", "tokenizer.json"]) {
        assert!(shop.folder.path().join("run/draft").join(file).is_file(), "{file} is missing");
    }

    // Folder, safetensors and .pth hold the same draft; none of them changes the text.
    let target = shop.target();
    let words = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "40"];
    let generate = |extra: &[&str]| last_json(&succeed(&[&words[..], &["--json"], extra].concat()));
    let plain = generate(&["--no-draft"]);
    for draft in ["run/draft", "run/draft/draft_model_weights.pth"] {
        let drafted = generate(&["--draft", &shop.path(draft)]);
        assert_eq!(plain["tokens"], drafted["tokens"]);
        assert!(drafted["drafted"].as_u64() > Some(0));
    }

    let prompts = shop.write("prompts.jsonl", "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a\"}\n");
    let draft = shop.path("run/draft");
    let measure = ["eval", "decode", "--target", &target, "--draft", &draft, "--prompts", &prompts];
    let measured = last_json(&succeed(&[&measure[..], &["--max-tokens", "30", "--json"]].concat()));
    assert_eq!((&measured["prompts"], &measured["equal"]), (&2.into(), &2.into()));
}

/// Beside quantised blocks a draft's matrices are held as blocks alone, and not in f32 as well.
#[test]
fn generate_tells_what_a_draft_takes() {
    let shop = Workshop::new();
    let target = demonstration();
    succeed(&["train", &shop.config(), &format!("target={target}"), "train.steps=1"]);
    let run = shop.path("run");
    let held = |dtype: &str| {
        let generate = ["generate", "--target", &target, "--draft", &run, "--prompt", "a"];
        let more = ["--max-tokens", "1", "--dtype", dtype];
        let output = support::succeeded(support::run(&[&generate[..], &more].concat()));
        let told = support::stderr(&output);
        let (_, draft) = told.split_once("; draft: ").expect("a draft");
        let (size, _) = draft.split_once("; cache: ").expect("a cache");
        let (number, unit) = size.split_once(' ').expect("a unit");
        let factor = if unit == "MiB" { 1024.0 } else { 1.0 };
        number.parse::<f64>().expect("a number") * factor
    };
    let (blocks, in_f32) = (held("stored"), held("f32"));
    assert!(2.0 * blocks < in_f32, "{blocks} KiB in blocks, {in_f32} in f32");
}

#[test]
fn a_draft_proposes_what_its_training_text_had_most() {
    let shop = Workshop::new();
    let counts = |run: &str| {
        let text = std::fs::read_to_string(shop.path(run) + "/draft/token_counts.txt");
        let text = text.expect("counts");
        let counts = text.lines().map(|line| line.split_once(' ').expect("id and count").1);
        counts.map(|count| count.parse::<u64>().expect("a count")).sum::<u64>()
    };
    succeed(&["train", &shop.config(), "train.steps=2"]);
    succeed(&["extract", &shop.path("run")]);
    // A draft that is trained on keeps the counts of the text before.
    let (from, output) = (format!("draft.from={}", shop.path("run/draft")), shop.path("second"));
    let again = ["train", &shop.config(), "train.steps=2", &from, &format!("output={output}")];
    succeed(&again);
    succeed(&["extract", &output]);
    assert!(counts("run") > 0);
    assert_eq!(counts("second"), 2 * counts("run"));

    let (target, draft) = (shop.target(), shop.path("second/draft"));
    let words = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "20"];
    let text = |extra: &[&str]| {
        last_json(&succeed(&[&words[..], extra, &["--json"]].concat()))["text"].clone()
    };
    let reduced = ["--draft", &draft, "--draft-vocab-size", "12"];
    assert_eq!(text(&reduced), text(&["--no-draft"]));
    std::fs::remove_file(format!("{draft}/token_counts.txt")).expect("the file is there");
    fail_with(&[&words[..], &reduced].concat(), 2, &["no token counts are there", "extract"]);
}

#[test]
fn a_draft_proposes_the_tokens_that_it_learned_to_propose() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=2", "draft.draft_vocab_size=12"]);
    succeed(&["extract", &shop.path("run")]);
    let draft = shop.path("run/draft");
    assert_eq!(read_json(format!("{draft}/config.json"))["draft_vocab_size"], 12);
    let target = shop.target();
    let words = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "40"];
    let generate = |extra: &[&str]| last_json(&succeed(&[&words[..], extra, &["--json"]].concat()));
    let with =
        |extra: &[&str]| generate(&[&["--draft", &draft, "--pace", "fixed"], extra].concat());
    let (own, named, all) =
        (with(&[]), with(&["--draft-vocab-size", "12"]), with(&["--draft-vocab-size", "100"]));
    let plain = generate(&["--no-draft"]);
    for answer in [&own, &named, &all] {
        assert_eq!(answer["tokens"], plain["tokens"]);
        assert!(answer["drafted"].as_u64() > Some(0), "{answer}");
    }
    assert_eq!(own["accepted"], named["accepted"]);
    // Without the counts nobody knows which tokens these are.
    std::fs::remove_file(format!("{draft}/token_counts.txt")).expect("the file is there");
    fail_with(&[&words[..], &["--draft", &draft]].concat(), 2, &["no token counts are there"]);
}

#[test]
fn a_run_killed_at_any_moment_ends_like_an_uninterrupted_one() {
    let shop = Workshop::new();
    let whole = shop.path("whole");
    succeed(&["train", &shop.config(), &format!("output={whole}")]);
    let killed = shop.path("killed");
    let output = format!("output={killed}");
    run_with_kills(shop.folder.path(), |kills| {
        // Where the optimizer's state lies makes no difference, and may change.
        let state = ["memory", "file"][kills % 2];
        longdraft(&["train", &shop.config(), &output, &format!("parallel.optimizer_state={state}")])
    });
    assert_eq!(draft_bytes(&whole), draft_bytes(&killed));
    assert_eq!(metrics(&whole), metrics(&killed));
}

#[test]
fn an_interrupt_finishes_the_step_saves_and_can_be_resumed() {
    let shop = Workshop::new();
    let (whole, stopped) = (shop.path("whole"), shop.path("stopped"));
    let train = |output: &str| {
        longdraft(&["train", &shop.config(), &format!("output={output}"), "train.epochs=30"])
    };
    assert!(train(&whole).output().expect("the binary starts").status.success());
    let child = start_kept(&mut train(&stopped));
    wait_until("steps", || lines_so_far(format!("{stopped}/metrics.jsonl")) >= 5);
    signal(&child, "-INT");
    let output = child.wait_with_output().expect("wait");
    assert_eq!(output.status.code(), Some(130));
    let said = support::stdout(&output);
    assert!(said.contains("stopped after step") && !said.contains("done:"), "{said}");
    assert!(train(&stopped).output().expect("the binary starts").status.success());
    assert_eq!(draft_bytes(&whole), draft_bytes(&stopped));
}

#[test]
fn a_draft_of_another_target_is_warned_about_and_changes_nothing() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=2"]);
    succeed(&["extract", &shop.path("run")]);
    let other = shop.folder.path().join("other");
    let mut config = support::tiny_config("llama");
    config["rope_theta"] = 500.0.into();
    support::write_target(&other, &config);
    let target = other.display().to_string();
    let draft = shop.path("run/draft");
    let common = ["generate", "--target", &target, "--prompt", "a", "--max-tokens", "20", "--json"];
    let drafted = support::run(&[&common[..], &["--draft", &draft]].concat());
    assert!(support::stderr(&drafted).contains("trained for another target"));
    let plain = last_json(&succeed(&[&common[..], &["--no-draft"]].concat()));
    assert_eq!(plain["tokens"], last_json(&support::stdout(&drafted))["tokens"]);
}

#[test]
fn stored_features_train_exactly_like_the_target_online_in_the_first_epoch() {
    let shop = Workshop::new();
    let common = ["teacher.soft_targets=top_k", "teacher.top_k=8", "train.epochs=1"];
    let train = |name: &str, features: &str| {
        let output = format!("output={}", shop.path(name));
        let features = format!("train.features={features}");
        let config = shop.config();
        succeed(&[&["train", &config, &output, &features][..], &common].concat());
        draft_bytes(&shop.path(name))
    };
    assert_eq!(train("online", "online"), train("memory", "memory"));
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config()]);
    let path = shop.path("run/checkpoints/last/draft.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).expect("write");
    // Nothing is made of it, either.
    let run = shop.path("run");
    for command in [&["extract", &run][..], &["export", &run, "--to", "hf", "-o", &shop.path("hf")]]
    {
        fail_with(command, 1, &["draft.safetensors: damaged"]);
    }
    assert!(!std::path::Path::new(&shop.path("run/draft")).exists());
    let text = support::noted(&["train", &shop.config()]);
    require_words(&text, &["draft.safetensors: damaged", "resumed after step"]);
}

#[test]
fn a_run_directory_of_another_run_is_refused_with_old_and_new() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config()]);
    let words = ["train.seed was 0, now 5", "hint: "];
    fail_with(&["train", &shop.config(), "train.seed=5"], 1, &words);
}

#[test]
fn an_exploding_loss_stops_with_step_and_rows_and_overwrites_nothing() {
    let shop = Workshop::new();
    let text = fail(
        &["train", &shop.config(), "schedule.learning_rate=1e30", "optimizer.clip_norm=1e30"],
        1,
    );
    require_words(&text, &["is not finite (in rows.jsonl:", "hint: look at these rows"]);
    assert!(!shop.folder.path().join("run/checkpoints/last").exists());
}

#[test]
fn compat_trains_the_published_layer() {
    let shop = Workshop::new();
    let train = [
        "train",
        &shop.config(),
        "draft.compat=longspec",
        "draft.soft_weight=0",
        "schedule.kind=deepspeed_warmup_cosine",
        "train.steps=8",
    ];
    succeed(&train);
    let extracted = last_json(&succeed(&["extract", &shop.path("run"), "--json"]));
    assert_eq!(extracted["tensors"], 20);
    let first = &metrics(&shop.path("run"))[0];
    assert_eq!(first["learning_rate"], 0.0);
}

#[test]
fn wrong_use_is_exit_2_with_a_remedy() {
    let shop = Workshop::new();
    fail_with(&["train", &shop.config(), "train.stepz=3"], 2, &["stepz"]);
    fail(&["train", &shop.path("absent.yaml")], 2);
    fail(&["extract", &shop.path("target")], 2);
    let text = fail(&["train", &shop.config(), "draft.compat=longspec"], 2);
    assert!(text.contains("draft.soft_weight: 0"), "{text}");
    let rows = shop.write("bad.jsonl", "{\"text\": \"fine\"}\n{\"text\": 3}\n");
    let sources = format!("data.train=[{{path: {rows}}}]");
    let words = ["bad.jsonl:2: field `text` is not a string", "1 of 2 rows", "hint: "];
    fail_with(&["train", &shop.config(), &sources, "data.max_bad_rows=0"], 1, &words);
    let aside = std::fs::read_to_string(shop.path("run/quarantine.jsonl")).expect("quarantine");
    assert!(aside.contains("\"origin\":\"bad.jsonl:2\""), "{aside}");
}

#[test]
fn a_read_only_or_missing_output_is_an_error() {
    let shop = Workshop::new();
    std::fs::write(shop.folder.path().join("file"), "").expect("file");
    let text = fail(&["train", &shop.config(), &format!("output={}", shop.path("file/run"))], 2);
    assert!(text.contains("`output`: ") && text.contains("file is a file, no folder"), "{text}");
}
