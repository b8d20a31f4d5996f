//! What tests of several modules ask.

use std::fmt::Display;

use candle_core::Tensor;

use crate::language_model::LanguageModelConfig;

/// Something is refused, in words that hold every part.
#[track_caller]
pub(crate) fn assert_refused<T, E: Display>(result: Result<T, E>, parts: &[&str]) {
    let Err(error) = result else { panic!("not refused: {parts:?}") };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

/// A language model of two layers and 19 tokens.
pub(crate) fn small_language_model() -> LanguageModelConfig {
    LanguageModelConfig {
        vocab_size: 19,
        num_hidden_layers: 2,
        hidden_size: 16,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        ..LanguageModelConfig::default()
    }
}

/// The f32 values of a tensor.
#[track_caller]
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.detach().flatten_all().and_then(|flat| flat.to_vec1()).expect("f32 values")
}

/// Their bits.
#[track_caller]
pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}
