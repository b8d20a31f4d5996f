//! A draft as a GGUF file for llama.cpp.

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_kernels::rope::RopeScaling;
use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::eagle3::gguf_file::{ARCHITECTURE, LAYER_KEYS, TENSOR_NAMES};

use super::config::entered_ids;
use crate::error::Result;
use crate::formats::files::interleaved;

/// Keys of the header, in the order in which they are written.
pub fn metadata(
    config: &Eagle3Config,
    name: &str,
    dtype: DType,
    tokenizer: &[(String, Value)],
) -> Vec<(String, Value)> {
    let count = |size: usize| Value::U32(size as u32);
    let mut all: Vec<(String, Value)> = vec![
        ("general.architecture".into(), Value::String(ARCHITECTURE.into())),
        ("general.type".into(), Value::String("model".into())),
        ("general.name".into(), Value::String(name.to_owned())),
        ("general.alignment".into(), Value::U32(32)),
        ("general.quantization_version".into(), Value::U32(2)),
        (
            "general.file_type".into(),
            Value::U32(match dtype {
                DType::F16 => 1,
                DType::BF16 => 32,
                _ => 0,
            }),
        ),
    ];
    let mut add = |key: &str, value| all.push((format!("{ARCHITECTURE}.{key}"), value));
    add("block_count", Value::U32(1));
    add("context_length", count(config.max_position_embeddings));
    add("embedding_length", count(config.hidden_size));
    add("feed_forward_length", count(config.intermediate_size));
    add("attention.head_count", count(config.num_attention_heads));
    add("attention.head_count_kv", count(config.num_key_value_heads));
    add("attention.key_length", count(config.head_dim));
    add("attention.value_length", count(config.head_dim));
    add("attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps as f32));
    add("rope.dimension_count", count(config.head_dim));
    add("rope.freq_base", Value::F32(config.rope.theta as f32));
    for (key, value) in scaling(config.rope.scaling) {
        add(&format!("rope.scaling.{key}"), value);
    }
    add("vocab_size", count(config.vocab_size));
    let layers = entered_ids(config).map(|id| Value::I32(id as i32)).to_vec();
    add("target_hidden_size", count(config.target_hidden_size));
    add("norm_before_residual", Value::Bool(config.norm_before_residual));
    for key in LAYER_KEYS {
        all.push((key.into(), Value::Array(layers.clone())));
    }
    all.extend(tokenizer.iter().cloned());
    all
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

/// Divisors of the frequencies, `[D/2]`, where the target's rule or file has such.
fn divisors(config: &Eagle3Config) -> Option<Vec<f32>> {
    if config.rope.divisors.is_some() {
        return config.rope.divisors.clone();
    }
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } =
        config.rope.scaling
    else {
        return None;
    };
    let half = config.head_dim / 2;
    let divisor = |i: usize| {
        let wavelength = std::f64::consts::TAU * config.rope.theta.powf(i as f64 / half as f64);
        if wavelength < original_context / high_freq_factor {
            1.0
        } else if wavelength > original_context / low_freq_factor {
            factor
        } else {
            let smooth = (original_context / wavelength - low_freq_factor)
                / (high_freq_factor - low_freq_factor);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    Some((0..half).map(|i| divisor(i) as f32).collect())
}

/// Tensors under their GGUF names: q and k interleaved, norms in f32, `d2t` absolute, no `t2d`.
///
/// # Errors
/// - a tensor cannot be made
pub fn tensors(
    config: &Eagle3Config,
    published: &[(String, Tensor)],
) -> Result<Vec<(String, Tensor)>> {
    let mut all = Vec::new();
    if let Some(divisors) = divisors(config) {
        let count = divisors.len();
        let tensor = Tensor::from_vec(divisors, count, &candle_core::Device::Cpu)?;
        all.push(("rope_freqs.weight".to_owned(), tensor));
    }
    for (name, tensor) in published {
        let Some((gguf, _)) = TENSOR_NAMES.iter().find(|(_, published)| published == name) else {
            continue;
        };
        let tensor = if name == "d2t" {
            let offsets: Vec<i64> = tensor.to_vec1()?;
            let ids: Vec<i64> = offsets.iter().zip(0..).map(|(offset, i)| offset + i).collect();
            Tensor::from_vec(ids, tensor.dims(), tensor.device())?
        } else if tensor.rank() == 1 {
            tensor.to_dtype(DType::F32)?
        } else if name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight") {
            interleaved(tensor, config.head_dim)?
        } else {
            tensor.clone()
        };
        all.push(((*gguf).to_owned(), tensor));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_becomes_divisors_with_the_same_angles() {
        use longdraft_models::config::RopeParameters;
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64.0,
        };
        let json = serde_json::json!({
            "hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 10
        });
        let mut config = Eagle3Config::from_json(&json, Some(32)).expect("valid");
        config.rope = RopeParameters { theta: 5e5, scaling, divisors: None };
        let divided = RopeParameters { divisors: divisors(&config), ..RopeParameters::plain(5e5) };
        let table = |rope: &RopeParameters| {
            let rope = rope.build(16).expect("rope");
            let table = rope.table(&[1, 63, 500], &candle_core::Device::Cpu).expect("table");
            table.sin().flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values")
        };
        for (a, b) in table(&config.rope).iter().zip(table(&divided)) {
            assert!((a - b).abs() < 2e-4, "{a} and {b}");
        }
    }
}
