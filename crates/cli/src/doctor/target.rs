//! What the weights of a target cost on this machine, type by type.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use longdraft_kernels::threads::awake;
use longdraft_models::disk::readable_bytes;
use longdraft_models::target_model::{StoredType, Target};

use super::finding::Finding;
use crate::failure::Result;

const CHECK: &str = "target";
/// Inputs of the matrix that is measured: a multiple of every block.
const INPUTS: usize = 1024;
/// Its bytes in a file: more than most caches hold, as a whole target is.
const BYTES: usize = 48 << 20;
/// Products of which the fastest counts, because other work on the machine only adds.
const TIMES: usize = 5;
/// Rows of a pass that verifies four proposals.
const ROWS: usize = 5;

/// What products of a type cost.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Bytes of a value in memory.
    bytes: f64,
    /// Seconds for a value, with one row and with [`ROWS`].
    seconds: [f64; 2],
}

/// Measures products of every type of a local target's matrices.
pub(crate) fn examine(path: &Path) -> Result<Vec<Finding>> {
    let mut measured = Vec::new();
    for of_type in Target::stored_types(path)? {
        let pace = measure(of_type.name)?;
        measured.push((of_type, pace));
    }
    Ok(judge(&measured))
}

/// One line a type, and what all of them come to.
fn judge(types: &[(StoredType, Pace)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (mut bytes, mut token, mut pass) = (0.0, 0.0, 0.0);
    for (of_type, pace) in types {
        let held = pace.bytes * of_type.values as f64;
        let [one, several] = pace.seconds.map(|seconds| seconds * of_type.values_of_a_token as f64);
        let fact = format!(
            "{}: {} in memory, {:.1} ms a token, {:.2} times that for {ROWS} tokens",
            of_type.name,
            readable_bytes(held as u64),
            1e3 * one,
            several / one.max(f64::MIN_POSITIVE)
        );
        findings.push(Finding::ok(CHECK, fact));
        (bytes, token, pass) = (bytes + held, token + one, pass + several);
    }
    let fact = format!(
        "weights take {} and {:.1} ms a token, {:.1} ms for {ROWS} tokens; attention comes on top",
        readable_bytes(bytes as u64),
        1e3 * token,
        1e3 * pass
    );
    findings.push(Finding::ok(CHECK, fact));
    findings
}

/// Products with a matrix held as `--dtype stored` holds this type.
fn measure(name: &str) -> Result<Pace> {
    let (matrix, values, bytes) = matrix(name)?;
    let mut seconds = [0.0; 2];
    for (seconds, rows) in seconds.iter_mut().zip([1, ROWS]) {
        let x = Tensor::ones((rows, INPUTS), DType::F32, &Device::Cpu)?;
        let fastest = awake(|| {
            let mut fastest = f64::INFINITY;
            for _ in 0..TIMES {
                let started = Instant::now();
                matrix.linear(&x, None)?;
                fastest = fastest.min(started.elapsed().as_secs_f64());
            }
            Ok::<_, candle_core::Error>(fastest)
        })?;
        *seconds = fastest / values as f64;
    }
    Ok(Pace { bytes: bytes as f64 / values as f64, seconds })
}

/// A matrix, its values, and their bytes in memory.
fn matrix(name: &str) -> Result<(Matrix, usize, usize)> {
    if let Some(format) = BlockFormat::named(name) {
        let row = INPUTS / format.values() * format.bytes();
        let outputs = BYTES / row;
        let matrix = QuantisedMatrix::new(format, outputs, INPUTS, &vec![17; outputs * row])?;
        let bytes = matrix.side_by_side().len();
        return Ok((Matrix::Quantised(Arc::new(matrix)), outputs * INPUTS, bytes));
    }
    let dtype = match name {
        "BF16" => DType::BF16,
        "F16" => DType::F16,
        _ => DType::F32,
    };
    let outputs = BYTES / dtype.size_in_bytes() / INPUTS;
    let weight = Tensor::ones((outputs, INPUTS), DType::F32, &Device::Cpu)?.to_dtype(dtype)?;
    let values = outputs * INPUTS;
    Ok((Matrix::Dense(weight), values, values * dtype.size_in_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_can_be_measured_and_is_told_by_its_share() {
        let of_type = |name, values, values_of_a_token| {
            let pace = Pace { bytes: 0.5, seconds: [1e-9, 2e-9] };
            (StoredType { name, values, values_of_a_token }, pace)
        };
        let types = [of_type("Q4_K", 4 << 20, 3_000_000), of_type("F16", 2 << 20, 1_000_000)];
        let facts: Vec<String> = judge(&types).into_iter().map(|finding| finding.fact).collect();
        assert_eq!(facts.len(), 3);
        assert_eq!(facts[0], "Q4_K: 2 MiB in memory, 3.0 ms a token, 2.00 times that for 5 tokens");
        assert!(facts[2].contains("take 3 MiB and 4.0 ms a token, 8.0 ms for 5"), "{}", facts[2]);
        for name in BlockFormat::ALL.map(BlockFormat::name).into_iter().chain(["F16", "F32"]) {
            let (_, values, bytes) = matrix(name).expect("a matrix");
            assert!(values > 0 && bytes >= BYTES - 4096, "{name}");
        }
    }
}
