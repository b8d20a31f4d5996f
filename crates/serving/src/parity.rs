//! What a written network computes on a fixed input: transposed, permuted, swapped and renamed
//! tensors all show there.
//!
//! The input is a function of the draft's sizes: 64 token ids, features and embeddings from
//! counter-based random numbers. Logits of a few rows and test-time steps are recorded at export and
//! computed again from the files.

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::random::CounterRng;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Tokens of the input.
pub const TOKENS: usize = 64;
/// Rows that are recorded.
const ROWS: [u32; 4] = [0, 21, 42, 62];
/// Logits recorded of each row and step, evenly spaced.
const SAMPLES: usize = 16;
/// Most values of embeddings; the largest published have half as many.
const LARGEST_EMBEDDING: usize = 1 << 32;
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
    /// Of these rows, on the input of this version.
    pub(crate) fn of(rows: Vec<RowRecord>) -> Self {
        Self { version: VERSION, rows }
    }

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

/// Token ids that spread over a vocabulary.
pub(crate) fn fixed_ids(vocabulary: usize) -> Vec<u32> {
    (0..TOKENS).map(|i| ((i * 7919 + 13) % vocabulary) as u32).collect()
}

/// Normally distributed values, the same for a purpose and shape.
pub(crate) fn normal(purpose: &str, shape: &[usize]) -> Result<Tensor> {
    let mut rng = CounterRng::new(u64::from(VERSION), purpose, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Embeddings `[V, H]` in the place of the target's, so that the check needs none: one byte each. Only the rows of
/// [`fixed_ids`] and of the token `further` are written. The others are never read, so they take no memory.
/// It fails where there are none, or they are larger than those of any published target, by files that are wrong.
pub(crate) fn stand_in_embedding(rows: usize, width: usize, further: u32) -> Result<Tensor> {
    if rows == 0 || rows.saturating_mul(width) > LARGEST_EMBEDDING {
        let problem = format!("embeddings of {rows} tokens, {width} values each, are not made");
        return Err(candle_core::Error::Msg(problem).into());
    }
    let mut values = vec![0_u8; rows * width];
    for row in fixed_ids(rows).into_iter().chain([further]).map(|id| id as usize) {
        for (i, value) in values.iter_mut().skip(row * width).take(width).enumerate() {
            *value = ((row * 31 + i * 17 + row * i) % 251) as u8;
        }
    }
    Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?)
}

/// What is recorded of a step's outputs.
pub(crate) fn records(step: usize, outputs: &Tensor) -> Result<Vec<RowRecord>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_that_are_read_are_written() -> Result<()> {
        let (rows, width, further) = (100_000, 6, 99_998);
        let table = stand_in_embedding(rows, width, further)?.to_vec2::<u8>()?;
        let mut ids = fixed_ids(rows);
        ids.push(further);
        for (row, values) in table.iter().enumerate() {
            let is_read = ids.contains(&(row as u32));
            let of = |i: usize| ((row * 31 + i * 17 + row * i) % 251) as u8;
            let wanted: Vec<u8> = (0..width).map(|i| if is_read { of(i) } else { 0 }).collect();
            assert_eq!(*values, wanted, "row {row}");
        }
        assert!(stand_in_embedding(0, width, 0).is_err());
        assert!(stand_in_embedding(1 << 20, 1 << 13, 0).is_err());
        Ok(())
    }
}
