//! What a rank sends and how long it waits in collectives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::transport::{Transport, Wait};

/// Counters of a rank, from its start on. Seconds include the wait for slower ranks, and gathers
/// that run beside the computation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes for other ranks, as if every pair talked directly: rings send as much.
    pub sent_bytes: u64,
    /// Seconds in collectives: moving bytes, and waiting for ranks that come later.
    pub seconds: f64,
}

impl std::ops::Sub for Traffic {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes - earlier.sent_bytes,
            seconds: self.seconds - earlier.seconds,
        }
    }
}

/// Sums of a process, shared by the worlds that it belongs to.
#[derive(Debug, Default)]
pub(super) struct Meter {
    sent_bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Meter {
    pub(super) fn add_sent(&self, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Traffic {
        Traffic {
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            seconds: 1e-9 * self.nanoseconds.load(Ordering::Relaxed) as f64,
        }
    }
}

/// A transport whose collectives are counted.
pub(super) struct Counted {
    transport: Arc<dyn Transport>,
    meter: Arc<Meter>,
}

impl Counted {
    pub(super) fn new(transport: Arc<dyn Transport>, meter: Arc<Meter>) -> Self {
        Self { transport, meter }
    }

    /// Runs a collective in which this rank sends so many bytes.
    fn count(&self, bytes: usize, collective: impl FnOnce(&dyn Transport)) {
        let started = Instant::now();
        collective(self.transport.as_ref());
        let nanoseconds = started.elapsed().as_nanos() as u64;
        self.meter.add_sent(bytes);
        self.meter.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn others(&self) -> usize {
        self.size() - 1
    }
}

impl Transport for Counted {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn barrier(&self) {
        self.count(0, |transport| transport.barrier());
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) {
        let sent = if root == self.rank() { bytes.len() * self.others() } else { 0 };
        self.count(sent, |transport| transport.broadcast(root, bytes));
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        self.count(own.len() * self.others(), |transport| transport.all_gather(own, all));
    }

    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let sent = bytes.len() - send[self.rank()];
        self.count(sent, |transport| transport.all_to_all(bytes, send, received, receive));
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        let sent = size_of_val(own) * self.others();
        self.count(sent, |transport| transport.sum_blocks(values, own));
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        let sent = if to == self.rank() { 0 } else { bytes.len() };
        self.count(sent, |transport| transport.send_receive(to, bytes, from, received));
    }

    fn abort(&self, code: u8) -> ! {
        self.transport.abort(code)
    }

    fn set_timeout(&self, limit: Duration) {
        self.transport.set_timeout(limit);
    }

    fn set_patient(&self, is_patient: bool) {
        self.transport.set_patient(is_patient);
    }

    fn watched(&self, wait: Wait, among: &[usize], work: &mut dyn FnMut()) {
        self.count(0, |transport| transport.watched(wait, among, work));
    }
}
