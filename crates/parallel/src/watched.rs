//! Exchange between the ranks' devices, under the eyes of what watches their other waits.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Result, Tensor};
use longdraft_kernels::collectives::{DeviceRanks, Gathering};

use super::traffic::Meter;
use super::transport::{Transport, Wait, watched};

/// What NCCL calls an error that comes of another process's.
const OF_ANOTHER: &str = "ncclRemoteError";
/// In this time the other one tells its own error, and ends all.
const TELLS_WITHIN: Duration = Duration::from_secs(3);

/// The ranks' devices. A wait for others that takes too long ends the job as one of the transport does, which names
/// who does not answer.
pub(super) struct Watched {
    devices: Arc<dyn DeviceRanks>,
    transport: Arc<dyn Transport>,
    /// What they send is added to; `None` where it is counted already.
    meter: Option<Arc<Meter>>,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.devices, formatter)
    }
}

impl Watched {
    pub(super) fn new(
        devices: Arc<dyn DeviceRanks>,
        transport: Arc<dyn Transport>,
        meter: Option<Arc<Meter>>,
    ) -> Self {
        Self { devices, transport, meter }
    }

    /// Counts what a rank sends of tensors, so many times what falls to each of the others.
    fn count(&self, tensors: &[Tensor], times: usize) {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        let parts = times * tensors.iter().map(bytes).sum::<usize>() / self.size().max(1);
        if let Some(meter) = &self.meter {
            meter.add_sent(parts * (self.size() - 1));
        }
    }

    /// Runs what waits for the other ranks. What this one has left to do is not their time.
    fn over<T>(&self, collective: impl FnOnce(&dyn DeviceRanks) -> Result<T>) -> Result<T> {
        self.devices.device().synchronize()?;
        let collective = || collective(self.devices.as_ref());
        after_others(watched(self.transport.as_ref(), Wait::Exchange, collective))
    }
}

impl DeviceRanks for Watched {
    fn rank(&self) -> usize {
        self.devices.rank()
    }

    fn size(&self) -> usize {
        self.devices.size()
    }

    fn device(&self) -> Device {
        self.devices.device()
    }

    fn all_reduce(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        // A part of the sums is made of everybody's, and handed to all.
        self.count(tensors, 2);
        self.over(|devices| devices.all_reduce(tensors))
    }

    fn reduce_scatter(&self, blocks: &Tensor) -> Result<Tensor> {
        self.count(std::slice::from_ref(blocks), 1);
        self.over(|devices| devices.reduce_scatter(blocks))
    }

    /// The device goes on with what it computes. The first time the ranks' devices look for each other.
    fn start_all_gather(&self, own: &[Tensor]) -> Result<Box<dyn Gathering>> {
        self.count(own, self.size());
        let transport = Arc::clone(&self.transport);
        let start = || self.devices.start_all_gather(own);
        let started = watched(transport.as_ref(), Wait::Exchange, start);
        let gathering = after_others(started)?;
        Ok(Box::new(WatchedGathering { gathering, transport }))
    }
}

struct WatchedGathering {
    gathering: Box<dyn Gathering>,
    transport: Arc<dyn Transport>,
}

impl Gathering for WatchedGathering {
    fn finish(self: Box<Self>) -> Result<Vec<Tensor>> {
        let Self { gathering, transport } = *self;
        after_others(watched(transport.as_ref(), Wait::Exchange, || gathering.finish()))
    }
}

/// The same result; an error that came of another rank's only if that one says nothing.
fn after_others<T>(result: Result<T>) -> Result<T> {
    if result.as_ref().is_err_and(|error| error.to_string().contains(OF_ANOTHER)) {
        std::thread::sleep(TELLS_WITHIN);
    }
    result
}
