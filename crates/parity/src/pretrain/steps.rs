//! Training steps: batches, losses, gradients, schedules, weights.

use candle_core::{DType, Tensor};
use longdraft_data::token_stream::{LoaderKind, Position, TokenStream};
use longdraft_models::language_model::{Group, LanguageModel, Layout, group_of};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_parallel::Gradients;
use longdraft_pretrain::Muon;
use longdraft_pretrain::warmdown;
use serde_json::Value;

use super::case::Case;
use crate::error::{ParityError, Result};
use crate::training::steps;
use crate::{
    CaseReport, Place, ROUNDED, absolute_error, malformed, note, on_host, relative, stored,
};

const LOSS: f64 = 3e-6;
const LOGITS: f64 = 1e-5;
const GRADIENT: f64 = 5e-5;
const GRADIENT_NORM: f64 = 1e-5;
const MUON_WEIGHT: f64 = 2e-6;
const SCHEDULE: f64 = 1e-12;
/// Share of a tensor's weights that may be further off than the others.
const FAR: f64 = 0.01;
/// Weights of any tensor that may be so: a hundredth of a short one is less than one weight.
const FEW: f64 = 2.0;
/// Absolute, with 16-bit factors.
const ROUNDED_LOGITS: f64 = 5e-2;

pub(super) fn check(case: &Case<'_>, place: &Place, report: &mut CaseReport) -> Result<()> {
    let inputs = case.file("inputs.safetensors")?;
    let weights = case.file("weights_init.safetensors")?;
    let model = LanguageModel::from_source(&case.model, &weights)?.to_device(&place.device)?;
    let parameters = model.parameters();
    let own = case.model.parameter_count() as u64;
    report.check_count("parameter count", own, &case.meta["parameter_count"]);
    check_groups(case, &model, report);
    check_batches(case, &inputs, report)?;
    let lengths = vec![case.sequence; case.sequences];
    let layout = Layout::new(&case.model, &lengths, case.sequence)?;
    let mut optimizer = Muon::new(case.optimizer.clone(), parameters);
    for (index, step) in steps(case.folder, case.meta)?.iter().enumerate() {
        let number = index + 1;
        let label = |what: &str| format!("step {number} {what}");
        let mut gradients = Gradients::new(parameters);
        let mut loss = 0.0;
        for micro in 0..case.micro_batches {
            let prefix = prefix(case, number, micro);
            let ids = case.ids(&inputs, &format!("{prefix}.x"))?;
            let targets = case.ids(&inputs, &format!("{prefix}.y"))?;
            let hidden = model.hidden(&ids, &layout)?;
            if inputs.shape(&format!("{prefix}.logits")).is_some() {
                let want = logits(case, &inputs, (&prefix, ids.len()))?;
                let (error, _) = absolute_error(&model.logits(&hidden)?, &want)?;
                report.check(label("logits"), error, place.allowed(LOGITS, ROUNDED_LOGITS));
            }
            let output = model.cross_entropy(&hidden, &targets)?;
            let share = 1.0 / (ids.len() * case.micro_batches) as f64;
            loss += output.rows.hard.iter().sum::<f64>() * share;
            gradients.add_of(parameters, &(output.loss_sum * share)?)?;
        }
        let error = (loss - number_of(case, step, "loss")?).abs();
        report.check(label("loss"), error, place.allowed(LOSS, ROUNDED.loss));
        note(&mut report.loss_error, error);
        check_gradients(case, number, (&model, &gradients), place, report)?;
        let multiplier = warmdown::by_steps(index as u64, case.iterations, case.warmdown);
        let outcome = optimizer.step(parameters, &gradients, multiplier)?;
        let (norm, clip) = (outcome.grad_norm, outcome.clip_factor);
        let of_norm = place.allowed(GRADIENT_NORM, ROUNDED.grad);
        for (key, got, tolerance, relatively) in [
            ("grad_norm_preclip", norm, of_norm, true),
            ("clip_coef", clip, of_norm, true),
            ("lr_multiplier", multiplier, SCHEDULE, false),
            ("muon_momentum", outcome.momentum, SCHEDULE, false),
        ] {
            let want = number_of(case, step, key)?;
            let error = if relatively { relative(got, want) } else { (got - want).abs() };
            report.check(label(key), error, tolerance);
        }
        check_weights(case, number, &model, place, report)?;
    }
    Ok(())
}

