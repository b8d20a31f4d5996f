//! How long work still takes, and how sure that is.

/// Parts of the work so far whose speeds are compared.
const PARTS: usize = 8;
/// Samples that count: older ones tell of other circumstances.
const RECENT: usize = 64;
/// Error of a speed of which only one part is known, and least and largest error, as shares.
const UNKNOWN: f64 = 0.5;
const ERRORS: (f64, f64) = (0.03, 0.8);
/// Error of the time of a phase that has not begun, as a share.
const PLANNED: f64 = 0.2;

/// Seconds that are left.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Left {
    /// As far as can be foreseen.
    pub seconds: f64,
    /// Lower end: the speed may change by as much as it did from part to part.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Left {
    /// Of a phase that was planned to take so long, after some of it.
    pub(crate) fn planned(seconds: f64, passed: f64) -> Self {
        let at = |seconds: f64| (seconds - passed).max(0.0);
        Self {
            seconds: at(seconds),
            low: at(seconds * (1.0 - PLANNED)),
            high: at(seconds * (1.0 + PLANNED)),
        }
    }

    /// Of work that has come so far at such times, in seconds, of `all`, seen `now`; none where it has
    /// not moved yet.
    pub(crate) fn of(samples: &[(f64, f64)], all: f64, now: f64) -> Option<Self> {
        let recent = &samples[samples.len().saturating_sub(RECENT)..];
        let (&(began, first), &(seen, done)) = (recent.first()?, recent.last()?);
        let (passed, moved) = (seen - began, done - first);
        if passed <= 0.0 || moved <= 0.0 {
            return None;
        }
        let whole = (all - done).max(0.0) * passed / moved;
        let error = error(recent).unwrap_or(UNKNOWN).clamp(ERRORS.0, ERRORS.1);
        let since = (now - seen).max(0.0);
        let at = |seconds: f64| (seconds - since).max(0.0);
        Some(Self {
            seconds: at(whole),
            low: at(whole / (1.0 + error)),
            high: at(whole / (1.0 - error)),
        })
    }

    /// No more than this.
    pub(crate) fn at_most(self, seconds: f64) -> Self {
        let most = seconds.max(0.0);
        Self { seconds: self.seconds.min(most), low: self.low.min(most), high: self.high.min(most) }
    }

    /// One after the other: errors need not cancel.
    pub(crate) fn then(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            low: self.low + other.low,
            high: self.high + other.high,
        }
    }
}

/// Standard deviation of the speeds of parts over their mean.
fn error(samples: &[(f64, f64)]) -> Option<f64> {
    let parts = PARTS.min((samples.len() - 1) / 2);
    if parts < 3 {
        return None;
    }
    let at = |part: usize| samples[part * (samples.len() - 1) / parts];
    let speeds: Vec<f64> = (0..parts)
        .map(|part| (at(part), at(part + 1)))
        .filter(|((from, _), (to, _))| to > from)
        .map(|((from, before), (to, after))| (after - before) / (to - from))
        .collect();
    let count = speeds.len() as f64;
    let mean = speeds.iter().sum::<f64>() / count;
    let variance = speeds.iter().map(|speed| (speed - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (count > 1.0 && mean > 0.0).then(|| variance.sqrt() / mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work at these speeds, a second each.
    fn samples(speeds: impl IntoIterator<Item = f64>) -> Vec<(f64, f64)> {
        let mut done = 0.0;
        let later = speeds.into_iter().enumerate().map(|(i, speed)| {
            done += speed;
            ((i + 1) as f64, done)
        });
        let later: Vec<(f64, f64)> = later.collect();
        [(0.0, 0.0)].into_iter().chain(later).collect()
    }

    #[test]
    fn steady_work_is_told_exactly_and_unsteady_work_widely() {
        let steady = samples([2.0; 40]);
        let left = Left::of(&steady, 100.0, 40.0).expect("it moves");
        assert!((left.seconds - 10.0).abs() < 1e-9, "{left:?}");
        assert!(left.low > 9.5 && left.high < 10.5, "{left:?}");
        let unsteady = samples((0..40).map(|i| if i / 5 % 2 == 0 { 1.0 } else { 3.0 }));
        let wide = Left::of(&unsteady, 100.0, 40.0).expect("it moves");
        assert!(wide.low < 7.5 && wide.high > 15.0, "{wide:?}");
        // What passed since the last sign counts.
        let later = Left::of(&steady, 100.0, 44.0).expect("it moves");
        assert!((later.seconds - 6.0).abs() < 1e-9);
        assert!(Left::of(&steady, 100.0, 400.0).expect("late").seconds < 1e-9);
    }

    #[test]
    fn little_is_known_at_the_beginning() {
        assert_eq!(Left::of(&[], 10.0, 0.0), None);
        assert_eq!(Left::of(&[(1.0, 1.0)], 10.0, 1.0), None);
        assert_eq!(Left::of(&[(1.0, 1.0), (9.0, 1.0)], 10.0, 9.0), None);
        let left = Left::of(&[(0.0, 0.0), (1.0, 1.0)], 11.0, 1.0).expect("one part");
        assert!((left.seconds - 10.0).abs() < 1e-9 && left.high > 15.0, "{left:?}");
        let capped = left.at_most(4.0).then(Left::planned(10.0, 0.0));
        assert_eq!((capped.low, capped.seconds, capped.high), (12.0, 14.0, 16.0));
    }
}
