//! What a tensor's values say about it.

use half::{bf16, f16};

use super::{Checks, Effect, Problem, Severity};

/// Means of trained norm weights lie in here.
const NORM_MEANS: std::ops::RangeInclusive<f64> = 0.05..=20.0;
/// Root mean squares of trained matrices lie in here.
const MATRIX_RMS: std::ops::RangeInclusive<f64> = 1e-4..=10.0;
/// Share of subnormal halves that costs precision.
const MOST_SUBNORMAL: f64 = 0.01;

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
    let profile = checks.profile;
    let place = format!("tensor `{name}`");
    let mut report =
        |severity, code, found: String, expected: &str, words: &str| {
            let problem = Problem::new(severity, code, place.clone(), found, expected);
            checks.push(problem.effect_on(profile, Effect::Garbage, words).remedy(
                "look at the training run; export an earlier checkpoint (checkpoints/best)",
            ));
        };
    let count = summary.count.max(1) as f64;
    if summary.not_finite > 0 {
        let found = format!("{} of {} values are not finite", summary.not_finite, summary.count);
        report(Severity::Error, "not-finite", found, "finite values", "every logit is NaN");
        return;
    }
    let is_vector = shape.len() < 2;
    let is_dead = name.contains("cross_attn.k_proj") || name.contains("cross_attn.v_proj");
    let is_bias = name.rsplit('.').next() == Some("bias");
    if is_dead || is_bias {
        return;
    }
    if summary.squares == 0.0 {
        report(
            Severity::Error,
            "all-zero",
            "every value is 0".into(),
            "trained values",
            "a part of the network is dead",
        );
        return;
    }
    if summary.constant && !is_vector && summary.count > 1 {
        report(
            Severity::Error,
            "constant",
            "every value is the same".into(),
            "trained values",
            "a part of the network is dead",
        );
        return;
    }
    let mean = summary.sum / count;
    let rms = (summary.squares / count).sqrt();
    if is_vector && name.contains("norm") && !NORM_MEANS.contains(&mean) {
        let found = format!("norm weights of mean {mean:.3}");
        report(
            Severity::Warning,
            "norm-scale",
            found,
            "a mean between 0.05 and 20",
            "states of another size than in training",
        );
    }
    if !is_vector && !MATRIX_RMS.contains(&rms) {
        let found = format!("values of root mean square {rms:.2e}");
        report(
            Severity::Warning,
            "matrix-scale",
            found,
            "between 1e-4 and 10",
            "states of another size than in training",
        );
    }
    if summary.subnormal as f64 > MOST_SUBNORMAL * count {
        let found =
            format!("{} of {} values are subnormal in f16", summary.subnormal, summary.count);
        report(
            Severity::Warning,
            "f16-subnormal",
            found,
            "fewer than 1 %",
            "small values lose their digits",
        );
    }
}
