//! What the progress of training is counted in: the horizontal axes that the page's reader chooses
//! from.

use std::ops::Add;

/// A place in a training run, on every axis.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Place {
    /// Trained on since the start of the first stage.
    pub(crate) tokens: f64,
    /// Optimizer steps since then.
    pub(crate) steps: f64,
    /// Spent in these steps.
    pub(crate) seconds: f64,
}

impl Place {
    /// A place on the one axis of a chart that is not over training.
    pub(crate) fn fixed(x: f64) -> Self {
        Self { tokens: x, steps: x, seconds: x }
    }

    /// As seconds for [`TrainingAxis::Time`].
    pub(crate) fn on(self, axis: TrainingAxis) -> f64 {
        match axis {
            TrainingAxis::Tokens => self.tokens,
            TrainingAxis::Steps => self.steps,
            TrainingAxis::Time => self.seconds,
        }
    }

    /// The place a share of the way to another one.
    pub(crate) fn towards(self, other: Self, share: f64) -> Self {
        let between = |from: f64, to: f64| from + (to - from) * share;
        Self {
            tokens: between(self.tokens, other.tokens),
            steps: between(self.steps, other.steps),
            seconds: between(self.seconds, other.seconds),
        }
    }
}

impl Add for Place {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            steps: self.steps + other.steps,
            seconds: self.seconds + other.seconds,
        }
    }
}

/// A horizontal axis of charts over training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TrainingAxis {
    /// Training tokens.
    Tokens,
    /// Optimizer steps.
    Steps,
    /// Time in steps: evaluations, saving and pauses are left out.
    Time,
}

impl TrainingAxis {
    /// As the page offers it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Steps => "steps",
            Self::Time => "time",
        }
    }

    /// How a chart that reaches to `end` names its numbers, and how much one of them is.
    pub(crate) fn unit(self, end: f64) -> (&'static str, f64) {
        const MINUTE: f64 = 60.0;
        const HOUR: f64 = 3600.0;
        match self {
            Self::Tokens => ("training tokens", 1.0),
            Self::Steps => ("optimizer steps", 1.0),
            Self::Time if end >= 2.0 * HOUR => ("hours in steps", HOUR),
            Self::Time if end >= 2.0 * MINUTE => ("minutes in steps", MINUTE),
            Self::Time => ("seconds in steps", 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_told_in_units_that_read_well() {
        for (seconds, unit) in [
            (0.0, ("seconds in steps", 1.0)),
            (119.0, ("seconds in steps", 1.0)),
            (120.0, ("minutes in steps", 60.0)),
            (7200.0, ("hours in steps", 3600.0)),
        ] {
            assert_eq!(TrainingAxis::Time.unit(seconds), unit, "{seconds}");
        }
        assert_eq!(TrainingAxis::Steps.unit(1e6), ("optimizer steps", 1.0));
    }

    #[test]
    fn places_add_up_on_every_axis() {
        let place = |tokens, steps, seconds| Place { tokens, steps, seconds };
        let (one, two) = (place(100.0, 4.0, 8.0), place(300.0, 8.0, 10.0));
        assert_eq!(one.towards(two, 0.25), place(150.0, 5.0, 8.5));
        let sum = one + two;
        assert_eq!(sum, place(400.0, 12.0, 18.0));
        let fixed = Place::fixed(3.0).on(TrainingAxis::Time);
        let on = (sum.on(TrainingAxis::Steps), sum.on(TrainingAxis::Time), fixed);
        assert_eq!(on, (12.0, 18.0, 3.0));
    }
}
