//! Moving bytes between ranks. What is made of them stands in [`super::world`].

use std::time::Duration;

/// What ranks wait for in another way than by a transport's collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// A collective of their devices.
    Exchange,
    /// Until their devices have found each other.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "devices meet by NCCL alone"))]
    Meeting,
}

impl Wait {
    /// What it may take at most, whatever other waits may. Devices look for each other at the start, when all ranks are
    /// there: where they do not find each other in this time, they never do.
    pub(super) fn most(self) -> Option<Duration> {
        match self {
            Self::Exchange => None,
            Self::Meeting => Some(Duration::from_mins(10)),
        }
    }
}

/// The collectives that everything else is built from. Every rank calls the same ones in the same
/// order; lengths agree where nothing else is said. Where a transport has no better way they are made
/// of messages between two ranks: blocks travel in rings, so that every rank sends and receives each
/// block once, which is what the best all-gather needs.
pub(super) trait Transport: Send + Sync {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// Sends bytes to one rank and fills `received` with those of another; only these three are
    /// concerned, and each makes the call that belongs to it.
    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]);

    /// Ends all ranks with an exit code.
    fn abort(&self, code: u8) -> !;

    /// Ends the job when a collective takes longer.
    fn set_timeout(&self, limit: Duration);

    /// Lets a collective take longer where the others only work.
    fn set_patient(&self, is_patient: bool);

    /// Waits for all.
    fn barrier(&self) {
        self.all_gather(&[0], &mut vec![0; self.size()]);
    }

    /// Sends one rank's bytes to all.
    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        let mut all = vec![0; bytes.len() * self.size()];
        self.all_gather(bytes, &mut all);
        bytes.copy_from_slice(&all[root * bytes.len()..][..bytes.len()]);
    }

    /// Everybody's bytes in the order of the ranks.
    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        let size = own.len();
        all[self.rank() * size..][..size].copy_from_slice(own);
        let mut block = own.to_vec();
        for step in 1..self.size() {
            let mut received = vec![0; size];
            self.send_receive(self.next(1), &block, self.previous(1), &mut received);
            all[self.previous(step) * size..][..size].copy_from_slice(&received);
            block = received;
        }
    }

    /// The first `send[0]` bytes go to rank 0, the next `send[1]` to rank 1 and so on; `received`
    /// is laid out by `receive` in the same way.
    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let (out, into) = (starts(send), starts(receive));
        for step in 0..self.size() {
            let (to, from) = (self.next(step), self.previous(step));
            let sent = &bytes[out[to]..][..send[to]];
            let place = &mut received[into[from]..][..receive[from]];
            if step == 0 {
                place.copy_from_slice(sent);
            } else {
                self.send_receive(to, sent, from, place);
            }
        }
    }

    /// Sums equal blocks, one a rank, in any order; a rank receives its own.
    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        let blocks = vec![size_of_val(own); self.size()];
        let mut received = vec![0.0_f32; values.len()];
        let (bytes, into) = (bytemuck::cast_slice(values), bytemuck::cast_slice_mut(&mut received));
        self.all_to_all(bytes, &blocks, into, &blocks);
        own.fill(0.0);
        for values in received.chunks(own.len().max(1)) {
            own.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }

    /// Runs what waits for some ranks in another way, under the same limit or that of the wait, whichever is less.
    fn watched(&self, wait: Wait, among: &[usize], work: &mut dyn FnMut()) {
        let _ = (wait, among);
        work();
    }

    /// The rank `steps` after this one in the ring.
    fn next(&self, steps: usize) -> usize {
        (self.rank() + steps) % self.size()
    }

    /// The rank `steps` before this one in the ring.
    fn previous(&self, steps: usize) -> usize {
        (self.rank() + self.size() - steps) % self.size()
    }
}

/// Where each block begins.
fn starts(lengths: &[usize]) -> Vec<usize> {
    let starts = lengths.iter().scan(0, |end, length| {
        let start = *end;
        *end += length;
        Some(start)
    });
    starts.collect()
}

/// Runs what waits for all ranks as [`Transport::watched`] does.
pub(super) fn watched<T>(transport: &dyn Transport, wait: Wait, work: impl FnOnce() -> T) -> T {
    let all: Vec<usize> = (0..transport.size()).collect();
    let (mut work, mut result) = (Some(work), None);
    transport.watched(wait, &all, &mut || result = work.take().map(|work| work()));
    result.expect("every transport runs the work once")
}

/// A world of one.
pub(super) struct Alone;

impl Transport for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn send_receive(&self, _: usize, bytes: &[u8], _: usize, received: &mut [u8]) {
        received.copy_from_slice(bytes);
    }

    fn abort(&self, code: u8) -> ! {
        std::process::exit(i32::from(code))
    }

    fn set_timeout(&self, _: Duration) {}

    fn set_patient(&self, _: bool) {}
}