/// Logits `[T, V]` that a micro-batch of `rows` tokens must have.
fn logits(
    case: &Case<'_>,
    inputs: &SafetensorsSource,
    (prefix, rows): (&str, usize),
) -> Result<Tensor> {
    let tensor = format!("{prefix}.logits");
    let (want, expected) = (inputs.load(&tensor, DType::F32)?, vec![rows, case.model.vocab_size]);
    if want.elem_count() != expected.iter().product::<usize>() {
        let (folder, found) = (case.folder.to_path_buf(), want.dims().to_vec());
        return Err(ParityError::Shape { folder, tensor, found, expected });
    }
    Ok(want.reshape(expected)?)
}

fn number_of(case: &Case<'_>, step: &Value, key: &str) -> Result<f64> {
    let number = step[key].as_f64();
    number.ok_or_else(|| malformed(case.folder, format!("meta.json: a step has no `{key}`")))
}

fn prefix(case: &Case<'_>, step: usize, micro: usize) -> String {
    if case.micro_batches > 1 { format!("step{step}.micro{micro}") } else { format!("step{step}") }
}

/// Which optimizer every tensor has.
fn check_groups(case: &Case<'_>, model: &LanguageModel, report: &mut CaseReport) {
    let groups = [
        ("muon", Group::Matrix),
        ("adam_scalar", Group::Scalar),
        ("adam_token", Group::Token),
        ("adam_head", Group::Head),
    ];
    for (key, group) in groups {
        let Some(want) = case.meta["optimizer_groups"][key].as_array() else { continue };
        let mut want: Vec<&str> = want.iter().filter_map(Value::as_str).collect();
        let names = model.parameters().iter().map(|parameter| parameter.name.as_str());
        let mut got: Vec<&str> = names.filter(|name| group_of(name) == group).collect();
        want.sort_unstable();
        got.sort_unstable();
        report.check_equal(format!("group {key}"), &got, &want);
    }
}

/// The shards, read one after the other, give the steps' batches.
fn check_batches(
    case: &Case<'_>,
    inputs: &SafetensorsSource,
    report: &mut CaseReport,
) -> Result<()> {
    let mut shards: Vec<_> = std::fs::read_dir(case.folder)
        .map_err(|error| malformed(case.folder, error))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("train_") && name.ends_with(".bin")
        })
        .collect();
    shards.sort();
    if shards.is_empty() {
        return Ok(());
    }
    let stream = TokenStream::open(&shards)?;
    stream.check(case.model.vocab_size)?;
    let (mut position, sizes) = (Position::default(), (case.sequences, case.sequence));
    let steps = case.meta["steps"].as_array().map_or(0, Vec::len);
    for step in 1..=steps {
        for micro in 0..case.micro_batches {
            let batch = LoaderKind::Sequential.next_batch((&stream, 0), &mut position, sizes)?;
            let prefix = prefix(case, step, micro);
            let want = case.ids(inputs, &format!("{prefix}.x"))?;
            report.check_equal(format!("{prefix} inputs of the shards"), &batch.inputs, &want);
            let want = case.ids(inputs, &format!("{prefix}.y"))?;
            report.check_equal(format!("{prefix} targets of the shards"), &batch.targets, &want);
        }
    }
    Ok(())
}

