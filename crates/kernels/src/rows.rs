//! Some rows of a tensor.

use candle_core::{Result, Tensor};

/// The rows `ids` of `x`, `[T, ...]` → `[R, ...]`; gradients flow into them.
///
/// No ids give `[0, ...]` without a kernel: a GPU's driver refuses to start one that has no blocks.
///
/// # Errors
/// - an id is `T` or more (on the CPU), or the device has no memory
pub fn select_rows(x: &Tensor, ids: &[u32]) -> Result<Tensor> {
    if ids.is_empty() {
        let mut shape = x.dims().to_vec();
        shape[0] = 0;
        return Tensor::zeros(shape, x.dtype(), x.device());
    }
    x.index_select(&Tensor::from_slice(ids, ids.len(), x.device())?, 0)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn rows_come_in_the_order_of_their_ids() -> Result<()> {
        let x = Tensor::arange(0.0_f32, 6.0, &Device::Cpu)?.reshape((3, 2))?;
        let rows = select_rows(&x, &[2, 0, 2])?;
        assert_eq!(rows.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]);
        assert!(select_rows(&x, &[3]).is_err());
        Ok(())
    }

    #[test]
    fn no_ids_give_no_rows_and_start_nothing() -> Result<()> {
        let x = Tensor::zeros((3, 2, 5), DType::BF16, &Device::Cpu)?;
        let none = select_rows(&x, &[])?;
        assert_eq!((none.dims(), none.dtype()), ([0, 2, 5].as_slice(), DType::BF16));
        // A kernel's result would hang on what it was computed from.
        let variable = candle_core::Var::zeros((3, 2), DType::F32, &Device::Cpu)?;
        assert!(!select_rows(variable.as_tensor(), &[])?.track_op());
        Ok(())
    }
}
