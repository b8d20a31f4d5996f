//! Blocks of GGUF types: their values bit for bit, and products with activations of 8 bits.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::Value;

use super::{CaseReport, malformed};
use crate::error::Result;

/// Of a product, as a share of the sum of its terms' magnitudes.
const PRODUCT: f64 = 1e-6;
/// Codes with one scale, as products take them.
const SCALED: usize = 32;

pub(super) fn run(folder: &Path, meta: &Value, name: &str) -> Result<CaseReport> {
    let file = SafetensorsSource::open_file(&folder.join("tensors.safetensors"))?;
    let mut report = CaseReport::new(name, "quants");
    let types = meta["types"].as_object().ok_or_else(|| malformed(folder, "`types` is missing"))?;
    for (name, about) in types {
        let format = BlockFormat::ALL.into_iter().find(|format| format.name() == name);
        let format = format.ok_or_else(|| malformed(folder, format!("unknown type `{name}`")))?;
        let activations = match about["activations"].as_str() {
            Some(kind @ ("Q8_0" | "Q8_K")) => Activations::read(&file, kind),
            // The same codes with a sum beside them.
            Some("Q8_1") => Activations::read(&file, "Q8_0"),
            other => Err(malformed(folder, format!("`{name}` times activations {other:?}"))),
        };
        check(&file, format, &activations?, &mut report)?;
    }
    Ok(report)
}

/// One row of activations.
struct Activations {
    codes: Vec<i8>,
    /// Of [`SCALED`] codes each.
    scales: Vec<f32>,
}

impl Activations {
    fn read(file: &SafetensorsSource, kind: &str) -> Result<Self> {
        let codes = file.load_integers(&format!("{kind}.codes"))?;
        let codes: Vec<i8> = codes.into_iter().map(|code| code as i8).collect();
        let scales = file.load(&format!("{kind}.d"), DType::F32)?.to_vec1::<f32>()?;
        let each = codes.len() / SCALED / scales.len().max(1);
        let scales = scales.iter().flat_map(|scale| vec![*scale; each]).collect();
        Ok(Self { codes, scales })
    }
}

fn check(
    file: &SafetensorsSource,
    format: BlockFormat,
    activations: &Activations,
    report: &mut CaseReport,
) -> Result<()> {
    let name = format.name();
    let blocks = file.load_integers(&format!("{name}.blocks"))?;
    let blocks: Vec<u8> = blocks.into_iter().map(|byte| byte as u8).collect();
    let values = file.load(&format!("{name}.values"), DType::F32)?;
    let (outputs, inputs) = values.dims2()?;
    let matrix = Arc::new(QuantisedMatrix::new(format, outputs, inputs, &blocks)?);
    let values = values.flatten_all()?.to_vec1::<f32>()?;
    let mut widened = vec![0.0; outputs * inputs];
    format.widen(&blocks, &mut widened);
    report.check_bits(format!("{name} values"), &widened, &values);
    let held =
        Matrix::Quantised(Arc::clone(&matrix)).to_dense()?.flatten_all()?.to_vec1::<f32>()?;
    report.check_bits(format!("{name} values in memory"), &held, &values);

    let Activations { codes, scales } = activations;
    let dots = file.load_f64(&format!("{name}.dots"))?;
    let products = matrix.of_codes(codes, scales)?;
    let rows = values.chunks_exact(inputs.max(1));
    for (row, ((dot, product), values)) in dots.iter().zip(&products).zip(rows).enumerate() {
        let scales = scales.iter().flat_map(|scale| [*scale; SCALED]);
        let terms = values.iter().zip(codes).zip(scales);
        let size: f64 = terms
            .map(|((value, code), scale)| {
                (f64::from(*value) * f64::from(*code) * f64::from(scale)).abs()
            })
            .sum();
        let error = (f64::from(*product) - dot).abs() / size.max(f64::MIN_POSITIVE);
        report.check(format!("{name} product {row}"), error, PRODUCT);
    }
    report.check(format!("{name} products"), dots.len().abs_diff(outputs) as f64, 0.0);
    Ok(())
}
