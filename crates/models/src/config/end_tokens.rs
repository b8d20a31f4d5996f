//! Tokens that end what a model generates, beside those that its configuration calls ends of a text.
//!
//! A Hugging Face folder names them in `generation_config.json`, and a model that also sees in its outer
//! configuration; in a GGUF header they are known by how they are written.

use std::path::Path;

use serde_json::Value;

use super::json_keys::Keys;
use super::{Architecture, TargetConfig};
use crate::error::{ModelError, Result};
use crate::side_files;
use crate::weights::gguf::header::Header;

/// How tokens are written that end a turn, a text or a call of a tool; the list of the format's own reader.
const WRITTEN: [&str; 18] = [
    "<|eot_id|>",
    "<|im_end|>",
    END_OF_MESSAGE,
    END_OF_ANSWER,
    END_OF_CALL,
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
];
/// Where answers and calls of tools have ends of their own, the end of a message ends neither.
const END_OF_MESSAGE: &str = "<|end|>";
const END_OF_ANSWER: &str = "<|return|>";
const END_OF_CALL: &str = "<|call|>";

impl TargetConfig {
    /// Tokens that end what the model generates: those that end a text, then the further ones.
    pub fn end_token_ids(&self) -> Vec<u32> {
        self.eos_token_ids.iter().chain(&self.further_end_ids).copied().collect()
    }

    /// Adds ends that are not among those already known. Ids beyond the vocabulary end nothing.
    pub(super) fn add_ends(&mut self, ids: Vec<u32>) {
        for id in ids {
            let known = self.eos_token_ids.contains(&id) || self.further_end_ids.contains(&id);
            if !known && (id as usize) < self.vocab_size {
                self.further_end_ids.push(id);
            }
        }
    }
}

/// Ends that the `generation_config.json` beside a `config.json` names; none without such a file.
pub(super) fn beside(config: &Path) -> Result<Vec<u32>> {
    let path = config.with_file_name("generation_config.json");
    let Some(text) = side_files::read_text_if_there(&path)? else { return Ok(Vec::new()) };
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| ModelError::invalid(&path, format!("not JSON: {error}")))?;
    Ok(named(&value))
}

/// The key of ends.
const KEY: &str = "eos_token_id";

/// Ends that a configuration names.
pub(super) fn named(config: &Value) -> Vec<u32> {
    Keys::of(config).tokens(KEY)
}

/// Ends of a text: those that a configuration names, or those of the family's class where it leaves the key out. The
/// classes of GLM take null for a key that is left out, the others for none. Ids beyond the vocabulary end nothing.
pub(super) fn of_text(config: &Value, architecture: Architecture, vocabulary: usize) -> Vec<u32> {
    let is_glm = matches!(architecture, Architecture::Glm | Architecture::Glm4);
    if config.get(KEY).is_some_and(|value| !(is_glm && value.is_null())) {
        return named(config);
    }
    let ids = of_class(architecture).iter().copied();
    ids.filter(|id| (*id as usize) < vocabulary).collect()
}

/// Ends of a text that a family's class knows.
fn of_class(architecture: Architecture) -> &'static [u32] {
    use Architecture::{
        DeepseekV3, Gemma2, Gemma3, Gemma4, Glm, Glm4, Granite, Lfm2, Llama, Llama4, Ministral3,
        Mistral, Mixtral, Olmo2, Olmo3, Phi3, SmolLm3,
    };
    match architecture {
        Llama | Mistral | Ministral3 | Mixtral | Granite | Llama4 | Lfm2 => &[2],
        Gemma2 | Gemma3 | Gemma4 | DeepseekV3 => &[1],
        SmolLm3 => &[128_001],
        Olmo2 | Olmo3 => &[50_279],
        Phi3 => &[32_000],
        Glm | Glm4 => &[151_329, 151_336, 151_338],
        _ => &[],
    }
}

/// Whether a token is written as one that ends a turn, a text or a call of a tool.
pub(crate) fn names_an_end(token: &str) -> bool {
    WRITTEN.contains(&token)
}

