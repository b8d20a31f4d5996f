//! Products by the device's library, cuBLAS.

use std::ffi::{c_int, c_void};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::cublas::{result::gemm_ex, sys};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, DevicePtrMut, DeviceRepr,
};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Error, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::super::trace::on_stream;
use super::{Factor, name};

/// Values of matrices.
pub(super) trait Value: CudaDType + DeviceRepr {
    const DTYPE: DType;
    const KIND: sys::cudaDataType_t;
}

impl Value for f32 {
    const DTYPE: DType = DType::F32;
    const KIND: sys::cudaDataType_t = sys::cudaDataType_t::CUDA_R_32F;
}

impl Value for bf16 {
    const DTYPE: DType = DType::BF16;
    const KIND: sys::cudaDataType_t = sys::cudaDataType_t::CUDA_R_16BF;
}

impl Value for f16 {
    const DTYPE: DType = DType::F16;
    const KIND: sys::cudaDataType_t = sys::cudaDataType_t::CUDA_R_16F;
}

/// A factor as it is, or a copy whose rows lie together.
fn readable(tensor: &Tensor) -> Result<(Tensor, Factor)> {
    if let Some(factor) = Factor::of(tensor.layout()) {
        return Ok((tensor.clone(), factor));
    }
    let copy = tensor.contiguous()?;
    let Some(factor) = Factor::of(copy.layout()) else { bail!("product: {tensor:?}") };
    Ok((copy, factor))
}

/// The product in f32, or in bf16 of such factors.
pub(super) fn run<O: Value>(a: &Tensor, b: &Tensor, device: &CudaDevice) -> Result<Tensor> {
    let ((rows, inner), (_, columns)) = (a.dims2()?, b.dims2()?);
    if rows * inner * columns == 0 {
        return Tensor::zeros((rows, columns), O::DTYPE, a.device());
    }
    // SAFETY: the library, started below, writes all values in the order of the device's stream.
    let mut out = unsafe { device.alloc::<O>(rows * columns) }?;
    multiply(a, b, (&mut out, 0.0), device)?;
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(out, device.clone()));
    Ok(Tensor::from_storage(storage, (rows, columns), BackpropOp::none(), false))
}

/// Adds `a b` to a matrix of its size, of f32 or of bf16.
pub(super) fn add(a: &Tensor, b: &Tensor, sum: &mut CudaStorage) -> Result<()> {
    // Their product would wrap for the largest ones.
    if a.elem_count() == 0 || b.elem_count() == 0 {
        return Ok(());
    }
    let device = sum.device.clone();
    if sum.dtype() == DType::BF16 {
        return multiply(a, b, (sum.as_cuda_slice_mut::<bf16>()?, 1.0), &device);
    }
    multiply(a, b, (sum.as_cuda_slice_mut::<f32>()?, 1.0), &device)
}

/// `out`, times a number, plus `a b`.
fn multiply<O: Value>(
    a: &Tensor,
    b: &Tensor,
    out: (&mut CudaSlice<O>, f32),
    device: &CudaDevice,
) -> Result<()> {
    let ((a, of_a), (b, of_b)) = (readable(a)?, readable(b)?);
    let (a, b) = ((&a, of_a), (&b, of_b));
    match a.0.dtype() {
        DType::BF16 => of_type::<bf16, O>(a, b, out, device),
        DType::F16 => of_type::<f16, O>(a, b, out, device),
        _ => of_type::<f32, O>(a, b, out, device),
    }
}

fn of_type<T: Value, O: Value>(
    (a, of_a): (&Tensor, Factor),
    (b, of_b): (&Tensor, Factor),
    (out, kept): (&mut CudaSlice<O>, f32),
    device: &CudaDevice,
) -> Result<()> {
    let ((rows, inner), (_, columns)) = (a.dims2()?, b.dims2()?);
    let number = |count: usize| c_int::try_from(count).map_err(Error::wrap);
    let ((a_storage, a_layout), (b_storage, b_layout)) =
        (a.storage_and_layout(), b.storage_and_layout());
    let stream = device.cuda_stream();
    let one = 1.0_f32;
    let a_at = values::<T>(&a_storage, a_layout)?;
    let b_at = values::<T>(&b_storage, b_layout)?;
    let (a_at, _a) = a_at.device_ptr(&stream);
    let (b_at, _b) = b_at.device_ptr(&stream);
    let (out_at, _out) = out.device_ptr_mut(&stream);
    stream.context().bind_to_thread().map_err(Error::wrap)?;
    let start = || {
        // SAFETY: the three matrices are as large as the numbers say, which `Factor::of` has from their
        // layouts, and live as long as work in the device's stream needs them.
        unsafe {
            gemm_ex(
                *device.cublas_handle().handle(),
                operation(of_b),
                operation(of_a),
                number(columns)?,
                number(rows)?,
                number(inner)?,
                (&raw const one).cast(),
                b_at as *const c_void,
                T::KIND,
                number(of_b.leading)?,
                a_at as *const c_void,
                T::KIND,
                number(of_a.leading)?,
                (&raw const kept).cast(),
                out_at as *mut c_void,
                O::KIND,
                number(columns)?,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(Error::wrap)
    };
    on_stream(&stream, || name(a, b), start)
}

/// The library computes the turned result, outᵀ = bᵀ aᵀ: what it finds turned is right.
fn operation(factor: Factor) -> sys::cublasOperation_t {
    if factor.is_columns {
        sys::cublasOperation_t::CUBLAS_OP_T
    } else {
        sys::cublasOperation_t::CUBLAS_OP_N
    }
}

fn values<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = storage else { bail!("product: factors on several devices") };
    Ok(storage.as_cuda_slice::<T>()?.slice(layout.start_offset()..))
}
