//! The world of ranks.

mod collectives;

use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use longdraft_kernels::collectives::DeviceRanks;
use longdraft_models::target_model::Ranks;

use super::communicators::Communicators;
use super::group::Group;
use super::launcher::Launch;
use super::tcp::Tcp;
use super::traffic::{Counted, Meter, Traffic};
use super::transport::{Alone, Transport};
use super::watched::Watched;
use crate::error::{ParallelError, Result};

pub use collectives::Element;

/// Processes that work on one run. Every rank calls the same collectives in the same order; an
/// error that only some ranks meet must end all of them ([`Self::abort`]).
#[derive(Clone)]
pub struct World {
    transport: Arc<dyn Transport>,
    meter: Arc<Meter>,
    hosts: Arc<[String]>,
    /// Number of its first rank among all that were started.
    base: usize,
    /// This process's place on its machine, where a launcher tells it.
    local_rank: Option<usize>,
    /// The ranks' GPUs, if they exchange tensors there.
    gpus: Option<Arc<Watched>>,
    /// Those of these ranks, and of groups of them, on GPUs.
    communicators: Arc<Communicators>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "rank {} of {} on {}", self.rank(), self.size(), self.host())
    }
}

impl World {
    /// One process.
    pub fn single() -> Self {
        Self::over(Arc::new(Alone))
    }

    /// The processes that a launcher started together; one alone without a launcher.
    ///
    /// # Errors
    /// - as [`Self::of`] and [`Launch::read`]
    pub fn connect() -> Result<Self> {
        Self::of(&Launch::read()?)
    }

    /// The processes of a launch.
    ///
    /// # Errors
    /// - as [`Launch::local_rank`]
    /// - MPI started several, but the build has no MPI; or MPI cannot be used
    /// - the ranks do not meet
    pub fn of(launch: &Launch) -> Result<Self> {
        let local_rank = launch.local_rank()?;
        Ok(Self { local_rank, ..Self::met(launch)? })
    }

    fn met(launch: &Launch) -> Result<Self> {
        match launch {
            Launch::Alone => Ok(Self::single()),
            Launch::Tcp(place) => Ok(Self::over(Arc::new(Tcp::connect(place)?))),
            #[cfg(feature = "mpi")]
            Launch::Mpi(size) => {
                let mpi = super::mpi::Mpi::connect()?;
                if *size > 1 && mpi.size() != *size {
                    // Each would train alone, in one run directory.
                    let known = mpi.size();
                    return Err(ParallelError::Ranks {
                        problem: format!(
                            "a launcher started {size} processes, and this build's MPI knows {known}: start them with its own mpirun"
                        ),
                    });
                }
                Ok(Self::over(Arc::new(mpi)))
            }
            #[cfg(not(feature = "mpi"))]
            Launch::Mpi(1) => Ok(Self::single()),
            #[cfg(not(feature = "mpi"))]
            Launch::Mpi(size) => Err(ParallelError::Ranks {
                problem: format!("MPI started {size} processes, but this build has no MPI"),
            }),
        }
    }

    /// This process as the first of `ranks` on this machine, of which `command` starts the others. They come by
    /// [`Self::connect`].
    ///
    /// # Errors
    /// - they cannot be started, or end before they have come
    pub fn launch(ranks: usize, command: &dyn Fn() -> std::io::Result<Command>) -> Result<Self> {
        if ranks <= 1 {
            return Ok(Self::single());
        }
        Ok(Self::over(Arc::new(Tcp::launch(ranks, command)?)))
    }

    pub(super) fn over(transport: Arc<dyn Transport>) -> Self {
        let meter = Arc::new(Meter::default());
        let transport = Arc::new(Counted::new(transport, Arc::clone(&meter)));
        Self::named(transport, meter)
    }

