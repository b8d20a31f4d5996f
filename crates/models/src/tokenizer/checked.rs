//! Tokenizers that a file describes, made within bounds.

use std::time::Duration;

use base64::Engine;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, Tokenizer};

use crate::bounded::{self, Limits};
use crate::config::limits::VOCABULARY;

/// Longest token; published ones have up to some hundred bytes.
const LONGEST_TOKEN: usize = 1 << 16;

/// Longest piece whose merges are found by splitting it in all places; published ones have up to some
/// sixty bytes.
pub(super) const LONGEST_PIECE: usize = 1 << 10;

/// SentencePiece's pieces give some two merges each; hostile ones give as many as they have letters.
const MERGES_OF_A_PIECE: usize = 16;
/// Merges that are read of few pieces.
const MOST_MERGES: usize = 1 << 16;

/// Merges that are read of so many pieces.
pub(super) fn most_merges(pieces: usize) -> usize {
    MOST_MERGES + MERGES_OF_A_PIECE * pieces
}

/// Most characters that normalisation or decoding makes of one.
const MOST_GROWTH: f64 = 1024.0;

/// Memory that a file of so many bytes may take: published ones take some ten times their size.
fn limits(length: usize) -> Limits {
    let bytes = (256 << 20) + 64 * length;
    Limits { bytes, processor: Duration::from_mins(10), seconds: 600 }
}

/// The tokenizer that a `tokenizer.json` describes. What it says of padding and of cutting texts
/// short is left out: texts are taken as they are.
pub(super) fn from_json(bytes: Vec<u8>) -> Result<Tokenizer, String> {
    let limits = limits(bytes.len());
    let make = move || {
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        let vocabulary = tokenizer.get_vocab(true);
        check_length(vocabulary.keys())?;
        // Lists by id are as long as the largest one.
        if let Some(id) = vocabulary.values().find(|id| **id as usize >= VOCABULARY) {
            return Err(format!("an id of {id}, those below {VOCABULARY} are read"));
        }
        check_steps(&tokenizer)?;
        Ok(tokenizer)
    };
    bounded::run(limits, make).map_err(|stopped| stopped.to_string())?
}

/// Byte-pair encoding.
pub(super) struct Bpe {
    /// By id.
    pub(super) tokens: Vec<String>,
    /// Pairs that are joined, first the one that comes first.
    pub(super) merges: Merges,
    /// Takes the places of characters that no token has.
    pub(super) unknown: Option<String>,
    /// One token for a run of such characters.
    pub(super) fuse_unknown: bool,
    /// Tokens of single bytes come before it.
    pub(super) byte_fallback: bool,
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
}

/// The tokenizer of a model and of the steps before and after it, which are those of a
/// `tokenizer.json`. The model is no JSON: as such, 150 thousand tokens take 100 MB for a while.
pub(super) fn from_parts(
    model: Bpe,
    mut steps: Value,
    added: Vec<AddedToken>,
) -> Result<Tokenizer, String> {
    check_length(model.tokens.iter())?;
    steps["version"] = json!("1.0");
    steps["added_tokens"] = json!([]);
    steps["model"] = json!({"type": "BPE", "vocab": {}, "merges": []});
    let merges = model.merges.iter().map(|(left, right)| left.len() + right.len() + 8);
    let tokens = model.tokens.iter().map(|token| token.len() + 8);
    let limits = limits(tokens.chain(merges).sum());
    let make = move || {
        let mut tokenizer = serde_json::from_value::<Tokenizer>(steps)?;
        check_steps(&tokenizer)?;
        let ids = (0..).zip(model.tokens);
        let vocabulary: Vocab = ids.map(|(id, token)| (token, id)).collect();
        let mut builder = BPE::builder()
            .vocab_and_merges(vocabulary, model.merges)
            .fuse_unk(model.fuse_unknown)
            .byte_fallback(model.byte_fallback)
            .ignore_merges(model.ignore_merges);
        if let Some(token) = model.unknown {
            builder = builder.unk_token(token);
        }
        tokenizer.with_model(builder.build()?);
        tokenizer.add_tokens(added)?;
        Ok(tokenizer)
    };
    let made: tokenizers::Result<Tokenizer> =
        bounded::run(limits, make).map_err(|stopped| stopped.to_string())?;
    made.map_err(|error| error.to_string())
}

fn check_length<'a>(tokens: impl Iterator<Item = &'a String>) -> Result<(), String> {
    match tokens.map(String::len).max().filter(|length| *length > LONGEST_TOKEN) {
        Some(length) => Err(format!("a token of {length} bytes, at most {LONGEST_TOKEN} are read")),
        None => Ok(()),
    }
}

