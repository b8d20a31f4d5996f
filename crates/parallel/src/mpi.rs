//! Collectives of MPI (`rsmpi`).
//!
//! MPI is called by one thread at a time. An MPI error ends the job, as is MPI's default; a rank
//! that hears nothing of the others for too long ends itself, and the launcher then ends the rest:
//! a cut link may not close its connections for a quarter of an hour.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::mpi::collective::{CommunicatorCollectives, Root, SystemOperation};
use ::mpi::datatype::{Partition, PartitionMut};
use ::mpi::environment::{Threading, Universe};
use ::mpi::point_to_point::send_receive_into;
use ::mpi::topology::{Communicator, SimpleCommunicator};

use super::transport::{Transport, Wait};
use super::watch::{REMEDY, Watch, leave, tell};
use crate::error::{ParallelError, Result};

/// MPI's world.
pub(super) struct Mpi {
    rank: usize,
    size: usize,
    watch: Arc<Watch>,
    /// Ends MPI when dropped.
    _universe: Mutex<Universe>,
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
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        let watch = Watch::start(move |limit, is_patient| expired(rank, limit, is_patient))?;
        Ok(Self { rank, size, watch, _universe: Mutex::new(universe) })
    }

    /// Runs a collective under the watchdog's eyes.
    fn watched<T>(&self, collective: impl FnOnce(&SimpleCommunicator) -> T) -> T {
        self.watch.over(|| collective(&SimpleCommunicator::world()))
    }
}

/// Ends this rank, which hears nothing of the others. A patient one waits: MPI cannot tell who works.
fn expired(rank: usize, limit: Duration, is_patient: bool) {
    if is_patient {
        return;
    }
    let seconds = limit.as_secs_f64();
    let problem = format!(
        "rank {rank}: no answer of the other ranks for {seconds:.0} s: a process or a link is gone"
    );
    tell(&problem, REMEDY);
    // MPI is busy in the other thread: the launcher sees the exit and ends the rest.
    leave(1);
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

    fn watched(&self, wait: Wait, _: &[usize], work: &mut dyn FnMut()) {
        self.watch.over_within(wait.most(), work);
    }

    fn set_timeout(&self, limit: Duration) {
        self.watch.set_limit(limit);
    }

    fn set_patient(&self, is_patient: bool) {
        self.watch.set_patient(is_patient);
    }
}
