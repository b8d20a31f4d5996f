//! A draft as a GGUF file for llama.cpp.

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Tensor};
use longdraft_kernels::rope::RopeScaling;
use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::eagle3::gguf_file::{ARCHITECTURE, LAYER_KEYS, TENSOR_NAMES};

use super::config::entered_ids;
use crate::error::Result;
use crate::formats::files::interleaved;
use crate::formats::gguf::{decoder, file_type};
use crate::formats::{Named, vocabulary};

/// Keys of the header, in the order in which they are written.
pub fn metadata(
    config: &Eagle3Config,
    name: &str,
    dtype: DType,
    tokenizer: &[(String, Value)],
) -> Vec<(String, Value)> {
    let mut all = decoder!(config, ARCHITECTURE, file_type(dtype), 1).keys(name);
    let layers = entered_ids(config).map(|id| Value::I32(id as i32)).to_vec();
    let mut add = |key: &str, value| all.push((format!("{ARCHITECTURE}.{key}"), value));
    add("target_hidden_size", Value::U32(config.target_hidden_size as u32));
    add("norm_before_residual", Value::Bool(config.norm_before_residual));
    for key in LAYER_KEYS {
        all.push((key.into(), Value::Array(layers.clone())));
    }
    all.extend(tokenizer.iter().cloned());
    all
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
pub(super) fn tensors(config: &Eagle3Config, published: &[(String, Tensor)]) -> Result<Named> {
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
            vocabulary::absolute(tensor)?
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
