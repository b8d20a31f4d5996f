//! When a checkpoint is due: after so many steps, and after so many minutes.

use std::time::{Duration, Instant};

use longdraft_parallel::World;

/// Counts from the last save.
pub struct SaveClock {
    steps: u64,
    /// None: only steps count.
    interval: Option<Duration>,
    last: Instant,
}

impl SaveClock {
    /// After every `steps` steps, and `minutes` after the last save (0: never).
    pub fn new(steps: u64, minutes: f64) -> Self {
        let interval = Duration::try_from_secs_f64(60.0 * minutes).ok();
        let interval = interval.filter(|interval| !interval.is_zero());
        Self { steps, interval, last: Instant::now() }
    }

    /// Whether to save after this step. The first rank's clock decides for all; every rank asks.
    pub fn is_due(&self, step: u64, world: &World) -> bool {
        let late = |interval| world.of_first(u64::from(self.last.elapsed() >= interval)) > 0;
        step.is_multiple_of(self.steps.max(1)) || self.interval.is_some_and(late)
    }

    /// Begins anew.
    pub fn saved(&mut self) {
        self.last = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longdraft_parallel::threads::in_threads;

    #[test]
    fn steps_and_minutes_are_counted() {
        let world = World::single();
        let by_steps = SaveClock::new(4, 0.0);
        let due: Vec<bool> = (1..=8).map(|step| by_steps.is_due(step, &world)).collect();
        assert_eq!(due, [false, false, false, true, false, false, false, true]);
        let mut by_time = SaveClock::new(1000, 1e-9);
        std::thread::sleep(Duration::from_millis(1));
        assert!(by_time.is_due(1, &world));
        by_time.interval = Some(Duration::from_hours(1));
        assert!(!by_time.is_due(1, &world));
        by_time.interval = Some(Duration::ZERO);
        by_time.saved();
        assert!(by_time.is_due(1, &world));
    }

    #[test]
    fn the_first_ranks_clock_decides_for_all() {
        for first_is_late in [false, true] {
            let due = in_threads(3, move |world| {
                let late = (world.rank() == 0) == first_is_late;
                let interval = if late { Duration::ZERO } else { Duration::from_hours(1) };
                let clock = SaveClock { interval: Some(interval), ..SaveClock::new(1000, 0.0) };
                clock.is_due(1, &world)
            });
            assert_eq!(due, [first_is_late; 3]);
        }
    }
}
