//! Learning-rate multiplier of pretraining: constant, then down. Computed before the step, on the
//! 0-based step index `n`.
//!
//! - by steps, over `I` with a warmdown of `W`: 1 while `n < max(I − W, 0)`, then `(I − n) / W`;
//! - by wall clock: the time left over what `W` steps take so far, at most 1;
//! - by the fraction `p` of the budget that is spent: 1, then over the last `share` down to `floor`,
//!   linearly or as `1 − sqrt`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Form of the last part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// A straight line.
    #[default]
    Linear,
    /// `1 − sqrt(x)`
    Sqrt,
}

/// By steps.
pub fn by_steps(step: u64, iterations: u64, warmdown: u64) -> f64 {
    if step < iterations.saturating_sub(warmdown) || warmdown == 0 {
        return 1.0;
    }
    iterations.saturating_sub(step) as f64 / warmdown as f64
}

/// By wall clock; `step` steps took `elapsed_ms`, of `cap_ms` in all.
pub fn by_wall_clock(step: u64, elapsed_ms: f64, cap_ms: f64, warmdown: u64) -> f64 {
    let step_ms = elapsed_ms / step.max(1) as f64;
    let warmdown_ms = warmdown as f64 * step_ms;
    let left = (cap_ms - elapsed_ms).max(0.0);
    if left <= warmdown_ms { left / warmdown_ms.max(1e-9) } else { 1.0 }
}

/// By the spent fraction of the budget.
pub fn by_fraction(progress: f64, share: f64, floor: f64, decay: Decay) -> f64 {
    let into = ((progress - (1.0 - share)) / share.max(1e-9)).clamp(0.0, 1.0);
    let lost = match decay {
        Decay::Linear => into,
        Decay::Sqrt => into.sqrt(),
    };
    floor + (1.0 - floor) * (1.0 - lost)
}

/// Momentum on its way from `start` to `end` over `warmup` steps, by the 0-based step index.
pub fn momentum(step: u64, start: f64, end: f64, warmup: u64) -> f64 {
    if warmup == 0 {
        return end;
    }
    // One product and one sum of shares: the published rounding.
    let share = (step as f64 / warmup as f64).min(1.0);
    (1.0 - share) * start + share * end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-12, "{got} {want}");
    }

    #[test]
    fn steps_go_down_at_the_end() {
        for (step, iterations, warmdown, want) in [
            (69, 100, 30, 1.0),
            (70, 100, 30, 1.0),
            (71, 100, 30, 29.0 / 30.0),
            (99, 100, 30, 1.0 / 30.0),
            (0, 100, 400, 0.25),
            (99, 100, 400, 0.0025),
            (49, 50, 0, 1.0),
            (120, 100, 30, 0.0),
        ] {
            close(by_steps(step, iterations, warmdown), want);
        }
    }

    #[test]
    fn wall_clock_estimates_what_is_left() {
        for (step, elapsed, warmdown, want) in [
            (0, 0.0, 1200, 1.0),
            (1, 900.0, 1200, 0.554_722_222_222_222_2),
            (12_500, 544_250.0, 1200, 1.0),
            (13_500, 587_790.0, 1200, 0.233_693_155_718_879_2),
            (13_780, 600_010.0, 1200, 0.0),
        ] {
            close(by_wall_clock(step, elapsed, 600_000.0, warmdown), want);
        }
    }

    #[test]
    fn fractions_end_at_the_floor() {
        close(by_fraction(0.4, 0.5, 0.1, Decay::Linear), 1.0);
        close(by_fraction(0.75, 0.5, 0.1, Decay::Linear), 0.55);
        close(by_fraction(0.625, 0.5, 0.1, Decay::Sqrt), 0.55);
        close(by_fraction(1.0, 0.5, 0.1, Decay::Sqrt), 0.1);
        close(by_fraction(0.9, 0.0, 0.1, Decay::Linear), 1.0);
    }

    #[test]
    fn momentum_warms_up() {
        close(momentum(0, 0.85, 0.95, 500), 0.85);
        close(momentum(250, 0.85, 0.95, 500), 0.9);
        close(momentum(9999, 0.92, 0.99, 1500), 0.99);
        close(momentum(0, 0.92, 0.99, 0), 0.99);
    }
}
