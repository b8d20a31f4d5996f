//! Training a tokenizer of one's own: byte-level BPE, invertible, so that bytes are counted exactly.
//!
//! Ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>` as in the published vocabulary; digits stand
//! alone.

use serde_json::{Value, json};
use tokenizers::AddedToken;
use tokenizers::Tokenizer;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;

use super::TextTokenizer;
use crate::error::{ModelError, Result};

const SPECIAL: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];

/// Smallest vocabulary: special tokens and bytes.
pub const SMALLEST_VOCABULARY: usize = SPECIAL.len() + 256;

/// Trains a byte-level BPE tokenizer of `vocabulary` tokens on some texts.
///
/// # Errors
/// - the vocabulary is smaller than 260 tokens, or training fails
pub fn train_bpe(
    texts: impl Iterator<Item = String> + Send,
    vocabulary: usize,
) -> Result<TextTokenizer> {
    if vocabulary < SMALLEST_VOCABULARY {
        let problem = format!("a vocabulary of {vocabulary} is smaller than {SMALLEST_VOCABULARY}");
        return Err(ModelError::Tokenizer(problem));
    }
    let fail = |error: &dyn std::fmt::Display| ModelError::Tokenizer(error.to_string());
    let empty = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": Value::Object(serde_json::Map::new()), "merges": []}
    });
    let bytes = serde_json::to_vec(&empty).map_err(|error| fail(&error))?;
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| fail(&error))?;
    let mut alphabet: Vec<char> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let trainer = BpeTrainer::builder()
        .vocab_size(vocabulary)
        .min_frequency(2)
        .show_progress(false)
        .initial_alphabet(alphabet.into_iter().collect())
        .special_tokens(SPECIAL.map(|token| AddedToken::from(token, true)).to_vec())
        .build();
    let mut trainer = TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, texts).map_err(|error| fail(&error))?;
    Ok(TextTokenizer::new(tokenizer, None, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trained_tokenizer_is_invertible_small_and_splits_digits() -> Result<()> {
        let text = "the cat sat on the mat 1234 times, naïve as ever. ".repeat(30);
        let tokenizer = train_bpe(vec![text.clone()].into_iter(), 300)?;
        assert!(tokenizer.vocabulary() <= 300 && tokenizer.vocabulary() > SMALLEST_VOCABULARY);
        assert_eq!(tokenizer.id("<s>"), Some(1));
        for text in [text.as_str(), "unseen Ωß\n\ttext 77", ""] {
            let ids = tokenizer.encode(text)?.ids;
            assert_eq!(tokenizer.decode(&ids, false)?, text);
        }
        let digits = tokenizer.encode("1234")?.ids;
        assert_eq!(digits.len(), 4);
        assert!(train_bpe(std::iter::empty(), 20).is_err());
        Ok(())
    }
}
