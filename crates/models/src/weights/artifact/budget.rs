//! Clipping that makes the file fit a budget: fewer deviations spread codes wider and compress
//! worse, more deviations leave codes near zero. The entropy of a weight falls with `log2 k`.

use candle_core::Tensor;
use serde_json::Value;

use super::{Artifact, Compression, QuantiseConfig, QuantiseFormat, quantise};
use crate::error::{Result, refused};

/// Bisections of `log k`.
const STEPS: usize = 8;
/// Deviations that are tried.
const RANGE: (f64, f64) = (2.0, 64.0);

/// The smallest number of deviations whose file holds at most `bytes` bytes, with the model's configuration and the hash of
/// its tokenizer in it.
///
/// # Errors
/// - even the coarsest codes are too large, or a tensor cannot be quantised
pub fn fit_to_budget(
    (tensors, model, tokenizer): (&[(String, Tensor)], &Value, &str),
    config: &QuantiseConfig,
    compression: Compression,
    bytes: u64,
) -> Result<QuantiseConfig> {
    let with = |deviations: f64| QuantiseConfig {
        format: QuantiseFormat::Modern,
        clip_deviations: Some(deviations),
        ..config.clone()
    };
    let size = |deviations: f64| -> Result<u64> {
        let config = with(deviations);
        let stored = tensors.iter().map(|(name, tensor)| {
            let stored = quantise(name, tensor, &config)?;
            Ok((name.clone(), stored))
        });
        let tensors = stored.collect::<Result<_>>()?;
        let (config, tokenizer) = (model.clone(), tokenizer.to_owned());
        let artifact = Artifact { config, tokenizer, tensors };
        Ok(artifact.to_bytes(compression)?.len() as u64)
    };
    let (mut low, mut high) = RANGE;
    if size(low)? <= bytes {
        return Ok(with(low));
    }
    let smallest = size(high)?;
    if smallest > bytes {
        return Err(refused(format!(
            "a budget of {bytes} bytes: the smallest file has {smallest}"
        )));
    }
    for _ in 0..STEPS {
        let middle = (low * high).sqrt();
        if size(middle)? <= bytes { high = middle } else { low = middle }
    }
    Ok(with(high))
}
