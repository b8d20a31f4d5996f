//! Threads that stay awake between short parallel steps.

mod team;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::Yield;
use rayon::prelude::*;

use crate::at_end::AtEnd;
use team::{Member, Team};

/// Rounds without work after which a thread goes back to sleep: some milliseconds.
const PATIENCE: u32 = 50_000;
/// Rounds without work between two that look into the pool and leave the core to others.
const POLITENESS: u32 = 64;

/// Whether somebody holds the pool awake.
static HELD: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The team that this thread leads and that is not at work.
    static LEADING: RefCell<Option<Arc<Team>>> = const { RefCell::new(None) };
}

/// Runs `f` while the threads of the current pool look for work instead of falling asleep.
///
/// A decoding pass is some hundred parallel steps of tens of microseconds each; waking a sleeping
/// thread takes as long as one of them. Threads that find nothing for some milliseconds sleep all
/// the same. Results do not depend on it.
pub fn awake<R>(f: impl FnOnce() -> R) -> R {
    let threads = rayon::current_num_threads();
    if threads < 2 || HELD.swap(true, Ordering::AcqRel) {
        return f();
    }
    let done = AtomicBool::new(false);
    let team = Arc::new(Team::new(threads));
    let (team, done) = (&team, &done);
    // A caller from outside of the pool works in the place of its first thread.
    let home = rayon::current_thread_index().unwrap_or(0);
    rayon::in_place_scope(|scope| {
        // Also when `f` panics, or the scope would wait for ever.
        let _released = AtEnd(|| {
            done.store(true, Ordering::Release);
            HELD.store(false, Ordering::Release);
        });
        scope.spawn_broadcast(move |_, thread| {
            if thread.index() != home
                && let Some(member) = team.join()
            {
                look_for_work(team, member, done);
            }
        });
        LEADING.set(Some(Arc::clone(team)));
        let _leading = AtEnd(|| {
            LEADING.take();
        });
        f()
    })
}

/// Runs `f` for every index below `tasks`, on the threads that are [`awake`] if this thread woke
/// them, else on the pool.
pub(crate) fn split(tasks: usize, f: impl Fn(usize) + Sync) {
    if tasks < 2 {
        (0..tasks).for_each(f);
        return;
    }
    // Taken: what a task splits up goes to the pool.
    match LEADING.take() {
        // Who has gone to sleep in a long step of one thread is woken by the pool.
        Some(team) if !team.has_lost_helpers() => Lent(Some(team)).run(tasks, &f),
        _ => (0..tasks).into_par_iter().for_each(&f),
    }
}

/// A team at work; it is led again after that.
struct Lent(Option<Arc<Team>>);

impl Lent {
    fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        if let Some(team) = &self.0 {
            team.run(tasks, f);
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        LEADING.set(self.0.take());
    }
}

/// Patience also ends a wait of a thread that came here in the middle of a step that the leader
/// waits for.
fn look_for_work(team: &Team, mut member: Member<'_>, done: &AtomicBool) {
    let mut idle = 0;
    while idle < PATIENCE && !done.load(Ordering::Acquire) {
        idle += 1;
        if team.help(&mut member) {
            idle = 0;
        } else if idle % POLITENESS > 0 {
            std::hint::spin_loop();
        } else if rayon::yield_now() == Some(Yield::Executed) {
            idle = 0;
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn sum() -> u64 {
        (0..1000_u64).into_par_iter().map(|i| (0..i % 7).into_par_iter().sum::<u64>()).sum()
    }

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("pool")
    }

    /// How often each index was run.
    fn runs(tasks: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        split(tasks, |index| {
            counts[index].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn steps_give_the_same_inside_and_outside_of_pools() {
        let expected = sum();
        assert_eq!(awake(|| awake(sum)), expected);
        for threads in [1, 2, 5] {
            assert_eq!(pool(threads).install(|| awake(sum)), expected);
        }
    }

    #[test]
    fn callers_inside_each_other_s_steps_all_end() {
        let expected = sum();
        let all = pool(4).install(|| {
            (0..64).into_par_iter().map(|_| awake(|| awake(sum) + sum())).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|sum| *sum == 2 * expected));
    }

    #[test]
    fn every_index_runs_once_wherever_it_is_split_up() {
        for threads in [1, 2, 3, 5] {
            pool(threads).install(|| {
                for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                    assert_eq!(runs(tasks), vec![1; tasks]);
                    // Many steps, so that helpers meet them at any moment.
                    awake(|| (0..200).for_each(|_| assert_eq!(runs(tasks), vec![1; tasks])));
                }
            });
        }
        // From outside of the pool.
        awake(|| (0..200).for_each(|_| assert_eq!(runs(40), vec![1; 40])));
    }

    #[test]
    fn helpers_that_fell_asleep_in_a_long_step_are_woken_for_the_next() {
        use std::time::{Duration, Instant};

        let began = Instant::now();
        let mut shared = false;
        // The leader alone is at work until the helper has lost its patience.
        while !shared && began.elapsed() < Duration::from_mins(1) {
            pool(2).install(|| {
                awake(|| {
                    while LEADING.with_borrow(|team| {
                        team.as_ref().is_some_and(|team| !team.has_lost_helpers())
                    }) {
                        std::hint::spin_loop();
                    }
                    let arrived = AtomicUsize::new(0);
                    split(2, |_| {
                        arrived.fetch_add(1, Ordering::AcqRel);
                        let until = Instant::now() + Duration::from_secs(5);
                        while arrived.load(Ordering::Acquire) < 2 && Instant::now() < until {
                            std::thread::yield_now();
                        }
                        // The first one waits in vain where nobody else takes the second.
                        if Instant::now() >= until {
                            arrived.fetch_add(2, Ordering::AcqRel);
                        }
                    });
                    shared = arrived.into_inner() == 2;
                });
            });
        }
        assert!(shared, "one thread ran both halves, time after time");
    }

    #[test]
    fn steps_within_steps_run_too() {
        pool(3).install(|| {
            awake(|| {
                let total = AtomicUsize::new(0);
                split(20, |_| {
                    total.fetch_add(runs(10).iter().sum(), Ordering::Relaxed);
                    total.fetch_add(usize::from(sum() > 0), Ordering::Relaxed);
                });
                assert_eq!(total.into_inner(), 220);
                assert_eq!(runs(30), vec![1; 30]);
            });
        });
    }

    #[test]
    fn a_panic_passes_and_lets_the_next_in() {
        let caught = catch_unwind(|| awake(|| panic!("on purpose")));
        assert!(caught.is_err());
        assert_eq!(awake(|| 3), 3);
    }

    #[test]
    fn a_panic_in_any_task_passes_behind_the_others() {
        pool(3).install(|| {
            awake(|| {
                for wrong in 0..30 {
                    let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
                    let step = || {
                        split(30, |index| {
                            begun.fetch_add(1, Ordering::Relaxed);
                            assert!(index != wrong, "on purpose");
                            ended.fetch_add(1, Ordering::Relaxed);
                        });
                    };
                    assert!(catch_unwind(AssertUnwindSafe(step)).is_err());
                    // Nobody works on it any more.
                    assert_eq!(begun.into_inner(), ended.into_inner() + 1);
                    assert_eq!(runs(30), vec![1; 30]);
                }
            });
        });
    }
}
