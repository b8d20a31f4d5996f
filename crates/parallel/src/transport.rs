//! Moving bytes between ranks. What is made of them stands in [`super::world`].

use std::time::Duration;

use candle_core::{Device, Tensor};

/// The collectives that everything else is built from. Every rank calls the same ones in the same
/// order; lengths agree where nothing else is said.
pub(super) trait Transport: Send + Sync {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// Waits for all.
    fn barrier(&self);

    /// Sends one rank's bytes to all.
    fn broadcast(&self, root: usize, bytes: &mut [u8]);

    /// Everybody's bytes in the order of the ranks.
    fn all_gather(&self, own: &[u8], all: &mut [u8]);

    /// The first `send[0]` bytes go to rank 0, the next `send[1]` to rank 1 and so on; `received`
    /// is laid out by `receive` in the same way.
    fn all_to_all(&self, bytes: &[u8], send: &[usize], received: &mut [u8], receive: &[usize]);

    /// Sums equal blocks, one a rank, in any order; a rank receives its own.
    fn sum_blocks(&self, values: &[f32], own: &mut [f32]);

    /// Sends bytes to one rank and fills `received` with those of another; only these three are
    /// concerned, and each makes the call that belongs to it.
    fn send_receive(&self, to: usize, bytes: &[u8], from: usize, received: &mut [u8]);

    /// Ends all ranks with an exit code.
    fn abort(&self, code: u8) -> !;

    /// Ends the job when a collective takes longer.
    fn set_timeout(&self, limit: Duration);

    /// Runs what waits for other ranks in another way, under the same limit.
    fn watched(&self, work: &mut dyn FnMut()) {
        work();
    }
}

/// Sums of tensors between ranks that have a GPU each, where they lie.
pub(super) trait GpuRanks: Send + Sync {
    /// This rank's GPU.
    fn device(&self) -> Device;

    /// Sums of everybody's f32 tensors, the same bits on every rank; all pass the same shapes in the
    /// same order. An error if the others do not answer within `limit`.
    fn sum(&self, tensors: &[Tensor], limit: Duration) -> candle_core::Result<Vec<Tensor>>;
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

    fn barrier(&self) {}

    fn broadcast(&self, _: usize, _: &mut [u8]) {}

    fn all_gather(&self, own: &[u8], all: &mut [u8]) {
        all.copy_from_slice(own);
    }

    fn all_to_all(&self, bytes: &[u8], _: &[usize], received: &mut [u8], _: &[usize]) {
        received.copy_from_slice(bytes);
    }

    fn sum_blocks(&self, values: &[f32], own: &mut [f32]) {
        own.copy_from_slice(values);
    }

    fn send_receive(&self, _: usize, bytes: &[u8], _: usize, received: &mut [u8]) {
        received.copy_from_slice(bytes);
    }

    fn abort(&self, code: u8) -> ! {
        std::process::exit(i32::from(code))
    }

    fn set_timeout(&self, _: Duration) {}
}
