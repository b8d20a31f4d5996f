//! Kind `glide`: training steps of the GLIDE draft, compat and default mode.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_data::batch::anchored_positions;
use longdraft_kernels::linear_cross_entropy::{Inputs, SoftTargets, linear_cross_entropy};
use longdraft_kernels::top_k::TopK;
use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::{Compat, FinalNorm, GlideConfig, GlideDraft, Trace};
use longdraft_models::target::{PackedSequence, Tap, Taps, Target, TargetOptions};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::features::{BatchFeatures, TeacherFeatures};
use longdraft_train::metrics::{DraftMetrics, Rate};
use longdraft_train::objective::{
    GlideObjective, GlideObjectiveConfig, Objective, SoftTargetKind, TailKind,
};
use longdraft_train::optim::{AdamW, AdamWConfig, DeadParameters, Gradients};
use serde_json::Value;

use super::{CaseReport, malformed, relative, relative_error};
use crate::failure::Result;

/// Absolute tolerance of rates and simulated lengths.
const RATE_TOLERANCE: f64 = 1e-5;

/// A case's files and settings.
struct Case<'a> {
    folder: &'a Path,
    meta: &'a Value,
    inputs: SafetensorsSource,
    weights: SafetensorsSource,
    compat: bool,
    /// Rows of the inputs: batch rows in compat, micro-batches in the default mode.
    rows: usize,
    seq_len: usize,
    tolerance: Tolerance,
}

struct Tolerance {
    loss: f64,
    grad: f64,
    weight: f64,
}

impl<'a> Case<'a> {
    fn open(folder: &'a Path, meta: &'a Value) -> Result<Self> {
        let file = |name: &str| SafetensorsSource::open_file(&folder.join(name));
        let compat = !meta["compat"].is_null();
        let rows = if compat { &meta["batch_size"] } else { &meta["micro_batches"] };
        let size = |value: &Value, name: &str| {
            let size = value.as_u64().map(|n| n as usize).filter(|n| *n > 0);
            size.ok_or_else(|| malformed(folder, format!("meta.json: `{name}` is missing")))
        };
        let tolerance =
            |key: &str, default: f64| meta["tolerance"][key].as_f64().unwrap_or(default);
        Ok(Self {
            folder,
            meta,
            inputs: file("inputs.safetensors")?,
            weights: file("weights.safetensors")?,
            compat,
            rows: size(rows, "batch_size or micro_batches")?,
            seq_len: size(&meta["seq_len"], "seq_len")?,
            tolerance: Tolerance {
                loss: tolerance("loss_rel", 1e-5),
                grad: tolerance("grad_rel_max", 1e-4),
                weight: tolerance("weight_rel_max", 1e-4),
            },
        })
    }

    /// An input tensor with exactly `count` values.
    fn integers(&self, name: &str, count: usize) -> Result<Vec<i64>> {
        let values = self.inputs.load_i64(name)?;
        if values.len() != count {
            let problem = format!("input `{name}` has {} values, not {count}", values.len());
            return Err(malformed(self.folder, problem));
        }
        Ok(values)
    }

    fn steps(&self) -> Result<&'a Vec<Value>> {
        let steps = self.meta["steps"].as_array().filter(|steps| !steps.is_empty());
        steps.ok_or_else(|| malformed(self.folder, "meta.json: `steps` is missing"))
    }

    fn objective(&self, key: &str) -> &'a Value {
        &self.meta["objective"][key]
    }

    fn optimizer(&self) -> AdamWConfig {
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
        }
    }
}

