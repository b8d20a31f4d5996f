//! How much a rank exchanges with the others, and how long that takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::transport::Transport;

/// What a rank exchanged so far. Time includes the wait for slower ranks, and that of gathers which
/// run beside the computation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes that came from other ranks.
    pub received_bytes: u64,
    /// Seconds inside of collectives.
    pub seconds: f64,
}

impl Traffic {
    /// What came on top of an earlier reading.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            received_bytes: self.received_bytes - earlier.received_bytes,
            seconds: self.seconds - earlier.seconds,
        }
    }
}

/// Sums of a process, shared by the worlds that it belongs to.
#[derive(Debug, Default)]
pub(super) struct Meter {
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Meter {
    pub(super) fn read(&self) -> Traffic {
        Traffic {
            received_bytes: self.bytes.load(Ordering::Relaxed),
            seconds: self.nanoseconds.load(Ordering::Relaxed) as f64 * 1e-9,
        }
    }
}

/// A transport whose collectives are counted.
pub(super) struct Metered {
    transport: Arc<dyn Transport>,
    meter: Arc<Meter>,
}

impl Metered {
    pub(super) fn new(transport: Arc<dyn Transport>, meter: Arc<Meter>) -> Self {
        Self { transport, meter }
    }

    /// Runs a collective that brings `bytes` from other ranks.
    fn count(&self, bytes: usize, collective: impl FnOnce(&dyn Transport)) {
        let started = Instant::now();
        collective(self.transport.as_ref());
        let took = started.elapsed().as_nanos() as u64;
        self.meter.nanoseconds.fetch_add(took, Ordering::Relaxed);
        if self.size() > 1 {
            self.meter.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

impl Transport for Metered {
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
        let received = if root == self.rank() { 0 } else { bytes.len() };
        self.count(received, |transport| transport.broadcast(root, bytes));
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        self.count(all.len() - own.len(), |transport| transport.all_gather(own, all));
    }

    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]) {
        let others = received.len() - receive[self.rank()];
        self.count(others, |transport| transport.all_to_all(bytes, send, received, receive));
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        let others = size_of_val(values) - size_of_val(own);
        self.count(others, |transport| transport.sum_blocks(values, own));
    }

    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]) {
        let count = received.len();
        self.count(count, |transport| transport.send_receive(to, bytes, from, received));
    }

    fn abort(&self, code: u8) -> ! {
        self.transport.abort(code)
    }

    fn set_timeout(&self, limit: Duration) {
        self.transport.set_timeout(limit);
    }
}
