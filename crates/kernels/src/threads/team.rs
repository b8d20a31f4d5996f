//! Steps of tens of microseconds, shared out between a leader and threads that spin for them.
//!
//! A work-stealing pool splits a step in halves, and a thread that waits for the last half falls
//! asleep; waking it costs as much as the step. Here indices are handed out by an atomic each, and
//! nobody sleeps.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Rounds of waiting for others' last tasks between two that leave the core to them.
const POLITENESS: u32 = 256;

/// What is left of one member's indices: the first in the high half, the end in the low one.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Share(AtomicU64);

impl Share {
    fn set(&self, first: usize, end: usize) {
        self.0.store((first as u64) << 32 | end as u64, Ordering::Relaxed);
    }

    /// Takes the first index, or the last.
    fn take(&self, last: bool) -> Option<usize> {
        let left = |both: u64| {
            let (first, end) = (both >> 32, both & u64::from(u32::MAX));
            (first < end).then_some((first, end))
        };
        let rest = |both: u64| {
            let (first, end) = left(both)?;
            Some(if last { first << 32 | (end - 1) } else { (first + 1) << 32 | end })
        };
        let before = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).ok()?;
        let (first, end) = left(before)?;
        Some(if last { end - 1 } else { first } as usize)
    }
}

type Task<'f> = dyn Fn(usize) + Sync + 'f;

/// A leader and its helpers.
pub(super) struct Team {
    /// One for every member, the leader's first.
    shares: Box<[Share]>,
    /// Members so far.
    members: AtomicUsize,
    /// Whether a helper has gone.
    has_lost: AtomicBool,
    /// Odd while a job is open.
    turn: AtomicUsize,
    /// Helpers that may hold the job.
    inside: AtomicUsize,
    job: UnsafeCell<Option<&'static Task<'static>>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the job is written by the leader alone, while it is closed and no helper is inside, and
// read by helpers that are inside and saw it open after their entry: `Closing` waits for them.
unsafe impl Sync for Team {}

/// A helper's place in a team, which it leaves in the end.
pub(super) struct Member<'t> {
    team: &'t Team,
    place: usize,
    /// The last turn of which nothing was left.
    done: usize,
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        self.team.has_lost.store(true, Ordering::Relaxed);
    }
}

/// Closes a job, also when the leader's part of it panics.
struct Closing<'t>(&'t Team);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.turn.fetch_add(1, Ordering::SeqCst);
        let mut rounds = 0_u32;
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(POLITENESS) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

impl Team {
    /// Of at most `members` threads.
    pub(super) fn new(members: usize) -> Self {
        Self {
            shares: (0..members).map(|_| Share::default()).collect(),
            members: AtomicUsize::new(1),
            has_lost: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        }
    }

    /// A helper joins, if there is a place.
    pub(super) fn join(&self) -> Option<Member<'_>> {
        let place = self.members.fetch_add(1, Ordering::Relaxed);
        (place < self.shares.len()).then(|| Member { team: self, place, done: 0 })
    }

    /// Whether a helper has gone: what is shared out may stay with the leader.
    pub(super) fn has_lost_helpers(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// Runs `f` for every index below `tasks`. The leader alone calls it, never inside of itself.
    ///
    /// # Panics
    /// - a task does; all others have run or will not run then
    pub(super) fn run(&self, tasks: usize, f: &Task<'_>) {
        assert!(u32::try_from(tasks).is_ok(), "too many tasks");
        let panic = || self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Of an earlier job in which the leader panicked as well.
        drop(panic());
        let members = self.shares.len();
        for (place, share) in self.shares.iter().enumerate() {
            share.set(place * tasks / members, (place + 1) * tasks / members);
        }
        // SAFETY: `Closing` ends before `f` does, and after it no helper holds the reference. Nobody
        // else touches the cell: the job is closed, and helpers were waited for.
        unsafe {
            let lasting = std::mem::transmute::<&Task<'_>, &'static Task<'static>>(f);
            *self.job.get() = Some(lasting);
        }
        self.turn.fetch_add(1, Ordering::SeqCst);
        let closing = Closing(self);
        self.work(0, f);
        drop(closing);
        if let Some(panic) = panic() {
            resume_unwind(panic);
        }
    }

    /// Takes part in the open job; whether there was anything to do.
    pub(super) fn help(&self, member: &mut Member<'_>) -> bool {
        let turn = self.turn.load(Ordering::Acquire);
        if turn.is_multiple_of(2) || turn == member.done {
            return false;
        }
        self.inside.fetch_add(1, Ordering::SeqCst);
        // A job that is open now stays so until this thread leaves.
        let turn = self.turn.load(Ordering::SeqCst);
        let mut helped = false;
        if !turn.is_multiple_of(2) {
            // SAFETY: as said where `Sync` is.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                match catch_unwind(AssertUnwindSafe(|| self.work(member.place, job))) {
                    Ok(worked) => helped = worked,
                    Err(panic) => {
                        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                    }
                }
            }
            member.done = turn;
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
        helped
    }

    /// Own indices from the front, neighbouring ones one after the other, then others' from the back.
    fn work(&self, place: usize, f: &Task<'_>) -> bool {
        let mut worked = false;
        let members = self.shares.len();
        for from in 0..members {
            let share = &self.shares[(place + from) % members];
            while let Some(index) = share.take(from > 0) {
                f(index);
                worked = true;
            }
        }
        worked
    }
}
