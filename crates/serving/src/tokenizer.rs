//! The target's tokenizer as the `tokenizer.*` keys of a GGUF file.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use longdraft_models::config::TargetConfig;
use longdraft_models::paths::folder_of;
use longdraft_models::tokenizer::{TextTokenizer, pre_tokenizer_name};
use longdraft_models::weights::gguf::header::Header;
use serde_json::Value as Json;

/// Token types of the format.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The keys of the target's own GGUF file, as they stand there.
pub(crate) fn copied(header: &Header) -> Result<Vec<(String, Value)>, String> {
    let keys: Vec<(String, Value)> = header
        .metadata
        .iter()
        .filter(|(key, _)| key.starts_with("tokenizer."))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if keys.is_empty() { Err("the target's GGUF file holds no tokenizer".into()) } else { Ok(keys) }
}

/// Keys made from `tokenizer.json`: byte-level BPE (`gpt2`) or BPE with byte fallback (`llama`).
/// It fails with a reason if the tokenizer is of another kind or splits text in a way that has no name there.
pub(crate) fn from_folder(
    folder: &Path,
    config: &TargetConfig,
) -> Result<Vec<(String, Value)>, String> {
    let folder = folder_of(folder);
    let text = std::fs::read_to_string(folder.join("tokenizer.json"))
        .map_err(|error| format!("tokenizer.json: {error}"))?;
    let json: Json =
        serde_json::from_str(&text).map_err(|error| format!("tokenizer.json: {error}"))?;
    let settings = std::fs::read_to_string(folder.join("tokenizer_config.json")).ok();
    let settings: Json =
        settings.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
    let model = &json["model"];
    if model["type"] != "BPE" {
        return Err(format!("a tokenizer of type {} has no GGUF form here", model["type"]));
    }
    let (tokens, types) = tokens(&json, config.vocab_size)?;
    let merges = merges(model);
    let byte_fallback = model["byte_fallback"].as_bool().unwrap_or(false);
    let strings =
        |items: &[String]| Value::Array(items.iter().cloned().map(Value::String).collect());
    let mut keys = vec![];
    let mut add = |name: &str, value| keys.push((format!("tokenizer.ggml.{name}"), value));
    if byte_fallback {
        add("model", Value::String("llama".into()));
        let rank: HashMap<String, usize> =
            merges.iter().enumerate().rev().map(|(i, (a, b))| (format!("{a}{b}"), i)).collect();
        // The better a merge, the larger the score of what it makes.
        let score = |token: &String| rank.get(token).map_or(-1e6, |rank| -(*rank as f32));
        add("scores", Value::Array(tokens.iter().map(|t| Value::F32(score(t))).collect()));
        add("add_space_prefix", Value::Bool(adds_space(&json)));
    } else {
        add("model", Value::String("gpt2".into()));
        add("pre", Value::String(pre_tokenizer(&json["pre_tokenizer"])?.into()));
        let merges: Vec<String> = merges.iter().map(|(a, b)| format!("{a} {b}")).collect();
        add("merges", strings(&merges));
    }
    add("tokens", strings(&tokens));
    add("token_type", Value::Array(types.into_iter().map(Value::I32).collect()));
    for (name, id) in [
        ("bos_token_id", config.bos_token_id),
        ("eos_token_id", config.eos_token_ids.first().copied()),
        ("padding_token_id", config.pad_token_id),
    ] {
        if let Some(id) = id {
            add(name, Value::U32(id));
        }
    }
    // Post-processors may add it, too, whatever the settings say.
    let adds_bos = TextTokenizer::from_folder(folder).is_ok_and(|tokenizer| tokenizer.adds_bos());
    let says_nothing = settings["add_bos_token"].as_bool().is_none();
    let adds_bos = config.bos_token_id.is_some() && (adds_bos || byte_fallback && says_nothing);
    add("add_bos_token", Value::Bool(adds_bos));
    if let Some(template) = settings["chat_template"].as_str() {
        keys.push(("tokenizer.chat_template".into(), Value::String(template.to_owned())));
    }
    Ok(keys)
}

/// Whether a text gets a space before it. Newer files say so in the splitting of text.
fn adds_space(json: &Json) -> bool {
    let [normalizer, split] = ["normalizer", "pre_tokenizer"].map(|key| json[key].to_string());
    let is_off = ["\"prepend_scheme\":\"never\"", "\"add_prefix_space\":false"];
    normalizer.contains("\"Prepend\"")
        || (split.contains("\"Metaspace\"") && !is_off.iter().any(|off| split.contains(off)))
}

