//! Large tensors of an NVIDIA GPU on their way to main memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaView, DeviceRepr, PinnedHostSlice};
use candle_core::{
    CudaDevice, CudaStorage, DType, Device, Error, Layout, Result, Storage, Tensor, bail,
};
use half::bf16;
use half::vec::HalfBitsVecExt;
use rayon::prelude::*;

/// Words of the page-locked memory: 16 MiB.
const STAGE: usize = 1 << 21;
/// Bytes from which on the way through the stage pays.
const LARGE: usize = 1 << 20;
/// Values that a thread copies at once.
const PIECE: usize = 1 << 16;

/// Page-locked memory that nobody uses, by the device's index. The host reads it, so it is cached, other than that of uploads.
static STAGES: Mutex<BTreeMap<usize, PinnedHostSlice<u64>>> = Mutex::new(BTreeMap::new());

/// A copy in main memory; `None` for small tensors, other types and other devices.
pub(super) fn download(tensor: &Tensor) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = tensor.device() else { return Ok(None) };
    let count = tensor.elem_count();
    if count * tensor.dtype().size_in_bytes() < LARGE {
        return Ok(None);
    }
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("download: a GPU's tensor expected") };
    let shape = tensor.shape();
    let copy = match tensor.dtype() {
        DType::F32 => {
            let mut values = vec![0.0_f32; count];
            fetch(device, &view(storage, layout)?, &mut values)?;
            Tensor::from_vec(values, shape, &Device::Cpu)?
        }
        DType::BF16 => {
            // Zeros of a type of its own would be written one by one.
            let mut values = vec![0_u16; count].reinterpret_into::<bf16>();
            fetch(device, &view(storage, layout)?, &mut values)?;
            Tensor::from_vec(values, shape, &Device::Cpu)?
        }
        _ => return Ok(None),
    };
    Ok(Some(copy))
}

fn view<'a, T: CudaDType>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let first = layout.start_offset();
    Ok(storage.as_cuda_slice::<T>()?.slice(first..first + layout.shape().elem_count()))
}

/// Fills `values` with those of the device, once its stream has written them.
fn fetch<T: DeviceRepr + Copy + Send + Sync>(
    device: &CudaDevice,
    from: &CudaView<'_, T>,
    values: &mut [T],
) -> Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    // Taken, not locked: while a thread waits for others to copy it may be given further downloads.
    let waiting = stages().remove(&context.ordinal());
    let mut stage = match waiting {
        Some(stage) => stage,
        // SAFETY: what is read was written before.
        None => unsafe { context.alloc_pinned_with_flags(STAGE, 0) }.map_err(Error::wrap)?,
    };
    let most = STAGE * size_of::<u64>() / size_of::<T>();
    for (number, piece) in values.chunks_mut(most).enumerate() {
        let words = stage.as_mut_slice().map_err(Error::wrap)?;
        // SAFETY: the words are aligned for numbers of up to 8 bytes and hold `most` of them.
        let staged =
            unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<T>(), piece.len()) };
        let part = from.slice(number * most..number * most + piece.len());
        stream.memcpy_dtoh(&part, &mut *staged).map_err(Error::wrap)?;
        stream.synchronize().map_err(Error::wrap)?;
        // New memory is mapped when it is first written: by several threads.
        let pieces = piece.par_chunks_mut(PIECE).zip(staged.par_chunks(PIECE));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
    }
    stages().insert(context.ordinal(), stage);
    Ok(())
}

fn stages() -> MutexGuard<'static, BTreeMap<usize, PinnedHostSlice<u64>>> {
    STAGES.lock().unwrap_or_else(PoisonError::into_inner)
}
