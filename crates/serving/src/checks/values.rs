//! What a tensor's values say about it.

use half::{bf16, f16};

use super::Checks;
use super::rules::{Rule, tensor_place};

/// Means of trained norm weights lie in here.
const NORM_MEANS: std::ops::RangeInclusive<f64> = 0.05..=20.0;
/// Root mean squares of trained matrices lie in here.
const MATRIX_RMS: std::ops::RangeInclusive<f64> = 1e-4..=10.0;
/// Share of subnormal halves that costs precision.
const MOST_SUBNORMAL: f64 = 0.01;

/// What helps where values are at fault.
const RUN: &str = "look at the training run; export an earlier checkpoint (checkpoints/best)";
const DEAD: &str = "a part of the network is dead";
const OTHER_SIZE: &str = "states of another size than in training";

const NOT_FINITE: Rule =
    Rule::garbage("not-finite", "finite values", "every logit is NaN").remedy(RUN);
const ALL_ZERO: Rule = Rule::garbage("all-zero", "trained values", DEAD).remedy(RUN);
const CONSTANT: Rule = Rule::garbage("constant", "trained values", DEAD).remedy(RUN);
const NORM_SCALE: Rule =
    Rule::garbage("norm-scale", "a mean between 0.05 and 20", OTHER_SIZE).remedy(RUN).doubtful();
const MATRIX_SCALE: Rule =
    Rule::garbage("matrix-scale", "between 1e-4 and 10", OTHER_SIZE).remedy(RUN).doubtful();
const SUBNORMAL: Rule =
    Rule::garbage("f16-subnormal", "fewer than 1 %", "small values lose their digits")
        .remedy(RUN)
        .doubtful();

/// Sums over a tensor's values.
#[derive(Debug, Default)]
struct Summary {
    count: usize,
    not_finite: usize,
    sum: f64,
    squares: f64,
    first: Option<f32>,
    constant: bool,
    subnormal: usize,
}

impl Summary {
    fn of(dtype: &str, bytes: &[u8]) -> Option<Self> {
        let mut summary = Self { constant: true, ..Self::default() };
        match dtype {
            "F32" => bytes.chunks_exact(4).for_each(|b| {
                summary.add(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            }),
            "BF16" => bytes.chunks_exact(2).for_each(|b| {
                summary.add(bf16::from_le_bytes([b[0], b[1]]).to_f32());
            }),
            "F16" => bytes.chunks_exact(2).for_each(|b| {
                let value = f16::from_le_bytes([b[0], b[1]]);
                let subnormal = value.classify() == std::num::FpCategory::Subnormal;
                summary.subnormal += usize::from(subnormal);
                summary.add(value.to_f32());
            }),
            _ => return None,
        }
        Some(summary)
    }

    fn add(&mut self, value: f32) {
        self.count += 1;
        if !value.is_finite() {
            self.not_finite += 1;
            return;
        }
        self.sum += f64::from(value);
        self.squares += f64::from(value).powi(2);
        let first = *self.first.get_or_insert(value);
        self.constant &= first.to_bits() == value.to_bits();
    }
}

/// Reports values that no training leaves.
pub(crate) fn check(
    checks: &mut Checks<'_>,
    name: &str,
    shape: &[usize],
    dtype: &str,
    bytes: &[u8],
) {
    let Some(summary) = Summary::of(dtype, bytes) else { return };
    let Summary { count, not_finite, subnormal, .. } = summary;
    let mut report = |rule: &Rule, found: String| checks.broken(rule, tensor_place(name), found);
    if not_finite > 0 {
        return report(&NOT_FINITE, format!("{not_finite} of {count} values are not finite"));
    }
    let is_vector = shape.len() < 2;
    let is_dead = name.contains("cross_attn.k_proj") || name.contains("cross_attn.v_proj");
    let is_bias = name.rsplit('.').next() == Some("bias");
    if is_dead || is_bias {
        return;
    }
    if summary.squares == 0.0 {
        return report(&ALL_ZERO, "every value is 0".to_owned());
    }
    if summary.constant && !is_vector && count > 1 {
        return report(&CONSTANT, "every value is the same".to_owned());
    }
    let values = count.max(1) as f64;
    let (mean, rms) = (summary.sum / values, (summary.squares / values).sqrt());
    if is_vector && name.contains("norm") && !NORM_MEANS.contains(&mean) {
        report(&NORM_SCALE, format!("norm weights of mean {mean:.3}"));
    }
    if !is_vector && !MATRIX_RMS.contains(&rms) {
        report(&MATRIX_SCALE, format!("values of root mean square {rms:.2e}"));
    }
    if subnormal as f64 > MOST_SUBNORMAL * values {
        report(&SUBNORMAL, format!("{subnormal} of {count} values are subnormal in f16"));
    }
}
