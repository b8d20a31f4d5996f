//! Tables of single functions.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::orthogonalise::{Rule, orthogonalise, reference};
use longdraft_kernels::rope::{Rope, RopeScaling};
use longdraft_models::bits_per_byte::{Tail, sliding_windows};
use longdraft_models::language_model::{LanguageModelConfig, RopeConfig};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::artifact::{quantise_rows, quantise_tensor};
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_pretrain::warmdown;
use serde_json::Value;

use crate::error::Result;
use crate::{CaseReport, absolute_error, floats, malformed, read_json, stored};

const SCHEDULE: f64 = 1e-12;
const CLIP_QUANTILE: f64 = 0.999_998_4;
/// Places at which a map is looked at for its range.
const POINTS: u32 = 400_000;

pub(crate) fn run(folder: &Path, meta: &Value, name: &str) -> Result<CaseReport> {
    let file = meta["expected"].as_str().unwrap_or("units.json");
    if Path::new(file).components().count() != 1 || file.starts_with("..") {
        return Err(malformed(folder, format!("`{file}` is not a file name")));
    }
    let units = read_json(&folder.join(file))?;
    let mut report = CaseReport::new(name, "pretrain-units");
    let open = |name: &str| SafetensorsSource::open_file(&folder.join(name));
    check_orthogonalise(&open("orthogonalise.safetensors")?, &mut report)?;
    check_scalar_map(&units, &mut report);
    check_codes(&open("int8.safetensors")?, &units["int8"], &mut report)?;
    check_rope(&open("rope.safetensors")?, &units["rope"], &mut report)?;
    check_windows(folder, &units["windows"], &mut report)?;
    check_schedules(&units["schedule"], &mut report);
    Ok(report)
}

fn check_orthogonalise(file: &SafetensorsSource, report: &mut CaseReport) -> Result<()> {
    for name in file.names() {
        let Some(case) = name.strip_suffix(".input") else { continue };
        let input = file.load(&name, DType::F32)?;
        let (rows, columns) = input.dims2()?;
        let single = format!("{case}.ns5_f32");
        if let Some(want) = stored(file, &single)? {
            let values: Vec<f32> = input.flatten_all()?.to_vec1()?;
            let got = orthogonalise(&values, rows, columns, Rule::NewtonSchulz);
            let got = Tensor::from_vec(got, (rows, columns), &Device::Cpu)?;
            let tolerance = if case.contains("lowrank") { 5e-5 } else { 1e-5 };
            report.check(single, absolute_error(&got, &want)?.0, tolerance);
        }
        for (rule, kind) in [(Rule::NewtonSchulz, "ns5"), (Rule::PolarExpress, "polar5")] {
            let double = format!("{case}.{kind}_f64");
            if file.shape(&double).is_some() {
                let got = reference(&input.to_dtype(DType::F64)?, rule)?;
                let want = file.load_f64(&double)?;
                let want = Tensor::from_vec(want, (rows, columns), &Device::Cpu)?;
                let (error, _) = absolute_error(&got, &want)?;
                report.check(double, error, 1e-9);
            }
        }
    }
    Ok(())
}

fn check_scalar_map(units: &Value, report: &mut CaseReport) {
    let rules = [("ns5", Rule::NewtonSchulz), ("polar5", Rule::PolarExpress)];
    for row in units["scalar_map"].as_array().into_iter().flatten() {
        let Some(s) = row["s"].as_f64() else { continue };
        for (key, rule) in rules {
            if let Some(want) = row[key].as_f64() {
                let error = (rule.of_singular_value(s) - want).abs();
                report.check(format!("{key} of {s}"), error, 1e-9);
            }
        }
    }
    let range = &units["scalar_range"];
    let (Some(low), Some(high)) = (range["interval"][0].as_f64(), range["interval"][1].as_f64())
    else {
        return;
    };
    for (key, rule) in rules {
        let at = |i: u32| low * (high / low).powf(f64::from(i) / f64::from(POINTS));
        let values = (0..=POINTS).map(|i| rule.of_singular_value(at(i)));
        let (least, most) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
        for (index, got) in [(0, least), (1, most)] {
            if let Some(want) = range[key][index].as_f64() {
                report.check(format!("{key} range {index}"), (got - want).abs(), 1e-6);
            }
        }
    }
}

fn check_codes(file: &SafetensorsSource, cases: &Value, report: &mut CaseReport) -> Result<()> {
    let wide = |codes: &[i8]| codes.iter().map(|code| i64::from(*code)).collect::<Vec<_>>();
    for (name, case) in cases.as_object().into_iter().flatten() {
        let values = floats(file, &format!("{name}.input"))?;
        let want = floats(file, &format!("{name}.scale"))?;
        let codes = file.load_i64(&format!("{name}.q"))?;
        if case["scheme"] == "per_tensor" {
            let Ok(got) = quantise_tensor(&values, CLIP_QUANTILE) else {
                report.check(format!("{name} is refused"), f64::INFINITY, 0.0);
                continue;
            };
            report.check_equal(format!("{name} codes"), &wide(&got.codes), &codes);
            report.check_bits(format!("{name} scale"), &[got.scale], &want);
            let back: Vec<f32> = got.codes.iter().map(|c| f32::from(*c) * got.scale).collect();
            let dequantised = floats(file, &format!("{name}.dequant"))?;
            report.check_bits(format!("{name} values"), &back, &dequantised);
            continue;
        }
        let columns = file.shape(&format!("{name}.input")).and_then(|s| s.get(1).copied());
        let columns = columns.unwrap_or(values.len()).max(1);
        match quantise_rows(&values, columns, CLIP_QUANTILE) {
            // What the reference stores as infinity is refused.
            Err(_) => {
                let overflows = want.iter().any(|scale| scale.is_infinite());
                report.check_equal(format!("{name} is refused"), &[overflows], &[true]);
            }
            Ok(got) => {
                report.check_equal(format!("{name} codes"), &wide(&got.codes), &codes);
                let scales: Vec<f32> = got.stored.iter().map(|scale| scale.to_f32()).collect();
                report.check_bits(format!("{name} scales"), &scales, &want);
                let rows = got.codes.chunks(columns).zip(&scales);
                let back: Vec<f32> =
                    rows.flat_map(|(row, s)| row.iter().map(move |c| f32::from(*c) * s)).collect();
                let dequantised = floats(file, &format!("{name}.dequant"))?;
                report.check_bits(format!("{name} values"), &back, &dequantised);
            }
        }
    }
    Ok(())
}

