//! Ranks that meet over TCP: no MPI is needed, by whatever they are started.
//!
//! Every rank has a connection to every other one. A rank that is gone, or hangs, is named with its machine, and all
//! end.

mod children;
mod greeting;
mod link;
mod rendezvous;
mod suspect;

use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::launcher::Place;
use super::transport::{Transport, Wait};
use super::watch::{REMEDY, Watch, tell};
use crate::error::{ParallelError, Result};
use children::Children;
use link::{Kind, Mail, News, Writer};

/// How long the news that all end may take.
const NEWS_WITHIN: Duration = Duration::from_secs(1);
const NEWS_TRAVEL: Duration = Duration::from_millis(100);
/// What a rank waits for itself and each one before it, until it tells what all notice: one tells, and ends the others.
const TURN: Duration = Duration::from_millis(300);
const LONGEST_TURN: Duration = Duration::from_secs(3);

/// A world over sockets.
pub(super) struct Tcp {
    job: Arc<Job>,
    watch: Arc<Watch>,
}

/// What the threads of a rank share.
struct Job {
    rank: usize,
    hosts: Vec<String>,
    mail: Arc<Mail>,
    /// The ways to the others.
    writers: Vec<Option<Arc<Writer>>>,
    children: Children,
    /// Whether the ranks' devices look for each other.
    is_meeting: AtomicBool,
    /// Held by the thread that ends this process: it tells why, once.
    ends: Mutex<()>,
}

impl Tcp {
    /// Meets the other ranks. It fails where they do not come, or contradict each other.
    pub(super) fn connect(place: &Place) -> Result<Self> {
        Self::meet(place, None, Children::default())
    }

    /// Starts further processes by a command, and is their first rank.
    /// It fails where they cannot be started, or end before they have come.
    pub(super) fn launch(
        size: usize,
        command: &dyn Fn() -> std::io::Result<Command>,
    ) -> Result<Self> {
        let (place, listener, children) = children::start(size, command)?;
        Self::meet(&place, Some(listener), children)
    }

    fn meet(place: &Place, listener: Option<TcpListener>, children: Children) -> Result<Self> {
        let met = rendezvous::meet(place, listener, &mut || children.are_all_there())?;
        let failed = |error: std::io::Error| ParallelError::Meeting {
            problem: format!("cannot listen to the other ranks: {error}"),
        };
        let way = |stream: &Option<TcpStream>| {
            let handle = stream.as_ref().map(TcpStream::try_clone).transpose()?;
            Ok(handle.map(|stream| Arc::new(Writer::new(stream))))
        };
        let writers = met.streams.iter().map(way).collect::<std::io::Result<Vec<_>>>();
        let job = Arc::new(Job {
            rank: place.rank,
            hosts: met.hosts,
            mail: Arc::new(Mail::new(place.size)),
            writers: writers.map_err(failed)?,
            children,
            is_meeting: AtomicBool::new(false),
            ends: Mutex::new(()),
        });
        for (rank, stream) in met.streams.into_iter().enumerate() {
            let (Some(stream), Some(writer)) = (stream, &job.writers[rank]) else { continue };
            let seen = Arc::clone(&job);
            let heard = move |news| match news {
                News::Abort(code) => seen.children.exit(code),
                News::Lost => seen.lost(rank),
            };
            link::listen(rank, stream, (&job.mail, writer), heard).map_err(failed)?;
        }
        let seen = Arc::clone(&job);
        let watch = Watch::start(move |limit, is_patient| seen.expired(limit, is_patient))?;
        Ok(Self { job, watch })
    }
}

impl Job {
    fn size(&self) -> usize {
        self.writers.len()
    }

    /// `rank 2 on node7`.
    fn name(&self, rank: usize) -> String {
        format!("rank {rank} on {}", self.hosts.get(rank).map_or("", String::as_str))
    }

    fn send(&self, to: usize, bytes: &[u8]) {
        let Some(writer) = &self.writers[to] else {
            return self.mail.put(to, bytes.to_vec());
        };
        self.mail.set_waits_for(&[to]);
        if writer.write(Kind::Data, 0, bytes).is_err() {
            self.lost(self.mail.lost(to));
        }
        self.mail.set_waits_for(&[]);
    }

    fn receive(&self, from: usize, into: &mut [u8]) {
        match self.mail.take(from) {
            Ok(bytes) if bytes.len() == into.len() => into.copy_from_slice(&bytes),
            Ok(bytes) => self.end(&format!(
                "{} sent {} bytes where {} were due: the ranks do not run the same",
                self.name(from),
                bytes.len(),
                into.len()
            )),
            Err(rank) => self.lost(rank),
        }
    }

