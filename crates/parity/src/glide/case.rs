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
use crate::{Place, ROUNDED, malformed};

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

pub(super) struct Tolerance {
    pub(super) loss: f64,
    pub(super) grad: f64,
    pub(super) weight: f64,
    /// Absolute, of rates and simulated lengths.
    pub(super) rate: f64,
    /// Share of a count that may differ.
    pub(super) count: f64,
}

impl Tolerance {
    /// Of a simulated length: a sum of `gamma` products of rates where these are rounded.
    pub(super) fn length(&self, gamma: usize) -> f64 {
        if self.count > 0.0 { self.rate * gamma as f64 } else { self.rate }
    }
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
        let tolerance = |key: &str, default: f64, rounded: f64| {
            place.allowed(meta["tolerance"][key].as_f64().unwrap_or(default), rounded)
        };
        Ok(Self {
            folder,
            meta,
            inputs: file("inputs.safetensors")?,
            weights: file("weights.safetensors")?,
            compat,
            rows: size(rows, "batch_size or micro_batches")?,
            seq_len: size(&meta["seq_len"], "seq_len")?,
            tolerance: Tolerance {
                loss: tolerance("loss_rel", 1e-5, ROUNDED.loss),
                grad: tolerance("grad_rel_max", 1e-4, ROUNDED.grad),
                weight: tolerance("weight_rel_max", 1e-4, ROUNDED.weight),
                rate: place.allowed(1e-5, ROUNDED.rate),
                count: place.allowed(0.0, ROUNDED.count),
            },
        })
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
        let steps = self.meta["steps"].as_array().filter(|steps| !steps.is_empty());
        steps.ok_or_else(|| malformed(self.folder, "meta.json: `steps` is missing"))
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
        let defaults = AdamWConfig::default();
        let number = |key: &str, default: f64| given[key].as_f64().unwrap_or(default);
        let beta = |i: usize, default: f64| given["betas"][i].as_f64().unwrap_or(default);
        let decays = given["parameters_without_grad"]
            .as_str()
            .or_else(|| given["dead_params"].as_str())
            .is_some_and(|mode| mode.starts_with("decay"));
        AdamWConfig {
            betas: (beta(0, defaults.betas.0), beta(1, defaults.betas.1)),
            eps: number("eps", defaults.eps),
            weight_decay: number("weight_decay", defaults.weight_decay),
            clip_norm: number("clip_norm", defaults.clip_norm),
            dead_params: if decays { DeadParameters::Decay } else { DeadParameters::Untouched },
            ..defaults
        }
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
