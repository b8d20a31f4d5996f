//! The tokenizer inside a GGUF header.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use candle_core::quantized::gguf_file::Value as GgufValue;
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::checked::{self, Bpe, LONGEST_PIECE};
use super::{ChatTemplate, TextTokenizer, pre_tokenizers};
use crate::config::end_tokens::names_an_end;
use crate::weights::gguf::header::{Header, number};

/// Token types of the format.
const NORMAL: u32 = 1;
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// Tokens of Llama 3, whose first files say no splitting.
const LLAMA3_TOKENS: usize = 128_256;
/// Tokens of DeepSeek Coder; likewise.
const DEEPSEEK_CODER_TOKENS: usize = 32_256;
/// Tokens of DeepSeek LLM; likewise.
const DEEPSEEK_LLM_TOKENS: usize = 102_400;

struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<u32>,
}

pub(super) fn read(header: &Header) -> Result<TextTokenizer, String> {
    let vocabulary = Vocabulary {
        tokens: strings(header, "tokens")?,
        types: numbers(header, "token_type")
            .map(|types| types.into_iter().map(|t| t as u32).collect())
            .unwrap_or_default(),
    };
    if vocabulary.tokens.is_empty() {
        return Err("`tokenizer.ggml.tokens` is empty".into());
    }
    let kind = string(header, "model").ok_or("`tokenizer.ggml.model` is missing")?;
    let template = chat_template(header, &vocabulary).map_err(|error| error.to_string())?;
    let splitting = splitting(header, &vocabulary);
    let begins = kind != "gpt2" || pre_tokenizers::begins_with_bos(splitting);
    // Early files of Gemma 4 say that it does not.
    let adds_bos = kind == "gemma4" || flag(header, "add_bos_token", begins);
    let bos = token_id(header, "bos_token_id").filter(|id| *id < vocabulary.tokens.len());
    let bos = bos.map(|id| id as u32);
    let added = added_tokens(header, &vocabulary);
    let twins = twins(&vocabulary.tokens);
    let (model, steps) = match kind {
        "gpt2" => byte_level_bpe(header, vocabulary, splitting)?,
        "llama" => sentence_piece(header, vocabulary)?,
        "gemma4" => gemma4(header, vocabulary)?,
        other => {
            return Err(format!("unknown tokenizer model `{other}` (known: gpt2, llama, gemma4)"));
        }
    };
    let tokenizer = checked::from_parts(model, steps, added)?;
    Ok(TextTokenizer { bos, twins, ..TextTokenizer::new(tokenizer, template, adds_bos) })
}

/// Ids by text: of those that share one the last, as other readers of the format have it.
fn ids_by_text(tokens: &[String]) -> HashMap<&str, u32> {
    tokens.iter().map(String::as_str).zip(0..).collect()
}

/// By ids whose text a later one has, too: the last of these.
fn twins(tokens: &[String]) -> HashMap<u32, u32> {
    let last = ids_by_text(tokens);
    let pairs = (0..).zip(tokens).map(|(id, token)| (id, last[token.as_str()]));
    pairs.filter(|(id, last)| id != last).collect()
}

/// The chat template, and the one for conversations with tools.
fn chat_template(
    header: &Header,
    vocabulary: &Vocabulary,
) -> crate::error::Result<Option<ChatTemplate>> {
    let text = |key| header.text(key);
    let Some(source) = text("tokenizer.chat_template") else { return Ok(None) };
    let template = ChatTemplate::new(source, special_tokens(header, vocabulary))?;
    template.with_tools(text("tokenizer.chat_template.tool_use")).map(Some)
}

fn value<'a>(header: &'a Header, key: &str) -> Option<&'a GgufValue> {
    header.metadata.get(&format!("tokenizer.ggml.{key}"))
}

fn string<'a>(header: &'a Header, key: &str) -> Option<&'a str> {
    match value(header, key) {
        Some(GgufValue::String(text)) => Some(text),
        _ => None,
    }
}

/// An id that a key names; some files say -1 for none.
fn token_id(header: &Header, key: &str) -> Option<usize> {
    let id = value(header, key).and_then(number).filter(|id| *id >= 0.0);
    id.map(|id| id as usize)
}

fn flag(header: &Header, key: &str, default: bool) -> bool {
    match value(header, key) {
        Some(GgufValue::Bool(flag)) => *flag,
        _ => default,
    }
}

fn strings(header: &Header, key: &str) -> Result<Vec<String>, String> {
    let Some(GgufValue::Array(items)) = value(header, key) else {
        return Err(format!("`tokenizer.ggml.{key}` is missing"));
    };
    let text = |item: &GgufValue| match item {
        GgufValue::String(text) => Ok(text.clone()),
        _ => Err(format!("`tokenizer.ggml.{key}` holds something that is not a string")),
    };
    items.iter().map(text).collect()
}

fn numbers(header: &Header, key: &str) -> Option<Vec<f64>> {
    match value(header, key) {
        Some(GgufValue::Array(items)) => items.iter().map(number).collect(),
        _ => None,
    }
}

/// Tokens that are found in texts before these are split.
fn added_tokens(header: &Header, vocabulary: &Vocabulary) -> Vec<AddedToken> {
    let name = header.text("general.name").unwrap_or_default().to_lowercase();
    // Phi-3's take spaces and ends of lines after them, which no key says.
    let strips = PHI_3.iter().any(|own| name.contains(own));
    let types = vocabulary.types.iter().copied().chain(std::iter::repeat(NORMAL));
    let added = vocabulary.tokens.iter().zip(types);
    added
        .filter_map(|(token, kind)| {
            let special = match kind {
                CONTROL | UNKNOWN => true,
                // Some files give the ends of turns another type than their models have them.
                _ if names_an_end(token) => true,
                USER_DEFINED => false,
                _ => return None,
            };
            let strips = strips && !STRIP_NOTHING.contains(&token.as_str());
            let added = AddedToken::from(token.clone(), special);
            Some(added.normalized(false).rstrip(strips))
        })
        .collect()
}

