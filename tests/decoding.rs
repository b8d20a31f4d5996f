//! `generate` and `eval decode` through the binary, on a tiny random target.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::support::files::{json_so_far, read_json};
#[cfg(unix)]
use crate::support::processes::signal;
use crate::support::processes::{killed_when, start_kept};
use crate::support::{
    self, VOCABULARY, Workshop, fail, last_json, longdraft, stderr, stdout, succeed,
};
use longdraft_models::draft::Init;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::{LayerId, TargetTokenId};
use serde_json::{Value, json};

/// A target of four layers with a chat template, and two drafts of it.
pub(crate) struct Shelf {
    folder: tempfile::TempDir,
}

impl Shelf {
    pub(crate) fn new() -> Self {
        let shelf = Self { folder: tempfile::tempdir().expect("tempdir") };
        let mut config = support::tiny_config("llama");
        config["num_hidden_layers"] = 4.into();
        support::write_target(Path::new(&shelf.path("target")), &config);
        let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[answer]";
        let chat = json!({"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"});
        support::add_block(Path::new(&shelf.path("target")), false, &|_, _| ());
        std::fs::write(shelf.path("target/tokenizer_config.json"), chat.to_string()).expect("file");
        let path = shelf.path("target");
        let target = Target::open(&path, &TargetOptions::default()).expect("target");
        let glide = GlideConfig::for_target(target.config(), None);
        std::fs::create_dir(shelf.path("glide")).expect("folder");
        GlideDraft::initialise(&glide, &target, Init::LastLayer, 1)
            .and_then(|draft| draft.save(Path::new(&shelf.path("glide")), target.fingerprint()))
            .expect("draft");
        let kept = (0..100).map(|i| TargetTokenId(i * 2)).collect();
        let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
        let mut wide = target.config().clone();
        wide.num_hidden_layers = 32;
        let mut eagle3 = Eagle3Config::for_target(&wide, map.draft_size()).expect("layers");
        eagle3.target_layers = [LayerId(0), LayerId(1), LayerId(3)];
        std::fs::create_dir(shelf.path("eagle3")).expect("folder");
        let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
        Eagle3Draft::initialise(&eagle3, map, &table, 1)
            .and_then(|draft| draft.save(Path::new(&shelf.path("eagle3")), target.fingerprint()))
            .expect("draft");
        shelf
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    pub(crate) fn generate(&self, extra: &[&str]) -> Value {
        let target = self.path("target");
        let common = ["generate", "--target", &target, "--max-tokens", "40", "--json"];
        last_json(&succeed(&[&common[..], extra].concat()))
    }
}

#[test]
fn every_way_to_draft_writes_the_same_text() {
    let shelf = Shelf::new();
    let (glide, eagle3) = (shelf.path("glide"), shelf.path("eagle3"));
    let frequent = shelf.path("frequent.txt");
    let lines: String = (0..200).map(|id| format!("{id} {}\n", 1000 - id)).collect();
    std::fs::write(&frequent, lines).expect("file");
    let ways: [&[&str]; 12] = [
        &["--draft", &glide, "--pace", "fixed"],
        &["--draft", &glide, "--tree", "static:3,4"],
        &["--draft", &glide, "--draft-vocab", &frequent, "--draft-vocab-size", "50"],
        &["--draft", &eagle3, "--draft-len", "6"],
        &["--draft", &eagle3, "--tree", "dynamic:3,4,12", "--pace", "fixed"],
        &["--lookup"],
        &["--mtp"],
        &["--mtp", "--tree", "static:3,4", "--pace", "fixed"],
        &["--mtp", "--lookup", "--draft-len", "2"],
        &["--mtp", "--lookup=switch", "--draft-vocab", &frequent, "--pace", "fixed"],
        &["--draft", &eagle3, "--lookup=switch"],
        &["--draft", &glide, "--lookup", "--tree", "sampled:2,2"],
    ];
    for temperature in ["0", "0.9"] {
        let prompt = ["--prompt", "the cat", "--temperature", temperature, "--verify", "match"];
        let plain = shelf.generate(&[&prompt[..], &["--no-draft"]].concat());
        assert_eq!(plain["tokens"].as_array().map(Vec::len), Some(40));
        for way in ways {
            let drafted = shelf.generate(&[&prompt[..], way].concat());
            assert_eq!(drafted["tokens"], plain["tokens"], "{way:?} at {temperature}");
        }
    }
}

/// What the target wrote once is proposed where it writes it again.
#[test]
fn a_datastore_proposes_what_other_texts_say() {
    let shelf = Shelf::new();
    let (store, target) = (shelf.path("store.jsonl"), shelf.path("target"));
    let prompt = ["--prompt", "the cat", "--pace", "fixed", "--draft-len", "6"];
    let plain = shelf.generate(&[&prompt[..], &["--no-draft"]].concat());
    let rows = format!(
        "{}\n{}\n",
        json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a dog"}]}),
        json!({"input_ids": plain["tokens"]})
    );
    std::fs::write(&store, rows).expect("file");
    let lookup = shelf.generate(&[&prompt[..], &["--lookup"]].concat());
    let with_store = shelf.generate(&[&prompt[..], &["--lookup", "--datastore", &store]].concat());
    assert_eq!(with_store["tokens"], plain["tokens"]);
    assert_eq!(with_store["lookup_share"], 1.0);
    let rounds = |value: &Value| value["rounds"].as_u64().expect("rounds");
    // 40 tokens, seven a round but for the first ones, that have nothing to look for.
    assert!(rounds(&with_store) <= 9, "{with_store}");
    assert!(rounds(&with_store) < rounds(&lookup), "{lookup}");

    let common = ["generate", "--target", &target, "--prompt", "the cat"];
    let refused = |more: &[&str], status| fail(&[&common[..], more].concat(), status);
    assert!(refused(&["--datastore", &store], 2).contains("--lookup"));
    let missing = shelf.path("missing.jsonl");
    assert!(refused(&["--lookup", "--datastore", &missing], 2).contains("missing.jsonl"));
    std::fs::write(&store, "{\"text\": \"a\"}\n{\"text\": }\n").expect("file");
    let error = refused(&["--lookup", "--datastore", &store], 1);
    assert!(error.contains("store.jsonl:2"), "{error}");
    std::fs::write(&store, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n")
        .expect("file");
    let error = refused(&["--lookup", "--datastore", &store], 2);
    assert!(error.contains("no row has an answer"), "{error}");
    std::fs::write(&store, "{\"input_ids\": [1, 2, 99999999]}\n").expect("file");
    let error = refused(&["--lookup", "--datastore", &store], 1);
    assert!(error.contains("store.jsonl:1") && error.contains("token 99999999"), "{error}");
    std::fs::write(&store, "{\"unheard_of\": 1}\n").expect("file");
    let error = refused(&["--lookup", "--datastore", &store], 2);
    assert!(error.contains("store.jsonl:1") && error.contains("unheard_of"), "{error}");
}

#[test]
fn without_a_draft_plain_decoding_is_measured() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let prompts = shelf.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a dog\"}\n")
        .expect("prompts");
    let common = ["eval", "decode", "--target", &target, "--prompts", &prompts, "--json"];
    let text = succeed(&[&common[..], &["--max-tokens", "8"]].concat());
    let value = last_json(&text);
    assert!(text.starts_with("plain decoding ("), "{text}");
    assert!(text.contains("outputs equal: 2 of 2") && !text.contains("proposal 1"), "{text}");
    assert_eq!((&value["tau"], &value["lossless"]), (&json!(1.0), &json!(true)));
    assert!(value["plain_tokens_per_second"].as_f64() > Some(0.0), "{value}");
}

