//! Codes, scales, kept tensors and sizes of the int8 artifact, through the file and back.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::artifact::{
    Artifact, Compression, QuantiseConfig, Quantised, quantise, quantise_rows,
};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::SafetensorsSource;

use super::case::Case;
use crate::error::Result;
use crate::{CaseReport, absolute_error, floats, malformed};

/// Checks the artifact; returns the weights that a reader of its file has.
pub(super) fn check(case: &Case<'_>, report: &mut CaseReport) -> Result<MemorySource> {
    let meta = &case.meta["int8"];
    let missing = |key: &str| malformed(case.folder, format!("meta.json: int8 `{key}` is missing"));
    let threshold = meta["keep_float_max_numel"].as_u64();
    let quantile = meta["clip_quantile"].as_f64();
    let config = QuantiseConfig {
        keep_max_elements: threshold.ok_or_else(|| missing("keep_float_max_numel"))? as usize,
        clip_quantile: quantile.ok_or_else(|| missing("clip_quantile"))?,
        ..QuantiseConfig::default()
    };
    let weights = case.file("weights_trained.safetensors")?;
    let want = case.file("int8.safetensors")?;
    let mut tensors = BTreeMap::new();
    for name in weights.names() {
        let tensor = weights.load(&name, DType::F32)?;
        let stored = quantise(&name, &tensor, &config)?;
        check_tensor(&name, &tensor, &stored.values, &config, &want, report)?;
        tensors.insert(name, stored);
    }
    let (config, tokenizer) = (serde_json::to_value(&case.model), String::new());
    let config = config.map_err(|error| malformed(case.folder, error))?;
    let artifact = Artifact { config, tokenizer, tensors };
    report.check_count("payload bytes", artifact.payload_bytes(), &meta["int8_payload_bytes"]);
    let read = Artifact::from_bytes(&artifact.to_bytes(Compression::Zlib)?)
        .map_err(|problem| malformed(case.folder, problem))?;
    report.check_equal("artifact read back", &[&read], &[&artifact]);
    let mut loaded = Vec::new();
    for (name, stored) in &read.tensors {
        let values = stored.values();
        let tensor = Tensor::from_vec(values, stored.shape.as_slice(), &candle_core::Device::Cpu)?;
        let dequantised = format!("dequant.{name}");
        if let Some(want) = crate::stored(&want, &dequantised)? {
            report.check(dequantised, absolute_error(&tensor, &want)?.0, 0.0);
        }
        loaded.push((name.clone(), tensor));
    }
    Ok(MemorySource::new(loaded))
}

fn check_tensor(
    name: &str,
    tensor: &Tensor,
    stored: &Quantised,
    config: &QuantiseConfig,
    want: &SafetensorsSource,
    report: &mut CaseReport,
) -> Result<()> {
    let floats = |key: &str| floats(want, &format!("{key}.{name}"));
    let wide = |codes: &[i8]| codes.iter().map(|code| i64::from(*code)).collect::<Vec<_>>();
    let is_there = |key: &str| want.shape(&format!("{key}.{name}")).is_some();
    match stored {
        Quantised::Rows { codes, scales } if is_there("q") => {
            let stored = want.load_i64(&format!("q.{name}"))?;
            report.check_equal(format!("q.{name}"), &wide(codes), &stored);
            let scales: Vec<f32> = scales.iter().map(|scale| scale.to_f32()).collect();
            report.check_bits(format!("scale_f16.{name}"), &scales, &floats("scale_f16")?);
            let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
            let rows = quantise_rows(&values, tensor.dim(1)?, config.clip_quantile);
            if let Ok(rows) = rows {
                for (key, got) in [("scale_f32", &rows.scales), ("clip", &rows.clips)] {
                    report.check_bits(format!("{key}.{name}"), got, &floats(key)?);
                }
            }
        }
        Quantised::F16(values) if is_there("keep") => {
            let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
            report.check_bits(format!("keep.{name} (f16)"), &values, &floats("keep")?);
        }
        Quantised::F32(values) if is_there("keep") => {
            report.check_bits(format!("keep.{name} (f32)"), values, &floats("keep")?);
        }
        Quantised::Whole { codes, .. } if is_there("q") => {
            let stored = want.load_i64(&format!("q.{name}"))?;
            report.check_equal(format!("q.{name}"), &wide(codes), &stored);
        }
        _ => report.check(format!("{name} is stored in another way"), f64::INFINITY, 0.0),
    }
    Ok(())
}