/// What the names of Phi-3's files hold, and those of its tokens that leave what follows them.
const PHI_3: [&str; 3] = ["phi-3", "phi3", "phi 3"];
const STRIP_NOTHING: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn special_tokens(header: &Header, vocabulary: &Vocabulary) -> Map<String, Value> {
    let keys = [
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("pad_token", "padding_token_id"),
        ("unk_token", "unknown_token_id"),
    ];
    let mut tokens = Map::new();
    for (name, key) in keys {
        let id = token_id(header, key);
        if let Some(token) = id.and_then(|id| vocabulary.tokens.get(id)) {
            tokens.insert(name.to_owned(), json!(token));
        }
    }
    tokens
}

/// How text is split before merging, as `tokenizer.ggml.pre` names it. Files of before May 2024 lack it: there the model
/// family and its number of tokens tell.
fn splitting<'a>(header: &'a Header, vocabulary: &Vocabulary) -> &'a str {
    string(header, "pre").unwrap_or_else(|| {
        match (header.text("general.architecture"), vocabulary.tokens.len()) {
            (Some("qwen2" | "qwen2moe"), _) => "qwen2",
            (Some("llama"), LLAMA3_TOKENS) => "llama-bpe",
            (Some("llama"), DEEPSEEK_CODER_TOKENS) => "deepseek-coder",
            (Some("llama"), DEEPSEEK_LLM_TOKENS) => "deepseek-llm",
            _ => "default",
        }
    })
}

/// Byte-level BPE after a splitting of text.
fn byte_level_bpe(
    header: &Header,
    vocabulary: Vocabulary,
    splitting: &str,
) -> Result<(Bpe, Value), String> {
    let splitting = pre_tokenizers::named(splitting)?;
    let model = Bpe {
        tokens: vocabulary.tokens,
        merges: stated_merges(header)?,
        unknown: None,
        fuse_unknown: false,
        byte_fallback: false,
        ignore_merges: splitting.whole_parts,
    };
    let steps = json!({
        "normalizer": if splitting.composes { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": splitting.steps,
        "post_processor": null,
        "decoder": pre_tokenizers::decoder(),
    });
    Ok((model, steps))
}

/// The merges of a header, best first.
fn stated_merges(header: &Header) -> Result<Vec<(String, String)>, String> {
    let pair = |merge: String| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
        None => Err(format!("merge `{merge}` has no space")),
    };
    strings(header, "merges")?.into_iter().map(pair).collect()
}

/// SentencePiece BPE with byte fallback; merges follow from the pieces' scores.
fn sentence_piece(header: &Header, vocabulary: Vocabulary) -> Result<(Bpe, Value), String> {
    let scores = numbers(header, "scores").ok_or("`tokenizer.ggml.scores` is missing")?;
    if scores.len() != vocabulary.tokens.len() {
        return Err("`tokenizer.ggml.scores` and `tokens` differ in length".into());
    }
    if let Some(token) = vocabulary.tokens.iter().find(|token| token.len() > LONGEST_PIECE) {
        return Err(format!("a token of {} bytes, at most {LONGEST_PIECE} are read", token.len()));
    }
    let merges = merges(&vocabulary, &scores)?;
    Ok(with_byte_fallback(header, vocabulary, merges, flag(header, "add_space_prefix", true)))
}

/// Gemma 4's: the same with its merges listed.
fn gemma4(header: &Header, vocabulary: Vocabulary) -> Result<(Bpe, Value), String> {
    let merges = stated_merges(header)?;
    Ok(with_byte_fallback(header, vocabulary, merges, flag(header, "add_space_prefix", false)))
}

/// BPE of characters, `▁` for a space, bytes for what no token has.
fn with_byte_fallback(
    header: &Header,
    vocabulary: Vocabulary,
    merges: Vec<(String, String)>,
    adds_space: bool,
) -> (Bpe, Value) {
    let unknown = token_id(header, "unknown_token_id");
    let unknown = vocabulary.tokens.get(unknown.unwrap_or(0));
    let mut normalizers =
        vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if adds_space {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let steps = json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
    });
    let model = Bpe {
        unknown: unknown.cloned(),
        merges,
        tokens: vocabulary.tokens,
        fuse_unknown: true,
        byte_fallback: true,
        ignore_merges: false,
    };
    (model, steps)
}

/// Every way to split a piece into two pieces, best resulting piece first. Of equal ones the first piece is better:
/// files that were made without scores have their pieces in the order of the merges. Of equal pieces the last counts.
fn merges(vocabulary: &Vocabulary, scores: &[f64]) -> Result<Vec<(String, String)>, String> {
    let most = checked::most_merges(vocabulary.tokens.len());
    let ids = ids_by_text(&vocabulary.tokens);
    let mut merges = Vec::new();
    for (id, (token, score)) in (0..).zip(vocabulary.tokens.iter().zip(scores)) {
        if ids[token.as_str()] != id {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                if merges.len() == most {
                    return Err(format!("its pieces have more than {most} merges"));
                }
                merges.push((*score, [id, l, r], (left, right)));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let owned = |(.., (left, right)): (_, _, (&str, &str))| (left.to_owned(), right.to_owned());
    Ok(merges.into_iter().map(owned).collect())
}