#[test]
fn answers_end_where_they_are_told() {
    let shelf = Shelf::new();
    let glide = shelf.path("glide");
    let target = shelf.path("target");
    let common = ["generate", "--target", &target, "--draft", &glide, "--max-tokens", "40"];
    // Hot enough for bytes of every kind.
    let prompt = ["--prompt", "the cat", "--temperature", "9", "--verify", "match", "--ignore-eos"];
    let whole = succeed(&[&common[..], &prompt].concat());
    // The tiny target's bytes are seldom text: what is printed at the start has to do.
    let stop = whole.chars().rfind(char::is_ascii_graphic);
    let stop = stop.unwrap_or_else(|| panic!("no plain character in {whole:?}")).to_string();
    let cut = succeed(&[&common[..], &prompt, &["--stop", &stop]].concat());
    let expected = &whole[..whole.find(&stop).expect("it is there")];
    assert_eq!(cut.strip_suffix('\n'), Some(expected));
    let drafted = ["--draft", &glide];
    let end =
        |extra: &[&str]| shelf.generate(&[&drafted[..], &prompt, extra].concat())["end"].clone();
    assert_eq!(end(&["--stop", &stop]), "StopString");
    let tokens = shelf.generate(&[&drafted[..], &prompt].concat())["tokens"].clone();
    assert_eq!(end(&["--stop-token", &tokens[3].to_string()]), "StopToken");
}

