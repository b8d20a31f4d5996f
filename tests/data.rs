//! Looking at data, preparing it, training from shards, regenerating it: through the binary.

use std::path::Path;

use crate::support::files::{read_json, read_rows};
use crate::support::runs::run_with_kills;
use crate::support::{
    self, Workshop, fail, fail_with, last_json, longdraft, noted, require_words, run, stderr,
    succeed, succeeded,
};
use serde_json::{Value, json};

/// ChatML for the byte tokenizer.
const CHAT_TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn inspect_marks_what_is_learned_and_flags_masks_that_learn_all_or_nothing() {
    let shop = Workshop::with_chat(CHAT_TEMPLATE);
    let messages = |turns: &[(&str, &str)]| -> Value {
        turns.iter().map(|(role, text)| json!({ "role": role, "content": text })).collect()
    };
    let rows = [
        json!({ "messages": messages(&[("user", "hi"), ("assistant", "ho")]) }),
        json!({ "messages": messages(&[("user", "alone")]) }),
        json!({ "messages": [{ "role": "user" }] }),
    ];
    let path = shop.write_rows("chat.jsonl", &rows);
    let target = shop.target();
    let common = ["data", "inspect", &path, "--target", &target, "--json"];
    let text = succeed(&[&common[..], &["--learn", "assistant"]].concat());
    assert!(text.contains("read as `messages`"), "{text}");
    assert!(text.contains("<user>hi</s><assistant>[[ho</s>]]"), "{text}");
    assert!(text.contains("! nothing is learned"), "{text}");
    require_words(&text, &["chat.jsonl:3: malformed: field `messages`: message 1: `content`"]);
    assert_eq!(last_json(&text)["rows"][0]["learned"], 3);
    // What the assistant says is learned by default.
    assert!(succeed(&common).contains("<user>hi</s><assistant>[[ho</s>]]"));
    let text = succeed(&[&common[..], &["--learn", "all"]].concat());
    assert!(text.contains("! everything is learned"), "{text}");
    // A chat needs a chat template.
    std::fs::remove_file(shop.target.join("tokenizer_config.json")).expect("remove");
    fail_with(&common, 2, &["no chat template", "messages.0.content"]);
}

#[test]
fn stats_tell_rows_lengths_fill_and_what_was_left_out() {
    let shop = Workshop::new();
    let out = succeed(&["data", "stats", &shop.config(), "--json"]);
    let figures = last_json(&out);
    assert_eq!(figures["sources"][0]["rows"], 60);
    assert!(out.contains("packed into"), "{out}");
    let number = |value: &Value| value.as_f64().expect("a number");
    let places = number(&figures["packed_rows"]) * number(&figures["row_tokens"]);
    let fill = number(&figures["sources"][0]["tokens"]) / places;
    // The last token of a long document may stand alone, and then in no row.
    let left_out = fill - number(&figures["fill"]);
    assert!((0.0..0.01).contains(&left_out) && fill > 0.8, "{fill}, {left_out}");
    assert!(figures["lengths"]["p50"].as_u64() < figures["lengths"]["p100"].as_u64());
    let rows = [json!({"text": "abc"}), json!({"text": 1}), json!({"text": "abcdef"})];
    let path = shop.write_rows("mixed.jsonl", &rows);
    let figures =
        last_json(&succeed(&["data", "stats", &path, "--target", &shop.target(), "--json"]));
    let source = &figures["sources"][0];
    assert_eq!(
        (&source["bad"], &source["documents"], &source["tokens"]),
        (&1.into(), &2.into(), &11.into())
    );
    assert_eq!(figures["lengths"]["p100"], 7);
}

#[test]
fn malformed_rows_are_set_aside_while_training_goes_on() {
    let shop = Workshop::new();
    let rows = shop.path("rows.jsonl");
    let text = std::fs::read_to_string(&rows).expect("rows");
    std::fs::write(&rows, format!("{{broken\n{text}")).expect("write");
    let said = noted(&["train", &shop.config(), "train.steps=2"]);
    require_words(&said, &["1 of 61 rows are malformed", "quarantine.jsonl"]);
    let row = read_json(shop.path("run/quarantine.jsonl"));
    assert_eq!((&row["origin"], &row["raw"]), (&"rows.jsonl:1".into(), &"{broken".into()));
}

