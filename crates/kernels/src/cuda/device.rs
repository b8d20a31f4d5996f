//! Opening an NVIDIA GPU, its name and its memory.
//!
//! candle's own way (`Device::new_cuda`) gives every thread of the process a stream of its own, and nothing
//! orders one thread's work after another's. Here a GPU has one stream for all threads: whoever
//! submits later runs later. Results of any thread can be used by any other once it has returned.

use candle_core::{Device, Result};

pub use super::launch::overlap_kernels;
pub use super::repeat::repeat_passes;

/// The NVIDIA GPU of an index, the same for all callers. Memory that tensors give back stays with the
/// process: mapping it anew takes about a millisecond a GiB, and the driver would take it at every
/// synchronisation.
///
/// # Errors
/// - there is no such GPU, it cannot be used, or the build has no CUDA support
pub fn open(index: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    return on_cuda::open(index);
    #[cfg(not(feature = "cuda"))]
    Device::new_cuda(index)
}

/// Free bytes of an NVIDIA GPU's memory, with what this process keeps and does not use; `None` for other
/// devices.
///
/// # Errors
/// - the driver does not say
pub fn free_memory(device: &Device) -> Result<Option<u64>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::free_memory(device).map(Some),
        _ => Ok(None),
    }
}

/// Bytes of an NVIDIA GPU's memory in all, the same whatever is in use; `None` for other devices.
///
/// # Errors
/// - the driver does not say
pub fn total_memory(device: &Device) -> Result<Option<u64>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let total = device.cuda_stream().context().total_mem();
            total.map(|bytes| Some(bytes as u64)).map_err(candle_core::Error::wrap)
        }
        _ => Ok(None),
    }
}

/// What no other NVIDIA GPU is called, whatever a process numbers it; `None` for other devices.
///
/// # Errors
/// - the driver does not say
pub fn uuid_of(device: &Device) -> Result<Option<[u8; 16]>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let uuid = device.cuda_stream().context().uuid();
            let uuid = uuid.map_err(candle_core::Error::wrap)?;
            Ok(Some(uuid.bytes.map(|byte| byte as u8)))
        }
        _ => Ok(None),
    }
}

/// Bytes that tensors of this process took on the device at most, since the start or the last
/// [`reset_peak_memory`]: what its pool handed out. What driver and libraries take is not counted. `None`
/// where nothing counts them: on the CPU, on Macs, on GPUs without pools.
pub fn peak_memory(device: &Device) -> Option<u64> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::peak_memory(device).ok().flatten(),
        _ => None,
    }
}

/// From here on the peak is that of what comes, beginning with what is in use.
pub fn reset_peak_memory(device: &Device) {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::reset_peak_memory(device),
        _ => {}
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::collections::BTreeMap;
    use std::ffi::c_void;
    use std::sync::{Mutex, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::CudaContext;
    use candle_core::cuda_backend::cudarc::driver::result::{device as of_device, mem_pool};
    use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool};
    use candle_core::{CudaDevice, Device, Error, Result, bail};

    /// GPUs that this process has opened: a second one of the same index would have a second stream.
    static OPENED: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());

    pub(super) fn open(index: usize) -> Result<Device> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.get(&index) {
            return Ok(device.clone());
        }
        let device = Device::new_cuda_with_stream(index)?;
        let Device::Cuda(cuda) = &device else { bail!("cuda:{index} is no NVIDIA GPU") };
        // SAFETY: no tensor exists on the device yet. All work on tensors goes to its one stream;
        // uploads, which have another, are waited for before their tensor is handed over (`transfer`).
        unsafe { cuda.disable_event_tracking() };
        keep_memory(cuda)?;
        opened.insert(index, device.clone());
        Ok(device)
    }

    pub(super) fn free_memory(device: &CudaDevice) -> Result<u64> {
        let stream = device.cuda_stream();
        let (free, _) = stream.context().mem_get_info().map_err(Error::wrap)?;
        let Some(pool) = pool_of(stream.context())? else { return Ok(free as u64) };
        let reserved = number(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = number(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok(free as u64 + reserved.saturating_sub(used))
    }

    pub(super) fn peak_memory(device: &CudaDevice) -> Result<Option<u64>> {
        let Some(pool) = pool_of(device.cuda_stream().context())? else { return Ok(None) };
        number(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH).map(Some)
    }

    pub(super) fn reset_peak_memory(device: &CudaDevice) {
        // Zero is the only value that the driver takes. A peak that stays is an old one, and no harm.
        let _ = set(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0);
    }

    fn keep_memory(device: &CudaDevice) -> Result<()> {
        set(device, CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
    }

    /// Sets an attribute of the pool that tensors come from, if the device has pools.
    fn set(device: &CudaDevice, attribute: CUmemPool_attribute, mut number: u64) -> Result<()> {
        let Some(pool) = pool_of(device.cuda_stream().context())? else { return Ok(()) };
        let value = (&raw mut number).cast::<c_void>();
        // SAFETY: the pool is the device's, and the attributes set here are of type u64.
        unsafe { mem_pool::set_attribute(pool, attribute, value) }.map_err(Error::wrap)
    }

    /// The pool that tensors come from, if the device has pools.
    fn pool_of(context: &CudaContext) -> Result<Option<CUmemoryPool>> {
        if !context.has_async_alloc() {
            return Ok(None);
        }
        // SAFETY: the device is an open context's.
        unsafe { of_device::get_mem_pool(context.cu_device()) }.map(Some).map_err(Error::wrap)
    }

    fn number(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Result<u64> {
        let mut bytes = 0_u64;
        let value = (&raw mut bytes).cast::<c_void>();
        // SAFETY: the pool is a device's, and the attributes asked for are of type u64.
        unsafe { mem_pool::get_attribute(pool, attribute, value) }.map_err(Error::wrap)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_other_than_nvidias_have_no_uuid_and_no_memory_of_their_own() -> Result<()> {
        assert_eq!(uuid_of(&Device::Cpu)?, None);
        assert_eq!(free_memory(&Device::Cpu)?, None);
        assert_eq!(total_memory(&Device::Cpu)?, None);
        reset_peak_memory(&Device::Cpu);
        assert_eq!(peak_memory(&Device::Cpu), None);
        Ok(())
    }
}
