//! What the GGUF files that this crate writes have in common: keys of a decoder, rotary scaling.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_kernels::rope::RopeScaling;
use longdraft_models::config::RopeParameters;
use longdraft_models::error::Problems;
use longdraft_models::weights::gguf::write::save;

use super::files::{gguf_name, usual_attention_factor};
use crate::Profile;
use crate::error::{Result, ServingError};
use crate::target::TargetFacts;

/// Sizes of a model of decoder layers.
pub(crate) struct Decoder<'a> {
    /// `general.architecture`, and the first part of its keys.
    pub(crate) architecture: &'a str,
    /// The format's number for the type of most weights.
    pub(crate) file_type: u32,
    pub(crate) layers: usize,
    /// Longest context in tokens.
    pub(crate) context: usize,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) eps: f64,
    pub(crate) rope: &'a RopeParameters,
    pub(crate) vocabulary: usize,
}

impl Decoder<'_> {
    /// Keys in the order in which they are written; `name` is the model's.
    pub(crate) fn keys(&self, name: &str) -> Vec<(String, Value)> {
        let count = |size: usize| Value::U32(size as u32);
        let text = |text: &str| Value::String(text.to_owned());
        let mut all: Vec<(String, Value)> = [
            ("general.architecture", text(self.architecture)),
            ("general.type", text("model")),
            ("general.name", text(name)),
            ("general.alignment", Value::U32(32)),
            ("general.quantization_version", Value::U32(2)),
            ("general.file_type", Value::U32(self.file_type)),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let mut add = |key: &str, value| all.push((format!("{}.{key}", self.architecture), value));
        add("block_count", count(self.layers));
        add("context_length", count(self.context));
        add("embedding_length", count(self.hidden));
        add("feed_forward_length", count(self.inner));
        add("attention.head_count", count(self.heads));
        add("attention.head_count_kv", count(self.kv_heads));
        add("attention.key_length", count(self.head_dim));
        add("attention.value_length", count(self.head_dim));
        add("attention.layer_norm_rms_epsilon", Value::F32(self.eps as f32));
        add("rope.dimension_count", count(self.head_dim));
        add("rope.freq_base", Value::F32(self.rope.theta as f32));
        for (key, value) in scaling(self.rope.scaling) {
            add(&format!("rope.scaling.{key}"), value);
        }
        add("vocab_size", count(self.vocabulary));
        all
    }
}

/// The sizes of a configuration as a [`Decoder`]: all kinds call them alike.
macro_rules! decoder {
    ($config:ident, $architecture:expr, $file_type:expr, $layers:expr) => {
        $crate::formats::gguf::Decoder {
            architecture: $architecture,
            file_type: $file_type,
            layers: $layers,
            context: $config.max_position_embeddings,
            hidden: $config.hidden_size,
            inner: $config.intermediate_size,
            heads: $config.num_attention_heads,
            kv_heads: $config.num_key_value_heads,
            head_dim: $config.head_dim,
            eps: $config.rms_norm_eps,
            rope: &$config.rope,
            vocabulary: $config.vocab_size,
        }
    };
}
pub(crate) use decoder;

/// The format's number for files of weights in `dtype`.
pub(crate) fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 32,
        _ => 0,
    }
}

/// Whether these keys hold a scaling of the rotary embedding; of yarn they hold the usual rule alone.
pub(crate) fn holds(scaling: RopeScaling) -> bool {
    let RopeScaling::Yarn { factor, attention_factor, truncate, .. } = scaling else {
        return true;
    };
    truncate && (attention_factor - usual_attention_factor(factor)).abs() < 1e-6
}

fn scaling(scaling: RopeScaling) -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.into());
    let float = |value: f64| Value::F32(value as f32);
    match scaling {
        // llama3's rule goes into divisors, a tensor of its own.
        RopeScaling::None | RopeScaling::Llama3 { .. } => Vec::new(),
        RopeScaling::Linear { factor } => {
            vec![("type", text("linear")), ("factor", float(factor))]
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, .. } => vec![
            ("type", text("yarn")),
            ("factor", float(factor)),
            ("original_context_length", Value::U32(original_context as u32)),
            ("yarn_beta_fast", float(beta_fast)),
            ("yarn_beta_slow", float(beta_slow)),
        ],
    }
}

/// The target's tokenizer as keys.
/// It fails with the reason where it has no form in GGUF files.
pub(crate) fn tokenizer(target: &TargetFacts) -> Result<Vec<(String, Value)>> {
    target.gguf_tokenizer.clone().map_err(|reason| {
        let problems = Problems(vec![format!("tokenizer: {reason}")]);
        ServingError::NotRepresentable { profile: Profile::Llamacpp, problems }
    })
}

/// The name of a draft of some kind for a target.
pub(crate) fn name(target: &TargetFacts, title: &str) -> String {
    let name = target.name.trim_end_matches('/');
    format!("{} {title} draft", name.rsplit('/').next().unwrap_or(name))
}

/// Writes the only model of a folder.
/// It fails where a tensor is of a type that such files do not hold, or the folder cannot be written.
pub(crate) fn write(
    folder: &Path,
    dtype: DType,
    keys: &[(String, Value)],
    tensors: &[(String, Tensor)],
) -> Result<()> {
    let stored: Vec<_> =
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect();
    Ok(save(&folder.join(gguf_name(dtype)), keys, &stored)?)
}
