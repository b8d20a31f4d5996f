//! What changes from pass to pass: words on the device.

use std::collections::VecDeque;

#[cfg(feature = "cuda")]
use candle_core::Error;
use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Result, Tensor, bail};

/// Words on a device that passes read, written before each of them.
#[derive(Debug)]
pub struct Inputs {
    words: Tensor,
    lengths: Vec<usize>,
}

impl Inputs {
    /// Parts in the order in which passes ask for them; none is empty.
    ///
    /// # Errors
    /// - a part is empty, or the device has no memory
    pub fn new(parts: &[&[u32]], device: &Device) -> Result<Self> {
        if parts.iter().any(|part| part.is_empty()) {
            bail!("an input without words");
        }
        let all = parts.concat();
        let count = all.len();
        let words = Tensor::from_vec(all, count, device)?;
        Ok(Self { words, lengths: parts.iter().map(|part| part.len()).collect() })
    }

    /// Writes other words.
    ///
    /// # Errors
    /// - parts have other lengths, or the transfer fails
    pub fn set(&self, parts: &[&[u32]]) -> Result<()> {
        if !parts.iter().map(|part| part.len()).eq(self.lengths.iter().copied()) {
            bail!("inputs of other lengths");
        }
        self.words.inplace_op1(&Put(CpuStorage::U32(parts.concat())))
    }

    /// Each part with the place where it lies.
    pub(super) fn views(&self, parts: &[&[u32]]) -> Result<VecDeque<(Vec<u32>, Tensor)>> {
        let mut first = 0;
        let view = |part: &&[u32]| {
            let view = self.words.narrow(0, first, part.len())?;
            first += part.len();
            Ok((part.to_vec(), view))
        };
        parts.iter().map(view).collect()
    }
}

/// Values from main memory, put over all that a tensor holds.
pub(super) struct Put(pub(super) CpuStorage);

impl InplaceOp1 for Put {
    fn name(&self) -> &'static str {
        "put"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        match (storage, &self.0) {
            (CpuStorage::U32(all), CpuStorage::U32(new)) => all.copy_from_slice(new),
            (CpuStorage::F32(all), CpuStorage::F32(new)) => all.copy_from_slice(new),
            (CpuStorage::BF16(all), CpuStorage::BF16(new)) => all.copy_from_slice(new),
            _ => bail!("put: other values"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let CpuStorage::U32(words) = &self.0 else { bail!("put: words") };
        let stream = storage.device.cuda_stream();
        stream.memcpy_htod(words, storage.as_cuda_slice_mut::<u32>()?).map_err(Error::wrap)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("built without CUDA")
    }
}
