//! Weights, tokenizer and JSON files of a forward case.

use std::path::{Path, PathBuf};

use candle_core::DType;
use longdraft_models::sha256;
use longdraft_models::target_model::gguf::GgufSource;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::Value;

use crate::error::{ParityError, Result};
use crate::{CaseReport, malformed, read_json};

/// The file that the case's hash speaks of.
pub(super) fn weights_file(path: &Path, meta: &Value) -> PathBuf {
    if path.is_dir() {
        path.join(meta["source"]["file"].as_str().unwrap_or("model.safetensors"))
    } else {
        path.to_path_buf()
    }
}

/// Refuses weights that the case was not made from.
pub(super) fn check_hash(folder: &Path, meta: &Value, weights: &Path) -> Result<()> {
    let Some(want) = meta["source"]["sha256"].as_str() else {
        return Ok(());
    };
    let got = sha256::of_file(weights).map_err(|error| malformed(weights, error))?;
    if got == want {
        return Ok(());
    }
    let (weights, folder) = (weights.to_path_buf(), folder.to_path_buf());
    Err(ParityError::OtherWeights { weights, folder, got, want: want.to_owned() })
}

pub(super) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// The token ids of a list.
pub(super) fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten().filter_map(Value::as_u64);
    ids.map(|id| id as u32).collect()
}

/// Every stored tensor dequantised, bit for bit.
pub(super) fn check_gguf_tensors(
    folder: &Path,
    weights: &Path,
    report: &mut CaseReport,
) -> Result<()> {
    let is_gguf = weights.extension().is_some_and(|extension| extension == "gguf");
    if !is_gguf || !folder.join("gguf_tensors.json").is_file() {
        return Ok(());
    }
    let source = GgufSource::open(weights)?;
    let expected = read_json(&folder.join("gguf_tensors.json"))?;
    let expected = match expected.get("tensors").unwrap_or(&expected) {
        Value::Array(list) => list.clone(),
        _ => Vec::new(),
    };
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for tensor in &expected {
        let hash = ["sha256_f32le", "sha256"].into_iter().find_map(|key| tensor[key].as_str());
        let (Some(name), Some(hash)) = (tensor["name"].as_str(), hash) else { continue };
        let values: Vec<f32> = source.load_stored(name, DType::F32)?.flatten_all()?.to_vec1()?;
        got.push(sha256::of_f32(&values));
        want.push(hash.to_owned());
    }
    report.check_equal(format!("{} dequantised tensors", want.len()), &got, &want);
    Ok(())
}

/// Ids of awkward strings, and what decoding gives back.
pub(super) fn check_tokenizer(
    folder: &Path,
    tokenizer: &TextTokenizer,
    report: &mut CaseReport,
) -> Result<()> {
    if !folder.join("tokenizer.json").is_file() {
        return Ok(());
    }
    let strings = read_json(&folder.join("tokenizer.json"))?;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for entry in strings.as_array().into_iter().flatten() {
        let expected = ids(&entry["ids"]);
        got.push((
            tokenizer.encode(entry["text"].as_str().unwrap_or_default())?.ids,
            tokenizer.decode(&expected, false)?,
        ));
        want.push((expected, entry["decoded"].as_str().unwrap_or_default().to_owned()));
    }
    report.check_equal(format!("{} tokenizer strings", want.len()), &got, &want);
    Ok(())
}
