//! Learning rate by optimizer step `n = 1..T`.

mod curves;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Ratio of the last rate to the base rate.
pub const FLOOR_RATIO: f64 = 1e-4;

/// Share of steps spent warming up.
pub const WARMUP_RATIO: f64 = 0.1;

/// Which curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Linear warm-up from `base/W` at step 1, cosine down to the floor at step T.
    #[default]
    WarmupCosine,
    /// DeepSpeed's WarmupCosineLR as the published runs used it, with two steps at rate 0.
    DeepspeedWarmupCosine,
    /// EAGLE-3's public trainer: warm-up, then cosine down to 0; the floor is not used.
    Eagle3Cosine,
    /// The same warm-up, then the base rate.
    ConstantAfterWarmup,
    /// The base rate always.
    Constant,
}

/// A schedule over a known number of steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Curve.
    pub kind: Kind,
    /// Largest rate.
    pub base: f64,
    /// T
    pub steps: u64,
    /// Steps that the warm-up is a share of: T, but for a run that was extended since it began.
    pub warmup_of: u64,
    /// Share of steps spent warming up.
    pub warmup_ratio: f64,
    /// Ratio of the last rate to the base rate.
    pub floor_ratio: f64,
}

impl Schedule {
    /// A schedule with the published warm-up and floor.
    pub fn new(kind: Kind, base: f64, steps: u64) -> Self {
        Self {
            kind,
            base,
            steps,
            warmup_of: steps,
            warmup_ratio: WARMUP_RATIO,
            floor_ratio: FLOOR_RATIO,
        }
    }

    /// The same schedule to another end; the warm-up stays.
    #[must_use]
    pub fn extended_to(self, steps: u64) -> Self {
        Self { steps, ..self }
    }

    /// What becomes of the learning rate where a run of this schedule, after `done` steps, takes up a
    /// longer one.
    pub fn describe_extension(&self, longer: &Self, done: u64) -> String {
        let (next, last) = (done + 1, longer.steps);
        let now = longer.learning_rate(next);
        let change = if done < self.steps {
            let before = self.learning_rate(next);
            format!("the learning rate of step {next} becomes {now:.3e}, not {before:.3e}")
        } else {
            let before = self.learning_rate(done);
            format!(
                "the learning rate goes from {before:.3e} at step {done} to {now:.3e} at the next"
            )
        };
        let rest = match self.kind {
            Kind::Constant | Kind::ConstantAfterWarmup => "and stays".to_owned(),
            _ => format!("and falls to {:.3e} at step {last}", longer.learning_rate(last)),
        };
        format!("{} steps become {last}: {change}, {rest}; the warm-up is as before", self.steps)
    }

    /// Rate of optimizer step `n`, from 1.
    pub fn learning_rate(&self, n: u64) -> f64 {
        self.base
            * match self.kind {
                Kind::Constant => 1.0,
                Kind::Eagle3Cosine => curves::cosine_to_zero(self, n),
                Kind::ConstantAfterWarmup => curves::flat_after_warmup(self, n),
                Kind::WarmupCosine => curves::warmup_cosine(self, n),
                Kind::DeepspeedWarmupCosine => curves::deepspeed(self, n),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extended_schedule_keeps_its_warm_up_and_says_what_becomes_of_the_rate() {
        for kind in [Kind::WarmupCosine, Kind::DeepspeedWarmupCosine, Kind::Eagle3Cosine] {
            let short = Schedule::new(kind, 1e-3, 100);
            let long = short.extended_to(1000);
            for step in 1..=10 {
                assert!((short.learning_rate(step) - long.learning_rate(step)).abs() < 1e-15);
            }
            assert!(long.learning_rate(101) > 0.9e-3, "{kind:?}");
        }
        let cosine = Schedule::new(Kind::WarmupCosine, 1e-3, 100);
        assert_eq!(
            cosine.describe_extension(&cosine.extended_to(200), 100),
            "100 steps become 200: the learning rate goes from 1.000e-7 at step 100 to 5.331e-4 at the \
             next, and falls to 1.000e-7 at step 200; the warm-up is as before"
        );
        assert!(cosine.describe_extension(&cosine.extended_to(200), 50).starts_with(
            "100 steps become 200: the learning rate of step 51 becomes 8.894e-4, not 5.696e-4"
        ));
        let flat = Schedule::new(Kind::Constant, 1e-3, 100);
        let told = flat.describe_extension(&flat.extended_to(101), 100);
        assert!(
            told.contains("from 1.000e-3 at step 100 to 1.000e-3 at the next, and stays"),
            "{told}"
        );
    }
}