    /// Asks the ranks for their machines.
    fn named(transport: Arc<dyn Transport>, meter: Arc<Meter>) -> Self {
        let (hosts, communicators) = (Arc::from([]), Arc::default());
        let (local_rank, gpus) = (None, None);
        let mut world = Self { transport, meter, hosts, base: 0, local_rank, gpus, communicators };
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let hosts = world.gather_varied(host.as_bytes());
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        world.hosts = hosts.into_iter().map(text).collect();
        world
    }

    /// Some ranks as a world of their own; each of `members`, ascending, calls it. All of them keep their GPUs.
    ///
    /// # Panics
    /// - this process is not one of them
    #[must_use]
    pub fn group(&self, members: Range<usize>) -> Self {
        if members.len() == 1 && self.size() > 1 {
            return Self { local_rank: self.local_rank, ..Self::single() };
        }
        let gpus = self.gpus.clone().filter(|_| members.len() == self.size());
        let base = self.base + members.start;
        let group = Group::new(Arc::clone(&self.transport), members.collect());
        let communicators = Arc::clone(&self.communicators);
        // The world counts what its groups exchange.
        let group = Self::named(Arc::new(group), Arc::clone(&self.meter));
        Self { base, local_rank: self.local_rank, gpus, communicators, ..group }
    }

    /// The group of `size` neighbours that this rank is in, as `parallel.{key}` says; all ranks call it.
    /// It fails where the ranks do not divide into such groups.
    pub(super) fn neighbours(&self, key: &str, size: usize) -> Result<Self> {
        let ranks = self.size();
        if !ranks.is_multiple_of(size) {
            let problem =
                format!("`parallel.{key}: {size}` does not divide the {ranks} ranks into groups");
            return Err(ParallelError::Unsupported { problem });
        }
        let first = self.rank() / size * size;
        Ok(self.group(first..first + size))
    }

    /// The same ranks, which exchange tensors where they lie.
    pub(super) fn over_gpus(&self, gpus: Arc<dyn DeviceRanks>) -> Self {
        let (transport, meter) = (Arc::clone(&self.transport), Arc::clone(&self.meter));
        self.over_watched(Watched::new(gpus, transport, Some(meter)))
    }

    /// The same over devices that exchange tensors by this world.
    #[cfg(any(test, feature = "threads"))]
    pub(super) fn over_itself(&self, gpus: Arc<dyn DeviceRanks>) -> Self {
        self.over_watched(Watched::new(gpus, Arc::clone(&self.transport), None))
    }

    fn over_watched(&self, gpus: Watched) -> Self {
        Self { gpus: Some(Arc::new(gpus)), ..self.clone() }
    }

    /// The ranks' GPUs, if they exchange tensors there.
    pub(super) fn gpus(&self) -> Option<&dyn DeviceRanks> {
        self.gpus.as_deref().map(|gpus| gpus as &dyn DeviceRanks)
    }

    /// Those of these ranks, and of groups of them, on GPUs.
    pub(super) fn communicators(&self) -> &Communicators {
        &self.communicators
    }

    /// This process, from 0.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of the first of these processes among all that were started.
    pub(super) fn base(&self) -> usize {
        self.base
    }

    /// Processes.
    pub fn size(&self) -> usize {
        self.transport.size()
    }

    /// Whether this is the process that shows, logs and writes what is written once.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Name of this process's machine.
    pub fn host(&self) -> &str {
        self.hosts.get(self.rank()).map_or("", String::as_str)
    }

    /// Names of the ranks' machines.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// This process's place among those of its machine, from 0: it chooses the GPU. Where no launcher tells it, host
    /// names do.
    pub fn local_rank(&self) -> usize {
        self.local_rank.unwrap_or_else(|| local_rank_of(self.rank(), &self.hosts))
    }

    /// What this process has sent to others and how long it has waited since its start, groups
    /// included.
    pub fn traffic(&self) -> Traffic {
        self.meter.read()
    }

    /// Ends the job when other ranks do not answer for so long; half an hour before this is called.
    pub fn set_timeout(&self, limit: Duration) {
        self.transport.set_timeout(limit);
    }

