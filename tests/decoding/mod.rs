//! `generate` and `eval decode` through the binary, on a tiny random target.

mod conversations;
mod figures;

use std::path::Path;
use std::process::Stdio;

#[cfg(unix)]
use crate::support::processes::signal;
use crate::support::processes::start_kept;
use crate::support::{
    self, VOCABULARY, fail, fail_with, finished, last_json, longdraft, noted, require_words,
    stderr, stdout, succeed, succeeded, told_by,
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
        shelf.write("target/tokenizer_config.json", chat.to_string());
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

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("written");
        path
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
    let lines: String = (0..200).map(|id| format!("{id} {}\n", 1000 - id)).collect();
    let frequent = shelf.write("frequent.txt", lines);
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
fn wrong_use_is_explained() {
    let shelf = Shelf::new();
    let (target, glide, eagle3) = (shelf.path("target"), shelf.path("glide"), shelf.path("eagle3"));
    let refused = |extra: &[&str]| {
        let common = ["generate", "--target", &target];
        fail(&[&common[..], extra].concat(), 2)
    };
    let long = "a".repeat(600);
    let binary = shelf.write("binary", [b'a', 0xff]);
    let list = shelf.write("list.txt", "1\nx\n");
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
fn weights_that_are_not_numbers_end_decoding_with_a_sentence() {
    let shelf = Shelf::new();
    let file = shelf.path("target/model.safetensors");
    let mut bytes = std::fs::read(&file).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    let offset = |i: usize| {
        8 + header
            + tensors["model.layers.0.input_layernorm.weight"]["data_offsets"][i]
                .as_u64()
                .expect("offset") as usize
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
            fail_with(&[&arguments[..], draft].concat(), 1, &["the logits are not numbers"]);
        }
    }
}
