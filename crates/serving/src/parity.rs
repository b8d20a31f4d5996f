//! What a written network computes on a fixed input: transposed, permuted, swapped and renamed
//! tensors all show there.
//!
//! The input is a function of the draft's sizes: 64 token ids, features and embeddings from
//! counter-based random numbers. Logits of a few rows and test-time steps are recorded at export and
//! computed again from the files.

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::{Delays, KeyRanges};
use longdraft_kernels::linear::linear;
use longdraft_kernels::random::CounterRng;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, TestTimeSteps};
use longdraft_models::draft::glide::{CrossContext, GlideDraft};
use longdraft_models::target::{KeyValues, PackedSequence, Target};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::error::Result;

/// Tokens of the input.
pub const TOKENS: usize = 64;
/// Rows that are recorded.
const ROWS: [u32; 4] = [0, 21, 42, 62];
/// Test-time steps that are recorded.
const STEPS: usize = 3;
/// Logits recorded of each row and step, evenly spaced.
const SAMPLES: usize = 16;
/// Version of the input.
const VERSION: u32 = 1;

/// Logits of some rows and steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParityVector {
    /// Which fixed input it belongs to.
    pub version: u32,
    /// Row by row within each step.
    pub rows: Vec<RowRecord>,
}

/// Outputs of one row at one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowRecord {
    /// Test-time step, from 0.
    pub step: usize,
    /// Row of the input.
    pub row: u32,
    /// Index of the largest output: the draft token that would be proposed.
    pub argmax: usize,
    /// Root of the sum of squares of all outputs.
    pub norm: f32,
    /// Evenly spaced outputs.
    pub samples: Vec<f32>,
}

/// How two vectors differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Difference {
    /// Largest difference of samples and norms against the row's largest sample or its norm.
    pub relative: f32,
    /// Rows whose largest output is another one.
    pub other_tokens: usize,
    /// Rows compared.
    pub rows: usize,
}

impl ParityVector {
    /// Against a vector of the same input; `None` if the inputs or shapes differ.
    pub fn difference(&self, other: &Self) -> Option<Difference> {
        if self.version != other.version || self.rows.len() != other.rows.len() {
            return None;
        }
        let mut out = Difference { relative: 0.0, other_tokens: 0, rows: self.rows.len() };
        for (a, b) in self.rows.iter().zip(&other.rows) {
            if a.samples.len() != b.samples.len() || (a.step, a.row) != (b.step, b.row) {
                return None;
            }
            let scale = a.samples.iter().fold(0.0_f32, |m, x| m.max(x.abs())).max(1e-20);
            let worst = a.samples.iter().zip(&b.samples).map(|(x, y)| (x - y).abs() / scale);
            let norm = (a.norm - b.norm).abs() / a.norm.abs().max(1e-20);
            // A value that is no number counts as a difference.
            let worst = worst.chain([norm]).fold(0.0, |m: f32, x| if x <= m { m } else { x });
            out.relative = if worst <= out.relative { out.relative } else { worst };
            out.other_tokens += usize::from(a.argmax != b.argmax);
        }
        Some(out)
    }
}

/// Most values of embeddings; the largest published have half as many.
const LARGEST_EMBEDDING: usize = 1 << 32;

/// What an EAGLE-3 draft reads.
pub struct Eagle3Input {
    /// `[T]`
    pub ids: Vec<u32>,
    /// `[T, 3·Ht]`
    pub aux: Tensor,
}

/// Token ids that spread over a vocabulary.
fn fixed_ids(vocabulary: usize) -> Vec<u32> {
    (0..TOKENS).map(|i| ((i * 7919 + 13) % vocabulary) as u32).collect()
}