/// Refuses steps that make texts without measure of short ones.
fn check_steps(tokenizer: &Tokenizer) -> Result<(), String> {
    for (name, part) in [
        ("normalizer", tokenizer.get_normalizer().map(serde_json::to_value)),
        ("decoder", tokenizer.get_decoder().map(serde_json::to_value)),
    ] {
        let part = part.transpose().map_err(|error| error.to_string())?;
        let growth = part.as_ref().map_or(1.0, growth);
        if growth > MOST_GROWTH {
            let problem = format!("its {name} makes up to {growth} characters of one");
            return Err(format!("{problem}, at most {MOST_GROWTH} are allowed"));
        }
    }
    Ok(())
}

/// Characters that a step, or all of its steps, may make of one.
fn growth(step: &Value) -> f64 {
    let characters = |text: &Value| text.as_str().map_or(0, |text| text.chars().count()) as f64;
    match step {
        Value::Array(steps) => steps.iter().map(growth).product(),
        Value::Object(keys) => {
            let own = match step["type"].as_str() {
                // An expression may match the empty text between two characters.
                Some("Replace") => match &step["pattern"]["String"] {
                    Value::Null => 1.0 + characters(&step["content"]),
                    pattern => characters(&step["content"]) / characters(pattern).max(1.0),
                },
                Some("Prepend") => 1.0 + characters(&step["prepend"]),
                Some("Precompiled") => longest_entry(&step["precompiled_charsmap"]),
                _ => 1.0,
            };
            own.max(1.0) * keys.values().map(growth).product::<f64>()
        }
        _ => 1.0,
    }
}

/// The longest text that a SentencePiece map puts in a character's place. Texts end with a zero and
/// follow a table whose size stands before it.
fn longest_entry(map: &Value) -> f64 {
    let map = map.as_str().unwrap_or_default();
    let bytes = base64::engine::general_purpose::STANDARD.decode(map).unwrap_or_default();
    let Some((size, rest)) = bytes.split_first_chunk() else { return 1.0 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0) as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document(normalizer: &Value, decoder: &Value, token: &str) -> Vec<u8> {
        let document = json!({
            "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": null,
            "post_processor": null, "decoder": decoder,
            "padding": {"strategy": {"Fixed": 1_000_000_000}, "direction": "Right", "pad_to_multiple_of": null,
                        "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
            "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
            "model": {"type": "BPE", "vocab": {"a": 0, token: 1}, "merges": []}
        });
        serde_json::to_vec(&document).expect("JSON")
    }

    fn replaced(pattern: &Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn texts_are_neither_padded_nor_cut() {
        let bytes = document(&Value::Null, &Value::Null, "b");
        let tokenizer = from_json(bytes).expect("tokenizer");
        let ids = tokenizer.encode("aba", false).expect("ids").get_ids().to_vec();
        assert_eq!(ids, [0, 1, 0]);
    }

    #[test]
    fn steps_that_multiply_texts_are_refused() {
        let doubled = replaced(&json!({"String": "a"}), "aa");
        let none = Value::Null;
        let many = |times| json!({"type": "Sequence", "normalizers": vec![doubled.clone(); times]});
        assert!(from_json(document(&many(10), &none, "b")).is_ok());
        let steps = json!({"type": "Sequence", "decoders": vec![doubled.clone(); 40]});
        let expression = replaced(&json!({"Regex": "x*"}), &"y".repeat(5000));
        for (bytes, part) in [
            (document(&many(11), &none, "b"), "its normalizer makes up to 2048"),
            (document(&expression, &none, "b"), "its normalizer makes up to 5001"),
            (document(&none, &steps, "b"), "its decoder makes up to"),
            (document(&none, &none, &"b".repeat(70_000)), "a token of 70000 bytes"),
            (b"{}".to_vec(), ""),
        ] {
            let problem = from_json(bytes).expect_err("refused");
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn ids_beyond_all_vocabularies_are_refused() {
        for (id, is_read) in [(VOCABULARY - 1, true), (VOCABULARY, false), (4_000_000_000, false)] {
            let bytes = document(&Value::Null, &Value::Null, "b");
            let mut value: Value = serde_json::from_slice(&bytes).expect("JSON");
            value["model"]["vocab"]["b"] = id.into();
            let read = from_json(serde_json::to_vec(&value).expect("JSON"));
            assert_eq!(read.is_ok(), is_read, "{id}");
        }
    }

    #[test]
    fn the_longest_entry_of_a_map_is_found() {
        let map = [&8_u32.to_le_bytes()[..], &[7; 8], b"ab\0abcde\0"].concat();
        let map = base64::engine::general_purpose::STANDARD.encode(map);
        assert!(
            (growth(&json!({"type": "Precompiled", "precompiled_charsmap": map})) - 5.0).abs()
                < 1e-9
        );
        for damaged in [json!(""), json!("////"), json!(7)] {
            assert!(longest_entry(&damaged) <= 1.0);
        }
    }
}
