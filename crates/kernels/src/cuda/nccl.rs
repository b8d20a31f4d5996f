//! Collectives over the GPUs of several processes, by NCCL.
//!
//! ```text
//! the device's stream   layer 0 | layer 1     | layer 2
//! NCCL's stream         gather 1| gather 2    | gather 3
//! ```
//!
//! NCCL works in a stream of its own. A collective begins there when the device has done what it was asked
//! for before, and the host waits for its end before it asks for what needs it. So a rank that does not come is
//! noticed, and the device computes meanwhile what it was asked for in between.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DevicePtr};
use candle_core::cuda_backend::cudarc::nccl::result::{
    NcclError, all_gather, all_reduce, comm_abort, comm_init_rank, get_uniqueid, group_end,
    group_start, reduce_scatter,
};
use candle_core::cuda_backend::cudarc::nccl::sys;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Error, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};

use super::collectives::{DeviceRanks, Gathering};
use super::wait::until;

/// Bytes that name the GPUs' common work.
pub const NAME_BYTES: usize = 128;

/// One process's part of the common work.
pub struct Communicator {
    device: CudaDevice,
    /// NCCL's, beside the device's own.
    stream: Arc<CudaStream>,
    rank: usize,
    size: usize,
    limit: Duration,
    handle: Arc<Shared>,
}

/// `None` once it failed. Else left to the end of the process: freeing waits for the other processes, of which one may
/// have failed. Who joins the same processes again goes on with the communicator that is there.
type Shared = Mutex<Option<Handle>>;

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
            state => Some(described(state)),
        }
    }

    /// Ends what still runs on the GPU, which would wait for ever.
    fn abort(self) {
        // SAFETY: the communicator is open and not used again. The error that led here is the one to tell.
        let _ = unsafe { comm_abort(self.0) };
    }
}

#[derive(Debug, Clone, Copy)]
enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl Collective {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "ncclAllReduce",
            Self::ReduceScatter => "ncclReduceScatter",
            Self::AllGather => "ncclAllGather",
        }
    }

    /// Shape of what comes of a tensor.
    fn shape(self, own: &Tensor, size: usize) -> Result<Shape> {
        match (self, own.dims()) {
            (Self::AllReduce, dims) => Ok(dims.into()),
            (Self::AllGather, dims) => Ok([&[size][..], dims].concat().into()),
            (Self::ReduceScatter, [blocks, dims @ ..]) if *blocks == size => Ok(dims.into()),
            (Self::ReduceScatter, dims) => bail!("NCCL: {dims:?} is not one block of {size}"),
        }
    }

    /// Submits the collective of one tensor.
    ///
    /// # Safety
    /// Own and result are as many values as the collective reads and writes. They live, and nobody else writes them,
    /// until the stream is through.
    unsafe fn submit(
        self,
        (handle, stream): (&Handle, &CudaStream),
        (own, result): (*const c_void, *mut c_void),
        (own_count, count): (usize, usize),
        of_type: sys::ncclDataType_t,
    ) -> Result<()> {
        let (comm, stream) = (handle.0, stream.cu_stream().cast());
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: as the caller promises.
        let submitted = unsafe {
            match self {
                Self::AllReduce => all_reduce(own, result, count, of_type, sum, comm, stream),
                Self::ReduceScatter => {
                    reduce_scatter(own, result, count, of_type, sum, comm, stream)
                }
                Self::AllGather => all_gather(own, result, own_count, of_type, comm, stream),
            }
        };
        submitted.map(|_| ()).map_err(|error| failed(self.name(), &error))
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
    /// for each other. That wait has no end where one does not come: who calls it ends the process then. A collective
    /// that takes longer than `limit` fails.
    ///
    /// # Errors
    /// - the device is no NVIDIA GPU, or two processes have the same
    /// - the processes do not reach each other
    pub fn join(
        device: &Device,
        (rank, size): (usize, usize),
        name: &[u8; NAME_BYTES],
        limit: Duration,
    ) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("NCCL: {:?} is no NVIDIA GPU", device.location())
        };
        let stream = device.cuda_stream().context().new_stream().map_err(Error::wrap)?;
        let number = |value: usize| c_int::try_from(value).map_err(Error::wrap);
        let id = sys::ncclUniqueId { internal: name.map(|byte| byte as c_char) };
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        // SAFETY: the communicator is written; the name is one that `new_name` made.
        unsafe { comm_init_rank(&raw mut comm, number(size)?, id, number(rank)?) }
            .map_err(|error| failed("ncclCommInitRank", &error))?;
        let handle = Arc::new(Mutex::new(Some(Handle(comm))));
        Ok(Self { device: device.clone(), stream, rank, size, limit, handle })
    }

    /// Starts the collective of each tensor, all at once.
    fn start(&self, collective: Collective, own: &[Tensor]) -> Result<Running> {
        if let Some(other) = own.iter().find(|tensor| !self.takes(tensor)) {
            let (dtype, place) = (other.dtype(), other.device().location());
            bail!("NCCL: a tensor of {dtype:?} on {place:?}");
        }
        let own = own.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
        let results = own.iter().map(|own| self.result_of(collective, own));
        let results = results.collect::<Result<Vec<_>>>()?;
        let compute = self.device.cuda_stream();
        // It reads what the device has made so far, and writes where other work may have been before.
        self.stream.join(&compute).map_err(Error::wrap)?;
        let mut held = lock(&self.handle);
        let Some(handle) = held.as_ref() else { bail!("NCCL: an earlier collective failed") };
        let started = self.submit(handle, collective, own.iter().zip(&results));
        match started.and_then(|()| self.stream.record_event(None).map_err(Error::wrap)) {
            Ok(end) => {
                let (handle, limit) = (Arc::clone(&self.handle), self.limit);
                let is_over = false;
                Ok(Running { handle, compute, collective, limit, end, _own: own, results, is_over })
            }
            Err(error) => {
                if let Some(handle) = held.take() {
                    handle.abort();
                }
                Err(error)
            }
        }
    }

    /// Room for what comes of a tensor.
    fn result_of(&self, collective: Collective, own: &Tensor) -> Result<Tensor> {
        let shape = collective.shape(own, self.size)?;
        // The driver has no room for nothing.
        let room = Shape::from(shape.elem_count().max(1));
        // SAFETY: NCCL writes all values before anybody else is given the tensor.
        let storage = unsafe { self.device.alloc_uninit(&room, own.dtype()) }?;
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// Submits all in one start.
    fn submit<'a>(
        &self,
        handle: &Handle,
        collective: Collective,
        mut tensors: impl Iterator<Item = (&'a Tensor, &'a Tensor)>,
    ) -> Result<()> {
        group_start().map_err(|error| failed("ncclGroupStart", &error))?;
        let submitted = tensors.try_for_each(|(own, result)| {
            let of_type = type_of(own.dtype())?;
            let (from, into) = (address(own, &self.stream)?, address(result, &self.stream)?);
            let counts = (own.elem_count(), result.elem_count());
            let (from, into) = (from as *const c_void, into as *mut c_void);
            let (whose, what) = ((handle, self.stream.as_ref()), (from, into));
            // SAFETY: both hold so many values, and [`Running`] keeps them until the end.
            unsafe { collective.submit(whose, what, counts, of_type) }
        });
        let ended = group_end().map_err(|error| failed("ncclGroupEnd", &error));
        submitted.and(ended.map(|_| ()))
    }
}

