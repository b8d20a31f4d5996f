//! Products of matrices whose sums and results are f32, whatever their factors are: candle's round the
//! result of bf16 factors to bf16, and those of f32 factors to TF32 where that is allowed.

use candle_core::Layout;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, Result, Storage, Tensor, bail,
};

use super::repeat::spoil;
#[cfg(any(test, feature = "emulate-cuda"))]
use super::{emulated, trace::on_host};
use crate::graph::{add_to, trained_type};
use crate::memory::outside;

/// `a b` of `[M, K]` and `[K, N]` factors of the same type: in f32 for f32, bf16 and f16, else in their
/// own. Factors may be turned, not copied, matrices. It fails where shapes or types do not fit, or the device fails.
pub(crate) fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let ((_, inner), (b_rows, _)) = (a.dims2()?, b.dims2()?);
    if inner != b_rows || a.dtype() != b.dtype() {
        bail!("product of {a:?} and {b:?}");
    }
    let narrow = matches!(a.dtype(), DType::BF16 | DType::F16);
    match a.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if narrow || a.dtype() == DType::F32 => {
            on_cuda::run::<f32>(a, b, device)
        }
        #[cfg(any(test, feature = "emulate-cuda"))]
        Device::Cpu if emulated() => on_host(|| name(a, b), || as_library(a, b, narrow)),
        _ => composed(a, b, narrow),
    }
}

/// The same in a type: bf16 factors have sums that are rounded to bf16 once, when they are written.
/// It fails as [`product`] does.
pub(crate) fn product_as(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = a.device()
        && [a.dtype(), b.dtype(), dtype] == [DType::BF16; 3]
        && a.dim(1)? == b.dim(0)?
    {
        return on_cuda::run::<half::bf16>(a, b, device);
    }
    product(a, b)?.to_dtype(dtype)
}

/// Adds `a b` to `sum`, a whole `[M, N]` matrix that is no factor, in place: whoever else holds its values sees the new
/// ones. It is f32, or bf16 as its factors are. It fails as [`product`] does, or where `sum` is no such matrix.
pub(crate) fn add_product(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let ((rows, inner), (b_rows, columns)) = (a.dims2()?, b.dims2()?);
    let whole = sum.is_contiguous() && sum.layout().start_offset() == 0;
    let fits = inner == b_rows && a.dtype() == b.dtype() && sum.dims() == [rows, columns];
    let typed = matches!((sum.dtype(), a.dtype()), (DType::F32, _) | (DType::BF16, DType::BF16));
    if !whole || !fits || !typed {
        bail!("product of {a:?} and {b:?} added to {sum:?}");
    }
    spoil("a product was added in place");
    sum.inplace_op1(&Onto { a, b })
}

/// Adds `a b` to the gradients of an argument of a node, as [`add_to`]: a GPU's library adds to an f32 sum what it
/// multiplies. It fails as [`product`] does.
pub(crate) fn add_product_to(argument: usize, a: &Tensor, b: &Tensor) -> Result<()> {
    let Some(dtype) = trained_type(argument) else { return Ok(()) };
    let narrow = matches!(a.dtype(), DType::F32 | DType::BF16 | DType::F16);
    if dtype != DType::F32 || !narrow || a.device().is_metal() {
        let own = product(a, b)?.to_dtype(dtype)?;
        return add_to(argument, |sum| sum.map_or_else(|| Ok(own.clone()), |sum| sum + &own));
    }
    add_to(argument, |sum| match sum {
        None => product(a, b),
        Some(sum) => {
            add_product(sum, a, b)?;
            Ok(sum.clone())
        }
    })
}

/// Adds the product of its factors to what is there.
struct Onto<'a> {
    a: &'a Tensor,
    b: &'a Tensor,
}

impl InplaceOp1 for Onto<'_> {
    fn name(&self) -> &'static str {
        "add_product"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        // A GPU's library makes no product beside the sum.
        outside(|| add_on_cpu(storage, &product(self.a, self.b)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        on_cuda::add(self.a, self.b, storage)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("add_product: built without CUDA")
    }
}

fn add_on_cpu(sum: &mut CpuStorage, own: &Tensor) -> Result<()> {
    let (own, _) = own.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(own)) = &*own else {
        bail!("add_product: a product of f32 expected")
    };
    match sum {
        CpuStorage::F32(sum) => sum.iter_mut().zip(own).for_each(|(sum, value)| *sum += value),
        CpuStorage::BF16(sum) => sum.iter_mut().zip(own).for_each(|(sum, value)| {
            *sum = half::bf16::from_f32(sum.to_f32() + value);
        }),
        _ => bail!("add_product: values of f32 or bf16 expected"),
    }
    Ok(())
}

