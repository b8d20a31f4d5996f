//! Starts by the driver, in the order of the device's stream.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUdeviceptr, CUgraphInstantiate_flags, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstreamCaptureMode,
    cuLaunchKernelEx,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr, result,
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

/// Where values of f32 or bf16 lie, from the `first` on.
pub(super) fn address(storage: &CudaStorage, first: usize) -> Result<u64> {
    let stream = storage.device.cuda_stream();
    let passed = match storage.dtype() {
        DType::F32 => at(&storage.as_cuda_slice::<f32>()?.slice(first..), &stream),
        DType::BF16 => at(&storage.as_cuda_slice::<half::bf16>()?.slice(first..), &stream),
        other => bail!("values of f32 or bf16 expected, found {other:?}"),
    };
    let Passed::At(address) = passed else { bail!("values without an address") };
    Ok(address)
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

/// Where a tensor's values lie.
fn place(tensor: &Tensor, stream: &CudaStream) -> Result<Passed> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { bail!("it lies on another device") };
    let first = layout.start_offset();
    let values = first..first + layout.shape().elem_count();
    Ok(match tensor.dtype() {
        DType::F32 => at(&storage.as_cuda_slice::<f32>()?.slice(values), stream),
        DType::BF16 => at(&storage.as_cuda_slice::<half::bf16>()?.slice(values), stream),
        DType::U32 => at(&storage.as_cuda_slice::<u32>()?.slice(values), stream),
        DType::U8 => at(&storage.as_cuda_slice::<u8>()?.slice(values), stream),
        other => bail!("it is of {other:?}"),
    })
}

/// Arguments as the driver takes them. Their tensors live as long as the start.
fn passed(arguments: &[Argument<'_>], stream: &CudaStream) -> Result<Vec<Passed>> {
    let each = arguments.iter().enumerate().map(|(index, argument)| match argument {
        Argument::Tensor(tensor) => {
            place(tensor, stream).map_err(|error| error.context(format!("argument {index}")))
        }
        Argument::F32(value) => Ok(Passed::Number(*value)),
        Argument::U32(value) => Ok(Passed::Integer(*value)),
        Argument::Count(value) => Ok(Passed::Integer(*value as u32)),
    });
    each.collect()
}

/// `into`: the kernel's last argument, bf16 values that it writes where they are.
pub(super) fn run(
    launch: &Launch<'_>,
    results: &[(Shape, DType)],
    device: &CudaDevice,
    into: Option<(&mut CudaStorage, &Layout)>,
) -> Result<Vec<Tensor>> {
    let (function, overlaps) = function(launch.program, launch.kernel, launch.memory, device)?;
    let stream = device.cuda_stream();
    let mut passed = passed(launch.arguments, &stream)?;
    let mut made = Vec::with_capacity(results.len());
    for (shape, of) in results {
        let result = Made::new(*of, shape.elem_count().max(1), device)?;
        passed.push(result.at(&stream));
        made.push(result);
    }
    if let Some((storage, layout)) = into {
        let first = layout.start_offset();
        let values = first..first + layout.shape().elem_count();
        passed.push(at(&storage.as_cuda_slice_mut::<half::bf16>()?.slice(values), &stream));
    }
    let start = || start(launch, &function, overlaps, &mut passed, &stream);
    on_stream(&stream, || launch.kernel.to_owned(), start)?;
    let made = made.into_iter().zip(results);
    Ok(made.map(|(result, (shape, _))| result.tensor(shape, device)).collect())
}

/// Starts that the driver makes by one call, in their order.
pub(in super::super) struct Graph(CudaGraph);

// SAFETY: the driver's handles belong to the process. Only `launch` uses them, which nobody else can call at the same time.
unsafe impl Send for Graph {}
// SAFETY: as above; a shared reference gives access to nothing.
unsafe impl Sync for Graph {}

impl Graph {
    /// Of starts whose arguments, results among them, stay where they are as long as the graph lives. They are recorded on a
    /// stream of their own, so that what other threads submit meanwhile is none of them.
    pub(in super::super) fn of(launches: &[Launch<'_>], device: &CudaDevice) -> Result<Self> {
        let all = launches.iter().map(|launch| {
            let found = function(launch.program, launch.kernel, launch.memory, device)?;
            Ok((launch, found))
        });
        // Code is loaded before, which is not allowed meanwhile.
        let all = all.collect::<Result<Vec<_>>>()?;
        let stream = device.cuda_stream().context().new_stream().map_err(Error::wrap)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(Error::wrap)?;
        let started = all.iter().try_for_each(|(launch, (function, overlaps))| {
            let mut passed = passed(launch.arguments, &stream)?;
            start(launch, function, *overlaps, &mut passed, &stream)
        });
        // Also after an error: the thread leaves the capture.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(Error::wrap);
        started?;
        graph?.map(Self).ok_or_else(|| Error::msg("the driver recorded no graph"))
    }

    /// Makes all starts, in the order of the device's stream.
    pub(in super::super) fn launch(&mut self, device: &CudaDevice) -> Result<()> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: the graph lives as long as `self`, and is used by nobody else meanwhile. What its kernels read and write lives
        // as long as the recording beside it.
        let launched = unsafe { result::graph::launch(self.0.cu_graph_exec(), stream.cu_stream()) };
        launched.map_err(Error::wrap)
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}
