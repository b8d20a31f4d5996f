//! Files that formats write, and values in the types that they hold.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::config::TargetConfig;
use longdraft_models::error::Problems;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_models::weights::gguf::half_split_row;
use longdraft_models::weights::safetensors;
use serde_json::{Value, json};

use crate::error::Result;

/// Largest value of an IEEE half.
const LARGEST_HALF: f32 = 65_504.0;

/// PyTorch's name of a weight type.
pub(crate) fn torch_dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// Says an unusual factor of yarn on cos and sin as vLLM and SGLang read it, too: as a multiple of the usual one.
/// Hugging Face reads the whole factor (`attention_factor`), and so do we.
pub(crate) fn set_attn_factor(config: &mut Value) {
    for key in ["rope_parameters", "rope_scaling"] {
        let number = |name: &str| config[key][name].as_f64();
        let (Some(whole), Some(factor)) = (number("attention_factor"), number("factor")) else {
            continue;
        };
        let share = whole / usual_attention_factor(factor);
        if (share - 1.0).abs() > 1e-9 {
            config[key]["attn_factor"] = share.into();
        }
    }
}

/// Yarn's factor on cos and sin where nothing else is said.
pub(crate) fn usual_attention_factor(factor: f64) -> f64 {
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

/// The target's special tokens, under the keys that engines read.
pub(crate) fn set_special_tokens(value: &mut Value, target: &TargetConfig) {
    if let Some(bos) = target.bos_token_id {
        value["bos_token_id"] = bos.into();
    }
    match target.eos_token_ids.as_slice() {
        [] => {}
        [one] => value["eos_token_id"] = (*one).into(),
        several => value["eos_token_id"] = json!(several),
    }
    if let Some(pad) = target.pad_token_id {
        value["pad_token_id"] = pad.into();
    }
}

/// A tensor in `dtype`; what does not fit is a problem.
pub(crate) fn narrowed(
    name: &str,
    tensor: &Tensor,
    dtype: DType,
    problems: &mut Problems,
) -> Result<Tensor> {
    let values = tensor.to_dtype(DType::F32)?;
    let largest = values.abs()?.max_all()?.to_scalar::<f32>()?;
    // NaN hides from a maximum, not from a sum; large values may add up to infinity.
    let sum = values.sum_all()?.to_scalar::<f32>()?;
    if !largest.is_finite() || sum.is_nan() {
        problems.push(format!("tensor `{name}` holds values that are not finite"));
    } else if dtype == DType::F16 && largest > LARGEST_HALF {
        problems.push(format!(
            "tensor `{name}` holds {largest}, too large for f16: export with --dtype bf16"
        ));
    }
    Ok(tensor.to_dtype(dtype)?.contiguous()?)
}

/// Name of the GGUF file of weights in `dtype`.
pub(crate) fn gguf_name(dtype: DType) -> String {
    let suffix = match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => "f32",
    };
    format!("draft-{suffix}.gguf")
}

/// Writes the weight file of a folder.
pub(crate) fn write_safetensors(folder: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(safetensors::save(&folder.join("model.safetensors"), tensors, metadata)?)
}

/// Writes a table of keys.
pub(crate) fn write_json(path: &Path, value: &Value) -> Result<()> {
    Ok(write_atomically(path, format!("{value:#}\n").as_bytes())?)
}

/// Rows of heads in the interleaved order of GGUF files.
pub(crate) fn interleaved(tensor: &Tensor, head_dim: usize) -> Result<Tensor> {
    let rows = tensor.dim(0)?;
    let order: Vec<u32> = (0..rows).map(|stored| half_split_row(stored, head_dim) as u32).collect();
    Ok(tensor.index_select(&Tensor::from_vec(order, rows, tensor.device())?, 0)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn large_values_are_finite_and_others_are_told() -> Result<()> {
        let told = |values: &[f32]| -> Result<usize> {
            let mut problems = Problems::default();
            narrowed("w", &Tensor::new(values, &Device::Cpu)?, DType::BF16, &mut problems)?;
            Ok(problems.0.len())
        };
        assert_eq!(told(&[3e38, 3e38])?, 0);
        assert_eq!(told(&[1.0, f32::NAN])?, 1);
        assert_eq!(told(&[1.0, f32::INFINITY])?, 1);
        Ok(())
    }

    #[test]
    fn a_heads_halves_alternate() {
        let order: Vec<usize> = (0..8).map(|row| half_split_row(row, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