/// What a GPU's library computes, which widens no factor: a budget does not count those that are widened here.
#[cfg(any(test, feature = "emulate-cuda"))]
fn as_library(a: &Tensor, b: &Tensor, narrow: bool) -> Result<Tensor> {
    let wide = |t: &Tensor| if narrow { t.to_dtype(DType::F32) } else { Ok(t.clone()) };
    let (left, right) = outside(|| Ok::<_, candle_core::Error>((wide(a)?, wide(b)?)))?;
    let out = left.matmul(&right);
    outside(|| drop((left, right)));
    out
}

fn composed(a: &Tensor, b: &Tensor, narrow: bool) -> Result<Tensor> {
    match a.device() {
        // Widened factors have the same products, which are exact in f32.
        Device::Cpu if narrow => a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?),
        _ if narrow => a.matmul(b)?.to_dtype(DType::F32),
        _ => a.matmul(b),
    }
}

/// What a trace calls a product: type of the factors, rows x inner x columns.
#[cfg(any(test, feature = "cuda", feature = "emulate-cuda"))]
fn name(a: &Tensor, b: &Tensor) -> String {
    let sizes: Vec<String> =
        [&a.dims()[..1], b.dims()].concat().iter().map(usize::to_string).collect();
    format!("product {} {}", a.dtype().as_str(), sizes.join("x"))
}

/// How the library, to which matrices are columns one after the other, reads a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg(any(test, feature = "cuda"))]
struct Factor {
    /// Whether it finds the factor itself, not the turned one.
    is_columns: bool,
    /// Values from one of its columns to the next.
    leading: usize,
}

#[cfg(any(test, feature = "cuda"))]
impl Factor {
    /// `None`: neither rows nor columns lie together, the factor has to be copied.
    fn of(layout: &Layout) -> Option<Self> {
        let (dims, strides) = (layout.dims(), layout.stride());
        let (&[rows, columns], &[down, right]) = (dims, strides) else { return None };
        // A stride that is never taken says nothing.
        if (right == 1 || columns == 1) && (rows == 1 || down >= columns) {
            let leading = if rows == 1 { columns } else { down };
            return Some(Self { is_columns: false, leading });
        }
        if (down == 1 || rows == 1) && (columns == 1 || right >= rows) {
            let leading = if columns == 1 { rows } else { right };
            return Some(Self { is_columns: true, leading });
        }
        None
    }
}