fn check_gradients(
    case: &Case<'_>,
    step: usize,
    (model, gradients): (&LanguageModel, &Gradients),
    place: &Place,
    report: &mut CaseReport,
) -> Result<()> {
    let file = case.file(&format!("grads_step{step}.safetensors"))?;
    let zero = case.meta["zero_gradients"][format!("step{step}")].as_array();
    let zero: Vec<&str> = zero.into_iter().flatten().filter_map(Value::as_str).collect();
    for (index, parameter) in model.parameters().iter().enumerate() {
        let name = parameter.name.as_str();
        let got = gradients.tensor(index, parameter)?;
        let label = format!("step {step} gradient {name}");
        if zero.contains(&name) {
            let largest = match got {
                Some(got) => got.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?,
                None => 0.0,
            };
            report.check(format!("{label} (zero)"), f64::from(largest), 0.0);
            continue;
        }
        let error = match (got, stored(&file, name)?) {
            (Some(got), Some(want)) => {
                let (error, largest) = absolute_error(&got, &want)?;
                error / largest.max(f64::MIN_POSITIVE)
            }
            _ => f64::INFINITY,
        };
        report.check(label, error, place.allowed(GRADIENT, ROUNDED.grad));
        note(&mut report.grad_error, error);
    }
    Ok(())
}

/// Muon's weights by the largest difference; Adam's by the share that is close, and the largest. Where
/// products are rounded, a gradient near zero may have the other sign, and both take a step of about the
/// rate in its direction: weights are then held to two such steps, and most of them to a small part.
fn check_weights(
    case: &Case<'_>,
    step: usize,
    model: &LanguageModel,
    place: &Place,
    report: &mut CaseReport,
) -> Result<()> {
    let steps = step as f64;
    let file = case.file(&format!("weights_step{step}.safetensors"))?;
    for parameter in model.parameters() {
        let name = parameter.name.as_str();
        let label = format!("step {step} weight {name}");
        let want = file.load(name, DType::F32)?;
        let (error, _) = absolute_error(parameter.var.as_tensor(), &want)?;
        let rate = match group_of(name) {
            Group::Matrix => {
                let rounded = 2.0 * steps * case.optimizer.matrix_learning_rate;
                report.check(label, error, place.allowed(MUON_WEIGHT, rounded));
                note(&mut report.weight_error, error);
                continue;
            }
            Group::Token => case.optimizer.token_learning_rate,
            Group::Head => case.optimizer.head_learning_rate,
            Group::Scalar => case.optimizer.scalar_learning_rate,
        };
        let largest = place.allowed(1e-2 * rate, 2.0 * steps * rate);
        report.check(format!("{label} (largest)"), error, largest);
        let part = place.allowed(1e-4, 0.1);
        let far = share_beyond(parameter.var.as_tensor(), &want, part * rate)?;
        let share = share_allowed(want.elem_count(), place.allowed(FAR, ROUNDED.count));
        report.check(format!("{label} (share beyond {part:e} lr)"), far, share);
    }
    Ok(())
}

/// The share of `count` weights that may be far off: `share`, or two weights where that is more.
fn share_allowed(count: usize, share: f64) -> f64 {
    (FEW / count.max(1) as f64).max(share)
}

fn share_beyond(a: &Tensor, b: &Tensor, tolerance: f64) -> Result<f64> {
    if a.dims() != b.dims() {
        return Ok(1.0);
    }
    let difference: Vec<f32> = (on_host(a)? - on_host(b)?)?.abs()?.flatten_all()?.to_vec1()?;
    let far = difference.iter().filter(|value| f64::from(**value) > tolerance).count();
    Ok(far as f64 / difference.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The share of a vector's weights that are off where `off` of them are, and the one that is allowed.
    fn shares(count: usize, off: usize) -> (f64, f64) {
        let values: Vec<f32> = (0..count).map(|i| if i < off { 1.0 } else { 0.0 }).collect();
        let got = Tensor::from_vec(values, count, &Device::Cpu).expect("tensor");
        let want = got.zeros_like().expect("zeros");
        (share_beyond(&got, &want, 0.5).expect("shares"), share_allowed(count, FAR))
    }

    #[test]
    fn two_weights_of_a_short_vector_may_be_off_and_a_hundredth_of_a_long_one() {
        for (count, most) in [(80, 2), (200, 2), (1000, 10)] {
            let (far, allowed) = shares(count, most);
            assert!(far <= allowed, "{most} of {count}: {far} {allowed}");
            let (far, allowed) = shares(count, most + 1);
            assert!(far > allowed, "{} of {count}: {far} {allowed}", most + 1);
        }
    }
}
