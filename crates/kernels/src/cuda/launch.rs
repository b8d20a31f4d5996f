//! Starting a kernel on a device.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Shape, Storage,
    Tensor, bail,
};

#[cfg(any(test, feature = "emulate-cuda"))]
use super::trace;
use super::{Program, exactly, repeat};

/// What a kernel is given before its results.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// Contiguous f32, bf16, u32 or u8 values.
    Tensor(&'a Tensor),
    U32(u32),
    /// Passed as a `u32`; [`Launch::run`] refuses one that is larger.
    Count(usize),
    F32(f32),
}

/// Blocks that a grid may have in each direction.
const LARGEST_GRID: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];

/// Whether every kernel begins after the end of the one before it, also where it would not have to.
static SERIAL: AtomicBool = AtomicBool::new(false);

/// Whether kernels may begin while the one before them ends, which changes no bit of what they compute. They may, unless a
/// benchmark asks what it brings.
pub fn overlap_kernels(overlap: bool) {
    SERIAL.store(!overlap, Ordering::Relaxed);
}

impl<'a> From<&'a Tensor> for Argument<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<usize> for Argument<'_> {
    fn from(value: usize) -> Self {
        Self::Count(value)
    }
}

impl From<bool> for Argument<'_> {
    fn from(value: bool) -> Self {
        Self::U32(u32::from(value))
    }
}

impl From<f64> for Argument<'_> {
    fn from(value: f64) -> Self {
        Self::F32(value as f32)
    }
}

/// Where a kernel finds contiguous values of f32 or bf16 that it is given in a list, not as an argument of their own. They
/// have to live until it is started, and to be on its device. It fails where they are others.
pub(crate) fn address(values: &Tensor) -> Result<u64> {
    if !values.is_contiguous() {
        bail!("contiguous values expected, found {:?}", values.layout());
    }
    let (storage, layout) = values.storage_and_layout();
    let first = layout.start_offset();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Ok(values[first..].as_ptr().addr() as u64),
        Storage::Cpu(CpuStorage::BF16(values)) => Ok(values[first..].as_ptr().addr() as u64),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => on_cuda::address(storage, first),
        _ => bail!("values of f32 or bf16 expected where kernels run, found {values:?}"),
    }
}

/// Arguments of several kinds, in the order of the kernel's.
#[derive(Debug)]
pub(crate) struct Arguments<'a>(Vec<Argument<'a>>);

impl<'a> Arguments<'a> {
    pub(crate) fn of<A: Into<Argument<'a>>>(first: impl IntoIterator<Item = A>) -> Self {
        // No kernel of ours has more.
        Self(Vec::with_capacity(24)).and(first)
    }

    pub(crate) fn and<A: Into<Argument<'a>>>(mut self, more: impl IntoIterator<Item = A>) -> Self {
        self.0.extend(more.into_iter().map(Into::into));
        self
    }
}

impl<'a> Deref for Arguments<'a> {
    type Target = [Argument<'a>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// What every block of a kernel has, however many there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) kernel: &'static str,
    /// Whole warps.
    pub(crate) threads: usize,
    /// Bytes of dynamic memory.
    pub(crate) memory: usize,
}

#[cfg(all(test, feature = "cuda"))]
impl Block {
    /// Without dynamic memory.
    pub(crate) fn plain(kernel: &'static str, threads: usize) -> Self {
        Self { kernel, threads, memory: 0 }
    }
}

/// One start of a kernel.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) program: &'a Program,
    pub(crate) kernel: &'a str,
    /// Blocks.
    pub(crate) grid: [usize; 3],
    /// Threads a block, whole warps.
    pub(crate) threads: usize,
    /// Bytes of dynamic memory a block.
    pub(crate) memory: usize,
    pub(crate) arguments: &'a [Argument<'a>],
}

