//! Headers whose tokenizers leave to a reader what it has to know.

use std::collections::BTreeMap;

use super::*;

fn text(text: &str) -> GgufValue {
    GgufValue::String(text.to_owned())
}

fn list(items: &[&str]) -> GgufValue {
    GgufValue::Array(items.iter().map(|item| text(item)).collect())
}

/// A header; keys without a point are those of the tokenizer.
fn header(keys: &[(&str, GgufValue)]) -> Header {
    let full = |key: &str| {
        let is_of_all = key.contains('.');
        if is_of_all { key.to_owned() } else { format!("tokenizer.ggml.{key}") }
    };
    let metadata = keys.iter().map(|(key, value)| (full(key), value.clone())).collect();
    Header { version: 3, metadata, tensors: BTreeMap::new() }
}

/// A tokenizer of bytes that is split as `pre` says, with further keys.
fn of_bytes(pre: &str, merges: &[&str], more: &[(&str, GgufValue)]) -> TextTokenizer {
    let mut keys = vec![
        ("model", text("gpt2")),
        ("pre", text(pre)),
        ("tokens", list(&["a", "b", "ab", "<s>"])),
        ("merges", list(merges)),
        ("bos_token_id", GgufValue::U32(3)),
    ];
    keys.extend_from_slice(more);
    read(&header(&keys)).expect("a tokenizer")
}

#[test]
fn prompts_begin_with_the_start_token_where_the_tokenizer_s_kind_wants_it() {
    for (pre, stated, begins) in [
        ("llama-bpe", None, true),
        ("lfm2", None, true),
        ("tekken", None, true),
        ("llama-bpe", Some(false), false),
        ("qwen2", None, false),
        ("qwen2", Some(true), true),
        ("granite-docling", None, false),
        ("falcon3", None, true),
        ("pixtral", None, true),
        ("midm-2.0", None, true),
        ("chameleon", None, true),
        ("stablelm2", None, false),
        ("minicpm5", None, false),
    ] {
        let stated: Vec<_> =
            stated.map(|flag| ("add_bos_token", GgufValue::Bool(flag))).into_iter().collect();
        let ids = of_bytes(pre, &["a b"], &stated).encode_prompt("ab", None).expect("ids");
        let wanted: &[u32] = if begins { &[3, 2] } else { &[2] };
        assert_eq!(ids, wanted, "{pre} {stated:?}");
    }
}

#[test]
fn a_start_token_that_is_none_begins_no_prompt() {
    for bos in [GgufValue::I32(-1), GgufValue::U32(u32::MAX), GgufValue::U32(4)] {
        let more = [("bos_token_id", bos.clone()), ("add_bos_token", GgufValue::Bool(true))];
        let ids = of_bytes("qwen2", &["a b"], &more).encode_prompt("ab", None).expect("ids");
        assert_eq!(ids, [2], "{bos:?}");
    }
}

#[test]
fn a_prompt_to_go_on_with_does_not_end() {
    let more = [("eos_token_id", GgufValue::U32(3)), ("add_eos_token", GgufValue::Bool(true))];
    let ids = of_bytes("qwen2", &["a b"], &more).encode_prompt("ab", None).expect("ids");
    assert_eq!(ids, [2]);
}

#[test]
fn ends_of_turns_and_the_unknown_token_are_found_in_texts_whatever_their_type() {
    let tokens = list(&["a", "<", "<unk>", "<|im_end|>", "<eos>", "<|x|>", "<tool>", "</s>"]);
    let of_types = |types: &[i32]| {
        let types = types.iter().map(|kind| GgufValue::I32(*kind)).collect();
        let keys = [
            ("model", text("gpt2")),
            ("tokens", tokens.clone()),
            ("token_type", GgufValue::Array(types)),
            ("merges", list(&[])),
        ];
        read(&header(&keys)).expect("a tokenizer")
    };
    let tokenizer = of_types(&[1, 1, 2, 1, 4, 1, 4, 1]);
    let ids = tokenizer.encode("a<unk><|im_end|><eos><tool>a").expect("ids").ids;
    assert_eq!(ids, [0, 2, 3, 4, 6, 0]);
    assert_eq!(tokenizer.special_ids(), [2, 3, 4]);
    // These are text like any other.
    assert_eq!(tokenizer.encode("<|x|>").expect("ids").ids[0], 1);
    assert_eq!(tokenizer.encode("</s>").expect("ids").ids[0], 1);
    let untyped = of_types(&[]);
    assert_eq!(untyped.encode("a<|im_end|>").expect("ids").ids, [0, 3]);
}

#[test]
fn some_kinds_take_a_part_that_is_a_token_whatever_the_merges_say() {
    for (pre, wanted) in [
        ("glm4", &[2][..]),
        ("falcon3", &[2]),
        ("youtu", &[2]),
        ("minicpm5", &[2]),
        ("dbrx", &[0, 1]),
        ("afmoe", &[0, 1]),
    ] {
        let ids = of_bytes(pre, &[], &[]).encode("ab").expect("ids").ids;
        assert_eq!(ids, wanted, "{pre}");
    }
}

#[test]
fn files_without_a_splitting_are_known_by_their_family() {
    let keys =
        [("model", text("gpt2")), ("tokens", list(&["1", "2", "12"])), ("merges", list(&["1 2"]))];
    for (architecture, ids) in [("qwen2", &[0, 1][..]), ("llama", &[2])] {
        let mut header = header(&keys);
        header.metadata.insert("general.architecture".into(), text(architecture));
        let found = read(&header).expect("a tokenizer").encode("12").expect("ids").ids;
        assert_eq!(found, ids, "{architecture}");
    }
}

