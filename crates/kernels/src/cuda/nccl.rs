//! Sums of tensors over the GPUs of several processes, by NCCL.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::cuda_backend::cudarc::nccl::result::NcclError;
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp, group_end, group_start};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, Device, Error, Result, Storage, Tensor, bail};

/// Bytes that name the GPUs' common work.
pub const NAME_BYTES: usize = 128;

/// One process's part of the common work.
pub struct Communicator {
    device: CudaDevice,
    /// Left to the end of the process: freeing waits for the other processes, and panics when one of
    /// them is gone.
    handle: Mutex<ManuallyDrop<Handle>>,
}

struct Handle(Comm);

// SAFETY: NCCL lets any thread use a communicator, one at a time, which the mutex around it ensures.
unsafe impl Send for Handle {}

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
    let id = Id::new().map_err(|error| failed("ncclGetUniqueId", &error))?;
    Ok(id.internal().map(|byte| byte as u8))
}

/// What no other GPU is called, whatever a process numbers it; `None` for other devices.
///
/// # Errors
/// - the driver does not say
pub fn uuid_of(device: &Device) -> Result<Option<[u8; 16]>> {
    let Device::Cuda(device) = device else { return Ok(None) };
    let uuid = device.cuda_stream().context().uuid().map_err(Error::wrap)?;
    Ok(Some(uuid.bytes.map(|byte| byte as u8)))
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
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        let id = Id::uninit(name.map(|byte| byte as std::ffi::c_char));
        let comm = Comm::from_rank(stream, rank, size, id)
            .map_err(|error| failed("ncclCommInitRank", &error))?;
        Ok(Self { device: device.clone(), handle: Mutex::new(ManuallyDrop::new(Handle(comm))) })
    }

    /// Where the tensors lie.
    pub fn device(&self) -> Device {
        Device::Cuda(self.device.clone())
    }

    /// Sums of everybody's f32 tensors, the same bits on all; every process calls it with the same
    /// shapes in the same order, from the thread whose kernels made them: its stream is NCCL's too. NCCL
    /// chooses in which order it adds.
    ///
    /// # Errors
    /// - a tensor is not f32 or lies elsewhere
    /// - there is no memory for the sums, or a process is gone
    pub fn sum(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        let tensors = tensors.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let held: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
        let mut slices = Vec::with_capacity(held.len());
        let mut sums: Vec<CudaSlice<f32>> = Vec::with_capacity(held.len());
        for (storage, layout) in &held {
            let Storage::Cuda(storage) = &**storage else {
                bail!("NCCL: a tensor lies on another device")
            };
            let (first, count) = (layout.start_offset(), layout.shape().elem_count());
            slices.push(storage.as_cuda_slice::<f32>()?.slice(first..first + count));
            // SAFETY: NCCL, started below, writes all values before the device's stream goes on.
            sums.push(unsafe { self.device.alloc::<f32>(count) }?);
        }
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.0.stream().context().bind_to_thread().map_err(Error::wrap)?;
        // One start for all of them.
        group_start().map_err(|error| failed("ncclGroupStart", &error))?;
        let added = slices
            .iter()
            .zip(&mut sums)
            .try_for_each(|(own, sum)| handle.0.all_reduce(own, sum, &ReduceOp::Sum).map(|_| ()));
        let ended = group_end().map(|_| ());
        added.and(ended).map_err(|error| failed("ncclAllReduce", &error))?;
        let tensor = |(slice, like): (CudaSlice<f32>, &Tensor)| {
            let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
            Tensor::from_storage(Storage::Cuda(storage), like.shape(), BackpropOp::none(), false)
        };
        Ok(sums.into_iter().zip(&tensors).map(tensor).collect())
    }
}

fn failed(call: &str, error: &NcclError) -> Error {
    Error::msg(format!("{call}: {:?} (NCCL_DEBUG=INFO says more)", error.0))
}
