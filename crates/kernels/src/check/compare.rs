//! Errors and bits of results.

use candle_core::{DType, Device, Result, Tensor};

/// Part of a tensor's largest value below which a row's own largest value does not count.
const FLOOR: f64 = 0.1;

/// What counts as a row's largest value at least: where everything cancels, nothing but rounding is left.
const SMALLEST: f64 = 0.01;

/// A result in the CPU's memory.
pub(super) struct Outcome {
    pub(super) name: String,
    pub(super) values: Tensor,
    pub(super) is_choice: bool,
}

/// A tensor in the CPU's memory; nothing is transferred of nothing.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() == 0 {
        return Tensor::zeros(tensor.shape(), tensor.dtype(), &Device::Cpu);
    }
    tensor.detach().to_device(&Device::Cpu)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// The largest error of a row; infinite where shapes differ, NaN where a value is.
pub(super) fn error(got: &Tensor, want: &Tensor) -> Result<f64> {
    if got.dims() != want.dims() {
        return Ok(f64::INFINITY);
    }
    let width = match want.dims() {
        [] | [_] => want.elem_count(),
        [.., width] => *width,
    };
    let (got, want) = (numbers(got)?, numbers(want)?);
    let whole = largest(&want);
    let mut worst = 0.0_f64;
    for (got, want) in got.chunks(width.max(1)).zip(want.chunks(width.max(1))) {
        let mut difference = 0.0_f64;
        for (got, want) in got.iter().zip(want) {
            let apart = (got - want).abs();
            if !apart.is_finite() {
                return Ok(f64::NAN);
            }
            difference = difference.max(apart);
        }
        worst = worst.max(difference / largest(want).max(FLOOR * whole).max(SMALLEST));
    }
    Ok(worst)
}

/// Whether all bits are equal.
pub(super) fn same_bits(a: &[Outcome], b: &[Outcome]) -> Result<bool> {
    if a.len() != b.len() {
        return Ok(false);
    }
    for (a, b) in a.iter().zip(b) {
        let bits = |tensor: &Tensor| -> Result<Vec<u64>> {
            Ok(numbers(tensor)?.into_iter().map(f64::to_bits).collect())
        };
        if a.values.dims() != b.values.dims() || bits(&a.values)? != bits(&b.values)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(values: [[f32; 2]; 2]) -> Tensor {
        Tensor::new(&values, &Device::Cpu).expect("rows")
    }

    #[test]
    fn a_wrong_row_shows_beside_a_larger_one() -> Result<()> {
        let want = rows([[100.0, 0.0], [1.0, 0.5]]);
        // In parts of a tenth of the largest value.
        let small = error(&rows([[100.0, 0.0], [1.5, 0.5]]), &want)?;
        assert!((small - 0.05).abs() < 1e-9, "{small}");
        let large = error(&rows([[101.0, 0.0], [1.0, 0.5]]), &want)?;
        assert!((large - 0.01).abs() < 1e-9, "{large}");
        let third = error(&rows([[3.0, 0.0], [1.0, 2.0]]), &rows([[3.0, 0.0], [1.0, 1.0]]))?;
        assert!((third - 1.0).abs() < 1e-9, "{third}");
        Ok(())
    }

    #[test]
    fn what_is_no_number_or_of_another_shape_never_passes() -> Result<()> {
        let want = rows([[1.0, 2.0], [3.0, 4.0]]);
        assert!(error(&rows([[1.0, f32::NAN], [3.0, 4.0]]), &want)?.is_nan());
        assert!(error(&rows([[1.0, f32::INFINITY], [3.0, 4.0]]), &want)?.is_nan());
        assert!(error(&want.flatten_all()?, &want)?.is_infinite());
        let nothing = Tensor::zeros((2, 2), DType::F64, &Device::Cpu)?;
        assert!((error(&want, &nothing)? - 400.0).abs() < 1e-9);
        Ok(())
    }

    #[test]
    fn zeros_of_both_signs_are_equal_values_and_different_bits() -> Result<()> {
        let of = |value: f32| -> Result<Vec<Outcome>> {
            let values = Tensor::new(&[value], &Device::Cpu)?;
            Ok(vec![Outcome { name: "result".to_owned(), values, is_choice: false }])
        };
        assert!(same_bits(&of(0.0)?, &of(0.0)?)?);
        assert!(!same_bits(&of(0.0)?, &of(-0.0)?)?);
        assert!(same_bits(&of(f32::NAN)?, &of(f32::NAN)?)?);
        assert!(!same_bits(&of(0.0)?, &[])?);
        Ok(())
    }
}
