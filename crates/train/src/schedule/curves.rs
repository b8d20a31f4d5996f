//! Factors of the base rate at optimizer step `n`, from 1, of `T`.

use super::Schedule;

/// `W = max(1, round(ratio · T))`, `n/W` up to W, then the cosine.
pub(super) fn warmup_cosine(schedule: &Schedule, n: u64) -> f64 {
    let warmup = (share(schedule).round() as u64).max(1);
    if n <= warmup {
        return n as f64 / warmup as f64;
    }
    cosine(schedule.floor_ratio, (n - warmup) as f64 / rest(schedule, warmup))
}

/// DeepSpeed's WarmupCosineLR: `W = max(2, ⌊ratio · T⌋)`; step 1 at 0, then with `k = n − 2`:
/// `k/W` below W (so step 2 is 0 again), the cosine of `(k − W + 1)/max(1, T − W)` from there.
pub(super) fn deepspeed(schedule: &Schedule, n: u64) -> f64 {
    if n <= 1 {
        return 0.0;
    }
    let warmup = (share(schedule).floor() as u64).max(2);
    let k = n - 2;
    if k < warmup {
        return k as f64 / warmup as f64;
    }
    cosine(schedule.floor_ratio, (k - warmup + 1) as f64 / rest(schedule, warmup))
}

/// EAGLE-3's public trainer: with `k = n − 1` and `W = ⌊ratio · T⌋`, `(k+1)/W` below W, then
/// `½(1 + cos(π(k−W)/(T−W)))`: the peak comes twice, and the last rate is above 0.
pub(super) fn cosine_to_zero(schedule: &Schedule, n: u64) -> f64 {
    let warmup = share(schedule).floor() as u64;
    let k = n.saturating_sub(1);
    if k < warmup {
        return n as f64 / warmup as f64;
    }
    cosine(0.0, (k - warmup) as f64 / rest(schedule, warmup))
}

/// The same warm-up, then flat.
pub(super) fn flat_after_warmup(schedule: &Schedule, n: u64) -> f64 {
    let warmup = share(schedule).floor() as u64;
    if n < warmup { n as f64 / warmup as f64 } else { 1.0 }
}

/// Steps of the warm-up, not rounded.
fn share(schedule: &Schedule) -> f64 {
    schedule.warmup_ratio * schedule.warmup_of as f64
}

/// Steps after the warm-up.
fn rest(schedule: &Schedule, warmup: u64) -> f64 {
    schedule.steps.saturating_sub(warmup).max(1) as f64
}

/// `f + (1−f) · ½(1 + cos(π x))` for progress `x` in 0..1.
fn cosine(floor: f64, progress: f64) -> f64 {
    let progress = progress.clamp(0.0, 1.0);
    floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    #[test]
    fn twenty_steps_have_the_published_rates() {
        // DeepSpeed's come two steps later.
        let plain: [f64; 20] = [
            0.5, 1.0, 0.992_405, 0.969_849, 0.933_019, 0.883_034, 0.821_412, 0.750_025, 0.671_043,
            0.586_865, 0.500_05, 0.413_235, 0.329_057, 0.250_075, 0.178_688, 0.117_066, 0.067_081,
            0.030_251, 0.007_695, 0.000_1,
        ];
        let deepspeed = [&[0.0, 0.0, 0.5][..], &plain[2..19]].concat();
        let eagle3: [f64; 20] = [
            0.5, 1.0, 1.0, 0.992_404, 0.969_846, 0.933_013, 0.883_022, 0.821_394, 0.75, 0.67101,
            0.586_824, 0.5, 0.413_176, 0.32899, 0.25, 0.178_606, 0.116_978, 0.066_987, 0.030_154,
            0.007_596,
        ];
        let flat = [&[0.5][..], &[1.0; 19][..]].concat();
        for (kind, want) in [
            (Kind::WarmupCosine, &plain[..]),
            (Kind::DeepspeedWarmupCosine, &deepspeed[..]),
            (Kind::Eagle3Cosine, &eagle3[..]),
            (Kind::ConstantAfterWarmup, &flat[..]),
        ] {
            assert_eq!(want.len(), 20);
            let schedule = Schedule::new(kind, 1.0, 20);
            let bound = if kind == Kind::ConstantAfterWarmup { 1e-12 } else { 1e-6 };
            for (n, want) in (1..).zip(want) {
                let got = schedule.learning_rate(n);
                assert!((got - want).abs() < bound, "{kind:?} {n}: {got} against {want}");
            }
        }
    }

    #[test]
    fn runs_too_short_for_a_warm_up_run_at_the_base_rate() {
        let rate = Schedule::new(Kind::WarmupCosine, 2.0, 1).learning_rate(1);
        assert!((rate - 2.0).abs() < 1e-12);
        for kind in [Kind::Eagle3Cosine, Kind::ConstantAfterWarmup] {
            let schedule = Schedule { warmup_ratio: 0.015, ..Schedule::new(kind, 1.0, 10) };
            assert!((schedule.learning_rate(1) - 1.0).abs() < 1e-12);
        }
    }
}
