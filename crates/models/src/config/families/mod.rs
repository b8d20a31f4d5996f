//! What each family's keys say about its layers. A family is a file: it fills in the table of parts, from
//! the keys of a `config.json` and from those of a GGUF header.

pub(super) mod deepseek;
mod gemma;
pub(super) mod gemma4;
mod hybrid;
pub(super) mod lfm;
mod mistral;
mod qwen;

use super::gguf::Keys as GgufKeys;
use super::hugging_face::Keys as JsonKeys;
use super::{Architecture, Parts, RopeParameters, limits};

/// What keys that are left out mean to a family's class; without a value a key is required.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    pub(super) vocab_size: Option<usize>,
    pub(super) num_attention_heads: Option<usize>,
    /// As many as query heads without it.
    pub(super) num_key_value_heads: Option<usize>,
    /// `H / N` without it.
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) tie_word_embeddings: bool,
    /// Without it a key is required.
    pub(super) intermediate_size: Option<usize>,
    /// The key of what is added under the root of norms, and its value.
    pub(super) norm_eps: (&'static str, f64),
    /// Base of the rotary embedding.
    pub(super) rope_theta: f64,
    /// The key of the activation, and the only one that is read.
    pub(super) activation: (&'static str, &'static str),
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            vocab_size: None,
            num_attention_heads: None,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            tie_word_embeddings: false,
            intermediate_size: None,
            norm_eps: ("rms_norm_eps", 1e-6),
            rope_theta: 10_000.0,
            activation: ("hidden_act", "silu"),
        }
    }
}

impl Defaults {
    pub(super) fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Qwen3 => Self { head_dim: Some(128), ..Self::default() },
            Architecture::Mistral | Architecture::Ministral3 => mistral::defaults(architecture),
            Architecture::Gemma2 | Architecture::Gemma3 => gemma::defaults(architecture),
            Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
                hybrid::defaults(architecture)
            }
            Architecture::Lfm2 => lfm::defaults(),
            Architecture::DeepseekV3 => deepseek::defaults(),
            Architecture::Gemma4 => gemma4::defaults(),
            _ => Self::default(),
        }
    }
}

/// Sizes that a family's parts depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) architecture: Architecture,
    pub(super) hidden_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

impl Sizes {
    /// One value a layer; a hostile number of layers lists no more than are ever read.
    fn each_layer<T>(&self, of: impl Fn(usize) -> T) -> Vec<T> {
        (0..self.num_hidden_layers.min(limits::LAYERS)).map(of).collect()
    }
}

/// Rotary embedding and parts of a `config.json`.
pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    match sizes.architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => gemma::of_json(keys, sizes),
        Architecture::Mistral | Architecture::Ministral3 | Architecture::Mixtral => {
            (keys.rope(sizes), mistral::of_json(keys, sizes))
        }
        Architecture::Llama => (keys.rope(sizes), llama(keys)),
        Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
            (keys.rope(sizes), hybrid::of_json(keys, sizes))
        }
        Architecture::Lfm2 => (keys.rope(sizes), lfm::of_json(keys, sizes)),
        Architecture::Gemma4 => gemma4::of_json(keys, sizes),
        Architecture::DeepseekV3 => (keys.rope(sizes), deepseek::of_json(keys, sizes)),
        _ => (keys.rope(sizes), qwen::of_json(keys, sizes)),
    }
}

/// A Llama has no windows.
fn llama(keys: &mut JsonKeys<'_>) -> Parts {
    if keys.flag("use_sliding_window", false) {
        keys.problems.push("`use_sliding_window` = true is not supported for `llama`");
    }
    Parts::default()
}

/// Parts of a GGUF header. Files of other families are read as their own reader does, without windows.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    match sizes.architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => gemma::of_gguf(keys, sizes),
        Architecture::Ministral3 => mistral::of_gguf(keys, sizes),
        Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
            hybrid::of_gguf(keys, sizes)
        }
        Architecture::Lfm2 => lfm::of_gguf(keys, sizes),
        _ => Parts::default(),
    }
}
