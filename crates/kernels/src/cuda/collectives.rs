//! Exchange of tensors between processes, where the tensors lie.

use std::fmt::Debug;

use candle_core::{DType, Device, Result, Tensor};

/// Processes that exchange tensors without a copy to main memory. All make the same calls in the same
/// order, one at a time, with as many values of the same type: f32, bf16 or f16.
pub trait DeviceRanks: Debug + Send + Sync {
    /// This process, from 0.
    fn rank(&self) -> usize;

    /// Processes.
    fn size(&self) -> usize;

    /// Where this process's tensors lie.
    fn device(&self) -> Device;

    /// Sums of everybody's tensors, the same bits on all. The order of the sums is the library's.
    ///
    /// # Errors
    /// - a tensor is of another type or device, or there is no memory for the sums
    /// - a process is gone or does not answer; no later call works then
    fn all_reduce(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>>;

    /// This process's block of everybody's values, summed: `[N, ..]` → `[..]`, a block for each of the `N`
    /// processes.
    ///
    /// # Errors
    /// - as [`Self::all_reduce`], or there is not one block a process
    fn reduce_scatter(&self, blocks: &Tensor) -> Result<Tensor>;

    /// Starts to gather everybody's values, beside what the device computes. No other call is made until
    /// the gathering is finished or dropped.
    ///
    /// # Errors
    /// - as [`Self::all_reduce`]
    fn start_all_gather(&self, own: &[Tensor]) -> Result<Box<dyn Gathering>>;

    /// Everybody's values: for each tensor `[..]` a tensor `[N, ..]`, in the order of the processes.
    ///
    /// # Errors
    /// - as [`Self::all_reduce`]
    fn all_gather(&self, own: &[Tensor]) -> Result<Vec<Tensor>> {
        self.start_all_gather(own)?.finish()
    }

    /// Whether a tensor lies where these processes exchange, and is of a type that they exchange.
    fn takes(&self, tensor: &Tensor) -> bool {
        matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
            && tensor.device().same_device(&self.device())
    }
}

/// Values under way.
pub trait Gathering: Send {
    /// Waits for the values: for each tensor `[..]` a tensor `[N, ..]`, in the order of the processes.
    ///
    /// # Errors
    /// - a process is gone or does not answer; no later call works then
    fn finish(self: Box<Self>) -> Result<Vec<Tensor>>;
}
