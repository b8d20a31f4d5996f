//! Log-probabilities of an answer's tokens in OpenAI's shape.

use longdraft_decode::LogProbs;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value, json};

use super::Head;
use crate::events::Piece;

/// Log-probabilities of an answer's tokens.
#[derive(Debug, Default)]
pub(super) struct TokenList {
    tokens: Vec<(TargetTokenId, LogProbs)>,
    /// Where in the text each begins, in characters.
    offsets: Vec<usize>,
}

impl TokenList {
    pub(super) fn add(&mut self, piece: &Piece) {
        if let (Some(token), Some(log_probs)) = (piece.token, &piece.log_probs) {
            self.tokens.push((token, log_probs.clone()));
            self.offsets.push(piece.offset);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(super) fn to_json(&self, head: &Head, tokenizer: &TextTokenizer) -> Value {
        if !head.telling.log_probs {
            return Value::Null;
        }
        if head.telling.is_chat {
            let entry = |token: TargetTokenId, log_prob: f32| {
                let bytes = bytes_of(token, tokenizer);
                json!({ "token": written(&bytes), "logprob": finite(log_prob), "bytes": bytes })
            };
            let content = self.tokens.iter().map(|(token, log_probs)| {
                let top = log_probs.top.iter().map(|(token, own)| entry(*token, *own));
                let mut own = entry(*token, log_probs.own);
                own["top_logprobs"] = top.collect();
                own
            });
            return json!({ "content": content.collect::<Value>(), "refusal": null });
        }
        let top =
            self.tokens.iter().map(|(token, log_probs)| by_text(*token, log_probs, tokenizer));
        let own = self.tokens.iter().map(|(_, log_probs)| finite(log_probs.own));
        let texts = self.tokens.iter().map(|(token, _)| written(&bytes_of(*token, tokenizer)));
        json!({
            "tokens": texts.collect::<Vec<_>>(),
            "token_logprobs": own.collect::<Value>(),
            "top_logprobs": top.collect::<Value>(),
            "text_offset": self.offsets,
        })
    }
}

/// Log-probabilities of the most likely tokens and of the own one by their texts. Where several have the same
/// text, the less likely ones go by their ids.
fn by_text(token: TargetTokenId, log_probs: &LogProbs, tokenizer: &TextTokenizer) -> Value {
    let own = (token, log_probs.own);
    let is_top = log_probs.top.iter().any(|(top, _)| *top == token);
    let mut entries = Map::new();
    for (token, log_prob) in log_probs.top.iter().copied().chain((!is_top).then_some(own)) {
        let text = written(&bytes_of(token, tokenizer));
        let is_taken = entries.contains_key(&text);
        let key = if is_taken { format!("token_id:{}", token.0) } else { text };
        entries.insert(key, finite(log_prob));
    }
    Value::Object(entries)
}

/// The bytes of a token; those of its name, if it is a special one.
fn bytes_of(token: TargetTokenId, tokenizer: &TextTokenizer) -> Vec<u8> {
    let name = || tokenizer.token(token.0).unwrap_or_default().into_bytes();
    tokenizer.bytes_of(token.0).unwrap_or_else(name)
}

/// The text of a token. A part of a character has none, and its bytes are told as OpenAI tells them.
fn written(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(
        |_| bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
        str::to_owned,
    )
}

/// JSON has no infinity.
fn finite(log_prob: f32) -> Value {
    Value::from(f64::from(log_prob.max(-9999.0)))
}