#[test]
fn pieces_that_make_merges_without_measure_are_refused() {
    let pieces: Vec<String> = (1..=512).map(|length| "a".repeat(length)).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    let scores = GgufValue::Array(vec![GgufValue::F32(0.0); pieces.len()]);
    let keys = [("model", text("llama")), ("tokens", list(&pieces)), ("scores", scores)];
    let told = read(&header(&keys)).err().expect("refused");
    assert!(told.contains("more than"), "{told}");
}

#[test]
fn a_template_of_its_own_serves_conversations_with_tools() {
    let more = [
        ("tokenizer.chat_template", text("{{ bos_token }}plain")),
        ("tokenizer.chat_template.tool_use", text("{{ bos_token }}tools")),
    ];
    let tokenizer = of_bytes("qwen2", &[], &more);
    let template = tokenizer.chat_template().expect("a template");
    let printed = |tools| template.render_messages(&[], tools, false).expect("text");
    assert_eq!(printed(None), "<s>plain");
    assert_eq!(printed(Some(&json!([]))), "<s>tools");
}

/// Ids of a text by pieces without scores, which are (text, type).
fn ids(name: &str, pieces: &[(&str, i32)], written: &str) -> Vec<u32> {
    ids_by_scores(name, pieces, &vec![-1000.0; pieces.len()], written)
}

fn ids_by_scores(name: &str, pieces: &[(&str, i32)], scores: &[f32], written: &str) -> Vec<u32> {
    let tokens: Vec<&str> = pieces.iter().map(|(piece, _)| *piece).collect();
    let types = pieces.iter().map(|(_, kind)| GgufValue::I32(*kind)).collect();
    let scores = scores.iter().map(|score| GgufValue::F32(*score)).collect();
    let keys = [
        ("general.name", text(name)),
        ("model", text("llama")),
        ("tokens", list(&tokens)),
        ("token_type", GgufValue::Array(types)),
        ("scores", GgufValue::Array(scores)),
        ("add_space_prefix", GgufValue::Bool(false)),
    ];
    read(&header(&keys)).expect("a tokenizer").encode(written).expect("ids").ids
}

#[test]
fn pieces_without_scores_are_merged_in_their_order() {
    let pieces = [("<unk>", 2), ("a", 1), ("b", 1), ("c", 1), ("bc", 1), ("ab", 1)];
    assert_eq!(ids("any", &pieces, "abc"), [1, 4]);
    let other = [("<unk>", 2), ("a", 1), ("b", 1), ("c", 1), ("ab", 1), ("bc", 1)];
    assert_eq!(ids("any", &other, "abc"), [4, 3]);
}

#[test]
fn tokens_of_phi_3_take_the_end_of_the_line_after_them() {
    let pieces = [("<unk>", 2), ("<s>", 3), ("<|user|>", 3), ("<0x0A>", 6), ("a", 1)];
    assert_eq!(ids("Mistral", &pieces, "<|user|>\na"), [2, 3, 4]);
    for name in ["Phi-3 Mini", "phi3", "Phi 3.5 Mini Instruct"] {
        assert_eq!(ids(name, &pieces, "<|user|>\na"), [2, 4], "{name}");
        assert_eq!(ids(name, &pieces, "<s>\na"), [1, 3, 4], "{name}");
    }
}

#[test]
fn a_text_of_two_ids_is_encoded_as_the_later_one_and_decoded_from_both() {
    let types = [1, 1, 1, 1, 1, 3, 3].map(GgufValue::I32).to_vec();
    let tokenizer = read(&header(&[
        ("model", text("gpt2")),
        ("pre", text("qwen2")),
        ("tokens", list(&["a", "b", "ab", "ab", "b", "<s>", "<s>"])),
        ("token_type", GgufValue::Array(types)),
        ("merges", list(&["a b"])),
    ]));
    let tokenizer = tokenizer.expect("a tokenizer");
    assert_eq!(tokenizer.encode("abb<s>").expect("ids").ids, [3, 4, 6]);
    assert_eq!(tokenizer.decode(&[0, 1, 2, 5, 3, 4], true).expect("text"), "abababb");
    assert_eq!(tokenizer.decode(&[5, 6], false).expect("text"), "<s><s>");
    assert_eq!((tokenizer.token(1).as_deref(), tokenizer.id("b")), (Some("b"), Some(4)));
    assert_eq!((tokenizer.vocabulary(), tokenizer.special_ids()), (7, vec![5, 6]));
    let bytes = tokenizer.token_bytes();
    assert_eq!((&bytes[1], &bytes[2], &bytes[5]), (&bytes[4], &bytes[3], &None));
    assert_eq!(bytes[2].as_deref(), Some(&b"ab"[..]));
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(2).expect("text") + &stream.push(5).expect("text"), "ab");
}

#[test]
fn of_equal_pieces_the_last_one_s_score_counts() {
    let pieces = [("<unk>", 2), ("a", 1), ("b", 1), ("c", 1), ("ab", 1), ("bc", 1), ("ab", 1)];
    let scores = [0.0, 0.0, 0.0, 0.0, -9.0, -5.0, -1.0];
    assert_eq!(ids_by_scores("any", &pieces, &scores, "abc"), [6, 3]);
}