/// Every id's token and type; ids without one are unused.
fn tokens(json: &Json, vocabulary: usize) -> Result<(Vec<String>, Vec<i32>), String> {
    let listed = json["model"]["vocab"].as_object().ok_or("the vocabulary is not a table")?;
    let mut tokens: Vec<String> = (0..vocabulary).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; vocabulary];
    let mut put = |id: &Json, token: &str, kind: i32| {
        let id = id.as_u64().map(|id| id as usize).filter(|id| *id < vocabulary);
        let id = id.ok_or_else(|| format!("token `{token}` has no id below {vocabulary}"))?;
        token.clone_into(&mut tokens[id]);
        types[id] = kind;
        Ok::<(), String>(())
    };
    for (token, id) in listed {
        let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        put(id, token, if is_byte { BYTE } else { NORMAL })?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let content = added["content"].as_str().unwrap_or_default();
        let special = added["special"].as_bool().unwrap_or(false);
        put(&added["id"], content, if special { CONTROL } else { USER_DEFINED })?;
    }
    Ok((tokens, types))
}

/// Pairs, best first, in either spelling.
fn merges(model: &Json) -> Vec<(String, String)> {
    let pair = |merge: &Json| match merge {
        Json::String(text) => text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
        Json::Array(parts) => {
            Some((parts.first()?.as_str()?.to_owned(), parts.get(1)?.as_str()?.to_owned()))
        }
        _ => None,
    };
    model["merges"].as_array().into_iter().flatten().filter_map(pair).collect()
}

/// The format's name for how text is split before merging.
fn pre_tokenizer(json: &Json) -> Result<&'static str, String> {
    if let Some(name) = pre_tokenizer_name(json) {
        return Ok(name);
    }
    let text = json.to_string();
    if text.contains(r"\\p{N}{1,3}") {
        Ok("llama-bpe")
    } else if text.contains(r"\\p{N}|") {
        Ok("qwen2")
    } else if text.contains("Digits") {
        Ok("smollm")
    } else if text.contains("ByteLevel") {
        Ok("gpt-2")
    } else {
        Err("its pre-tokenizer has no name in GGUF files: give the target's own GGUF file".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_before_a_text_is_found_in_older_and_newer_files() {
        let space = |normalizer: Json, split: Json| {
            adds_space(&serde_json::json!({"normalizer": normalizer, "pre_tokenizer": split}))
        };
        let of = |more: Json| {
            let mut split = serde_json::json!({"type": "Metaspace", "replacement": "▁"});
            split.as_object_mut().expect("a table").extend(more.as_object().cloned().expect("one"));
            split
        };
        let older = serde_json::json!({"type": "Sequence", "normalizers": [{"type": "Prepend"}]});
        assert!(space(older, Json::Null));
        for (more, wanted) in [
            (serde_json::json!({"prepend_scheme": "first", "split": false}), true),
            (serde_json::json!({"prepend_scheme": "always", "add_prefix_space": true}), true),
            (serde_json::json!({"prepend_scheme": "never"}), false),
            (serde_json::json!({"add_prefix_space": false}), false),
        ] {
            assert_eq!(space(Json::Null, of(more.clone())), wanted, "{more}");
        }
        assert!(!space(Json::Null, Json::Null));
    }

    #[test]
    fn splits_are_named_as_the_reader_names_them() {
        let digits = serde_json::json!({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true}, {"type": "ByteLevel"}]});
        assert_eq!(pre_tokenizer(&digits), Ok("smollm"));
        let split = serde_json::json!({"type": "Split", "pattern": {"Regex": r"x|\p{N}{1,3}| y"}});
        assert_eq!(pre_tokenizer(&split), Ok("llama-bpe"));
        let split = serde_json::json!({"type": "Split", "pattern": {"Regex": r"x|\p{N}| y"}});
        assert_eq!(pre_tokenizer(&split), Ok("qwen2"));
        assert!(pre_tokenizer(&serde_json::json!({"type": "Whitespace"})).is_err());
        let of = |expressions: &[&str]| {
            let split = |x: &&str| serde_json::json!({"type": "Split", "pattern": {"Regex": x}});
            serde_json::json!({
                "type": "Sequence", "pretokenizers": expressions.iter().map(split).collect::<Vec<_>>()
            })
        };
        let coder = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"];
        assert_eq!(pre_tokenizer(&of(&coder)), Ok("deepseek-coder"));
        assert!(pre_tokenizer(&of(&coder[1..])).is_err());
    }
}
