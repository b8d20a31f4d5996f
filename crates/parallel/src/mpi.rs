//! Collectives of MPI (`rsmpi`).
//!
//! MPI is called by one thread at a time. An MPI error ends the job, as is MPI's default; a rank
//! that hears nothing of the others for too long ends itself, and the launcher then ends the rest:
//! a cut link may not close its connections for a quarter of an hour.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ::mpi::collective::{CommunicatorCollectives, Root, SystemOperation};
use ::mpi::datatype::{Partition, PartitionMut};
use ::mpi::environment::{Threading, Universe};
use ::mpi::point_to_point::send_receive_into;
use ::mpi::topology::{Communicator, SimpleCommunicator};

use super::transport::Transport;
use crate::error::{ParallelError, Result};

/// Between two looks of the watchdog.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time of no collective.
const IDLE: u64 = u64::MAX;

/// MPI's world.
pub(super) struct Mpi {
    rank: usize,
    size: usize,
    watch: Arc<Watch>,
    /// Ends MPI when dropped.
    _universe: Mutex<Universe>,
}

/// What the watchdog looks at, in milliseconds.
struct Watch {
    start: Instant,
    limit: AtomicU64,
    /// Start of the collective that runs, or [`IDLE`].
    since: AtomicU64,
}

impl Mpi {
    /// Joins the world that the launcher started.
    pub(super) fn connect() -> Result<Self> {
        let fail = |problem: &str| ParallelError::Ranks { problem: problem.to_owned() };
        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| fail("MPI is already in use by this process"))?;
        if threading < Threading::Serialized {
            return Err(fail("this MPI cannot be called from a thread of a pool"));
        }
        let world = SimpleCommunicator::world();
        let watch = Arc::new(Watch {
            start: Instant::now(),
            limit: AtomicU64::new(IDLE),
            since: AtomicU64::new(IDLE),
        });
        let mpi = Self {
            rank: world.rank() as usize,
            size: world.size() as usize,
            watch: Arc::clone(&watch),
            _universe: Mutex::new(universe),
        };
        let rank = mpi.rank;
        std::thread::Builder::new()
            .name("watchdog".to_owned())
            .spawn(move || watch.guard(rank))
            .map_err(|error| fail(&format!("cannot start a thread: {error}")))?;
        Ok(mpi)
    }

    /// Runs a collective under the watchdog's eyes.
    fn watched<T>(&self, collective: impl FnOnce(&SimpleCommunicator) -> T) -> T {
        self.watch.since.store(self.watch.now(), Ordering::Relaxed);
        let result = collective(&SimpleCommunicator::world());
        self.watch.since.store(IDLE, Ordering::Relaxed);
        result
    }
}

impl Watch {
    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    fn guard(&self, rank: usize) {
        loop {
            std::thread::sleep(LOOK_EVERY);
            let (since, limit) =
                (self.since.load(Ordering::Relaxed), self.limit.load(Ordering::Relaxed));
            if since != IDLE && self.now().saturating_sub(since) > limit {
                // Nothing can be told where stderr is gone.
                let _ = writeln!(
                    std::io::stderr(),
                    "error: rank {rank}: no answer of the other ranks for {:.0} s: a process or a \
                     link is gone\nhint: the same command goes on from the last checkpoint; \
                     parallel.timeout_seconds sets the wait",
                    limit as f64 / 1000.0
                );
                // MPI is busy in the other thread: the launcher sees the exit and ends the rest.
                std::process::exit(1);
            }
        }
    }
}

/// MPI's counts.
fn counts(lengths: &[usize]) -> (Vec<i32>, Vec<i32>) {
    let starts = lengths.iter().scan(0, |end, length| {
        let start = *end;
        *end += *length as i32;
        Some(start)
    });
    (lengths.iter().map(|length| *length as i32).collect(), starts.collect())
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn barrier(&self) {
        self.watched(CommunicatorCollectives::barrier);
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        self.watched(|world| world.process_at_rank(root as i32).broadcast_into(bytes));
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        self.watched(|world| world.all_gather_into(own, all));
    }

    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let ((sent, sent_at), (got, got_at)) = (counts(send), counts(receive));
        let bytes = Partition::new(bytes, sent, sent_at);
        let mut received = PartitionMut::new(received, got, got_at);
        self.watched(|world| world.all_to_all_varcount_into(&bytes, &mut received));
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        self.watched(|world| {
            world.reduce_scatter_block_into(values, own, SystemOperation::sum());
        });
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        self.watched(|world| {
            let (to, from) = (world.process_at_rank(to as i32), world.process_at_rank(from as i32));
            send_receive_into(bytes, &to, received, &from);
        });
    }

    fn abort(&self, code: u8) -> ! {
        SimpleCommunicator::world().abort(i32::from(code))
    }

    fn watched(&self, work: &mut dyn FnMut()) {
        self.watched(|_| work());
    }

    fn set_timeout(&self, limit: Duration) {
        self.watch.limit.store(limit.as_millis() as u64, Ordering::Relaxed);
    }
}