/// Recomputes every step of the case.
pub(super) fn run(folder: &Path, meta: &Value, name: &str) -> Result<CaseReport> {
    let case = Case::open(folder, meta)?;
    let mut report = CaseReport::new(name, "glide");
    let config = TargetConfig::from_json(&meta["config"])
        .map_err(|problems| malformed(folder, format!("meta.json: config: {problems}")))?;
    let target = Arc::new(Target::from_source(config, &case.weights, &TargetOptions::default())?);
    let glide = glide_config(&case, target.config());
    let draft = GlideDraft::from_source(&case.weights, &glide, &target)?;
    let objective = GlideObjective::new(Arc::clone(&target), draft, objective_config(&case));
    let parameters = objective.draft().parameters().to_vec();
    let mut optimizer = AdamW::new(case.optimizer(), &parameters);
    let mut all_steps = DraftMetrics::default();
    let (mut loss_error, mut grad_error, mut weight_error) = (0.0_f64, 0.0_f64, 0.0_f64);
    let steps = case.steps()?;
    for (index, step) in steps.iter().enumerate() {
        let label = |what: &str| format!("step {} {what}", index + 1);
        let batches = batches(&case, index, step, &mut report)?;
        let outcome = run_step(&case, &target, &objective, &batches, index, &mut report)?;
        for (key, got) in [
            ("loss", outcome.loss),
            ("llm_loss", outcome.target_loss),
            ("grad_norm", outcome.grad_norm),
        ] {
            if let Some(want) = step[key].as_f64() {
                let error = relative(got, want);
                report.check(label(key), error, case.tolerance.loss);
                if key != "grad_norm" {
                    loss_error = worst(loss_error, error);
                }
            }
        }
        check_metrics(&case, &label, step, &outcome.metrics, &mut report);
        all_steps.merge(&outcome.metrics);
        if index == 0 {
            let error = check_gradients(&case, &parameters, &outcome.gradients, &mut report)?;
            grad_error = worst(grad_error, error);
        }
        let rate = step["lr"].as_f64();
        let rate = rate.ok_or_else(|| malformed(folder, "meta.json: a step has no `lr`"))?;
        optimizer.step(&parameters, &outcome.gradients, rate)?;
        let file = match index {
            0 => Some("weights_step1.safetensors"),
            i if i + 1 == steps.len() => Some("weights_final.safetensors"),
            _ => None,
        };
        for file in file.into_iter().chain(
            (steps.len() == 1 && folder.join("weights_final.safetensors").is_file())
                .then_some("weights_final.safetensors"),
        ) {
            let error = check_weights(&case, file, &objective, &mut report)?;
            weight_error = worst(weight_error, error);
        }
    }
    if !meta["all_steps"].is_null() {
        let label = |what: &str| format!("all steps {what}");
        check_metrics(&case, &label, &meta["all_steps"], &all_steps, &mut report);
    }
    report.loss_error = Some(loss_error);
    report.grad_error = Some(grad_error);
    report.weight_error = Some(weight_error);
    Ok(report)
}

/// The larger error; NaN stays.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

