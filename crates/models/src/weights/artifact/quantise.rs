//! Weights to codes.
//!
//! `compat`, a matrix of more than `keep_max_elements` values: per row `clip` = a quantile of `|w|`,
//! `scale = max(clip / 127, 1/127)` in f32, `code = round_half_even(clamp(w, ±clip) / scale)`, the
//! scale stored as f16 after that. Other shapes: one f32 scale without a floor. Small tensors are
//! kept: control tensors as f32, others as f16.
//!
//! `modern`: the scale is rounded to f16 first, no floor, `clip = k · std(row)` or the row's largest.

use std::collections::BTreeMap;

use candle_core::Tensor;
use half::f16;
use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::to_f16;
use crate::error::{Result, refused};

/// Which rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantiseFormat {
    /// The published quantiser.
    #[default]
    Compat,
    /// Scales that are rounded before use, without a floor.
    Modern,
}

/// How the embedding is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Embedding {
    /// As any other matrix.
    #[default]
    Codes,
    /// As f16: most of the loss of quantisation goes away for 0.5 MB.
    F16,
}

/// Precision of an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QuantiseConfig {
    /// Rules.
    pub format: QuantiseFormat,
    /// Tensors of at most so many values are kept.
    pub keep_max_elements: usize,
    /// Quantile of a row's sizes at which it is clipped (compat).
    pub clip_quantile: f64,
    /// Largest code: 127 for int8, 31 for int6 (compat: 127).
    pub levels: u8,
    /// Clip rows at so many standard deviations; more make codes smaller, and the file (modern;
    /// default: at the row's largest).
    pub clip_deviations: Option<f64>,
    /// How the embedding is stored.
    pub embedding: Embedding,
    /// Largest code of tensors whose name contains a key (modern); 0 keeps them as f16.
    pub precision: BTreeMap<String, u8>,
}

impl Default for QuantiseConfig {
    fn default() -> Self {
        Self {
            format: QuantiseFormat::Compat,
            keep_max_elements: 65_536,
            clip_quantile: 0.999_998_4,
            levels: 127,
            clip_deviations: None,
            embedding: Embedding::Codes,
            precision: BTreeMap::new(),
        }
    }
}

impl QuantiseConfig {
    /// Everything that makes no sense, by key of this section.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        rules.require(
            (0.0..=1.0).contains(&self.clip_quantile),
            "clip_quantile",
            "must be in 0 to 1",
        );
        rules.require((1..=127).contains(&self.levels), "levels", "must be in 1 to 127");
        rules.require(
            self.precision.values().all(|l| *l <= 127),
            "precision",
            "holds more than 127",
        );
        let positive = |k: f64| k > 0.0 && k.is_finite();
        rules.require(
            self.clip_deviations.is_none_or(positive),
            "clip_deviations",
            "must be positive",
        );
        rules.require(
            self.format == QuantiseFormat::Modern
                || (self.levels == 127
                    && self.clip_deviations.is_none()
                    && self.precision.is_empty()),
            "format",
            "is `compat`, which has 127 levels everywhere and no `clip_deviations`: set `modern`",
        );
        rules.into_problems()
    }
}

/// A tensor as stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Quantised,
}

/// Values as stored.
#[derive(Debug, Clone, PartialEq)]
pub enum Quantised {
    /// Codes with a scale a row.
    Rows {
        /// Row-major.
        codes: Vec<i8>,
        /// One a row.
        scales: Vec<f16>,
    },
    /// Codes with one scale.
    Whole {
        /// Row-major.
        codes: Vec<i8>,
        /// Of all.
        scale: f32,
    },
    /// Kept in 16 bits.
    F16(Vec<f16>),
    /// Kept as they are.
    F32(Vec<f32>),
}

impl Stored {
    /// `code · scale`, or what was kept.
    pub fn values(&self) -> Vec<f32> {
        match &self.values {
            Quantised::Rows { codes, scales } => {
                let columns = codes.len() / scales.len().max(1);
                let rows = codes.chunks(columns.max(1)).zip(scales);
                rows.flat_map(|(row, scale)| {
                    let scale = scale.to_f32();
                    row.iter().map(move |code| f32::from(*code) * scale)
                })
                .collect()
            }
            Quantised::Whole { codes, scale } => {
                codes.iter().map(|code| f32::from(*code) * scale).collect()
            }
            Quantised::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Quantised::F32(values) => values.clone(),
        }
    }

    /// Bytes before compression.
    pub fn payload_bytes(&self) -> u64 {
        let bytes = match &self.values {
            Quantised::Rows { codes, scales } => codes.len() + 2 * scales.len(),
            Quantised::Whole { codes, .. } => codes.len() + 4,
            Quantised::F16(values) => 2 * values.len(),
            Quantised::F32(values) => 4 * values.len(),
        };
        bytes as u64
    }
}

/// Codes of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct RowCodes {
    /// Row-major.
    pub codes: Vec<i8>,
    /// What the codes were made with, one a row.
    pub scales: Vec<f32>,
    /// What is stored, one a row.
    pub stored: Vec<f16>,
    /// Where rows were clipped.
    pub clips: Vec<f32>,
}

/// Codes of a tensor of another shape.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorCodes {
    /// Row-major.
    pub codes: Vec<i8>,
    /// Of all.
    pub scale: f32,
}

