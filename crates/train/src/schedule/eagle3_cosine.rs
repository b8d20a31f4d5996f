//! EAGLE-3's public trainer: with `k = n − 1` and `W = ⌊ratio · T⌋`, `(k+1)/W` below W, then
//! `½(1 + cos(π(k−W)/(T−W)))`: the peak comes twice, and the last rate is above 0.

use super::{Schedule, cosine};

pub(super) fn factor(schedule: &Schedule, n: u64) -> f64 {
    let warmup = warmup_steps(schedule);
    let k = n.saturating_sub(1);
    if k < warmup {
        return n as f64 / warmup as f64;
    }
    let rest = schedule.steps.saturating_sub(warmup).max(1);
    cosine(0.0, (k - warmup) as f64 / rest as f64)
}

/// The same warm-up, then flat.
pub(super) fn flat_factor(schedule: &Schedule, n: u64) -> f64 {
    let warmup = warmup_steps(schedule);
    if n < warmup { n as f64 / warmup as f64 } else { 1.0 }
}

fn warmup_steps(schedule: &Schedule) -> u64 {
    (schedule.warmup_ratio * schedule.warmup_of as f64).floor() as u64
}

#[cfg(test)]
mod tests {
    use super::super::Kind;

    use super::*;

    #[test]
    fn twenty_steps_have_the_published_rates() {
        let want = [
            0.5, 1.0, 1.0, 0.992_404, 0.969_846, 0.933_013, 0.883_022, 0.821_394, 0.75, 0.67101,
            0.586_824, 0.5, 0.413_176, 0.32899, 0.25, 0.178_606, 0.116_978, 0.066_987, 0.030_154,
            0.007_596,
        ];
        let schedule = Schedule::new(Kind::Eagle3Cosine, 1.0, 20);
        let flat = Schedule::new(Kind::ConstantAfterWarmup, 1.0, 20);
        for (n, want) in (1..).zip(want) {
            let got = schedule.learning_rate(n);
            assert!((got - want).abs() < 1e-6, "step {n}: {got} against {want}");
            let want = if n == 1 { 0.5 } else { 1.0 };
            assert!((flat.learning_rate(n) - want).abs() < 1e-12, "step {n}");
        }
    }

    #[test]
    fn runs_too_short_for_a_warm_up_have_none() {
        let mut schedule = Schedule::new(Kind::Eagle3Cosine, 1.0, 10);
        schedule.warmup_ratio = 0.015;
        assert!((schedule.learning_rate(1) - 1.0).abs() < 1e-12);
        schedule.kind = Kind::ConstantAfterWarmup;
        assert!((schedule.learning_rate(1) - 1.0).abs() < 1e-12);
    }
}