/// Ends among the tokens of a GGUF header.
pub(super) fn of_header(header: &Header) -> Vec<u32> {
    let tokens = header.metadata.get("tokenizer.ggml.tokens");
    let tokens = tokens.and_then(|tokens| tokens.to_vec().ok()).into_iter().flatten();
    let ends = (0_u32..).zip(tokens).filter_map(|(id, token)| {
        let written = token.to_string().ok()?.as_str();
        names_an_end(written).then_some((id, written))
    });
    let ends: Vec<(u32, &str)> = ends.collect();
    let holds = |wanted: &str| ends.iter().any(|(_, written)| *written == wanted);
    let has_others = holds(END_OF_ANSWER) && holds(END_OF_CALL);
    let is_end = |written: &str| !(has_others && written == END_OF_MESSAGE);
    ends.iter().filter(|(_, written)| is_end(written)).map(|(id, _)| *id).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_core::quantized::gguf_file::Value as GgufValue;
    use serde_json::json;

    use super::*;

    fn config() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 320, "eos_token_id": 9
        })
    }

    /// The ends of a folder with these two files.
    fn of_folder(config: &Value, generation: Option<&str>) -> Result<Vec<u32>> {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).expect("written");
        if let Some(text) = generation {
            std::fs::write(folder.path().join("generation_config.json"), text).expect("written");
        }
        let read = TargetConfig::from_file(&path)?;
        assert_eq!(read.eos_token_ids, named(config));
        Ok(read.end_token_ids())
    }

    #[test]
    fn a_folder_s_ends_are_those_of_both_files() {
        let ends = |generation| of_folder(&config(), generation).expect("valid");
        assert_eq!(ends(None), [9]);
        assert_eq!(ends(Some(r#"{"eos_token_id": [9, 12, 12, 7]}"#)), [9, 12, 7]);
        assert_eq!(ends(Some(r#"{"eos_token_id": 12}"#)), [9, 12]);
        // 320 is beyond the vocabulary.
        assert_eq!(ends(Some(r#"{"eos_token_id": [320, null, "x", -1]}"#)), [9]);
        assert_eq!(ends(Some("[]")), [9]);
        let mut silent = config();
        silent["eos_token_id"] = Value::Null;
        let ends = of_folder(&silent, Some(r#"{"eos_token_id": 12}"#)).expect("valid");
        assert_eq!(ends, [12]);
        let text = of_folder(&config(), Some("{")).expect_err("no JSON").to_string();
        assert!(text.contains("generation_config.json"), "{text}");
    }

    #[test]
    fn ends_that_a_file_leaves_out_are_those_of_the_family_s_class() {
        let ends = |kind: &str, stated: Option<Value>| {
            let mut value = config();
            let keys = value.as_object_mut().expect("an object");
            keys.remove("eos_token_id");
            keys.extend(stated.map(|value| ("eos_token_id".to_owned(), value)));
            keys.insert("model_type".to_owned(), kind.into());
            keys.insert("vocab_size".to_owned(), 151_337.into());
            keys.insert("head_dim".to_owned(), 16.into());
            keys.insert("num_key_value_heads".to_owned(), 2.into());
            TargetConfig::from_json(&value).expect("valid").eos_token_ids
        };
        for (kind, wanted) in [
            ("llama", &[2][..]),
            ("granite", &[2]),
            ("mistral", &[2]),
            ("gemma2", &[1]),
            ("smollm3", &[128_001]),
            ("olmo2", &[50_279]),
            ("glm", &[151_329, 151_336]),
            ("glm4", &[151_329, 151_336]),
            ("qwen3", &[]),
        ] {
            assert_eq!(ends(kind, None), wanted, "{kind}");
            assert_eq!(ends(kind, Some(json!(7))), [7], "{kind}");
            let null = if kind.starts_with("glm") { wanted } else { &[] };
            assert_eq!(ends(kind, Some(Value::Null)), null, "{kind}");
        }
    }

    #[test]
    fn the_outer_model_names_further_ends() {
        let mut text = config();
        text["model_type"] = "gemma4_text".into();
        text["num_key_value_heads"] = 2.into();
        text["head_dim"] = 16.into();
        text["vocab_size_per_layer_input"] = 320.into();
        let outer = json!({"model_type": "gemma4", "text_config": text, "eos_token_id": [9, 106]});
        let config = TargetConfig::from_json(&outer).expect("valid");
        assert_eq!(
            (config.eos_token_ids.as_slice(), config.end_token_ids()),
            (&[9][..], vec![9, 106])
        );
    }

    #[test]
    fn a_header_s_ends_are_known_by_how_they_are_written() {
        let ends = |tokens: &[&str]| {
            let tokens = tokens.iter().map(|token| GgufValue::String((*token).into())).collect();
            let tokens = ("tokenizer.ggml.tokens".to_owned(), GgufValue::Array(tokens));
            let metadata = BTreeMap::from([tokens]);
            of_header(&Header { version: 3, metadata, tensors: BTreeMap::new() })
        };
        assert_eq!(ends(&["<eos>", "a", "<end_of_turn>"]), [0, 2]);
        assert_eq!(ends(&["<|end|>", "<|endoftext|>"]), [0, 1]);
        assert_eq!(ends(&["<|end|>", "<|endoftext|>", "<|return|>", "<|call|>"]), [1, 2, 3]);
        assert_eq!(ends(&["</s>", "end"]), [0; 0]);
    }
}
