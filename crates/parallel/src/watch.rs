//! A watchdog over the waits for other ranks.
//!
//! A cut link may not close its connections for a quarter of an hour, and a rank may hang: the thread that waits
//! cannot tell, another one looks at its clock.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{ParallelError, Result};

/// Longest wait for other ranks where no other one is configured, and until a configuration is read.
pub(super) const LONGEST_WAIT: Duration = Duration::from_mins(30);

/// Between two looks of the watchdog.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What drivers and libraries may take at a process's end.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Time of no collective.
const IDLE: u64 = u64::MAX;

/// What the watchdog looks at, in milliseconds.
pub(super) struct Watch {
    start: Instant,
    limit: AtomicU64,
    /// What the wait that runs may take at most, where it has a limit of its own; else [`IDLE`].
    most: AtomicU64,
    /// Start of the collective that runs, or [`IDLE`].
    since: AtomicU64,
    /// Whether others may work for as long as they like.
    is_patient: AtomicBool,
}

impl Watch {
    /// Starts the watchdog with [`LONGEST_WAIT`]. `expired` is called when a wait has taken longer than the limit. It is
    /// told the limit, and whether the wait is patient. Where it returns, the wait begins anew.
    /// The start fails where there is no thread for it.
    pub(super) fn start(expired: impl Fn(Duration, bool) + Send + 'static) -> Result<Arc<Self>> {
        let (limit, is_patient) = (AtomicU64::new(millis(LONGEST_WAIT)), AtomicBool::new(false));
        let [most, since] = [IDLE; 2].map(AtomicU64::new);
        let watch = Arc::new(Self { start: Instant::now(), limit, most, since, is_patient });
        let watched = Arc::downgrade(&watch);
        let guard = move || {
            while let Some(watch) = watched.upgrade() {
                // Read before the look: a wait that ends meanwhile is then no long one.
                let (since, relaxed) = (watch.since.load(Ordering::Relaxed), Ordering::Relaxed);
                let is_patient = watch.is_patient.load(Ordering::Acquire);
                if let Some(limit) = watch.exceeded(watch.now()) {
                    expired(limit, is_patient);
                    // The wait may have ended meanwhile.
                    let _ = watch.since.compare_exchange(since, watch.now(), relaxed, relaxed);
                }
                drop(watch);
                std::thread::sleep(LOOK_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(guard);
        let problem = |error| format!("cannot start a thread: {error}");
        thread.map_err(|error| ParallelError::Ranks { problem: problem(error) })?;
        Ok(watch)
    }

    /// Sets the longest wait.
    pub(super) fn set_limit(&self, limit: Duration) {
        self.limit.store(millis(limit), Ordering::Relaxed);
    }

    /// Sets whether others may work for as long as they like.
    pub(super) fn set_patient(&self, is_patient: bool) {
        self.is_patient.store(is_patient, Ordering::Release);
    }

    /// Runs a collective under the watchdog's eyes.
    pub(super) fn over<T>(&self, collective: impl FnOnce() -> T) -> T {
        self.since.store(self.now(), Ordering::Relaxed);
        let result = collective();
        self.since.store(IDLE, Ordering::Relaxed);
        result
    }

    /// The same for a wait that may take `most` or the limit, whichever is less.
    pub(super) fn over_within<T>(&self, most: Option<Duration>, wait: impl FnOnce() -> T) -> T {
        self.most.store(most.map_or(IDLE, millis), Ordering::Relaxed);
        let result = self.over(wait);
        self.most.store(IDLE, Ordering::Relaxed);
        result
    }

    fn now(&self) -> u64 {
        millis(self.start.elapsed())
    }

    /// The limit, if a wait is longer at this time.
    fn exceeded(&self, now: u64) -> Option<Duration> {
        let since = self.since.load(Ordering::Relaxed);
        let limit = self.limit.load(Ordering::Relaxed).min(self.most.load(Ordering::Relaxed));
        let is_long = since != IDLE && now.saturating_sub(since) > limit;
        is_long.then(|| Duration::from_millis(limit))
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// What to do where ranks are lost.
pub(super) const REMEDY: &str =
    "the same command goes on from the last checkpoint; parallel.timeout_seconds sets the wait";

static TELLER: OnceLock<fn(&str, &str)> = OnceLock::new();

/// From here on `tell` is told why this process ends, and what to do about it; stderr without it.
pub fn set_teller(tell: fn(&str, &str)) {
    // The first one holds.
    let _ = TELLER.set(tell);
}

/// Tells why this process ends, and what to do about it.
pub(super) fn tell(problem: &str, remedy: &str) {
    match TELLER.get() {
        Some(tell) => tell(problem, remedy),
        // Nothing can be told where stderr is gone.
        None => drop(writeln!(std::io::stderr(), "error: {problem}\nhint: {remedy}")),
    }
}

/// Ends this process. What drivers and libraries do then may wait for a device that waits for ranks which are gone: after a
/// while the process is cut off.
pub(super) fn leave(code: u8) -> ! {
    let cut_off = || {
        std::thread::sleep(ENDS_WITHIN);
        std::process::abort()
    };
    // Where there is no thread for it, the end has to come by itself.
    let _ = std::thread::Builder::new().name("end".to_owned()).spawn(cut_off);
    std::process::exit(i32::from(code))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn only_a_wait_that_lasts_is_told() {
        let (tell, told) = channel();
        let expired = move |limit, is_patient| {
            let _ = tell.send((limit, is_patient));
        };
        let watch = Watch::start(expired).expect("a thread");
        watch.set_limit(Duration::from_millis(1));
        // Nothing waits, and a wait that ends before the first look is none.
        watch.over(|| ());
        assert!(told.recv_timeout(2 * LOOK_EVERY).is_err());
        let heard = || told.recv_timeout(Duration::from_mins(1)).expect("expired");
        assert_eq!(watch.over(heard), (Duration::from_millis(1), false));
        // A wait that goes on is told again.
        watch.set_patient(true);
        while told.try_recv().is_ok() {}
        let both = watch.over(|| [heard(), heard()]);
        assert_eq!(both, [(Duration::from_millis(1), true); 2]);
    }

    #[test]
    fn a_wait_is_limited_before_a_limit_is_set() {
        let watch = Watch::start(|_, _| ()).expect("a thread");
        let late = millis(LONGEST_WAIT);
        assert_eq!(watch.exceeded(late + 1), None);
        watch.over(|| {
            let since = watch.since.load(Ordering::Relaxed);
            assert_eq!(watch.exceeded(since + late), None);
            assert_eq!(watch.exceeded(since + late + 1), Some(LONGEST_WAIT));
        });
    }

    #[test]
    fn a_wait_with_a_limit_of_its_own_takes_the_shorter_one() {
        let watch = Watch::start(|_, _| ()).expect("a thread");
        let [short, long] = [5, 90].map(Duration::from_mins);
        // What is told of a wait that has lasted for 31 minutes.
        let told = |most| {
            watch.over_within(most, || {
                let since = watch.since.load(Ordering::Relaxed);
                watch.exceeded(since + millis(LONGEST_WAIT) + 60_000)
            })
        };
        assert_eq!(told(Some(short)), Some(short));
        assert_eq!([told(Some(long)), told(None)], [Some(LONGEST_WAIT); 2]);
        watch.set_limit(long);
        assert_eq!(told(None), None, "the limit of the wait before it is gone");
    }
}
