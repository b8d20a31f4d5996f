//! Starting a kernel on a device.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Tensor, bail,
};

use super::Program;
#[cfg(any(test, feature = "emulate-cuda"))]
use super::trace;

/// What a kernel is given before its results.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(any(test, feature = "cuda", feature = "emulate-cuda")),
    expect(dead_code, reason = "a build without a device starts no kernel")
)]
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

/// One start of a kernel.
#[derive(Debug)]
#[cfg_attr(
    not(any(test, feature = "cuda", feature = "emulate-cuda")),
    expect(dead_code, reason = "a build without a device starts no kernel")
)]
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
    /// Shapes of the kernel's last arguments: new tensors, of f32 if [`run`](Self::run) starts it, which it
    /// writes whole or which nobody reads.
    pub(crate) results: &'a [Shape],
}

impl Launch<'_> {
    /// The results.
    ///
    /// # Errors
    /// - an argument is not contiguous, of another type, or on another device
    /// - the kernel cannot be compiled or started, or there is no memory for the results
    pub(crate) fn run(&self, device: &Device) -> Result<Vec<Tensor>> {
        self.run_as(device, &vec![DType::F32; self.results.len()])
    }

    /// The same with results of `types`, each f32, bf16 or u32.
    ///
    /// # Errors
    /// - as [`run`](Self::run), or there is not such a type a result
    pub(crate) fn run_as(&self, device: &Device, types: &[DType]) -> Result<Vec<Tensor>> {
        let known = types.iter().all(|of| matches!(of, DType::F32 | DType::BF16 | DType::U32));
        if types.len() != self.results.len() || !known {
            bail!("{}: {types:?} for {} results", self.kernel, self.results.len());
        }
        self.check_arguments()?;
        if self.grid.contains(&0) {
            let results = self.results.iter().zip(types);
            return results.map(|(shape, of)| Tensor::zeros(shape, *of, device)).collect();
        }
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => on_cuda::run(self, types, cuda, None),
            #[cfg(any(test, feature = "emulate-cuda"))]
            Device::Cpu => {
                let start = || super::emulator::run(self, types, None);
                trace::on_host(|| self.kernel.to_owned(), start)
            }
            other => {
                bail!("{}: {} has no {:?}", self.kernel, self.program.name, other.location())
            }
        }
    }

    /// Starts a kernel that has no results: its last argument are the values of `into`, contiguous ones of bf16 in no
    /// gradient graph, which it writes where they are. Whoever else holds them sees the new ones.
    ///
    /// # Errors
    /// - as [`run`](Self::run), or `into` is another tensor or holds an argument's values, too
    pub(crate) fn run_into(&self, into: &Tensor) -> Result<()> {
        let fits = into.is_contiguous() && into.dtype() == DType::BF16 && !into.track_op();
        if !fits || !self.results.is_empty() {
            bail!("{}: written into {into:?}", self.kernel);
        }
        self.check_arguments()?;
        if self.grid.contains(&0) {
            return Ok(());
        }
        into.inplace_op1(&InPlace { launch: self })
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
pub(super) use on_cuda::{block_memory, capability};

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::ffi::c_void;
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering;

    use candle_core::cuda_backend::cudarc::driver::sys::{
        CUdevice_attribute_enum as Attribute, CUdeviceptr, CUlaunchAttribute, CUlaunchAttributeID,
        CUlaunchAttributeValue, CUlaunchConfig, cuLaunchKernelEx,
    };
    use candle_core::cuda_backend::cudarc::driver::{
        CudaFunction, CudaSlice, CudaStream, DevicePtr,
    };
    use candle_core::op::BackpropOp;
    use candle_core::{
        CudaDevice, CudaStorage, DType, Error, Layout, Result, Shape, Storage, Tensor, bail,
    };

    use super::super::code::function;
    use super::super::trace::on_stream;
    use super::{Argument, Launch, SERIAL};

    /// Bytes of dynamic memory that a block may ask for.
    pub(in super::super) fn block_memory(device: &CudaDevice) -> Result<usize> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        attribute_of(device, attribute).map(|bytes| bytes as usize)
    }

    /// Major and minor compute capability.
    pub(in super::super) fn capability(device: &CudaDevice) -> Result<(i32, i32)> {
        let major = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        Ok((attribute_of(device, major)?, attribute_of(device, minor)?))
    }

    fn attribute_of(device: &CudaDevice, attribute: Attribute) -> Result<i32> {
        device.cuda_stream().context().attribute(attribute).map_err(Error::wrap)
    }

    /// An argument as the driver takes it.
    enum Passed {
        /// Values on the device.
        At(CUdeviceptr),
        Integer(u32),
        Number(f32),
    }

    impl Passed {
        fn place(&mut self) -> *mut c_void {
            match self {
                Self::At(address) => (&raw mut *address).cast(),
                Self::Integer(value) => (&raw mut *value).cast(),
                Self::Number(value) => (&raw mut *value).cast(),
            }
        }
    }

    /// Where values lie, which stay there while the stream that uses them orders all work on them.
    fn at<T>(values: &impl DevicePtr<T>, stream: &CudaStream) -> Passed {
        Passed::At(values.device_ptr(stream).0)
    }

    /// Starts a kernel; if it `overlaps`, while the kernels before it may still run.
    fn start(
        launch: &Launch<'_>,
        function: &CudaFunction,
        overlaps: bool,
        passed: &mut [Passed],
        stream: &CudaStream,
    ) -> Result<()> {
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        let mut arguments: Vec<*mut c_void> = passed.iter_mut().map(Passed::place).collect();
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = launch.grid.map(|blocks| blocks as u32);
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.memory as u32,
            hStream: stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(overlaps && !SERIAL.load(Ordering::Relaxed)),
        };
        // SAFETY: number, order and types of the arguments are those of the kernel's signature, which the emulator's tests
        // start through the same list; indices stay within the shapes passed. A kernel that overlaps waits for those
        // before it, and then reads and writes what they use (`Program::overlapping`).
        let started = unsafe {
            cuLaunchKernelEx(&config, function.cu_function(), arguments.as_mut_ptr(), null_mut())
        };
        started.result().map_err(Error::wrap)
    }

    /// A new result.
    enum Made {
        F32(CudaSlice<f32>),
        Bf16(CudaSlice<half::bf16>),
        U32(CudaSlice<u32>),
    }

    impl Made {
        /// With whatever values its memory has.
        fn new(dtype: DType, count: usize, device: &CudaDevice) -> Result<Self> {
            // SAFETY: the values are not read before the kernel, started after this, has written them all,
            // or not at all; both are ordered by the device's stream.
            unsafe {
                Ok(match dtype {
                    DType::BF16 => Self::Bf16(device.alloc::<half::bf16>(count)?),
                    DType::U32 => Self::U32(device.alloc::<u32>(count)?),
                    _ => Self::F32(device.alloc::<f32>(count)?),
                })
            }
        }

        fn at(&self, stream: &CudaStream) -> Passed {
            match self {
                Self::F32(slice) => at(slice, stream),
                Self::Bf16(slice) => at(slice, stream),
                Self::U32(slice) => at(slice, stream),
            }
        }

        fn tensor(self, shape: &Shape, device: &CudaDevice) -> Tensor {
            let storage = match self {
                Self::F32(slice) => CudaStorage::wrap_cuda_slice(slice, device.clone()),
                Self::Bf16(slice) => CudaStorage::wrap_cuda_slice(slice, device.clone()),
                Self::U32(slice) => CudaStorage::wrap_cuda_slice(slice, device.clone()),
            };
            Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
        }
    }

    /// `into`: the kernel's last argument, bf16 values that it writes where they are.
    pub(super) fn run(
        launch: &Launch<'_>,
        types: &[DType],
        device: &CudaDevice,
        into: Option<(&mut CudaStorage, &Layout)>,
    ) -> Result<Vec<Tensor>> {
        let (function, overlaps) = function(launch.program, launch.kernel, launch.memory, device)?;
        let stream = device.cuda_stream();
        let held: Vec<_> = launch
            .arguments
            .iter()
            .map(|argument| match argument {
                Argument::Tensor(tensor) => Some(tensor.storage_and_layout()),
                _ => None,
            })
            .collect();
        let mut passed = Vec::with_capacity(held.len() + launch.results.len() + 1);
        for (argument, held) in launch.arguments.iter().zip(&held) {
            passed.push(match (argument, held) {
                (Argument::Tensor(tensor), Some((storage, layout))) => {
                    let Storage::Cuda(storage) = &**storage else {
                        bail!("{}: an argument lies on another device", launch.kernel)
                    };
                    let first = layout.start_offset();
                    let values = first..first + layout.shape().elem_count();
                    match tensor.dtype() {
                        DType::F32 => at(&storage.as_cuda_slice::<f32>()?.slice(values), &stream),
                        DType::BF16 => {
                            at(&storage.as_cuda_slice::<half::bf16>()?.slice(values), &stream)
                        }
                        DType::U32 => at(&storage.as_cuda_slice::<u32>()?.slice(values), &stream),
                        DType::U8 => at(&storage.as_cuda_slice::<u8>()?.slice(values), &stream),
                        other => bail!("{}: an argument of {other:?}", launch.kernel),
                    }
                }
                (Argument::F32(value), _) => Passed::Number(*value),
                (Argument::U32(value), _) => Passed::Integer(*value),
                (Argument::Count(value), _) => Passed::Integer(*value as u32),
                (Argument::Tensor(_), None) => bail!("{}: an argument is missing", launch.kernel),
            });
        }
        let mut results = Vec::with_capacity(launch.results.len());
        for (shape, of) in launch.results.iter().zip(types) {
            let made = Made::new(*of, shape.elem_count().max(1), device)?;
            passed.push(made.at(&stream));
            results.push(made);
        }
        if let Some((storage, layout)) = into {
            let first = layout.start_offset();
            let values = first..first + layout.shape().elem_count();
            passed.push(at(&storage.as_cuda_slice_mut::<half::bf16>()?.slice(values), &stream));
        }
        let start = || start(launch, &function, overlaps, &mut passed, &stream);
        on_stream(&stream, || launch.kernel.to_owned(), start)?;
        let made = results.into_iter().zip(launch.results);
        Ok(made.map(|(result, shape)| result.tensor(shape, device)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(grid: [usize; 3], arguments: &[Argument<'_>]) -> String {
        let launch = Launch {
            program: &Program::new("rows", "", &[]),
            kernel: "rms_norm",
            grid,
            threads: 32,
            memory: 0,
            arguments,
            results: &[],
        };
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