fn check_rope(file: &SafetensorsSource, cases: &Value, report: &mut CaseReport) -> Result<()> {
    for (name, case) in cases.as_object().into_iter().flatten() {
        let size = |key: &str| case[key].as_u64().unwrap_or(0) as usize;
        let (head_dim, length) = (size("head_dim"), size("length"));
        let rope = RopeConfig {
            rope_theta: case["base"].as_f64().unwrap_or(0.0),
            reference_length: size("reference_length"),
            ..RopeConfig::default()
        };
        let config = LanguageModelConfig {
            hidden_size: head_dim,
            num_attention_heads: 1,
            rope,
            ..LanguageModelConfig::default()
        };
        let base = config.effective_rope_base(length);
        let error = (base - case["effective_base"].as_f64().unwrap_or(f64::NAN)).abs();
        report.check(format!("{name} base"), error, 1e-9 * base);
        let positions: Vec<u32> = (0..length as u32).collect();
        let table =
            Rope::new(head_dim, base, RopeScaling::None)?.table(&positions, &Device::Cpu)?;
        for (part, got) in [("cos", table.cos()), ("sin", table.sin())] {
            let want = file.load(&format!("{name}.{part}"), DType::F32)?;
            report.check(format!("{name} {part}"), absolute_error(got, &want)?.0, 2e-5);
        }
    }
    Ok(())
}

fn check_windows(folder: &Path, cases: &Value, report: &mut CaseReport) -> Result<()> {
    for case in cases.as_array().into_iter().flatten() {
        let size = |key: &str| case[key].as_u64().unwrap_or(0) as usize;
        let (targets, window, stride) = (size("targets"), size("window"), size("stride"));
        if !(1..=window).contains(&stride) {
            return Err(malformed(folder, format!("a stride of {stride} in windows of {window}")));
        }
        let own: Vec<Vec<u64>> = sliding_windows(targets, window, stride, Tail::Score)
            .iter()
            .map(|w| [w.start, w.length, w.scored.start, w.scored.end].map(|n| n as u64).into())
            .collect();
        let label = format!("windows {targets}/{window}/{stride}");
        report.check_equal(format!("{label} count"), &[own.len() as u64], &[size("count") as u64]);
        let listed: Vec<&Value> = case["windows"].as_array().into_iter().flatten().collect();
        let gap = listed.iter().position(|entry| entry.is_string()).unwrap_or(listed.len());
        let parsed = |entries: &[&Value]| -> Vec<Vec<u64>> {
            let row = |entry: &&Value| {
                entry.as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
            };
            entries.iter().map(row).collect()
        };
        let head = parsed(&listed[..gap]);
        let tail = parsed(listed.get(gap + 1..).unwrap_or_default());
        report.check_equal(&label, &own[..head.len().min(own.len())], &head);
        let from = own.len().saturating_sub(tail.len());
        report.check_equal(format!("{label} end"), &own[from..], &tail);
    }
    Ok(())
}

fn check_schedules(schedule: &Value, report: &mut CaseReport) {
    let rows = |key: &str| schedule[key].as_array().into_iter().flatten();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let count = |row: &Value, key: &str| row[key].as_u64().unwrap_or(u64::MAX);
    for row in rows("steps") {
        let (step, iterations, warmdown) =
            (count(row, "step"), count(row, "iterations"), count(row, "warmdown"));
        let got = warmdown::by_steps(step, iterations, warmdown);
        let label = format!("multiplier {step} of {iterations}, warmdown {warmdown}");
        report.check(label, (got - number(row, "multiplier")).abs(), SCHEDULE);
    }
    for row in rows("wall_clock") {
        let (step, warmdown) = (count(row, "step"), count(row, "warmdown"));
        let (elapsed, cap) = (number(row, "elapsed_ms"), number(row, "cap_ms"));
        let got = warmdown::by_wall_clock(step, elapsed, cap, warmdown);
        let label = format!("multiplier {step} at {elapsed} ms, warmdown {warmdown}");
        report.check(label, (got - number(row, "multiplier")).abs(), SCHEDULE);
    }
    for row in rows("momentum") {
        let (step, warmup) = (count(row, "step"), count(row, "warmup"));
        let got = warmdown::momentum(step, number(row, "start"), number(row, "end"), warmup);
        let label = format!("momentum {step} of {warmup}");
        report.check(label, (got - number(row, "momentum")).abs(), SCHEDULE);
    }
}
