//! Time that a training works. A process that rests while answers are written is stopped by the system, and
//! clocks go on meanwhile: what counts are the beats of a thread that is stopped with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use longdraft_models::weights::atomic::write_atomically;
use longdraft_train::stage::{Event, Observer};

/// Name of the file with the milliseconds so far.
const FILE: &str = "worked";
/// Time between two beats, and most that counts as such.
const BEAT: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_millis(500);

/// Counts the time of all processes that worked on a training.
pub(super) struct Clock {
    file: PathBuf,
    milliseconds: Arc<AtomicU64>,
}

impl Clock {
    /// Goes on from what a training's folder tells; it beats until the process ends.
    /// It fails where the system gives no thread.
    pub(super) fn start(training: &Path) -> std::io::Result<Self> {
        let file = training.join(FILE);
        let before = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        let milliseconds = Arc::new(AtomicU64::new(before.unwrap_or(0)));
        let counter = Arc::clone(&milliseconds);
        std::thread::Builder::new().name("clock".to_owned()).spawn(move || {
            let mut last = Instant::now();
            loop {
                std::thread::sleep(BEAT);
                let beat = last.elapsed();
                last += beat;
                counter.fetch_add(beat.min(LONGEST).as_millis() as u64, Ordering::Relaxed);
            }
        })?;
        Ok(Self { file, milliseconds })
    }

    /// Time so far.
    pub(super) fn worked(&self) -> Duration {
        Duration::from_millis(self.milliseconds.load(Ordering::Relaxed))
    }

    fn save(&self) {
        // Without it a training that is killed has a little more time.
        let text = self.milliseconds.load(Ordering::Relaxed).to_string();
        let _ = write_atomically(&self.file, text.as_bytes());
    }
}

/// Ends a training's steps when their time is over.
pub(super) struct Budget<'a> {
    pub(super) clock: &'a Clock,
    pub(super) most: Duration,
}

impl Observer for Budget<'_> {
    fn on_event(&mut self, event: Event<'_>) {
        if matches!(event, Event::Saved(_)) {
            self.clock.save();
        }
    }

    fn should_stop(&self) -> bool {
        self.clock.worked() >= self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_adds_up_over_processes_and_ends_the_steps() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join(FILE), "60000").expect("file");
        let clock = Clock::start(folder.path()).expect("started");
        let budget = |seconds| Budget { clock: &clock, most: Duration::from_secs(seconds) };
        assert!(budget(60).should_stop() && !budget(6000).should_stop());
        while clock.worked() == Duration::from_mins(1) {
            std::thread::sleep(BEAT);
        }
        budget(60).on_event(Event::Saved(folder.path()));
        let again = Clock::start(folder.path()).expect("started");
        assert!(again.worked() > Duration::from_mins(1));
    }
}
