//! Sums of tensors over the GPUs of several processes, by NCCL.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use candle_core::cuda_backend::cudarc::nccl::result::{
    NcclError, all_reduce, comm_abort, comm_init_rank, get_uniqueid, group_end, group_start,
};
use candle_core::cuda_backend::cudarc::nccl::sys;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, Device, Error, Result, Storage, Tensor, bail};

use super::wait::until;

/// Bytes that name the GPUs' common work.
pub const NAME_BYTES: usize = 128;

/// One process's part of the common work.
pub struct Communicator {
    device: CudaDevice,
    /// `None` once it failed. Else left to the end of the process: freeing waits for the other processes.
    handle: Mutex<Option<Handle>>,
}

struct Handle(sys::ncclComm_t);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutex around it ensures.
unsafe impl Send for Handle {}

impl Handle {
    /// What went wrong in the background, if anything.
    fn failure(&self) -> Option<String> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is open, and the state is written.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.0, &raw mut state) };
        let state = if asked == sys::ncclResult_t::ncclSuccess { state } else { asked };
        match state {
            sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => None,
            state => Some(described("ncclAllReduce", state)),
        }
    }

    /// Ends what still runs on the GPU, which would wait for ever.
    fn abort(self) {
        // SAFETY: the communicator is open and not used again. The error that led here is the one to tell.
        let _ = unsafe { comm_abort(self.0) };
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("device", &self.device).finish_non_exhaustive()
    }
}

/// A name for common work, which the process that asks tells the others.
///
/// # Errors
/// - NCCL finds no way to be reached
pub fn new_name() -> Result<[u8; NAME_BYTES]> {
    let id = get_uniqueid().map_err(|error| failed("ncclGetUniqueId", &error))?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl Communicator {
    /// Joins the common work of `size` processes, each with a GPU of its own; all call it, and wait
    /// for each other.
    ///
    /// # Errors
    /// - the device is no NVIDIA GPU, or two processes have the same
    /// - the processes do not reach each other
    pub fn join(
        device: &Device,
        rank: usize,
        size: usize,
        name: &[u8; NAME_BYTES],
    ) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("NCCL: {:?} is no NVIDIA GPU", device.location())
        };
        device.cuda_stream().context().bind_to_thread().map_err(Error::wrap)?;
        let number = |value: usize| c_int::try_from(value).map_err(Error::wrap);
        let id = sys::ncclUniqueId { internal: name.map(|byte| byte as c_char) };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: the communicator is written; the name is one that `new_name` made.
        unsafe { comm_init_rank(&raw mut comm, number(size)?, id, number(rank)?) }
            .map_err(|error| failed("ncclCommInitRank", &error))?;
        Ok(Self { device: device.clone(), handle: Mutex::new(Some(Handle(comm))) })
    }

    /// Where the tensors lie.
    pub fn device(&self) -> Device {
        Device::Cuda(self.device.clone())
    }

    /// Sums of everybody's f32 tensors, the same bits on all, there when the call returns; every process
    /// calls it with the same shapes in the same order. NCCL chooses in which order it adds.
    ///
    /// # Errors
    /// - a tensor is not f32 or lies elsewhere, or there is no memory for the sums
    /// - a process is gone, or does not answer within `limit` after this one's own work is done; no later
    ///   call works then
    pub fn sum(&self, tensors: &[Tensor], limit: Duration) -> Result<Vec<Tensor>> {
        let tensors = tensors.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let mut sums: Vec<CudaSlice<f32>> = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            // SAFETY: NCCL, started below, writes all values in the order of the device's stream.
            sums.push(unsafe { self.device.alloc::<f32>(tensor.elem_count().max(1)) }?);
        }
        let stream = self.device.cuda_stream();
        // From here on it is the others who are waited for.
        stream.synchronize().map_err(Error::wrap)?;
        let mut held = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = held.as_ref() else { bail!("NCCL: an earlier sum failed") };
        let added = start(handle, &stream, &tensors, &mut sums).and_then(|()| {
            let end = stream.record_event(None).map_err(Error::wrap)?;
            until(|| end.try_is_complete().map_err(Error::wrap), || handle.failure(), limit)
        });
        if let Err(error) = added {
            if let Some(handle) = held.take() {
                handle.abort();
            }
            return Err(error);
        }
        let tensor = |(slice, like): (CudaSlice<f32>, &Tensor)| {
            let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
            Tensor::from_storage(Storage::Cuda(storage), like.shape(), BackpropOp::none(), false)
        };
        Ok(sums.into_iter().zip(&tensors).map(tensor).collect())
    }
}

/// Submits all sums in one start.
fn start(
    handle: &Handle,
    stream: &Arc<CudaStream>,
    tensors: &[Tensor],
    sums: &mut [CudaSlice<f32>],
) -> Result<()> {
    group_start().map_err(|error| failed("ncclGroupStart", &error))?;
    let added =
        tensors.iter().zip(sums).try_for_each(|(tensor, sum)| add(handle, stream, tensor, sum));
    let ended = group_end().map_err(|error| failed("ncclGroupEnd", &error));
    added.and(ended.map(|_| ()))
}

fn add(
    handle: &Handle,
    stream: &Arc<CudaStream>,
    tensor: &Tensor,
    sum: &mut CudaSlice<f32>,
) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("NCCL: a tensor lies on another device") };
    let (first, count) = (layout.start_offset(), layout.shape().elem_count());
    let own = storage.as_cuda_slice::<f32>()?.slice(first..first + count);
    let (own, _own) = own.device_ptr(stream);
    let (sum, _sum) = sum.device_ptr_mut(stream);
    // SAFETY: both hold `count` values and live as long as work in the device's stream needs them.
    unsafe {
        all_reduce(
            own as *const c_void,
            sum as *mut c_void,
            count,
            sys::ncclDataType_t::ncclFloat32,
            sys::ncclRedOp_t::ncclSum,
            handle.0,
            stream.cu_stream().cast(),
        )
    }
    .map(|_| ())
    .map_err(|error| failed("ncclAllReduce", &error))
}

fn failed(call: &str, error: &NcclError) -> Error {
    Error::msg(described(call, error.0))
}

fn described(call: &str, result: sys::ncclResult_t) -> String {
    format!("{call}: {result:?} (NCCL_DEBUG=INFO says more)")
}
