//! Answers, conversations and their commands on standard input.

use std::io::Write;

use super::*;

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

/// Tokens are bytes. A byte that begins a character is text only at the end, as U+FFFD.
#[test]
fn a_stop_string_may_be_completed_by_the_end_of_the_text() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let drawn = |seed: u64, tokens: usize, more: &[&str]| {
        let (seed, tokens) = (seed.to_string(), tokens.to_string());
        let common = ["generate", "--target", &target, "--prompt", "the cat", "--json"];
        let how = ["--temperature", "9", "--ignore-eos", "--seed", &seed, "--max-tokens", &tokens];
        last_json(&succeed(&[&common[..], &how, more].concat()))
    };
    // Plain letters, and then such a byte.
    let (seed, tokens) = (0..64)
        .find_map(|seed| {
            let answer = drawn(seed, 12, &[]);
            let ids = answer["tokens"].as_array().expect("tokens").iter();
            let mut ids = ids.map(|id| id.as_u64().expect("an id"));
            let at = ids.clone().position(|id| (0x80..0x100).contains(&id))?;
            (0xC2..0xF5).contains(&ids.nth(at)?).then_some((seed, at + 1))
        })
        .expect("a seed");
    let whole = drawn(seed, tokens, &[]);
    assert_eq!((&whole["finish"], &whole["end"]), (&json!("length"), &json!("TokenLimit")));
    let stopped = drawn(seed, tokens, &["--stop", "\u{FFFD}"]);
    assert_eq!((&stopped["finish"], &stopped["end"]), (&json!("stop"), &json!("StopString")));
    assert_eq!(stopped["tokens"], whole["tokens"]);
    let text = stopped["text"].as_str().expect("text");
    assert_eq!(whole["text"], format!("{text}\u{FFFD}"));
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