fn glide_config(case: &Case<'_>, target: &TargetConfig) -> GlideConfig {
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

fn objective_config(case: &Case<'_>) -> GlideObjectiveConfig {
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

/// Micro-batches of one step, with its pinned draws; also checks the rules that make them.
fn batches(
    case: &Case<'_>,
    index: usize,
    step: &Value,
    report: &mut CaseReport,
) -> Result<Vec<Batch>> {
    let (rows, length) = (case.rows, case.seq_len);
    let ids = case.integers("input_ids", rows * length)?;
    let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
    let steps = case.steps()?.len();
    if case.compat {
        return Ok(vec![compat_batch(case, index, step, &ids, report)?]);
    }
    let documents = case.integers("document_ids", rows * length)?;
    let mask = case.integers("loss_mask", rows * length)?;
    let positions = case.integers("position_ids", steps * rows * length)?;
    let delays = case.integers("delays", steps * rows * length)?;
    let mut learned_rows = 0;
    let batches: Vec<Batch> = (0..rows)
        .map(|row| {
            let tokens = row * length..(row + 1) * length;
            let drawn = index * rows * length + tokens.start..index * rows * length + tokens.end;
            let documents = &documents[tokens.clone()];
            let mask = &mask[tokens.clone()];
            let learned: Vec<u32> = (0..length - 1)
                .filter(|&t| {
                    mask[t + 1] != 0 && documents[t] >= 0 && documents[t] == documents[t + 1]
                })
                .map(|t| t as u32)
                .collect();
            learned_rows += learned.len();
            Batch {
                ids: ids[tokens].to_vec(),
                position_ids: positions[drawn.clone()].iter().map(|p| *p as u32).collect(),
                document_ids: documents.iter().map(|d| *d as i32).collect(),
                delays: delays[drawn].iter().map(|d| (*d).max(0) as u32).collect(),
                learned,
                origins: Vec::new(),
                row,
            }
        })
        .collect();
    if index == 0
        && let Some(want) = case.objective("supervised_rows").as_u64()
    {
        report.check_equal("learned rows", &[learned_rows as u64], &[want]);
    }
    check_anchors(index, step, &batches, report);
    Ok(batches)
}

/// All rows as documents of one packed batch: attention, window and delays stay within a row.
fn compat_batch(
    case: &Case<'_>,
    index: usize,
    step: &Value,
    ids: &[u32],
    report: &mut CaseReport,
) -> Result<Batch> {
    let (rows, length) = (case.rows, case.seq_len);
    let labels = case.integers("labels", rows * length)?;
    let positions = case.integers("position_ids", case.steps()?.len() * length)?;
    let positions: Vec<u32> =
        positions[index * length..(index + 1) * length].iter().map(|p| *p as u32).collect();
    let (sink, offset) = (step["sink"].as_u64(), step["offset"].as_u64());
    let drawn =
        anchored_positions(length, sink.unwrap_or(0) as usize, offset.unwrap_or(0) as usize);
    report.check_equal(format!("step {} position ids", index + 1), &drawn, &positions);
    if index == 0 && case.inputs.names().iter().any(|name| name == "labels_in") {
        let ignored = case.objective("label_ignore_token").as_i64().unwrap_or(0);
        let made: Vec<i64> = case
            .integers("labels_in", rows * length)?
            .into_iter()
            .map(|label| if label == ignored { -100 } else { label })
            .collect();
        report.check_equal("labels", &made, &labels);
    }
    let learned: Vec<u32> = (0..rows)
        .flat_map(|row| (0..length - 1).map(move |t| row * length + t))
        .filter(|&t| labels[t + 1] != -100)
        .map(|t| t as u32)
        .collect();
    if index == 0
        && let Some(want) = case.objective("supervised_rows").as_u64()
    {
        report.check_equal("learned rows", &[learned.len() as u64], &[want]);
    }
    let delay = step["delay"].as_u64();
    let delay = delay.ok_or_else(|| malformed(case.folder, "meta.json: a step has no `delay`"))?;
    Ok(Batch {
        ids: ids.to_vec(),
        position_ids: positions.repeat(rows),
        document_ids: (0..rows).flat_map(|row| vec![row as i32; length]).collect(),
        delays: vec![delay as u32; rows * length],
        learned,
        origins: Vec::new(),
        row: 0,
    })
}

/// Position ids of every document follow from its anchors and offset.
fn check_anchors(index: usize, step: &Value, batches: &[Batch], report: &mut CaseReport) {
    let Some(anchors) = step["anchors"].as_array() else {
        return;
    };
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for anchor in anchors {
        let number = |key: &str| anchor[key].as_u64().map(|n| n as usize);
        let (Some(row), Some(document)) = (number("row"), anchor["document"].as_i64()) else {
            continue;
        };
        let Some(batch) = batches.get(row) else {
            continue;
        };
        let of_document = batch.document_ids.iter().zip(&batch.position_ids);
        let positions: Vec<u32> = of_document
            .filter(|(id, _)| i64::from(**id) == document)
            .map(|(_, position)| *position)
            .collect();
        let (sink, offset) = (number("sink").unwrap_or(0), number("offset").unwrap_or(0));
        got.extend(anchored_positions(positions.len(), sink, offset));
        want.extend(positions);
    }
    report.check_equal(format!("step {} position ids", index + 1), &got, &want);
}

struct Outcome {
    loss: f64,
    target_loss: f64,
    grad_norm: f64,
    gradients: Gradients,
    metrics: DraftMetrics,
}

fn run_step(
    case: &Case<'_>,
    target: &Target,
    objective: &GlideObjective,
    batches: &[Batch],
    index: usize,
    report: &mut CaseReport,
) -> Result<Outcome> {
    let parameters = objective.draft().parameters();
    let total: usize = batches.iter().map(|batch| batch.learned.len()).sum();
    let mut gradients = Gradients::new(parameters);
    let mut metrics = DraftMetrics::default();
    let (mut loss, mut target_loss) = (0.0, 0.0);
    for (micro, batch) in batches.iter().enumerate() {
        let (features, micro_target_loss) = features(case, target, batch, index, micro)?;
        target_loss += micro_target_loss;
        if index == 0 {
            check_activations(case, objective, batch, &features, micro, report)?;
        }
        let result = objective.loss(batch, &features, true)?;
        let weight = objective_config(case).soft_weight;
        loss += (1.0 - weight) * result.metrics.hard_sum + weight * result.metrics.soft_sum;
        metrics.merge(&result.metrics);
        if let Some(numerator) = result.numerator {
            let scaled = (numerator / total as f64)?;
            gradients.add(parameters, &scaled.backward()?)?;
        }
    }
    Ok(Outcome {
        loss: loss / total as f64,
        target_loss: target_loss / total as f64,
        grad_norm: gradients.norm(),
        gradients,
        metrics,
    })
}

/// The target's features, with the teacher that the case pins, and its own `Σ ℓ_hard`.
fn features(
    case: &Case<'_>,
    target: &Target,
    batch: &Batch,
    index: usize,
    micro: usize,
) -> Result<(BatchFeatures, f64)> {
    let sequence = PackedSequence {
        ids: batch.ids.clone(),
        position_ids: batch.position_ids.clone(),
        document_ids: batch.document_ids.clone(),
    };
    let taps = Taps::of(&[Tap::LastKv, Tap::FinalHidden]);
    let features = target.forward(&sequence, &taps)?;
    let learned = Tensor::from_slice(&batch.learned, batch.learned.len(), target.device())?;
    let hidden = features.final_hidden()?.index_select(&learned, 0)?;
    let labels = batch.labels();
    let own = linear_cross_entropy(&Inputs {
        hidden: &hidden,
        head: target.head(),
        labels: &labels,
        soft: SoftTargets::None,
        soft_weight: 0.0,
        teacher: None,
    })?;
    let config = objective_config(case);
    let teacher = match config.soft_targets {
        SoftTargetKind::Full if config.soft_weight > 0.0 => TeacherFeatures::Full { hidden },
        SoftTargetKind::TopK if config.soft_weight > 0.0 => {
            let entries = top_k_entries(case, batch, index, micro)?;
            TeacherFeatures::TopK { entries, k: config.top_k, hidden: Some(hidden) }
        }
        _ => TeacherFeatures::None,
    };
    let features = BatchFeatures { last_kv: features.last_kv()?.clone(), teacher };
    Ok((features, own.rows.hard.iter().sum()))
}

fn top_k_entries(case: &Case<'_>, batch: &Batch, index: usize, micro: usize) -> Result<TopK> {
    let k = objective_config(case).top_k;
    let count = case.steps()?.len() * case.rows * case.seq_len * k;
    let ids = case.integers("topk_ids", count)?;
    let log_probs: Vec<f32> =
        case.inputs.load("topk_logprobs", DType::F32)?.flatten_all()?.to_vec1()?;
    if log_probs.len() != count {
        return Err(malformed(case.folder, "`topk_logprobs` and `topk_ids` differ in size"));
    }
    let start = (index * case.rows + micro) * case.seq_len;
    let mut entries = TopK::default();
    for &t in &batch.learned {
        let at = (start + t as usize) * k;
        entries.ids.extend(ids[at..at + k].iter().map(|id| *id as u32));
        entries.log_probs.extend(&log_probs[at..at + k]);
    }
    Ok(entries)
}

/// Compares what the activations file holds of the first step.
fn check_activations(
    case: &Case<'_>,
    objective: &GlideObjective,
    batch: &Batch,
    features: &BatchFeatures,
    micro: usize,
    report: &mut CaseReport,
) -> Result<()> {
    let path = case.folder.join("activations.safetensors");
    if !path.is_file() {
        return Ok(());
    }
    let file = SafetensorsSource::open_file(&path)?;
    let mut trace: Trace = Vec::new();
    objective.hidden(batch, features, &mut trace)?;
    let mut values: Vec<(String, Tensor)> =
        trace.into_iter().map(|(name, tensor)| (format!("draft.{name}"), tensor)).collect();
    values.push(("target.last_k".into(), features.last_kv.k.clone()));
    values.push(("target.last_v".into(), features.last_kv.v.clone()));
    let real: Vec<u32> =
        (0..).zip(&batch.document_ids).filter(|(_, id)| **id >= 0).map(|(t, _)| t).collect();
    let real = Tensor::from_slice(&real, real.len(), &candle_core::Device::Cpu)?;
    for (name, got) in values {
        // The default mode stores one output a micro-batch, and keys with a leading [M].
        let own_name = format!("{name}.{micro}");
        let (stored, single) = match (file.shape(&own_name), file.shape(&name)) {
            (Some(_), _) => (own_name, true),
            (None, Some(_)) => (name, false),
            (None, None) => continue,
        };
        let mut want = file.load(&stored, DType::F32)?;
        if !single && !case.compat {
            want = want.narrow(0, micro, 1)?;
        }
        if want.elem_count() != got.elem_count() {
            report.check(format!("activation {stored}"), f64::INFINITY, case.tolerance.grad);
            continue;
        }
        let want = want.reshape(got.shape())?;
        let error = relative_error(&got.index_select(&real, 0)?, &want.index_select(&real, 0)?)?;
        report.check(format!("activation {stored} ({micro})"), error, case.tolerance.grad);
    }
    Ok(())
}

fn check_gradients(
    case: &Case<'_>,
    parameters: &[longdraft_models::draft::Parameter],
    gradients: &Gradients,
    report: &mut CaseReport,
) -> Result<f64> {
    let file = SafetensorsSource::open_file(&case.folder.join("grads.safetensors"))?;
    let mut largest = 0.0;
    let mut reached = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let stored = format!("draft_model.{}", parameter.name);
        let Some(got) = gradients.tensor(index, parameter)? else {
            continue;
        };
        reached.push(stored.clone());
        let error = match file.shape(&stored) {
            Some(_) => relative_error(&got, &file.load(&stored, DType::F32)?)?,
            None => f64::INFINITY,
        };
        largest = worst(largest, error);
        report.check(format!("gradient {}", parameter.name), error, case.tolerance.grad);
    }
    reached.sort();
    report.check_equal("tensors with a gradient", &reached, &file.names());
    Ok(largest)
}

fn check_weights(
    case: &Case<'_>,
    file_name: &str,
    objective: &GlideObjective,
    report: &mut CaseReport,
) -> Result<f64> {
    let file = SafetensorsSource::open_file(&case.folder.join(file_name))?;
    let mut largest = 0.0;
    for (name, got) in objective.glide().named_tensors() {
        let stored = format!("draft_model.{name}");
        let error = match file.shape(&stored) {
            Some(_) => relative_error(&got, &file.load(&stored, DType::F32)?)?,
            None => f64::INFINITY,
        };
        largest = worst(largest, error);
        let step = file_name.trim_start_matches("weights_").trim_end_matches(".safetensors");
        report.check(format!("weight {name} ({step})"), error, case.tolerance.weight);
    }
    Ok(largest)
}

/// Counters and rates, where the case has them.
fn check_metrics(
    case: &Case<'_>,
    label: &dyn Fn(&str) -> String,
    want: &Value,
    got: &DraftMetrics,
    report: &mut CaseReport,
) {
    for (key, value) in [("hard_loss", got.hard_loss()), ("soft_loss", got.soft_loss())] {
        if let Some(want) = want[key].as_f64() {
            report.check(label(key), relative(value, want), case.tolerance.loss);
        }
    }
    if let Some(by_delay) = want["by_delay"].as_object() {
        for (delay, want) in by_delay {
            let counts =
                delay.parse::<usize>().ok().and_then(|d| got.by_delay.get(d.checked_sub(1)?));
            let counts = counts.copied().unwrap_or_default();
            let numbers = [
                ("rows", counts.rows as f64, 0.0),
                ("top1_count", counts.top1_count as f64, 0.0),
                ("acceptance_sum", counts.acceptance_sum, RATE_TOLERANCE * counts.rows as f64),
                ("top1_agreement", counts.top1_agreement(), RATE_TOLERANCE),
                ("acceptance_rate", counts.acceptance_rate(), RATE_TOLERANCE),
            ];
            for (key, value, tolerance) in numbers {
                if let Some(want) = want[key].as_f64() {
                    let name = label(&format!("delay {delay} {key}"));
                    report.check(name, (value - want).abs(), tolerance);
                }
            }
        }
    }
    let gamma = case.objective("gamma").as_u64().unwrap_or(5) as usize;
    let lengths = [
        ("simulated_acceptance_length", Rate::Top1, 0.0),
        ("simulated_acceptance_length_sampling", Rate::Acceptance, 0.0),
        ("simulated_acceptance_length_without_bonus", Rate::Top1, 1.0),
        ("simulated_acceptance_length_sampling_without_bonus", Rate::Acceptance, 1.0),
    ];
    for (key, rate, bonus) in lengths {
        if let Some(want) = want[key].as_f64() {
            let value = got.simulated_acceptance_length(rate, gamma) - bonus;
            report.check(label(key), (value - want).abs(), RATE_TOLERANCE);
        }
    }
}