fn normal(purpose: &str, shape: &[usize]) -> Result<Tensor> {
    let mut rng = CounterRng::new(u64::from(VERSION), purpose, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// The fixed input of a draft.
///
/// # Errors
/// - it cannot be made
pub fn fixed_input(config: &Eagle3Config) -> Result<Eagle3Input> {
    let aux = normal("parity aux", &[TOKENS, 3 * config.target_hidden_size])?;
    Ok(Eagle3Input { ids: fixed_ids(config.vocab_size), aux })
}

/// Embeddings `[V, Ht]` in the place of the target's, so that the check needs none: one byte each.
///
/// # Errors
/// - they are larger than those of any published target, by files that are wrong
pub fn stand_in_embedding(config: &Eagle3Config) -> Result<Tensor> {
    let (rows, width) = (config.vocab_size, config.target_hidden_size);
    if rows.saturating_mul(width) > LARGEST_EMBEDDING {
        let problem = format!("embeddings of {rows} tokens, {width} values each, are not made");
        return Err(candle_core::Error::Msg(problem).into());
    }
    let values: Vec<u8> = (0..rows)
        .flat_map(|row| (0..width).map(move |i| ((row * 31 + i * 17 + row * i) % 251) as u8))
        .collect();
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
}

/// Logits `[T, Vd]` of each of the first test-time steps, over one document.
///
/// # Errors
/// - shapes do not fit
pub fn eagle3_logits(draft: &Eagle3Draft, input: &Eagle3Input) -> Result<Vec<Tensor>> {
    let tokens = input.ids.len();
    let sequence = PackedSequence {
        ids: input.ids.clone(),
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
    };
    let rows: Vec<u32> = (0..tokens as u32).collect();
    let mut steps = TestTimeSteps::new(draft, &sequence, &input.aux)?;
    (0..STEPS)
        .map(|_| {
            let hidden = steps.step(&rows)?;
            Ok(linear(&draft.head_input(&hidden)?, draft.head()?, None)?)
        })
        .collect()
}

/// The vector of an EAGLE-3 draft.
///
/// # Errors
/// - shapes do not fit
pub fn of_eagle3(draft: &Eagle3Draft) -> Result<ParityVector> {
    let logits = eagle3_logits(draft, &fixed_input(draft.config())?)?;
    let mut rows = Vec::new();
    for (step, logits) in logits.iter().enumerate() {
        rows.extend(records(step, logits)?);
    }
    Ok(ParityVector { version: VERSION, rows })
}

/// The vector of a GLIDE layer: its outputs on a fixed text, keys and values.
///
/// # Errors
/// - shapes do not fit
pub fn of_glide(draft: &GlideDraft, target: &Target) -> Result<ParityVector> {
    let config = draft.config();
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let table = target.rope().table(&positions, &Device::Cpu)?;
    let embeddings = normal("parity embeddings", &[TOKENS, config.hidden_size])?;
    let shape = [TOKENS, config.num_key_value_heads, config.head_dim];
    let last_kv =
        KeyValues { k: normal("parity keys", &shape)?, v: normal("parity values", &shape)? };
    let documents = vec![0; TOKENS];
    let window = Some(config.self_window);
    let own = Arc::new(KeyRanges::packed(&documents, window, Delays::Same(0)));
    let ranges = Arc::new(KeyRanges::packed(&documents, None, Delays::Same(1)));
    let cross = CrossContext { last_kv: &last_kv, ranges };
    let output = draft.forward(&embeddings, &table, &own, &cross, &mut Vec::new())?;
    Ok(ParityVector { version: VERSION, rows: records(0, &output)? })
}

fn records(step: usize, outputs: &Tensor) -> Result<Vec<RowRecord>> {
    let outputs = outputs.to_dtype(DType::F32)?;
    ROWS.iter()
        .map(|&row| {
            let values: Vec<f32> = outputs.get(row as usize)?.to_vec1()?;
            let count = values.len().max(1);
            let best = values.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| {
                if x > best.1 { (i, x) } else { best }
            });
            let norm = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
            let samples = (0..SAMPLES).map(|i| values[i * count / SAMPLES]).collect();
            Ok(RowRecord { step, row, argmax: best.0, norm, samples })
        })
        .collect()
}