    /// Waits for ranks that may work for as long as they like, as the first one where it alone scores a model. Over TCP
    /// the job still ends where one of them does not answer any more.
    pub fn patiently<T>(&self, wait: impl FnOnce(&Self) -> T) -> T {
        self.transport.set_patient(true);
        let result = wait(self);
        self.transport.set_patient(false);
        result
    }

    /// Runs what waits until the ranks' devices have found each other, under the same limit or ten minutes, whichever is
    /// less.
    #[cfg(feature = "nccl")]
    pub(super) fn meeting<T>(&self, work: impl FnOnce() -> T) -> T {
        super::transport::watched(self.transport.as_ref(), super::transport::Wait::Meeting, work)
    }

    /// Ends all ranks with an exit code.
    pub fn abort(&self, code: u8) -> ! {
        self.transport.abort(code)
    }
}

impl Ranks for World {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        self.transport.all_gather(own, all);
    }

    fn sum_parts(&self, values: &[f32], counts: &[usize]) -> Vec<f32> {
        self.reduce_scatter(values, counts)
    }

    fn devices(&self) -> Option<&dyn DeviceRanks> {
        self.gpus()
    }
}

fn local_rank_of(rank: usize, hosts: &[String]) -> usize {
    hosts.iter().take(rank).filter(|host| Some(*host) == hosts.get(rank)).count()
}

#[cfg(test)]
mod tests {
    use super::super::tcp;
    use super::super::threads::in_threads;
    use super::{World, local_rank_of};

    fn over_sockets<T: Send>(size: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
        tcp::tests::in_threads(size, |transport| run(World::over(transport)))
    }

    /// What each rank comes to, over threads and over sockets.
    fn in_both<T: Send>(size: usize, run: impl Fn(World) -> T + Sync) -> [Vec<T>; 2] {
        [in_threads(size, &run), over_sockets(size, &run)]
    }

    #[test]
    fn ranks_are_counted_machine_by_machine_however_they_are_placed() {
        let counted = |hosts: &[&str]| -> Vec<usize> {
            let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
            (0..hosts.len()).map(|rank| local_rank_of(rank, &hosts)).collect()
        };
        assert_eq!(counted(&["a", "a", "b", "b"]), [0, 1, 0, 1]);
        // Placed in turn: by global rank, a node with two GPUs would open one of them twice.
        assert_eq!(counted(&["a", "b", "a", "b"]), [0, 0, 1, 1]);
    }

    #[test]
    fn a_launcher_knows_places_that_host_names_do_not_tell() {
        let places = |told: Option<usize>| {
            in_threads(2, |world| {
                let world = World { local_rank: told.map(|first| first + world.rank()), ..world };
                let alone = world.group(world.rank()..world.rank() + 1);
                let whole = world.group(0..2);
                (world.local_rank(), whole.local_rank(), alone.local_rank())
            })
        };
        assert_eq!(places(Some(4)), [(4, 4, 4), (5, 5, 5)]);
        assert_eq!(places(None), [(0, 0, 0), (1, 1, 0)]);
    }

