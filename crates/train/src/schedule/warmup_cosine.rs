//! Corrected warm-up cosine: `W = max(1, round(ratio · T))`, `n/W` up to W, then the cosine.

use super::{Schedule, cosine};

pub(super) fn factor(schedule: &Schedule, n: u64) -> f64 {
    let warmup = ((schedule.warmup_ratio * schedule.warmup_of as f64).round() as u64).max(1);
    if n <= warmup {
        return n as f64 / warmup as f64;
    }
    let rest = schedule.steps.saturating_sub(warmup).max(1);
    cosine(schedule.floor_ratio, (n - warmup) as f64 / rest as f64)
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn twenty_steps_have_the_published_rates_two_steps_earlier() {
        let want = [
            0.5, 1.0, 0.992_405, 0.969_849, 0.933_019, 0.883_034, 0.821_412, 0.750_025, 0.671_043,
            0.586_865, 0.500_05, 0.413_235, 0.329_057, 0.250_075, 0.178_688, 0.117_066, 0.067_081,
            0.030_251, 0.007_695, 0.000_1,
        ];
        let schedule = Schedule::new(Kind::WarmupCosine, 1.0, 20);
        for (n, want) in (1..).zip(want) {
            let got = schedule.learning_rate(n);
            assert!((got - want).abs() < 1e-6, "step {n}: {got} against {want}");
        }
    }

    #[test]
    fn one_step_runs_at_the_base_rate() {
        let rate = Schedule::new(Kind::WarmupCosine, 2.0, 1).learning_rate(1);
        assert!((rate - 2.0).abs() < 1e-12);
    }
}