#[test]
fn a_conversation_keeps_its_history_and_its_cache() {
    let shelf = Shelf::new();
    let (target, glide) = (shelf.path("target"), shelf.path("glide"));
    let chat = ["generate", "--target", &target, "--draft", &glide, "--chat", "--json"];
    let more = ["--system", "be brief", "--max-tokens", "12", "--show-acceptance"];
    let output = fed(&[&chat[..], &more].concat(), "hello\n\nand then?\n");
    assert!(output.status.success(), "{}", stderr(&output));
    let last = last_json(&stdout(&output));
    assert!(last["reused_tokens"].as_u64() > Some(20), "{last}");
    assert_eq!(stderr(&output).matches("tokens after a prompt").count(), 2);
    assert!(!stderr(&output).contains("no draft"), "{}", stderr(&output));
}

/// Output of a command with this text on its stdin.
fn fed(arguments: &[&str], text: &str) -> std::process::Output {
    let mut child = start_kept(longdraft(arguments).stdin(Stdio::piped()));
    child.stdin.take().expect("stdin").write_all(text.as_bytes()).expect("text");
    child.wait_with_output().expect("the binary ends")
}

#[test]
fn a_target_alone_decodes_plainly_and_reads_what_is_piped_in() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let plain = shelf.generate(&["--prompt", "the cat"]);
    assert_eq!(plain["finish"], "length");
    assert_eq!(plain["plain_rounds"], plain["rounds"]);
    let common = ["generate", "--target", &target, "--max-tokens", "40", "--json"];
    let piped = fed(&common, "the cat\n");
    assert!(piped.status.success(), "{}", stderr(&piped));
    assert!(stderr(&piped).contains("plain decoding"), "{}", stderr(&piped));
    let piped = last_json(&stdout(&piped));
    assert_eq!((&piped["tokens"], &piped["text"]), (&plain["tokens"], &plain["text"]));
    assert!(plain["text"].as_str().is_some_and(|text| !text.is_empty()));
}

#[test]
fn accepted_tokens_are_marked_where_there_are_no_colours() {
    let shelf = Shelf::new();
    let (target, store) = (shelf.path("target"), shelf.path("store.jsonl"));
    // Hot enough for text among the bytes; what is said is in the datastore.
    let prompt = ["--prompt", "the cat", "--temperature", "9", "--verify", "match", "--ignore-eos"];
    let said = shelf.generate(&prompt);
    std::fs::write(&store, json!({"input_ids": said["tokens"]}).to_string()).expect("file");
    let common = ["generate", "--target", &target, "--max-tokens", "40"];
    let bare = succeed(&[&common[..], &prompt].concat());
    let lookup = ["--lookup", "--datastore", &store, "--pace", "fixed", "--show-acceptance"];
    let shown = support::run(&[&common[..], &prompt, &lookup].concat());
    let told = stderr(&shown);
    assert!(told.contains("tokens per target pass (its own, and a 1st, 2nd, ..."), "{told}");
    let shown = stdout(&shown);
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
    assert!(shown.contains("{{") && shown.contains("}}"), "{shown:?}");
    assert_eq!(shown.replace("{{", "").replace("}}", ""), bare);
}