    #[test]
    fn collectives_follow_the_order_of_the_ranks() {
        for (size, all) in [1, 2, 3].map(|size| {
            let all = in_both(size, |world| {
                let rank = world.rank();
                let mut sums = [1.0_f64, rank as f64];
                world.all_reduce_sum(&mut sums);
                let mut largest = [rank as u64];
                world.all_reduce_max(&mut largest);
                let own: Vec<u64> = vec![rank as u64; rank];
                world.barrier();
                let texts = world.gather_json(&format!("r{rank}")).expect("texts");
                let last = world.size() - 1;
                let mut from_last = [rank as f32];
                world.broadcast(last, &mut from_last);
                assert_eq!(world.hosts().len(), world.size());
                (sums, largest[0], world.gather_varied(&own), texts, from_last[0])
            });
            (size, all)
        }) {
            let last = size - 1;
            for (sums, largest, varied, texts, from_last) in all.into_iter().flatten() {
                assert_eq!(sums.map(|sum| sum as usize), [size, (0..size).sum()]);
                assert_eq!((largest, from_last), (last as u64, last as f32));
                assert_eq!(varied, (0..size).map(|r| vec![r as u64; r]).collect::<Vec<_>>());
                assert_eq!(texts, (0..size).map(|r| format!("r{r}")).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn groups_are_worlds_that_do_not_wait_for_each_other() {
        let all = in_both(6, |world| {
            let first = world.rank() / 3 * 3;
            let group = world.group(first..first + 3);
            let rank = group.rank();
            assert_eq!((rank, group.size()), (world.rank() - first, 3));
            // The second group calls twice as often.
            for _ in 0..=first {
                group.barrier();
            }
            let mut sum = [world.rank() as f64];
            group.all_reduce_sum(&mut sum);
            let values: Vec<f32> = (0..4).map(|i| (10 * world.rank() + i) as f32).collect();
            let ordered = group.reduce_scatter(&values, &[1, 0, 3]);
            assert_eq!(group.reduce_scatter_by_library(&values, &[1, 0, 3]), ordered);
            let before = world.traffic();
            let last = group.of_first(world.rank() as u64);
            // Every rank sends what the two others are told.
            let exchanged = world.traffic() - before;
            assert!(exchanged.sent_bytes == 16 && exchanged.seconds > 0.0, "{exchanged:?}");
            (sum[0], group.gather_varied(&vec![world.rank() as u64; rank]), ordered, last)
        });
        let all = all.into_iter().flat_map(|all| all.into_iter().enumerate());
        for (rank, (sum, gathered, ordered, first)) in all {
            let base = rank / 3 * 3;
            assert_eq!(sum as usize, 3 * base + 3);
            let member = |i: usize| vec![(base + i) as u64; i];
            assert_eq!(gathered, (0..3).map(member).collect::<Vec<_>>());
            let at = |i: usize| (10 * (3 * base + 3) + 3 * i) as f32;
            let want = [vec![at(0)], vec![], vec![at(1), at(2), at(3)]];
            assert_eq!(ordered, want[rank % 3]);
            assert_eq!(first, base as u64);
        }
    }

    #[test]
    fn reduce_scatter_sums_uneven_parts_in_either_order() {
        // (1e8 + 1) - 1e8 loses the 1 in f32: the order shows.
        let values = [[1e8_f32, 1.0, 2.0], [1.0, 10.0, 20.0], [-1e8, 100.0, 200.0]];
        let counts = [1, 0, 2];
        let ordered = in_both(3, |world| world.reduce_scatter(&values[world.rank()], &counts));
        let others =
            in_both(3, |world| world.reduce_scatter_by_library(&values[world.rank()], &counts));
        for parts in ordered.iter().chain(&others) {
            assert!(parts[0].len() == 1 && parts[1].is_empty());
            assert_eq!(parts[2], [111.0, 222.0]);
        }
        let [ordered, over_sockets] = ordered;
        assert_eq!(ordered, over_sockets);
        assert_eq!(ordered[0], [(1e8_f32 + 1.0) + -1e8]);
    }

    #[test]
    fn large_blocks_of_all_cross_without_waiting_for_each_other() {
        // More than the buffers of a connection hold, from everybody to everybody.
        let count = 3 << 20;
        let all = over_sockets(3, |world| {
            let own = vec![world.rank() as f32; count];
            let gathered = world.all_gather(&own);
            let sums = world.reduce_scatter(&gathered, &[count, count, count]);
            let mut from_last = own;
            world.broadcast(2, &mut from_last);
            (gathered[0], gathered[3 * count - 1], sums[0], from_last[count - 1])
        });
        for (rank, (first, last, sum, from_last)) in all.into_iter().enumerate() {
            let ranks = [first, last, sum, from_last].map(|value| value as usize);
            assert_eq!(ranks, [0, 2, 3 * rank, 2]);
        }
    }
}