/// Quantile of sizes by linear interpolation, all in f32 as published.
fn quantile(sizes: &mut [f32], q: f32) -> f32 {
    sizes.sort_unstable_by(f32::total_cmp);
    let Some(last) = sizes.len().checked_sub(1) else { return 0.0 };
    let rank = q * last as f32;
    let low = rank.floor();
    let f = rank - low;
    let (a, b) = (sizes[(low as usize).min(last)], sizes[(low as usize + 1).min(last)]);
    if f < 0.5 { a + f * (b - a) } else { b - (b - a) * (1.0 - f) }
}

fn code(value: f32, clip: f32, scale: f32, levels: u8) -> i8 {
    let levels = f32::from(levels);
    (value.clamp(-clip, clip) / scale).round_ties_even().clamp(-levels, levels) as i8
}

/// A matrix by the published rule.
///
/// # Errors
/// - a value is no finite number, or a row's scale is beyond f16
pub fn quantise_rows(
    values: &[f32],
    columns: usize,
    clip_quantile: f64,
) -> std::result::Result<RowCodes, String> {
    let of_row = |row: &[f32]| {
        let mut sizes: Vec<f32> = row.iter().map(|value| value.abs()).collect();
        let clip = quantile(&mut sizes, clip_quantile as f32);
        (clip, (clip / 127.0).max(1.0 / 127.0))
    };
    rows(values, columns, 127, of_row)
}

fn rows(
    values: &[f32],
    columns: usize,
    levels: u8,
    of_row: impl Fn(&[f32]) -> (f32, f32),
) -> std::result::Result<RowCodes, String> {
    let (mut codes, mut scales, mut clips) =
        (Vec::with_capacity(values.len()), Vec::new(), Vec::new());
    for (index, row) in values.chunks(columns.max(1)).enumerate() {
        if let Some(value) = row.iter().find(|value| !value.is_finite()) {
            return Err(format!("row {index} holds {value}"));
        }
        let (clip, scale) = of_row(row);
        if !f16::from_f32(scale).is_finite() {
            return Err(format!("row {index} needs the scale {scale}, f16 ends at 65504"));
        }
        codes.extend(row.iter().map(|value| code(*value, clip, scale, levels)));
        scales.push(scale);
        clips.push(clip);
    }
    Ok(RowCodes { codes, stored: to_f16(&scales), scales, clips })
}

/// A matrix by the modern rule.
fn modern_rows(
    values: &[f32],
    columns: usize,
    levels: u8,
    deviations: Option<f64>,
) -> std::result::Result<RowCodes, String> {
    rows(values, columns, levels, |row| {
        let largest = row.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let clip = deviations.map_or(largest, |k| {
            let count = row.len().max(1) as f64;
            let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
            let square = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / count;
            (k * square.sqrt()) as f32
        });
        // The smallest f16 that is not denormal: a zero row keeps a usable scale.
        let scale = f16::from_f32((clip / f32::from(levels)).max(f16::MIN_POSITIVE.to_f32()));
        (clip, scale.to_f32())
    })
}

/// A tensor that is no matrix, by the published rule.
///
/// # Errors
/// - a value is no finite number
pub fn quantise_tensor(
    values: &[f32],
    clip_quantile: f64,
) -> std::result::Result<TensorCodes, String> {
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(format!("it holds {value}"));
    }
    let mut sizes: Vec<f32> = values.iter().map(|value| value.abs()).collect();
    let clip = quantile(&mut sizes, clip_quantile as f32);
    let scale = if clip > 0.0 { clip / 127.0 } else { 1.0 };
    let codes = values.iter().map(|value| code(*value, clip, scale, 127)).collect();
    Ok(TensorCodes { codes, scale })
}

/// Tensors that steer the streams; kept in full when small.
fn is_control(name: &str) -> bool {
    let control = ["attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weight"];
    control.iter().any(|part| name.contains(part))
}

/// One tensor by its name, size and the configuration.
///
/// # Errors
/// - a value is no finite number, or a scale is beyond f16; the tensor is named
pub fn quantise(name: &str, tensor: &Tensor, config: &QuantiseConfig) -> Result<Stored> {
    let shape = tensor.dims().to_vec();
    let values: Vec<f32> =
        tensor.to_dtype(candle_core::DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let fail = |problem: String| refused(format!("tensor `{name}`: {problem}"));
    let chosen = config.precision.iter().find(|(part, _)| name.contains(part.as_str()));
    let levels = chosen.map_or(config.levels, |(_, levels)| *levels);
    let embeddings = ["tok_emb.weight", "model.embed_tokens.weight"];
    let embedding = config.embedding == Embedding::F16 && embeddings.contains(&name);
    let kept = values.len() <= config.keep_max_elements || embedding || levels == 0;
    let values = if kept {
        if is_control(name) {
            Quantised::F32(values)
        } else {
            let halves = to_f16(&values);
            if let Some(at) = halves.iter().position(|value| !value.is_finite()) {
                return Err(fail(format!("value {at} is {}, beyond f16", values[at])));
            }
            Quantised::F16(halves)
        }
    } else if let [_, columns] = shape[..] {
        let coded = match config.format {
            QuantiseFormat::Compat => quantise_rows(&values, columns, config.clip_quantile),
            QuantiseFormat::Modern => modern_rows(&values, columns, levels, config.clip_deviations),
        };
        let coded = coded.map_err(fail)?;
        Quantised::Rows { codes: coded.codes, scales: coded.stored }
    } else {
        let coded = quantise_tensor(&values, config.clip_quantile).map_err(fail)?;
        Quantised::Whole { codes: coded.codes, scale: coded.scale }
    };
    Ok(Stored { shape, values })
}