    /// Ends all, for a rank is gone.
    fn lost(&self, rank: usize) -> ! {
        let how = self.children.end_of(rank).unwrap_or_else(|| "its connection closed".to_owned());
        self.end(&format!("{} is gone: {how}", self.name(rank)))
    }

    /// Tells why all end, and ends them.
    fn end(&self, why: &str) -> ! {
        let _ends = self.ends.lock();
        // A rank that ends all says so itself, and is heard before it is missed.
        let turn = TURN.saturating_mul(u32::try_from(self.rank + 1).unwrap_or(u32::MAX));
        std::thread::sleep(turn.min(LONGEST_TURN));
        let is_meeting = self.is_meeting.load(Ordering::Relaxed);
        let remedy = if is_meeting { "the same command tries again" } else { REMEDY };
        tell(&format!("rank {}: {why}", self.rank), remedy);
        self.abort(1)
    }

    fn abort(&self, code: u8) -> ! {
        for writer in self.writers.iter().flatten() {
            writer.write_within(Kind::Abort, u32::from(code), &[], NEWS_WITHIN);
            writer.close(Shutdown::Write);
        }
        // What is not read yet would take the news back with it.
        std::thread::sleep(NEWS_TRAVEL);
        self.children.exit(code)
    }
}

impl Transport for Tcp {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn size(&self) -> usize {
        self.job.size()
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        self.watch.over(|| {
            self.job.send(to, bytes);
            self.job.receive(from, received);
        });
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        self.watch.over(|| {
            if root != self.rank() {
                return self.job.receive(root, bytes);
            }
            for step in 1..self.size() {
                self.job.send(self.next(step), bytes);
            }
        });
    }

    fn abort(&self, code: u8) -> ! {
        self.job.abort(code)
    }

    fn set_timeout(&self, limit: Duration) {
        self.watch.set_limit(limit);
    }

    fn set_patient(&self, is_patient: bool) {
        self.watch.set_patient(is_patient);
    }

    fn watched(&self, wait: Wait, among: &[usize], work: &mut dyn FnMut()) {
        self.job.is_meeting.store(wait == Wait::Meeting, Ordering::Relaxed);
        self.watch.over_within(wait.most(), || {
            self.job.mail.set_waits_for(among);
            work();
            self.job.mail.set_waits_for(&[]);
        });
        self.job.is_meeting.store(false, Ordering::Relaxed);
        // Where another thread ends this process, it says why. What was waited for may have failed by that alone.
        drop(self.job.ends.lock());
    }
}

impl Drop for Tcp {
    /// Tells the others that nothing follows, and waits for the processes that this one started.
    fn drop(&mut self) {
        for writer in self.job.writers.iter().flatten() {
            writer.write_within(Kind::Bye, 0, &[], NEWS_WITHIN);
            writer.close(Shutdown::Write);
        }
        self.job.children.wait();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::group::Group;
    use super::*;

    /// Runs every rank of a job in a thread.
    pub(in super::super) fn in_threads<T: Send>(
        size: usize,
        run: impl Fn(Arc<dyn Transport>) -> T + Sync,
    ) -> Vec<T> {
        of_tcp(size, |tcp| run(Arc::new(tcp)))
    }

    pub(super) fn of_tcp<T: Send>(size: usize, run: impl Fn(Tcp) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let place = |rank| {
            let (address, job) = ("127.0.0.1".to_owned(), format!("test {port}"));
            Place { rank, size, address, port, job, is_local: true, is_child: false }
        };
        let mut listener = Some(listener);
        let (run, place) = (&run, &place);
        std::thread::scope(|scope| {
            let start = |rank| {
                let own = if rank == 0 { listener.take() } else { None };
                scope.spawn(move || {
                    let tcp = Tcp::meet(&place(rank), own, Children::default()).expect("met");
                    run(tcp)
                })
            };
            let threads: Vec<_> = (0..size).map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("the rank's thread")).collect()
        })
    }

    #[test]
    fn a_group_waits_for_its_own_members() {
        of_tcp(4, |tcp| {
            let tcp = Arc::new(tcp);
            if tcp.rank() % 2 == 0 {
                return;
            }
            let group = Group::new(Arc::clone(&tcp) as Arc<dyn Transport>, vec![1, 3]);
            let mut several = Vec::new();
            group.watched(Wait::Exchange, &[0, 1], &mut || several = tcp.job.mail.waits_for());
            assert_eq!(several, [1, 3]);
        });
    }
}
