//! Weights that are no numbers, refused where decoding would not notice them.
//!
//! One row of a head that holds NaN means that its token is never chosen, and one of an embedding spoils the texts that
//! have its token. Blocks are left as they are: their values would have to be made for it.

use std::path::Path;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use rayon::prelude::*;

use crate::error::{ModelError, Result};

/// Refuses a table of a row for each token that holds NaN or an infinity.
///
/// # Shapes
/// - `table`: `[V, H]`, in main memory
pub(super) fn require_finite(path: &Path, name: &str, table: &Tensor) -> Result<()> {
    let width = table.dims().last().copied().unwrap_or(1);
    let table = table.contiguous()?;
    let (storage, layout) = table.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else { return Ok(()) };
    let row = match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            first_row(&values[start..end], width, f32::is_finite)
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            first_row(&values[start..end], width, half::bf16::is_finite)
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            first_row(&values[start..end], width, half::f16::is_finite)
        }
        _ => None,
    };
    match row {
        Some(row) => {
            let dtype = table.dtype().as_str();
            let problem = format!(
                "tensor `{name}`: row {row} holds NaN or an infinity in {dtype}: the file is damaged"
            );
            Err(ModelError::invalid(path, problem))
        }
        None => Ok(()),
    }
}

/// The first row with a value that is no finite number.
fn first_row<T: Copy + Sync>(
    values: &[T],
    width: usize,
    is_finite: impl Fn(T) -> bool + Sync,
) -> Option<usize> {
    // Counts, so that several values are looked at together.
    let bad = |row: &[T]| row.iter().filter(|value| !is_finite(**value)).count();
    values.par_chunks(width.max(1)).position_first(|row| bad(row) > 0)
}

/// Refuses the weight of a norm that makes no numbers of a normed row, whose values are at most `√H`.
///
/// # Shapes
/// - `weight`: `[H]`, in f32
pub(in crate::target_model) fn require_bounded(
    path: &Path,
    name: &str,
    weight: &Tensor,
) -> Result<()> {
    let values: Vec<f32> = weight.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?;
    let largest = (values.len() as f32).sqrt();
    match values.iter().position(|value| !(value * largest).is_finite()) {
        Some(at) => {
            let value = values[at];
            let problem = format!(
                "tensor `{name}`: {value:e} at {at} is no weight of a norm: the file is damaged"
            );
            Err(ModelError::invalid(path, problem))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn the_first_row_without_numbers_is_named() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (bad, row) in [(f32::NAN, 0), (f32::INFINITY, 5), (f32::NEG_INFINITY, 6)] {
                let mut values = [0.5_f32; 21];
                values[3 * row + 1] = bad;
                values[20] = bad;
                let table = Tensor::new(&values, &Device::Cpu).and_then(|t| t.reshape((7, 3)));
                let table = table.and_then(|table| table.to_dtype(dtype)).expect("a table");
                let told = require_finite(Path::new("a"), "t", &table).expect_err("refused");
                assert!(told.to_string().contains(&format!("`t`: row {row} holds")), "{told}");
                let rows = table.narrow(0, row + 1, 6 - row).expect("rows");
                let rest = require_finite(Path::new("a"), "t", &rows);
                assert_eq!(rest.is_err(), row < 6, "{dtype:?} {row}");
            }
        }
    }

    #[test]
    fn a_norm_may_weigh_as_long_as_numbers_come_of_it() {
        let told = |value: f32| {
            let weight = Tensor::new(&[1.0, value, 1.0, 1.0], &Device::Cpu).expect("a weight");
            require_bounded(Path::new("a"), "t", &weight).map_err(|error| error.to_string())
        };
        assert_eq!(told(1e38), Ok(()));
        for bad in [3e38, f32::NAN, f32::INFINITY] {
            assert!(told(bad).expect_err("refused").contains("`t`: "), "{bad}");
        }
    }
}