impl DeviceRanks for Communicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn device(&self) -> Device {
        Device::Cuda(self.device.clone())
    }

    fn all_reduce(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        Box::new(self.start(Collective::AllReduce, tensors)?).finish()
    }

    fn reduce_scatter(&self, blocks: &Tensor) -> Result<Tensor> {
        let running = self.start(Collective::ReduceScatter, std::slice::from_ref(blocks))?;
        let own = Box::new(running).finish()?.pop();
        own.ok_or_else(|| Error::msg("NCCL: no sums came of a tensor"))
    }

    fn start_all_gather(&self, own: &[Tensor]) -> Result<Box<dyn Gathering>> {
        Ok(Box::new(self.start(Collective::AllGather, own)?))
    }
}

/// A collective that was submitted.
struct Running {
    handle: Arc<Shared>,
    compute: Arc<CudaStream>,
    collective: Collective,
    limit: Duration,
    end: CudaEvent,
    /// Read until the end.
    _own: Vec<Tensor>,
    /// Written until the end.
    results: Vec<Tensor>,
    is_over: bool,
}

impl Gathering for Running {
    fn finish(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        let shared = Arc::clone(&self.handle);
        let mut held = lock(&shared);
        let Some(handle) = held.as_ref() else { bail!("NCCL: an earlier collective failed") };
        let waited = until(
            || self.end.try_is_complete().map_err(Error::wrap),
            || handle.failure(),
            self.limit,
        );
        // A collective that failed in the background may end all the same, without values.
        let failure = waited.err().map(|error| error.to_string()).or_else(|| handle.failure());
        if let Some(failure) = failure {
            if let Some(handle) = held.take() {
                handle.abort();
            }
            bail!("{}: {failure}", self.collective.name());
        }
        self.is_over = true;
        Ok(std::mem::take(&mut self.results))
    }
}

impl Drop for Running {
    /// The tensors' memory is given back in the order of the device's stream, so that has to wait. What was aborted ends, too, but
    /// not at once.
    fn drop(&mut self) {
        if !self.is_over {
            // Where that fails, so does all that follows.
            let _ = self.compute.wait(&self.end);
        }
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Option<Handle>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn type_of(dtype: DType) -> Result<sys::ncclDataType_t> {
    match dtype {
        DType::F32 => Ok(sys::ncclDataType_t::ncclFloat32),
        DType::BF16 => Ok(sys::ncclDataType_t::ncclBfloat16),
        DType::F16 => Ok(sys::ncclDataType_t::ncclFloat16),
        other => bail!("NCCL: values of type {other:?}"),
    }
}

/// Where a tensor's values begin. Uses are not tracked, so that nobody is told of this one (`device`).
fn address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("NCCL: a tensor lies on another device") };
    let first = layout.start_offset();
    let address = match tensor.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>()?.slice(first..).device_ptr(stream).0,
        DType::BF16 => storage.as_cuda_slice::<bf16>()?.slice(first..).device_ptr(stream).0,
        DType::F16 => storage.as_cuda_slice::<f16>()?.slice(first..).device_ptr(stream).0,
        other => bail!("NCCL: values of type {other:?}"),
    };
    Ok(address)
}

fn failed(call: &str, error: &NcclError) -> Error {
    Error::msg(format!("{call}: {}", described(error.0)))
}

fn described(result: sys::ncclResult_t) -> String {
    format!("{result:?} (NCCL_DEBUG=INFO says more)")
}
