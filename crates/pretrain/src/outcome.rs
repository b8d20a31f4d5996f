//! The artifact of a model, and its score after reading it back.

use std::path::Path;

use longdraft_models::ModelError;
use longdraft_models::bits_per_byte::{Score, Tail};
use longdraft_models::language_model::{LanguageModel, open};
use longdraft_models::weights::artifact::{Artifact, Sizes, fit_to_budget, quantise};
use serde_json::{Value, json};

use crate::checkpoint::named;
use crate::config::ArtifactConfig;
use crate::error::Result;
use crate::score::ScoredStream;

/// Writes a model's artifact; returns its sizes.
///
/// # Errors
/// - a tensor cannot be quantised, no clipping fits the budget, or the file cannot be written
pub fn build_artifact(
    model: &LanguageModel,
    tokenizer_hash: &str,
    config: &ArtifactConfig,
    path: &Path,
) -> Result<Sizes> {
    let tensors = named(model.parameters());
    let description =
        serde_json::to_value(model.config()).map_err(|error| ModelError::invalid(path, error))?;
    let precision = match config.budget_bytes {
        Some(bytes) => {
            let left = bytes.saturating_sub(config.code_bytes);
            let held = (&tensors[..], &description, tokenizer_hash);
            fit_to_budget(held, &config.quantise, config.compression, left)?
        }
        None => config.quantise.clone(),
    };
    let stored = tensors.iter().map(|(name, tensor)| {
        let stored = quantise(name, tensor, &precision)?;
        Ok((name.clone(), stored))
    });
    let artifact = Artifact {
        config: description,
        tokenizer: tokenizer_hash.to_owned(),
        tensors: stored.collect::<Result<_>>()?,
    };
    let artifact_bytes = artifact.save(path, config.compression)?;
    let payload_bytes = artifact.payload_bytes();
    Ok(Sizes { artifact_bytes, payload_bytes, code_bytes: config.code_bytes })
}

/// Live weights beside the artifact that was read back.
#[derive(Debug, Clone)]
pub struct ArtifactReport {
    /// Sizes of the file.
    pub sizes: Sizes,
    /// Live weights, plain windows.
    pub live: Score,
    /// Artifact, plain windows.
    pub plain: Score,
    /// Artifact, sliding windows.
    pub sliding: Score,
    /// Window and stride of the sliding score.
    pub windows: (usize, usize),
    /// RoPE's base in those windows.
    pub rope_base: f64,
}

impl ArtifactReport {
    /// Builds the artifact, reads it back and scores both.
    ///
    /// # Errors
    /// - as [`build_artifact`], and what scoring fails with
    pub fn measure(
        model: &LanguageModel,
        tokenizer_hash: &str,
        config: &ArtifactConfig,
        path: &Path,
        stream: &ScoredStream,
        (length, window, stride, batch_tokens): (usize, usize, usize, usize),
    ) -> Result<Self> {
        let sizes = build_artifact(model, tokenizer_hash, config, path)?;
        let read = open(path)?.0.frozen()?;
        Ok(Self {
            sizes,
            live: stream.score_plain(model, length, batch_tokens)?,
            plain: stream.score_plain(&read, length, batch_tokens)?,
            sliding: stream.score_sliding(&read, (window, stride), Tail::Score, batch_tokens)?,
            windows: (window, stride),
            rope_base: model.config().effective_rope_base(window),
        })
    }

    /// What quantisation costs in bits per byte.
    pub fn penalty(&self) -> f64 {
        self.plain.bits_per_byte() - self.live.bits_per_byte()
    }

    /// All figures as one object.
    pub fn to_json(&self) -> Value {
        json!({
            "live_bpb": self.live.bits_per_byte(), "artifact_bpb": self.plain.bits_per_byte(),
            "sliding_bpb": self.sliding.bits_per_byte(), "penalty": self.penalty(),
            "window": self.windows.0, "stride": self.windows.1, "rope_base": self.rope_base,
            "plain_scored": self.plain.tokens, "sliding_scored": self.sliding.tokens,
            "total_targets": self.plain.total_tokens,
            "artifact_bytes": self.sizes.artifact_bytes, "payload_bytes": self.sizes.payload_bytes,
            "code_bytes": self.sizes.code_bytes, "total_bytes": self.sizes.total(),
            "fits": self.sizes.fits(),
        })
    }
}