#[test]
fn lines_with_a_slash_are_commands_of_a_conversation() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let common = ["generate", "--target", &target, "--chat", "--max-tokens", "4", "--json"];
    let said = |text: &str| {
        let output = fed(&common, text);
        assert!(output.status.success(), "{}", stderr(&output));
        (last_json(&stdout(&output)), stderr(&output))
    };
    let (first, _) = said("hello\n");
    let (after, told) = said("hm\n/help\n/save it\n/clear\nhello\n/quit\nmore\n");
    assert_eq!(after["tokens"], first["tokens"], "nothing else was said: {told}");
    assert_eq!(told.matches("tokens after a prompt").count(), 2);
    assert!(told.contains("/system TEXT") && told.contains("/save is not a command"), "{told}");
    // What does not fit is taken back, and the conversation goes on.
    let (after, told) = said(&format!("{}\nhello\n", "long ".repeat(20_000)));
    assert_eq!(after["tokens"], first["tokens"], "{told}");
    assert!(told.contains("leaves no room") && told.contains("hint: /clear"), "{told}");
    let (other, _) = said("/system be brief\nhello\n");
    let with =
        last_json(&stdout(&fed(&[&common[..], &["--system", "be brief"]].concat(), "hello\n")));
    assert_eq!(other["tokens"], with["tokens"]);
}

/// A token that the tokenizer cannot put into words ends an answer in the middle of a line.
#[test]
fn an_error_in_the_middle_of_a_line_begins_a_new_one() {
    let shelf = Shelf::new();
    let written = |seed: &String| -> Vec<u8> {
        let prompt = ["--prompt", "the cat", "--no-draft", "--temperature", "0.9", "--seed", seed];
        let ids = shelf.generate(&prompt)["tokens"].as_array().expect("tokens").clone();
        ids.iter().filter_map(|id| u8::try_from(id.as_u64()?).ok()).collect()
    };
    // An answer that begins with two letters: the first one is printed, the other is none that can
    // be.
    let is_fit = |seed: &String| {
        let bytes = written(seed);
        bytes[..2].iter().all(u8::is_ascii_graphic) && bytes[0] != bytes[1]
    };
    let seed = (0..200).map(|seed| seed.to_string()).find(is_fit).expect("two letters");
    let prompt = ["--prompt", "the cat", "--no-draft", "--temperature", "0.9", "--seed", &seed];
    let bytes = written(&seed);
    // Cutting a lone letter off on both sides is more than the library can do.
    let path = shelf.path("target/tokenizer.json");
    let mut tokenizer = support::byte_tokenizer();
    let letter = char::from(bytes[1]).to_string();
    let cut = json!({"type": "Strip", "content": letter, "start": 1, "stop": 1});
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().expect("a map");
    vocabulary.remove(&format!("<0x{:02X}>", bytes[1]));
    vocabulary.insert(letter, bytes[1].into());
    tokenizer["decoder"]["decoders"] = json!([{"type": "ByteFallback"}, cut, {"type": "Fuse"}]);
    std::fs::write(path, tokenizer.to_string()).expect("tokenizer");
    let target = shelf.path("target");
    let common = ["generate", "--target", &target, "--max-tokens", "40", "--json"];
    let failed = support::run(&[&common[..], &prompt].concat());
    assert_eq!(failed.status.code(), Some(1), "{}", stderr(&failed));
    let printed = stdout(&failed);
    let (text, last) = printed.trim_end().rsplit_once('\n').expect("text, then a line of its own");
    let error: Value = serde_json::from_str(last).expect("the last line is JSON");
    assert!(error["error"]["message"].as_str().is_some_and(|m| m.contains("tokenizer")), "{error}");
    assert!(text.contains(char::from(bytes[0])), "{printed:?}");
    // Without text there is no line to end.
    let refused = ["generate", "--target", &target, "--max-tokens", "0", "--prompt", "a", "--json"];
    let refused = stdout(&support::run(&refused));
    assert_eq!((refused.lines().count(), refused.starts_with('{')), (1, true), "{refused:?}");
}

