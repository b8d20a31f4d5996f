//! A case's files and what its `meta.json` says of layer, loss and optimizer.

use std::path::Path;

use longdraft_models::TargetConfig;
use longdraft_models::draft::Parameter;
use longdraft_models::draft::glide::{Compat, FinalNorm, GlideConfig};
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::method::glide::GlideObjectiveConfig;
use longdraft_train::objective::{SoftTargetKind, TailKind};
use longdraft_train::optim::{AdamWConfig, DeadParameters};
use serde_json::Value;

use crate::error::Result;
use crate::training::{self, SINGLE, Tolerance};
use crate::{Place, malformed};

/// A case's files and settings.
pub(super) struct Case<'a> {
    pub(super) folder: &'a Path,
    pub(super) meta: &'a Value,
    pub(super) inputs: SafetensorsSource,
    pub(super) weights: SafetensorsSource,
    pub(super) compat: bool,
    /// Rows of the inputs: batch rows in compat, micro-batches in the default mode.
    pub(super) rows: usize,
    pub(super) seq_len: usize,
    pub(super) tolerance: Tolerance,
}

impl<'a> Case<'a> {
    pub(super) fn open(folder: &'a Path, meta: &'a Value, place: &Place) -> Result<Self> {
        let file = |name: &str| SafetensorsSource::open_file(&folder.join(name));
        let compat = !meta["compat"].is_null();
        let rows = if compat { &meta["batch_size"] } else { &meta["micro_batches"] };
        let size = |value: &Value, name: &str| {
            let size = value.as_u64().map(|n| n as usize).filter(|n| *n > 0);
            size.ok_or_else(|| malformed(folder, format!("meta.json: `{name}` is missing")))
        };
        Ok(Self {
            folder,
            meta,
            inputs: file("inputs.safetensors")?,
            weights: file("weights.safetensors")?,
            compat,
            rows: size(rows, "batch_size or micro_batches")?,
            seq_len: size(&meta["seq_len"], "seq_len")?,
            tolerance: Tolerance::of(meta, place, &SINGLE),
        })
    }

    /// Of a simulated length: a sum of `gamma` products of rates where these are rounded.
    pub(super) fn length_tolerance(&self, gamma: usize) -> f64 {
        let Tolerance { rate, count, .. } = self.tolerance;
        if count > 0.0 { rate * gamma as f64 } else { rate }
    }

    /// An input tensor with exactly `count` values.
    pub(super) fn integers(&self, name: &str, count: usize) -> Result<Vec<i64>> {
        let values = self.inputs.load_i64(name)?;
        if values.len() != count {
            let problem = format!("input `{name}` has {} values, not {count}", values.len());
            return Err(malformed(self.folder, problem));
        }
        Ok(values)
    }

    pub(super) fn steps(&self) -> Result<&'a Vec<Value>> {
        training::steps(self.folder, self.meta)
    }

    pub(super) fn objective(&self, key: &str) -> &'a Value {
        &self.meta["objective"][key]
    }

    /// The draft's parameters with the case's choice of which of them decay.
    pub(super) fn optimized(&self, parameters: &[Parameter]) -> Vec<Parameter> {
        let all = self.meta["optimizer"]["decay_norms_and_biases"].as_bool();
        let with_choice = |parameter: &Parameter| {
            let matrix = parameter.var.rank() == 2;
            let decay = all.map_or(parameter.decay, |all| all || matrix);
            Parameter { decay, ..parameter.clone() }
        };
        parameters.iter().map(with_choice).collect()
    }

    pub(super) fn optimizer(&self) -> AdamWConfig {
        let given = &self.meta["optimizer"];
        let decays = given["parameters_without_grad"]
            .as_str()
            .or_else(|| given["dead_params"].as_str())
            .is_some_and(|mode| mode.starts_with("decay"));
        let dead_params = if decays { DeadParameters::Decay } else { DeadParameters::Untouched };
        training::optimizer(self.meta, &AdamWConfig { dead_params, ..AdamWConfig::default() })
    }
}

/// The layer that the case's objective describes.
pub(super) fn glide_config(case: &Case<'_>, target: &TargetConfig) -> GlideConfig {
    let compat = case.compat.then_some(Compat::Longspec);
    let mut config = GlideConfig::for_target(target, compat);
    let size = |key: &str| case.objective(key).as_u64().map(|n| n as usize);
    config.self_window = size("self_window").unwrap_or(config.self_window);
    config.gamma = size("gamma").unwrap_or(config.gamma);
    config.final_norm = match case.objective("final_norm").as_str() {
        Some("trained") => FinalNorm::Trained,
        Some("target") => FinalNorm::Target,
        _ => FinalNorm::None,
    };
    config
}

/// The loss that the case's objective describes.
pub(super) fn objective_config(case: &Case<'_>) -> GlideObjectiveConfig {
    let soft = case.objective("soft_targets").as_str();
    let default_weight = if case.compat || soft.is_none() { 0.0 } else { 0.9 };
    GlideObjectiveConfig {
        soft_weight: case.objective("soft_weight").as_f64().unwrap_or(default_weight),
        soft_targets: match soft {
            Some("full") => SoftTargetKind::Full,
            _ => SoftTargetKind::TopK,
        },
        top_k: case.objective("top_k").as_u64().unwrap_or(64) as usize,
        tail: match case.objective("tail").as_str() {
            Some("renormalise" | "renormalize") => TailKind::Renormalise,
            _ => TailKind::Bucket,
        },
    }
}
