//! DeepSpeed's WarmupCosineLR: `W = max(2, ⌊ratio · T⌋)`; step 1 at 0, then with `k = n − 2`:
//! `k/W` below W (so step 2 is 0 again), the cosine of `(k − W + 1)/max(1, T − W)` from there.

use super::{Schedule, cosine};

pub(super) fn factor(schedule: &Schedule, n: u64) -> f64 {
    if n <= 1 {
        return 0.0;
    }
    let warmup = ((schedule.warmup_ratio * schedule.warmup_of as f64).floor() as u64).max(2);
    let k = n - 2;
    if k < warmup {
        return k as f64 / warmup as f64;
    }
    let rest = schedule.steps.saturating_sub(warmup).max(1);
    cosine(schedule.floor_ratio, (k - warmup + 1) as f64 / rest as f64)
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn twenty_steps_have_the_published_rates() {
        let want = [
            0.0, 0.0, 0.5, 0.992_405, 0.969_849, 0.933_019, 0.883_034, 0.821_412, 0.750_025,
            0.671_043, 0.586_865, 0.500_05, 0.413_235, 0.329_057, 0.250_075, 0.178_688, 0.117_066,
            0.067_081, 0.030_251, 0.007_695,
        ];
        let schedule = Schedule::new(Kind::DeepspeedWarmupCosine, 1.0, 20);
        for (n, want) in (1..).zip(want) {
            let got = schedule.learning_rate(n);
            assert!((got - want).abs() < 1e-6, "step {n}: {got} against {want}");
        }
    }
}
