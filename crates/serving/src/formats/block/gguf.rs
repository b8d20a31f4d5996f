//! A block draft as a GGUF file for llama.cpp.

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_models::draft::block::gguf_file::{ARCHITECTURE, MASK_TOKEN, stored_name};
use longdraft_models::draft::block::key_names::{
    BEND, BLOCK_SIZE, CONVOLUTION, FROM_ANCHOR, SELECTOR,
};
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_models::draft::vocabulary::MAP;

use crate::error::Result;
use crate::formats::gguf::{decoder, file_type};
use crate::formats::{Named, vocabulary};

/// Keys of the header, in the order in which they are written. What readers default differently is
/// always there.
pub(super) fn metadata(
    config: &BlockConfig,
    name: &str,
    dtype: DType,
    tokenizer: &[(String, Value)],
) -> Vec<(String, Value)> {
    let mut all = decoder!(config, ARCHITECTURE, file_type(dtype), config.layers.len()).keys(name);
    let count = |size: usize| Value::U32(size as u32);
    let mut add = |key: &str, value| all.push((format!("{ARCHITECTURE}.{key}"), value));
    add(BLOCK_SIZE, count(config.block_size));
    let entered = config.target_layers.iter().map(|layer| Value::I32(layer.entered().0 as i32));
    add("target_layers", Value::Array(entered.collect()));
    add(FROM_ANCHOR, Value::Bool(config.chain.is_some()));
    let causal = config.layers.iter().all(|kind| config.is_causal_in(*kind));
    add("attention.causal", Value::Bool(causal));
    if let Some(window) = config.sliding_window.filter(|_| slides(config)) {
        add("attention.sliding_window", count(window));
        let pattern = config.layers.iter().map(|kind| Value::Bool(*kind == LayerKind::Sliding));
        add("attention.sliding_window_pattern", Value::Array(pattern.collect()));
    }
    if let Some(sizes) = config.convolution {
        add(CONVOLUTION[0], count(sizes.kernel_size));
        add(CONVOLUTION[1], count(sizes.group_size));
    }
    if let Some(sizes) = config.selector {
        add(SELECTOR[0], count(sizes.rank));
        add(SELECTOR[1], count(sizes.top_k));
    }
    if !config.bend.is_plain() {
        add("logit_scale", Value::F32(config.bend.divisor.recip() as f32));
    }
    if let Some(softcap) = config.bend.softcap {
        add(BEND[1], Value::F32(softcap as f32));
    }
    if let Some(sizes) = config.chain {
        add("has_confidence_head", Value::Bool(sizes.confidence.is_some()));
    }
    all.extend(tokenizer.iter().filter(|(key, _)| key != MASK_TOKEN).cloned());
    all.push((MASK_TOKEN.into(), Value::U32(config.mask_token_id)));
    all
}

fn slides(config: &BlockConfig) -> bool {
    config.layers.contains(&LayerKind::Sliding)
}

/// Tensors under their names in files: vectors and kernels of convolutions in f32, rows in the order of
/// the published files, `d2t` absolute, no `t2d`.
pub(super) fn tensors(published: &[(String, Tensor)]) -> Result<Named> {
    let named = published.iter().filter_map(|(name, tensor)| {
        let stored = stored_name(name)?;
        let is_exact = tensor.rank() == 1 || name.ends_with(".base_kernel");
        let tensor = if name == MAP[0] {
            vocabulary::absolute(tensor)
        } else if is_exact {
            tensor.to_dtype(DType::F32)
        } else {
            Ok(tensor.clone())
        };
        Some(tensor.map(|tensor| (stored, tensor)))
    });
    Ok(named.collect::<candle_core::Result<_>>()?)
}