#[test]
fn training_from_shards_equals_training_from_rows() {
    let shop = Workshop::new();
    let shards = shop.path("shards");
    let out =
        succeed(&["data", "prepare", &shop.config(), "--output", &shards, "--shard-kib", "1"]);
    assert!(out.contains("data.train"), "{out}");
    let train = |name: &str, extra: &[&str]| {
        let output = format!("output={}", shop.path(name));
        let config = shop.config();
        succeed(&[&["train", &config, &output, "train.epochs=1"], extra].concat());
        let draft = shop.path(&format!("{name}/checkpoints/last/draft.safetensors"));
        std::fs::read(draft).expect("checkpoint")
    };
    let sources = format!("data.train=[{{path: {shards}}}]");
    assert_eq!(train("rows", &[]), train("shards_run", &[&sources]));
    // Shards of another tokenizer are refused.
    let mut tokenizer = support::byte_tokenizer();
    tokenizer["normalizer"] = json!({"type": "NFC"});
    std::fs::write(shop.target.join("tokenizer.json"), tokenizer.to_string()).expect("write");
    let text = fail(&["train", &shop.config(), &sources, &format!("output={}", shop.path("x"))], 2);
    assert!(text.contains("prepared with another tokenizer"), "{text}");
    let command = ["data", "prepare", &shop.config(), "--output", &shards, "--shard-kib", "1"];
    fail_with(&command, 1, &["another recipe (tokenizer differ)"]);
}

#[test]
fn preparing_that_is_killed_at_any_moment_ends_with_the_same_bytes() {
    let shop = Workshop::new();
    let rows: Vec<Value> = (0..3000)
        .map(|i| json!({ "text": format!("row {i} {}", "word ".repeat(i % 40)) }))
        .collect();
    let path = shop.write_rows("many.jsonl", &rows);
    let (target, whole, killed) = (shop.target(), shop.path("whole"), shop.path("killed"));
    let prepare = |output: &str| {
        let common = ["data", "prepare", &path, "--target", &target, "--output", output];
        longdraft(&[&common[..], &["--shard-kib", "4"]].concat())
    };
    succeeded(prepare(&whole).output().expect("the binary starts"));
    run_with_kills(Path::new(&killed), |_| prepare(&killed));
    let (whole, killed) = (support::files(&whole), support::files(&killed));
    let is_shard = |name: &&String| Path::new(name).extension() == Some("bin".as_ref());
    assert!(whole.keys().filter(is_shard).count() > 10);
    assert_eq!(whole, killed);
}

