//! Threads that stay awake between short parallel steps.

use std::sync::atomic::{AtomicBool, Ordering};

use rayon::Yield;

/// Rounds without work after which a thread goes back to sleep: some milliseconds.
const PATIENCE: u32 = 20_000;
/// Rounds without work between two that leave the core to others.
const POLITENESS: u32 = 64;

/// Whether somebody holds the pool awake.
static HELD: AtomicBool = AtomicBool::new(false);

/// Runs `f` while the threads of the current pool look for work instead of falling asleep.
///
/// A decoding pass is some hundred parallel steps of tens of microseconds each; waking a sleeping
/// thread takes as long as one of them. Threads that find nothing for some milliseconds sleep all
/// the same. Results do not depend on it.
pub fn awake<R>(f: impl FnOnce() -> R) -> R {
    let others = rayon::current_num_threads() > 1;
    if !others || HELD.swap(true, Ordering::AcqRel) {
        return f();
    }
    let done = AtomicBool::new(false);
    let home = rayon::current_thread_index();
    rayon::in_place_scope(|scope| {
        // Also when `f` panics, or the scope would wait for ever.
        let _released = Release(&done);
        scope.spawn_broadcast(|_, thread| {
            if Some(thread.index()) != home {
                look_for_work(&done);
            }
        });
        f()
    })
}

struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        HELD.store(false, Ordering::Release);
    }
}

/// Patience also ends a wait of a thread that came here in the middle of a step that `f` waits for.
fn look_for_work(done: &AtomicBool) {
    let mut idle = 0;
    while idle < PATIENCE && !done.load(Ordering::Acquire) {
        if rayon::yield_now() == Some(Yield::Executed) {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle % POLITENESS == 0 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    fn sum() -> u64 {
        (0..1000_u64).into_par_iter().map(|i| (0..i % 7).into_par_iter().sum::<u64>()).sum()
    }

    #[test]
    fn steps_give_the_same_inside_and_outside_of_pools() {
        let expected = sum();
        assert_eq!(awake(|| awake(sum)), expected);
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool");
            assert_eq!(pool.install(|| awake(sum)), expected);
        }
    }

    #[test]
    fn callers_inside_each_other_s_steps_all_end() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().expect("pool");
        let expected = sum();
        let all = pool.install(|| {
            (0..64).into_par_iter().map(|_| awake(|| awake(sum) + sum())).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|sum| *sum == 2 * expected));
    }

    #[test]
    fn a_panic_passes_and_lets_the_next_in() {
        let caught = std::panic::catch_unwind(|| awake(|| panic!("on purpose")));
        assert!(caught.is_err());
        assert_eq!(awake(|| 3), 3);
    }
}
