//! Tokenizers of GGUF headers, held to ids that the tokenizers library gave (`fixtures/token_ids.py`).

use std::io::Cursor;
use std::path::Path;

use candle_core::quantized::gguf_file::{Value as Gguf, write};
use longdraft_models::tokenizer::{TextTokenizer, pre_tokenizer_name};
use longdraft_models::weights::gguf::header::Header;
use serde_json::Value;

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/token_ids.json")).expect("JSON")
}

fn strings(items: &Value) -> Gguf {
    let text = |item: &Value| Gguf::String(item.as_str().expect("text").to_owned());
    Gguf::Array(items.as_array().expect("a list").iter().map(text).collect())
}

/// The tokenizer of a header with these keys.
fn tokenizer(keys: &[(&str, Gguf)]) -> Result<TextTokenizer, String> {
    let names: Vec<String> = keys.iter().map(|(key, _)| format!("tokenizer.ggml.{key}")).collect();
    let metadata: Vec<(&str, &Gguf)> =
        names.iter().map(String::as_str).zip(keys.iter().map(|(_, value)| value)).collect();
    let mut file = Cursor::new(Vec::new());
    write(&mut file, &metadata, &[]).expect("GGUF");
    let header = Header::read(&file.into_inner()).expect("a header");
    TextTokenizer::from_gguf(&header, Path::new("model.gguf")).map_err(|error| error.to_string())
}

/// Texts and the ids that each should have.
fn cases(texts: &Value, ids: &Value) -> Vec<(String, Vec<u32>)> {
    let texts = texts.as_array().expect("texts").iter();
    let text = |text: &Value| text.as_str().expect("a text").to_owned();
    let ids: Vec<Vec<u32>> = serde_json::from_value(ids.clone()).expect("ids");
    assert_eq!(texts.len(), ids.len());
    texts.map(text).zip(ids).collect()
}

#[test]
fn every_named_way_to_split_gives_the_ids_of_the_library() {
    let fixture = fixture();
    let bytes = &fixture["bytes"];
    let ways = bytes["ids"].as_object().expect("ways");
    assert!(ways.len() > 24);
    for (name, ids) in ways {
        let keys = [
            ("model", Gguf::String("gpt2".into())),
            ("pre", Gguf::String(name.clone())),
            ("tokens", strings(&bytes["tokens"])),
            ("merges", strings(&bytes["merges"])),
        ];
        let tokenizer = tokenizer(&keys).expect("a tokenizer");
        // Names of one way have the first of them.
        let same = if ["glm4", "dbrx"].contains(&name.as_str()) { "llama-bpe" } else { name };
        let is_named = !["gpt-2", "smollm", "mellum2"].contains(&name.as_str());
        assert_eq!(pre_tokenizer_name(&bytes["steps"][name]), is_named.then_some(same), "{name}");
        for (text, wanted) in cases(&fixture["texts"], ids) {
            let found = tokenizer.encode(&text).expect("ids").ids;
            assert_eq!(found, wanted, "{name}: {text:?}");
            if !name.contains("qwen") {
                assert_eq!(tokenizer.decode(&found, false).expect("text"), text, "{name}");
            }
        }
    }
}

#[test]
fn gemma_4_s_characters_have_the_ids_of_the_library() {
    let fixture = fixture();
    let gemma = &fixture["gemma4"];
    let count = gemma["tokens"].as_array().expect("tokens").len();
    let kind = |id: usize| match id {
        0..3 => 3,
        3 => 2,
        4..260 => 6,
        _ => 1,
    };
    let mut keys = vec![
        ("model", Gguf::String("gemma4".into())),
        ("tokens", strings(&gemma["tokens"])),
        ("merges", strings(&gemma["merges"])),
        ("token_type", Gguf::Array((0..count).map(|id| Gguf::I32(kind(id))).collect())),
        ("scores", Gguf::Array(vec![Gguf::F32(0.0); count])),
        ("unknown_token_id", Gguf::U32(3)),
    ];
    let read = tokenizer(&keys).expect("a tokenizer");
    for (text, wanted) in cases(&fixture["texts"], &gemma["ids"]) {
        let found = read.encode(&text).expect("ids").ids;
        assert_eq!(found, wanted, "{text:?}");
        assert_eq!(read.decode(&found, false).expect("text"), text);
    }
    keys.retain(|(key, _)| *key != "merges");
    let told = tokenizer(&keys).err().expect("refused");
    assert!(told.contains("`tokenizer.ggml.merges` is missing"), "{told}");
}

#[test]
fn hostile_keys_of_tokenizers_are_told() {
    let bytes = &fixture()["bytes"];
    let text = |text: &str| Gguf::String(text.into());
    let list = |items: &[&str]| Gguf::Array(items.iter().map(|item| text(item)).collect());
    for (changed, told) in [
        (("pre", text("no-such")), "unknown pre-tokenizer `no-such` (known: default, "),
        (("pre", text("")), "unknown pre-tokenizer ``"),
        (
            ("model", text("no-such")),
            "unknown tokenizer model `no-such` (known: gpt2, llama, gemma4)",
        ),
        (("merges", list(&["ab"])), "merge `ab` has no space"),
        (("merges", list(&["no such"])), "not a tokenizer"),
        (("merges", Gguf::Array(vec![Gguf::U32(7)])), "holds something that is not a string"),
        (("tokens", list(&[])), "`tokenizer.ggml.tokens` is empty"),
    ] {
        let keys = [
            ("model", text("gpt2")),
            ("pre", text("deepseek-v3")),
            ("tokens", strings(&bytes["tokens"])),
            ("merges", strings(&bytes["merges"])),
        ];
        let change = |(key, value)| {
            if key == changed.0 { (key, changed.1.clone()) } else { (key, value) }
        };
        let problem = tokenizer(&keys.map(change)).err().expect("refused");
        assert!(problem.contains(told), "{told} not in {problem}");
    }
}
