//! A case's files and what its `meta.json` says of model and optimizer.

use std::path::Path;

use longdraft_models::language_model::{LanguageModelConfig, RopeConfig, RopeRule};
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_pretrain::{MuonConfig, Orthogonalisation};
use serde_json::Value;

use crate::error::Result;
use crate::malformed;

pub(super) struct Case<'a> {
    pub(super) folder: &'a Path,
    pub(super) meta: &'a Value,
    pub(super) model: LanguageModelConfig,
    pub(super) optimizer: MuonConfig,
    pub(super) iterations: u64,
    pub(super) warmdown: u64,
    pub(super) sequence: usize,
    pub(super) sequences: usize,
    pub(super) micro_batches: usize,
}

impl<'a> Case<'a> {
    pub(super) fn open(folder: &'a Path, meta: &'a Value) -> Result<Self> {
        let config = &meta["config"];
        let missing = |key: &str| malformed(folder, format!("meta.json: `{key}` is missing"));
        let size = |key: &str| {
            let size = config[key].as_u64().filter(|n| (1..1 << 24).contains(n));
            size.map(|n| n as usize).ok_or_else(|| missing(key))
        };
        let number = |key: &str, default: f64| config[key].as_f64().unwrap_or(default);
        let count = |key: &str| config[key].as_u64().ok_or_else(|| missing(key));
        let rope = RopeConfig {
            rope_theta: number("rope_base", 10_000.0),
            reference_length: size("rope_train_len")?,
            rule: if config["rope_rule"] == "none" { RopeRule::None } else { RopeRule::Ntk },
            dimensions: None,
        };
        let model = LanguageModelConfig {
            vocab_size: size("vocab_size")?,
            num_hidden_layers: size("num_layers")?,
            hidden_size: size("model_dim")?,
            num_attention_heads: size("num_heads")?,
            num_key_value_heads: size("num_kv_heads")?,
            mlp_mult: size("mlp_mult")?,
            tie_word_embeddings: config["tie_embeddings"].as_bool().unwrap_or(true),
            final_logit_softcapping: number("logit_softcap", 30.0),
            rms_norm_eps: meta["rms_norm_eps"].as_f64().ok_or_else(|| missing("rms_norm_eps"))?,
            rope,
            ..LanguageModelConfig::default()
        };
        let problems = model.problems();
        if !problems.is_empty() {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            return Err(malformed(folder, problems.join("; ")));
        }
        let defaults = MuonConfig::default();
        let optimizer = MuonConfig {
            matrix_learning_rate: number("matrix_lr", defaults.matrix_learning_rate),
            scalar_learning_rate: number("scalar_lr", defaults.scalar_learning_rate),
            token_learning_rate: number("token_lr", defaults.token_learning_rate),
            head_learning_rate: number("head_lr", defaults.head_learning_rate),
            momentum: number("muon_momentum", defaults.momentum),
            momentum_warmup_start: number("muon_momentum_warmup_start", 0.85),
            momentum_warmup_steps: count("muon_momentum_warmup_steps")?,
            orthogonalisation: orthogonalisation(folder, config)?,
            normalise_rows: config["normalise_rows"].as_bool().unwrap_or(false),
            weight_decay: number("muon_weight_decay", 0.0),
            betas: (number("beta1", 0.9), number("beta2", 0.95)),
            eps: number("adam_eps", 1e-8),
            clip_norm: number("grad_clip_norm", 0.0),
        };
        Ok(Self {
            folder,
            meta,
            model,
            optimizer,
            iterations: count("iterations")?,
            warmdown: count("warmdown_steps")?,
            sequence: size("seq_len")?,
            sequences: size("batch_seqs")?,
            micro_batches: config["accumulate"].as_u64().unwrap_or(1).clamp(1, 1 << 16) as usize,
        })
    }

    pub(super) fn file(&self, name: &str) -> Result<SafetensorsSource> {
        Ok(SafetensorsSource::open_file(&self.folder.join(name))?)
    }

    /// Token ids of an input.
    pub(super) fn ids(&self, source: &SafetensorsSource, name: &str) -> Result<Vec<u32>> {
        let ids: Option<Vec<u32>> =
            source.load_i64(name)?.into_iter().map(|id| u32::try_from(id).ok()).collect();
        let ids = ids.ok_or_else(|| malformed(self.folder, format!("`{name}`: negative id")))?;
        let expected = self.sequence * self.sequences;
        if ids.len() == expected {
            Ok(ids)
        } else {
            let problem = format!("`{name}` has {} values, not {expected}", ids.len());
            Err(malformed(self.folder, problem))
        }
    }
}

/// One triple of coefficients is Newton-Schulz, a list of triples Polar Express.
fn orthogonalisation(folder: &Path, config: &Value) -> Result<Orthogonalisation> {
    let kind = if config["muon_coefficients"][0].is_array() {
        Orthogonalisation::Polar5
    } else {
        Orthogonalisation::Ns5
    };
    let rule: longdraft_kernels::orthogonalise::Rule = kind.into();
    for (index, (a, b, c)) in rule.coefficients().iter().enumerate() {
        let given = &config["muon_coefficients"];
        let given = if given[0].is_array() { &given[index] } else { given };
        let same = [a, b, c].iter().enumerate().all(|(i, value)| {
            given[i].as_f64().is_none_or(|given| (given - **value).abs() < 1e-12)
        });
        if !same {
            return Err(malformed(folder, format!("unknown `muon_coefficients`: {given}")));
        }
    }
    if config["muon_steps"].as_u64().is_some_and(|steps| steps != 5) {
        return Err(malformed(folder, "`muon_steps` is 5 in both rules"));
    }
    Ok(kind)
}