#[test]
fn regenerated_rows_are_the_targets_own_answers_and_every_row_is_accounted_for() {
    let shop = Workshop::with_chat(CHAT_TEMPLATE);
    let rows = [
        json!({"question": "a", "answer": "old"}),
        json!({"turns": ["b", "c"]}),
        json!({"text": "no prompt"}),
        json!({"question": "x".repeat(600), "answer": "too long for the context"}),
        json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"},
            {"role": "assistant", "content": "old"}]}),
        json!({"prompt": 3}),
    ];
    let prompts = shop.write_rows("prompts.jsonl", &rows);
    let target = shop.target();
    let answers = |name: &str| std::fs::read_to_string(shop.path(name)).expect("answers");
    let regenerate = |name: &str, extra: &[&str]| {
        let output = shop.path(name);
        let common = ["data", "regenerate", &prompts, "--target", &target, "--output", &output];
        last_json(&succeed(&[&common[..], &["--max-tokens", "12", "--json"], extra].concat()))
    };
    let counts = regenerate("whole.jsonl", &[]);
    assert_eq!(
        (&counts["success"], &counts["error"], &counts["skipped"]),
        (&3.into(), &1.into(), &2.into())
    );
    let lines = read_rows(shop.path("whole.jsonl"));
    let roles: Vec<&str> = lines[1]["messages"]
        .as_array()
        .expect("turns")
        .iter()
        .filter_map(|m| m["role"].as_str())
        .collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!(lines[2]["messages"][0]["content"], "s");

    // The same greedy answer as `generate` gives.
    let generate = ["generate", "--target", &target, "--no-draft", "--chat", "--json"];
    let more = ["--prompt", "a", "--max-tokens", "12"];
    let generated = last_json(&succeed(&[&generate[..], &more].concat()));
    let tokens = generated["tokens"].as_array().expect("tokens").len();
    assert_eq!(lines[0]["tokens"].as_u64(), Some(tokens as u64));

    // Answered one by one, and at a temperature with a batch of another size.
    regenerate("single.jsonl", &["--batch", "1"]);
    assert_eq!(answers("single.jsonl"), answers("whole.jsonl"));
    for (name, batch) in [("warm-1.jsonl", "1"), ("warm-3.jsonl", "3")] {
        regenerate(name, &["--temperature", "0.8", "--batch", batch]);
    }
    assert_eq!(answers("warm-1.jsonl"), answers("warm-3.jsonl"));

    // Cut in the middle of a line: the rest is written again, the same.
    let whole = answers("whole.jsonl");
    let first = whole.find('\n').expect("a line") + 1;
    shop.write("cut.jsonl", &whole[..first + 9]);
    let resumed = regenerate("cut.jsonl", &[]);
    assert_eq!(resumed["from_before"], 1);
    assert_eq!(answers("cut.jsonl"), whole);
    assert_eq!(answers("cut.jsonl.failed.jsonl"), answers("whole.jsonl.failed.jsonl"));

    // What is sampled follows from the seed; another recipe is not mixed in.
    let sampled = |name: &str, seed: &str| {
        regenerate(name, &["--temperature", "9", "--seed", seed]);
        let rows = read_rows(shop.path(name));
        rows.iter().map(|row| row["messages"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(sampled("s1.jsonl", "1"), sampled("s2.jsonl", "1"));
    assert_ne!(sampled("s1.jsonl", "1"), sampled("s3.jsonl", "2"));
    let output = shop.path("s1.jsonl");
    let text = fail(
        &["data", "regenerate", &prompts, "--target", &target, "--output", &output, "--seed", "5"],
        1,
    );
    let differ = "--temperature 9 (now 0), --seed 1 (now 5), --max-tokens 12 (now 512)\n";
    assert!(text.contains(&format!("was written with {differ}hint: ")), "{text}");

    // The answers are training data as they are.
    let whole = shop.path("whole.jsonl");
    let out = succeed(&["data", "inspect", &whole, "--target", &target, "--learn", "last"]);
    assert!(out.contains("read as `messages`") && out.contains("</s><assistant>[["), "{out}");
}

/// What a target without a chat template wrote is learned as the text that it is, by every command that reads it.
#[test]
fn answers_without_a_chat_template_are_text_that_trains() {
    let shop = Workshop::new();
    let mut rows: Vec<Value> = (0..20).map(|i| json!({ "prompt": format!("row {i}: ") })).collect();
    rows.push(json!({ "turns": ["a", "b"] }));
    let prompts = shop.write_rows("prompts.jsonl", &rows);
    let (target, output) = (shop.target(), shop.path("answers.jsonl"));
    let command = ["data", "regenerate", &prompts, "--target", &target, "--output", &output];
    let command = [&command[..], &["--max-tokens", "24", "--json"]].concat();
    assert_eq!(last_json(&succeed(&command))["success"], 21);
    assert_eq!(last_json(&succeed(&command))["from_before"], 21, "they answer what is asked");
    let row = read_rows(&output).pop().expect("a line");
    let said = |turn: usize| row["dialogue"][turn]["content"].as_str().expect("a text");
    let whole = format!("{}{}\n{}{}", said(0), said(1), said(2), said(3));
    assert_eq!((said(0), row["text"].as_str()), ("a", Some(whole.as_str())));
    assert!(row.get("messages").is_none(), "{row}");
    let text = succeed(&["data", "inspect", &output, "--target", &target]);
    assert!(text.contains("read as `raw`"), "{text}");
    // The same prompts as before.
    let again = shop.path("again.jsonl");
    let command = ["data", "regenerate", &output, "--target", &target, "--output", &again];
    succeed(&[&command[..], &["--max-tokens", "24"]].concat());
    let texts = |file: &str| -> Vec<Value> {
        read_rows(file).iter().map(|row| row["text"].clone()).collect()
    };
    assert_eq!(texts(&again), texts(&output));
    let config = shop.path("mine.yaml");
    let init = ["init", &config, "--yes", "--target", &target, "--data", &output];
    succeed(&[&init[..], &["--output", &shop.path("mine")]].concat());
    succeed(&["config", "check", &config]);
    succeed(&["train", &config, "train.steps=1", "data.row_tokens=64", "data.held_out_rows=1"]);
}

/// A wrong field answers no row; with the right one the same command answers them all. Nothing is tried twice alike.
#[test]
fn rows_that_failed_are_tried_again_where_they_are_asked_otherwise() {
    let shop = Workshop::with_chat(CHAT_TEMPLATE);
    let rows: Vec<Value> = (0..12).map(|i| json!({ "q": format!("question {i}") })).collect();
    // Of many only the first are told.
    let prompts = shop.write_rows("many.jsonl", &rows);
    let (target, output) = (shop.target(), shop.path("many-answers.jsonl"));
    let many = ["data", "regenerate", &prompts, "--target", &target, "--output", &output];
    let text = fail(&many, 1);
    assert_eq!(text.matches("many.jsonl:10: ").count(), 1, "{text}");
    assert!(!text.contains("many.jsonl:11: "), "{text}");
    assert!(text.contains("further rows without an answer are told in "), "{text}");
    let rows = &rows[..4];
    let prompts = shop.write_rows("prompts.jsonl", rows);
    let output = shop.path("answers.jsonl");
    let common = ["data", "regenerate", &prompts, "--target", &target, "--output", &output];
    let common = [&common[..], &["--max-tokens", "4"]].concat();
    let failures = || std::fs::read_to_string(format!("{output}.failed.jsonl")).expect("failures");
    let typo = &["--field", "typo"][..];
    for (wrong, is_known) in [(typo, false), (typo, true), (&[], false)] {
        let text = fail(&[&common[..], wrong].concat(), 1);
        assert_eq!(text.contains("not tried again: 4 rows"), is_known, "{text}");
        assert_eq!(text.contains("row prompts.jsonl:1: "), !is_known, "{text}");
        assert!(text.contains("prompts.jsonl: no row was answered"), "{text}");
        assert!(text.contains("hint: --field names the field of the prompt"), "{text}");
        assert_eq!(failures().lines().count(), 4);
    }
    let out = succeed(&[&common[..], &["--field", "q", "--json"]].concat());
    let counts = last_json(&out);
    assert_eq!((&counts["success"], &counts["from_before"]), (&4.into(), &0.into()), "{counts}");
    assert_eq!(failures(), "");
    // Answers of other prompts are not taken for those of these.
    shop.write_rows("prompts.jsonl", &[&rows[..3], &[json!({ "q": "another" })]].concat());
    let text = fail(&[&common[..], &["--field", "q"]].concat(), 1);
    assert!(text.contains("row 3 (prompts.jsonl:4) answers another prompt"), "{text}");
    assert!(text.contains("hint: the prompts or --field are others"), "{text}");
    // A row without that field asks nothing, so its line stays.
    shop.write_rows("prompts.jsonl", rows);
    let out = succeed(&[&common[..], &["--field", "typo", "--json"]].concat());
    assert_eq!(last_json(&out)["from_before"], 4, "{out}");
    let empty = shop.write_rows("empty.jsonl", &[]);
    let other = shop.path("none.jsonl");
    let text = fail(&["data", "regenerate", &empty, "--target", &target, "--output", &other], 1);
    assert!(text.contains("empty.jsonl: no row was answered"), "{text}");
}

#[test]
fn wrong_use_of_data_commands_is_exit_2_with_a_remedy() {
    let shop = Workshop::new();
    let rows = shop.path("rows.jsonl");
    assert!(fail(&["data", "inspect", &rows], 2).contains("--target"));
    let target = shop.target();
    fail_with(&["data", "stats", "nowhere", "--target", &target], 2, &["ultrachat"]);
    let out = shop.path("out");
    fail_with(&["data", "prepare", &shop.config(), &rows, "--output", &out], 2, &["stands alone"]);
    let asked = ["train", &shop.config(), &format!("data.train=[{{path: {rows}, learn: last}}]")];
    fail_with(&asked, 2, &["`learn` is `last`, which needs rows of a prompt and an answer"]);
    let text = fail(
        &["train", &shop.config(), &format!("data.train=[{{path: {rows}, max_prompt_tokens: 4}}]")],
        2,
    );
    assert!(text.contains("`max_prompt_tokens` needs"), "{text}");
    // The remedy names what was given.
    let inspect = |path: &str, more: &[&str]| {
        run(&[&["data", "inspect", path, "--target", &target][..], more].concat())
    };
    let text = stderr(&inspect(&rows, &["--learn", "assistant"]));
    assert!(text.contains("leave `learn` (--learn of a command) out"), "{text}");
    assert!(!text.contains("template"), "{text}");
    let prompts = shop.write_rows("prompts.jsonl", &[json!({ "prompt": "a" })]);
    let text = stderr(&inspect(&prompts, &[]));
    assert!(text.contains("`longdraft data regenerate` has the target answer"), "{text}");
    let text = stderr(&inspect(&shop.write_rows("empty.jsonl", &[]), &[]));
    assert!(text.contains("hint: give a file that holds rows"), "{text}");
    assert!(!text.contains("longdraft data inspect"), "{text}");
    shop.write("rows.xlsx", "");
    let text = fail(&["data", "inspect", &shop.path("rows.xlsx"), "--target", &target], 2);
    assert!(text.contains("unknown kind of file") && text.contains(".csv"), "{text}");
    fail_with(&["data", "inspect", "hf://wrong", "--target", &target], 1, &["hf://org/name"]);
}

/// Rows as people have them, without a word about their format: what answers is learned.
#[test]
fn formats_are_recognised_without_a_template() {
    let shop = Workshop::with_chat(CHAT_TEMPLATE);
    let said = |role: &str, text: &str| json!({ "role": role, "content": text });
    let conversations =
        |i: usize| json!({ "messages": [said("user", &format!("q{i}")), said("assistant", "a")] });
    let preferences = |i: usize| json!({ "prompt": format!("q{i}"), "chosen": [said("assistant", "a")], "rejected": "b" });
    let mut with_a_bad_row: Vec<Value> = (0..60).map(conversations).collect();
    with_a_bad_row[0] = json!({ "nope": 1 });
    let table: String = (0..60).map(|i| format!("q{i},a\n")).collect();
    shop.write("table.csv", format!("question,answer\n{table}"));
    for (path, kind) in [
        (shop.write_rows("chats.jsonl", &with_a_bad_row), "messages"),
        (
            shop.write_rows("preferences.jsonl", &(0..60).map(preferences).collect::<Vec<_>>()),
            "prompt_completion",
        ),
        (shop.path("table.csv"), "gsm8k"),
    ] {
        let text = noted(&[
            "train",
            &shop.config(),
            &format!("data.train=[{{path: {path}}}]"),
            &format!("output={}", shop.path(kind)),
            "train.steps=2",
        ]);
        assert!(text.contains(&format!("read as `{kind}`")), "{text}");
        let text = succeed(&["data", "inspect", &path, "--target", &shop.target(), "--rows", "60"]);
        assert!(text.contains("<user>q7</s><assistant>[[a</s>]]"), "{text}");
        if kind == "messages" {
            require_words(&text, &["chats.jsonl:1: malformed: field `messages` is missing"]);
        }
    }
}

#[test]
fn as_many_rows_are_held_out_as_the_configuration_says() {
    let shop = Workshop::new();
    for (row_tokens, rows) in [(64, 1), (128, 2), (256, 2), (64, 9)] {
        let text = noted(&[
            "train",
            &shop.config(),
            &format!("data.row_tokens={row_tokens}"),
            &format!("data.held_out_rows={rows}"),
            &format!("output={}", shop.path(&format!("{row_tokens}-{rows}"))),
            "train.steps=1",
        ]);
        assert!(text.contains(&format!("({rows} held out)")), "{text}");
    }
    let text = stderr(&run(&["train", &shop.config(), "data.held_out_rows=500", "train.steps=1"]));
    assert!(text.contains("of the 500 rows of `data.held_out_rows` are held out"), "{text}");
}