#[cfg(feature = "cuda")]
mod on_cuda;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close};

    /// What a library of columns makes of `op(b) op(a)`, from the values that it is pointed at.
    fn by_columns(
        (b, of_b): (&[f32], Factor),
        (a, of_a): (&[f32], Factor),
        (rows, inner, columns): (usize, usize, usize),
    ) -> Vec<f32> {
        let at = |values: &[f32], factor: Factor, row: usize, column: usize| {
            // Element of the factor as the library finds it, turned if asked for.
            let (row, column) = if factor.is_columns { (column, row) } else { (row, column) };
            values[row + column * factor.leading]
        };
        let mut out = vec![0.0; rows * columns];
        for m in 0..columns {
            for n in 0..rows {
                let sum = (0..inner).map(|k| at(b, of_b, m, k) * at(a, of_a, k, n)).sum();
                out[m + n * columns] = sum;
            }
        }
        out
    }

    fn values_of(tensor: &Tensor) -> Vec<f32> {
        let (storage, layout) = tensor.storage_and_layout();
        let candle_core::Storage::Cpu(candle_core::CpuStorage::F32(values)) = &*storage else {
            panic!("a CPU tensor of f32")
        };
        values[layout.start_offset()..].to_vec()
    }

    #[test]
    fn the_librarys_view_of_every_layout_is_the_product() -> Result<()> {
        let mut noise = Noise::new(31);
        for (rows, inner, columns) in
            [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 5), (1, 4, 1), (3, 1, 1), (1, 1, 1)]
        {
            let plain = |noise: &mut Noise, m: usize, n: usize| noise.tensor(&[m, n]);
            let turned = |noise: &mut Noise, m: usize, n: usize| noise.tensor(&[n, m]).t();
            // Some columns, or rows, of a larger matrix.
            let part =
                |noise: &mut Noise, m: usize, n: usize| noise.tensor(&[m, n + 3]).narrow(1, 2, n);
            let turned_part = |noise: &mut Noise, m: usize, n: usize| {
                noise.tensor(&[n, m + 3]).narrow(1, 1, m)?.t()
            };
            let all = |noise: &mut Noise, m, n| -> Result<Vec<Tensor>> {
                Ok(vec![
                    plain(noise, m, n),
                    turned(noise, m, n)?,
                    part(noise, m, n)?,
                    turned_part(noise, m, n)?,
                ])
            };
            for a in all(&mut noise, rows, inner)? {
                for b in all(&mut noise, inner, columns)? {
                    let (of_a, of_b) = (Factor::of(a.layout()), Factor::of(b.layout()));
                    let (of_a, of_b) =
                        (of_a.expect("rows or columns"), of_b.expect("rows or columns"));
                    for (factor, tensor) in [(of_a, &a), (of_b, &b)] {
                        let (rows, columns) = tensor.dims2()?;
                        let least = if factor.is_columns { rows } else { columns };
                        assert!(factor.leading >= least, "{factor:?} {tensor:?}");
                    }
                    let sizes = (rows, inner, columns);
                    let out = by_columns((&values_of(&b), of_b), (&values_of(&a), of_a), sizes);
                    let out = Tensor::from_vec(out, (rows, columns), &Device::Cpu)?;
                    let want = a.contiguous()?.matmul(&b.contiguous()?)?;
                    assert_close(&format!("{a:?} {b:?}"), &out, &want, 1e-6);
                }
            }
        }
        let scattered = noise.tensor(&[3, 4, 2]).narrow(2, 0, 1)?.squeeze(2)?;
        assert_eq!(Factor::of(scattered.layout()), None);
        Ok(())
    }

    #[test]
    fn a_product_is_added_to_what_is_there() -> Result<()> {
        let mut noise = Noise::new(33);
        let sum = noise.tensor(&[7, 5]);
        for dtype in [DType::F32, DType::BF16] {
            let (a, b) = (noise.tensor(&[9, 7]).t()?, noise.tensor(&[9, 5]));
            let (a, b) = (a.to_dtype(dtype)?, b.to_dtype(dtype)?);
            let want = (&sum + product(&a, &b)?)?;
            add_product(&sum, &a, &b)?;
            assert_close("sum", &sum, &want, 1e-6);
        }
        let (a, b) = (noise.tensor(&[7, 3]), noise.tensor(&[3, 5]));
        assert!(add_product(&sum.t()?, &b.t()?, &a.t()?).is_err(), "turned");
        assert!(add_product(&sum.narrow(0, 1, 6)?, &a.narrow(0, 0, 6)?, &b).is_err(), "a part");
        assert!(add_product(&sum, &a, &b.t()?).is_err());
        assert!(add_product(&sum, &a, &b.to_dtype(DType::BF16)?).is_err());
        Ok(())
    }

    #[test]
    fn a_product_in_bf16_is_rounded_once() -> Result<()> {
        let mut noise = Noise::new(34);
        let half = |t: Tensor| t.to_dtype(DType::BF16);
        let (a, b) = (half(noise.tensor(&[5, 70]))?, half(noise.tensor(&[70, 9]))?);
        let wide = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec2::<f32>();
        let own = product_as(&a, &b, DType::BF16)?;
        assert_eq!(own.dtype(), DType::BF16);
        assert_eq!(wide(&own)?, wide(&half(product(&a, &b)?)?)?);
        // Onto bf16 values, too.
        let sum = half(noise.tensor(&[5, 9]))?;
        let want = (sum.to_dtype(DType::F32)? + product(&a, &b)?)?;
        add_product(&sum, &a, &b)?;
        assert_eq!(wide(&sum)?, wide(&half(want)?)?);
        let [a, b] = [&a, &b].map(|t| t.to_dtype(DType::F32));
        assert_eq!(product_as(&a?, &b?, DType::F32)?.dtype(), DType::F32);
        assert!(add_product(&sum, &noise.tensor(&[5, 3]), &noise.tensor(&[3, 9])).is_err());
        Ok(())
    }

    #[test]
    fn results_of_half_factors_are_not_rounded_to_halves() -> Result<()> {
        let mut noise = Noise::new(32);
        for dtype in [DType::BF16, DType::F16] {
            let (a, b) =
                (noise.tensor(&[5, 70]).to_dtype(dtype)?, noise.tensor(&[70, 9]).to_dtype(dtype)?);
            let own = product(&a, &b)?;
            assert_eq!(own.dtype(), DType::F32);
            let want = a.to_dtype(DType::F64)?.matmul(&b.to_dtype(DType::F64)?)?;
            assert_close("product", &own, &want.to_dtype(DType::F32)?, 1e-6);
        }
        let wide = noise.tensor(&[2, 3]).to_dtype(DType::F64)?;
        assert_eq!(product(&wide, &wide.t()?)?.dtype(), DType::F64);
        assert!(product(&wide, &wide).is_err());
        Ok(())
    }
}