impl<'a> Launch<'a> {
    /// Blocks and threads of each, without dynamic memory.
    pub(crate) fn new(
        program: &'a Program,
        kernel: &'a str,
        (grid, threads): ([usize; 3], usize),
        arguments: &'a [Argument<'a>],
    ) -> Self {
        Self { program, kernel, grid, threads, memory: 0, arguments }
    }

    /// So many blocks of a kernel.
    pub(crate) fn of(
        program: &'a Program,
        Block { kernel, threads, memory }: Block,
        grid: [usize; 3],
        arguments: &'a [Argument<'a>],
    ) -> Self {
        Self { program, kernel, grid, threads, memory, arguments }
    }

    /// New f32 tensors of such shapes: the kernel's last arguments, which it writes whole or which nobody reads.
    ///
    /// # Errors
    /// - an argument is not contiguous, of another type, or on another device
    /// - the kernel cannot be compiled or started, or there is no memory for the results
    pub(crate) fn run<const N: usize>(
        &self,
        device: &Device,
        shapes: [Shape; N],
    ) -> Result<[Tensor; N]> {
        self.run_as(device, &shapes.map(|shape| (shape, DType::F32)))
    }

    /// The same of types: f32, bf16 or u32. It fails as [`run`](Self::run) does, or where a type is another.
    pub(crate) fn run_as<const N: usize>(
        &self,
        device: &Device,
        results: &[(Shape, DType); N],
    ) -> Result<[Tensor; N]> {
        exactly(self.started(device, results)?)
    }

    pub(super) fn started(
        &self,
        device: &Device,
        results: &[(Shape, DType)],
    ) -> Result<Vec<Tensor>> {
        for (_, of) in results {
            if !matches!(of, DType::F32 | DType::BF16 | DType::U32) {
                bail!("{}: a result of {of:?}", self.kernel);
            }
        }
        self.check_arguments()?;
        if self.grid.contains(&0) {
            return results.iter().map(|(shape, of)| Tensor::zeros(shape, *of, device)).collect();
        }
        let made: Result<Vec<Tensor>> = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => on_cuda::run(self, results, cuda, None),
            #[cfg(any(test, feature = "emulate-cuda"))]
            Device::Cpu => {
                let start = || super::emulator::run(self, results, None);
                trace::on_host(|| self.kernel.to_owned(), start)
            }
            other => Err(Error::msg(format!(
                "{}: {} has no {:?}",
                self.kernel,
                self.program.name,
                other.location()
            ))),
        };
        let made = made?;
        repeat::note(self, &made, None);
        Ok(made)
    }

    /// Starts a kernel that has no results: its last argument are the values of `into`, contiguous ones of bf16 in no
    /// gradient graph, which it writes where they are. Whoever else holds them sees the new ones.
    /// It fails as [`run`](Self::run) does, or where `into` is another tensor or holds an argument's values, too.
    pub(crate) fn run_into(&self, into: &Tensor) -> Result<()> {
        let fits = into.is_contiguous() && into.dtype() == DType::BF16 && !into.track_op();
        if !fits {
            bail!("{}: written into {into:?}", self.kernel);
        }
        self.check_arguments()?;
        if self.grid.contains(&0) {
            return Ok(());
        }
        into.inplace_op1(&InPlace { launch: self })?;
        repeat::note(self, &[], Some(into));
        Ok(())
    }

    /// Whether arguments are contiguous, and all counts are what a kernel and a grid can hold.
    fn check_arguments(&self) -> Result<()> {
        for argument in self.arguments {
            if let Argument::Tensor(tensor) = argument
                && !tensor.is_contiguous()
            {
                bail!("{}: contiguous values expected, found {:?}", self.kernel, tensor.layout());
            }
        }
        self.check_counts()
    }

    fn check_counts(&self) -> Result<()> {
        for (place, argument) in self.arguments.iter().enumerate() {
            if let Argument::Count(count) = argument
                && u32::try_from(*count).is_err()
            {
                bail!("{}: argument {place} is {count}, at most {} fit", self.kernel, u32::MAX);
            }
        }
        if self.grid.iter().zip(LARGEST_GRID).any(|(blocks, most)| *blocks > most) {
            let grid = self.grid;
            bail!("{}: a grid of {grid:?} blocks, at most {LARGEST_GRID:?} fit", self.kernel);
        }
        Ok(())
    }
}

/// A start that writes into values which exist.
struct InPlace<'a> {
    #[cfg_attr(
        not(any(test, feature = "cuda", feature = "emulate-cuda")),
        expect(dead_code, reason = "a build without a device starts no kernel")
    )]
    launch: &'a Launch<'a>,
}

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        "kernel"
    }

    #[cfg(any(test, feature = "emulate-cuda"))]
    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let CpuStorage::BF16(values) = storage else { bail!("{}: bf16", self.launch.kernel) };
        let first = layout.start_offset();
        let into = &mut values[first..first + layout.shape().elem_count()];
        let start = || super::emulator::run(self.launch, &[], Some(into));
        trace::on_host(|| self.launch.kernel.to_owned(), start).map(drop)
    }

    #[cfg(not(any(test, feature = "emulate-cuda")))]
    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a kernel for NVIDIA GPUs on a CPU")
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let device = storage.device.clone();
        on_cuda::run(self.launch, &[], &device, Some((storage, layout))).map(drop)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("built without CUDA")
    }
}

#[cfg(feature = "cuda")]
pub(super) use on_cuda::{Graph, block_memory, capability};

#[cfg(feature = "cuda")]
mod on_cuda;

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(grid: [usize; 3], arguments: &[Argument<'_>]) -> String {
        let program = Program::new("rows", "", &[]);
        let launch = Launch::new(&program, "rms_norm", (grid, 32), arguments);
        launch.check_counts().expect_err("more than fits").to_string()
    }

    #[test]
    fn counts_that_a_kernel_cannot_hold_are_refused_by_name() {
        let rows = u32::MAX as usize + 1;
        let error = refused([1, 1, 1], &[Argument::from(1), Argument::from(rows)]);
        assert!(error.contains("rms_norm: argument 1 is 4294967296"), "{error}");
        assert!(refused([1, 65_536, 1], &[]).contains("a grid of [1, 65536, 1] blocks"));
    }
}