#[test]
fn wrong_use_is_explained() {
    let shelf = Shelf::new();
    let (target, glide, eagle3) = (shelf.path("target"), shelf.path("glide"), shelf.path("eagle3"));
    let refused = |extra: &[&str]| {
        let common = ["generate", "--target", &target];
        fail(&[&common[..], extra].concat(), 2)
    };
    let long = "a".repeat(600);
    let binary = shelf.path("binary");
    std::fs::write(&binary, [b'a', 0xff]).expect("file");
    let list = shelf.path("list.txt");
    std::fs::write(&list, "1\nx\n").expect("file");
    let plain = ["--no-draft", "--prompt"];
    for (extra, says) in [
        (&[][..], "there is no prompt"),
        (&["--draft", &glide, "--prompt", "a", "--draft-len", "0"], "drafts nothing"),
        (
            &["--no-draft", "--prompt", "a", "--stop-token", "<nothing>"],
            "is not a token of the target",
        ),
        (&["--no-draft", "--prompt", "a", "--stop-token", "258"], "is not a token of the target"),
        (&["--no-draft", "--prompt", "a", "--temperature", "-1"], "temperature of -1"),
        (&["--no-draft", "--prompt", "a", "--seed", "-1"], "-1"),
        (&["--no-draft", "--prompt", "a", "--top-p", "0"], "top-p of 0"),
        (&[plain[0], plain[1], &long], "leaves no room in the context of 512"),
        (&["--no-draft", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (&["--no-draft", "--prompt-file", &binary], "no UTF-8 at byte 1"),
        (&["--draft", &glide, "--prompt", "a", "--tree", "bush"], "expected static"),
        (
            &["--draft", &eagle3, "--prompt", "a", "--draft-vocab", &list],
            "through the target's head",
        ),
    ] {
        let text = refused(extra);
        assert!(text.contains(says), "{extra:?}: {text}");
    }
    let vocab = ["generate", "--target", &target, "--draft", &glide, "--prompt", "a"];
    let text = fail(&[&vocab[..], &["--draft-vocab", &list]].concat(), 1);
    assert!(text.contains("line 2: `x` is no token id"), "{text}");
}

#[test]
fn figures_are_measured_written_and_shown() {
    let shelf = Shelf::new();
    let prompts = shelf.path("mt-bench.jsonl");
    let row = |category: &str, turns: &[&str]| {
        format!("{}\n", json!({"question_id": 1, "category": category, "turns": turns}))
    };
    let rows = [row("writing", &["a b", "more"]), row("math", &["1 + 1"]), row("math", &["x"])];
    std::fs::write(&prompts, rows.concat()).expect("prompts");
    let document = "the cat sat on the mat. ".repeat(30);
    let row = json!({"id": 1, "kind": "book", "document": document, "question": "who sat?"});
    std::fs::write(shelf.path("longdoc-eval.jsonl"), format!("{row}\n")).expect("documents");
    let (target, eagle3) = (shelf.path("target"), shelf.path("eagle3"));
    let output = shelf.path("run");
    let common = ["eval", "decode", "--target", &target, "--draft", &eagle3, "--max-tokens", "16"];
    let measure = |extra: &[&str]| {
        let run = longdraft(&[&common[..], extra].concat())
            .env("LONGDRAFT_DATA", shelf.folder.path())
            .output()
            .expect("the binary starts");
        assert!(run.status.success(), "{}", stderr(&run));
        stdout(&run)
    };
    let set = ["--prompts", "mt-bench", "--limit", "1", "--output", &output, "--json"];
    let text = measure(&[&set[..], &["--temperature", "0,1", "--tree", "static:2,2"]].concat());
    let value = last_json(&text);
    // Two turns of the first writing row, the first math row.
    assert_eq!(
        (&value["prompts"], &value["equal"], &value["lossless"]),
        (&3.into(), &3.into(), &true.into())
    );
    let cells = value["record"]["cells"].as_array().expect("cells");
    assert_eq!(
        (&cells[0]["verifier"], &cells[1]["verifier"]),
        (&"greedy".into(), &"candidate".into())
    );
    for cell in cells {
        let figures = &cell["figures"];
        let tau = figures["tau_incl_bonus"].as_f64().expect("tau");
        assert!(tau >= 1.0 && figures["tau_interval"][0].as_f64() <= Some(tau));
        assert_eq!(cell["speed_up_of_runs"].as_array().map(Vec::len), Some(3));
        assert_eq!(cell["categories"].as_array().map(Vec::len), Some(2));
        assert_eq!(cell["equal"], cell["checked"]);
        assert_eq!(cell["residual_fallbacks"], 0);
    }
    assert_eq!(read_json(format!("{output}/decode.json")), value["record"]);

    let documents = ["--prompts", "longdoc", "--contexts", "100,200,400,5000"];
    let more = ["--runs", "1", "--lookup", "--json", "--temperature", "1"];
    let curve = last_json(&measure(&[&documents[..], &more].concat()));
    let contexts = curve["record"]["cells"][0]["contexts"].as_array().expect("contexts").clone();
    let names: Vec<&str> = contexts.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(names, ["128", "256", "512"]);
    assert_eq!(
        curve["record"]["cells"][0]["checked"], 0,
        "drawn proposals: the distribution, not the tokens"
    );

    let missing = longdraft(&[&common[..], &["--prompts", "gsm8k"]].concat())
        .env("LONGDRAFT_DATA", shelf.folder.path())
        .output()
        .expect("the binary starts");
    assert_eq!(missing.status.code(), Some(2));
    assert!(stderr(&missing).contains("gsm8k-test.jsonl is not there"), "{}", stderr(&missing));
}

#[test]
fn an_evaluation_that_was_killed_goes_on() {
    let shelf = Shelf::new();
    let (target, glide, prompts) =
        (shelf.path("target"), shelf.path("glide"), shelf.path("prompts.jsonl"));
    let row = |index: usize| format!("{}\n", json!({"prompt": format!("the cat {index}")}));
    std::fs::write(&prompts, (0..16).map(row).collect::<String>()).expect("prompts");
    let evaluation = |output: &str, temperatures: &str| {
        let command = ["eval", "decode", "--target", &target, "--draft", &glide];
        let set = ["--prompts", &prompts, "--max-tokens", "60", "--runs", "2"];
        let more = ["--json", "--output", output, "--temperature", temperatures];
        longdraft(&[&command[..], &set, &more].concat())
    };
    let ended = |output: std::process::Output| {
        assert!(output.status.success(), "{}", stderr(&output));
        (last_json(&stdout(&output))["record"]["cells"].clone(), stderr(&output))
    };
    let cells = |cells: &Value| -> Vec<Value> {
        let cells = cells.as_array().expect("cells").iter();
        cells
            .map(|cell| json!([cell["tested_by_position"], cell["checked"], cell["equal"]]))
            .collect()
    };
    let (output, whole) = (shelf.path("killed"), shelf.path("whole"));
    let (whole, _) = ended(evaluation(&whole, "0,1").output().expect("the binary starts"));
    let left = Path::new(&output).join("decode-unfinished.json");
    let mut state = Value::Null;
    killed_when(&mut evaluation(&output, "0,1"), "its prompts", || {
        state = json_so_far(&left);
        state["progress"]["prompts"].as_u64() > Some(3)
    });
    assert!(!Path::new(&output).join("decode.json").exists());
    let (resumed, told) = ended(evaluation(&output, "0,1").output().expect("the binary starts"));
    assert!(told.contains("going on after "), "{told}");
    assert_eq!(cells(&resumed), cells(&whole));
    assert_eq!(resumed[0]["speed_up_of_runs"].as_array().map(Vec::len), Some(2));
    assert!(!left.exists());
    // What other settings left, or nobody can read, is told and not used.
    for (text, problem) in [(state.to_string(), "of another evaluation"), ("{".into(), "EOF")] {
        std::fs::write(&left, text).expect("state");
        let (anew, told) = ended(evaluation(&output, "0").output().expect("the binary starts"));
        assert!(told.contains(problem) && !told.contains("going on"), "{told}");
        assert_eq!(cells(&anew)[0], cells(&whole)[0]);
    }
}

#[test]
fn figures_that_could_not_be_kept_are_not_measured() {
    let shelf = Shelf::new();
    let (target, prompts) = (shelf.path("target"), shelf.path("prompts.jsonl"));
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n").expect("prompts");
    let command = ["eval", "decode", "--target", &target, "--lookup", "--prompts", &prompts];
    let into = |output: &str, code| fail(&[&command[..], &["--output", output]].concat(), code);
    let told = into(&format!("{prompts}/figures"), 2);
    assert!(told.contains("figures: nothing can be written there"), "{told}");
    assert!(told.contains("hint: ") && !told.contains("each answered"), "{told}");
    // Another process measures there.
    let output = shelf.path("figures");
    std::fs::create_dir(&output).expect("folder");
    let lock = std::fs::File::create(format!("{output}/.decode.lock")).expect("file");
    lock.lock().expect("free");
    let told = into(&output, 1);
    assert!(told.contains("another process works in this folder"), "{told}");
    assert!(told.contains("hint: ") && !told.contains("each answered"), "{told}");
    drop(lock);
    let few = ["--max-tokens", "2", "--runs", "1", "--output", &output];
    succeed(&[&command[..], &few].concat());
    // Lengths of a file's prompts are as they are.
    let told = fail(&[&command[..], &["--contexts", "64"]].concat(), 2);
    assert!(told.contains("--contexts cuts documents"), "{told}");
}

/// A command that was asked to end by Ctrl-C as soon as it told `sign` on stderr.
#[cfg(unix)]
fn interrupted(arguments: &[&str], sign: &str) -> std::process::Output {
    use std::io::Read;
    let mut child = start_kept(&mut longdraft(arguments));
    let mut stderr = child.stderr.take().expect("piped");
    let mut told = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&told).contains(sign) {
        assert_eq!(stderr.read(&mut byte).expect("read"), 1, "{}", String::from_utf8_lossy(&told));
        told.push(byte[0]);
    }
    signal(&child, "-INT");
    let rest = std::thread::spawn(move || {
        let mut rest = Vec::new();
        stderr.read_to_end(&mut rest).map(|_| rest)
    });
    let mut output = child.wait_with_output().expect("the binary ends");
    told.extend(rest.join().expect("no panic").expect("read"));
    output.stderr = told;
    output
}

#[cfg(unix)]
#[test]
fn what_an_interrupt_leaves_is_told() {
    let shelf = Shelf::new();
    let (target, prompts) = (shelf.path("target"), shelf.path("prompts.jsonl"));
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n").expect("prompts");
    let command = ["eval", "decode", "--target", &target, "--lookup", "--prompts", &prompts];
    let command = [&command[..], &["--runs", "1000000"]].concat();
    let output = interrupted(&command, "each answered");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let told = stdout(&output);
    assert!(told.contains("nothing is kept without --output DIR"), "{told}");
    assert!(!told.contains("goes on"), "{told}");
    let figures = shelf.path("figures");
    let kept = [&command[..], &["--output", &figures]].concat();
    let output = interrupted(&kept, "each answered");
    assert!(stdout(&output).contains("the same command goes on"), "{}", stdout(&output));
}

/// An answer is ended as it is, and the exit code says by what.
#[cfg(unix)]
#[test]
fn an_answer_that_is_interrupted_ends_with_the_code_of_the_signal() {
    use std::io::Read;
    let folder = tempfile::tempdir().expect("tempdir");
    let mut config = support::tiny_config("llama");
    config["max_position_embeddings"] = 100_000.into();
    support::write_target(folder.path(), &config);
    let target = folder.path().display().to_string();
    let command = ["generate", "--target", &target, "--prompt", "the cat", "--ignore-eos"];
    // Hot enough for text among the bytes.
    let more = ["--temperature", "9", "--max-tokens", "90000", "--json"];
    let child = longdraft(&[&command[..], &more].concat()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("the binary starts");
    let mut first = [0];
    child.stdout.as_mut().expect("piped").read_exact(&mut first).expect("some text");
    signal(&child, "-INT");
    let output = child.wait_with_output().expect("the binary ends");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(last_json(&stdout(&output))["finish"], "interrupted");
}

#[test]
fn a_run_shows_what_was_measured_beside_its_plots() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=4"]);
    succeed(&["extract", &shop.path("run")]);
    let prompts = shop.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a\"}\n").expect("prompts");
    let (target, draft, output) = (shop.target(), shop.path("run/draft"), shop.path("run"));
    let measure = ["eval", "decode", "--target", &target, "--draft", &draft, "--prompts", &prompts];
    let more = ["--max-tokens", "20", "--runs", "1", "--output", &output];
    succeed(&[&measure[..], &more].concat());
    succeed(&["report", &shop.path("run")]);
    let page = std::fs::read_to_string(shop.path("run/report.html")).expect("page");
    assert!(page.contains("Acceptance by position, where reached"), "{page}");
    assert!(page.contains("GLIDE draft; chains of 4 tokens, greedy"), "{page}");
    // What it opens with is what the file says.
    let mut record = read_json(shop.path("run/decode.json"));
    let cell = &record["cells"][0];
    let tile = |label: &str| {
        let at = page.find(&format!("<div class=\"label\">{label}</div>")).expect(label);
        let value = page[at..].split("<div class=\"value\">").nth(1).expect("a value");
        value.split('<').next().expect("its end").to_owned()
    };
    let figure = |name: &str| cell["figures"][name].as_f64().expect("a figure");
    assert_eq!(tile("Speed-up"), format!("{:.2}×", figure("speed_up")));
    assert_eq!(tile("Tokens per target pass (tau)"), format!("{:.2}", figure("tau_incl_bonus")));
    assert_eq!(tile("Equal outputs"), format!("{} of {}", cell["equal"], cell["checked"]));
    assert_eq!(tile("Machine"), "1 thread");
    assert!(page.contains("<code>longdraft eval decode --target "), "the command is shown");
    // The answer is shown token by token, its text is escaped.
    let tokens = cell["sample"]["tokens"].as_array().expect("a sample").clone();
    let proposed = |token: &&serde_json::Value| token["proposed_by"] == "draft";
    let marked = tokens.iter().filter(proposed).count();
    assert_eq!(page.matches("<span class=\"draft\">").count(), marked);
    assert!(!tokens.is_empty(), "{record}");
    // A file alone is a report, also one of before samples were kept.
    std::fs::create_dir(shop.path("alone")).expect("folder");
    record.as_object_mut().expect("an object").remove("circumstances");
    let older = record["cells"][0].as_object_mut().expect("an object");
    older.remove("sample");
    // Older files have the names of drafter and layout only.
    assert_eq!(older.remove("drafter_parts"), Some(json!({"method": "glide"})));
    assert_eq!(older.remove("shape"), Some(json!({"rule": "chain", "length": 4})));
    std::fs::write(shop.path("alone/decode.json"), record.to_string()).expect("record");
    let told = support::run(&["report", &shop.path("alone")]);
    assert!(told.status.success() && stderr(&told).is_empty(), "{}", stderr(&told));
    let alone = std::fs::read_to_string(shop.path("alone/report.html")).expect("page");
    assert!(alone.contains(&tile("Speed-up")) && !alone.contains("A sample answer"), "{alone}");
    assert!(alone.contains("GLIDE draft; chains of 4 tokens, greedy"), "{alone}");
    std::fs::write(shop.path("run/decode.json"), "{\"version\": 1}").expect("file");
    let told = support::run(&["report", &shop.path("run")]);
    assert!(
        told.status.success() && stderr(&told).contains("skipped decode.json"),
        "{}",
        stderr(&told)
    );
}

#[test]
fn weights_that_are_not_numbers_end_decoding_with_a_sentence() {
    let shelf = Shelf::new();
    let file = shelf.path("target/model.safetensors");
    let mut bytes = std::fs::read(&file).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    let offset = |i: usize| {
        8 + header
            + tensors["model.norm.weight"]["data_offsets"][i].as_u64().expect("offset") as usize
    };
    for value in bytes[offset(0)..offset(1)].as_chunks_mut::<4>().0 {
        *value = f32::NAN.to_le_bytes();
    }
    std::fs::write(&file, bytes).expect("weights");
    let target = shelf.path("target");
    for temperature in ["0", "1"] {
        for draft in [&["--no-draft"][..], &["--lookup"]] {
            let arguments =
                ["generate", "--target", &target, "--temperature", temperature, "--prompt", "hi"];
            let told = fail(&[&arguments[..], draft].concat(), 1);
            assert!(told.contains("the logits are not numbers"), "{told}");
        }
    }
}
