//! A draft's matrices as one that only proposes reads them, without gradients: as blocks of 8 bits or in bf16. Proposals
//! need not be exact, and beside a target that is read as blocks of 4 a draft in f32 would take a third of its time.

use std::collections::HashMap;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use longdraft_kernels::dispatch::multiplies_halves;
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix, holds_blocks};

use super::Parameter;
use crate::error::Result;
use crate::weights::TensorRole;

/// How the matrices of a draft that only proposes are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldAs {
    /// As blocks of 8 bits, where a device multiplies them and rows are whole blocks.
    Blocks,
    /// In bf16, where an NVIDIA GPU multiplies it.
    Halves,
}

impl HeldAs {
    fn is_multiplied_on(self, device: &Device) -> bool {
        match self {
            Self::Blocks => holds_blocks(device),
            Self::Halves => multiplies_halves(device),
        }
    }
}

/// Matrices by published name; empty while a draft is held in f32.
#[derive(Default)]
pub(super) struct Matrices {
    matrices: HashMap<String, Matrix>,
    /// Values of the tensors whose f32 form is gone.
    freed: usize,
}

impl Matrices {
    /// Rounds every matrix that can be held so, where its device multiplies it, and takes its f32 values out of the
    /// parameters before the next one is rounded: only one is ever held in both forms, beside those of the `kept` modules.
    /// Parameters that are never in the graph go, too.
    pub(super) fn take_over(
        &mut self,
        parameters: &mut Vec<Parameter>,
        how: HeldAs,
        kept: &[&str],
    ) -> Result<()> {
        let mut next = 0;
        while let Some(parameter) = parameters.get(next) {
            if self.replaces(parameter, how, kept)? {
                self.freed += parameter.var.elem_count();
                drop(parameters.remove(next));
            } else {
                next += 1;
            }
        }
        Ok(())
    }

    /// Rounds a parameter if it can be rounded. Returns whether nobody needs its f32 values any more.
    fn replaces(&mut self, parameter: &Parameter, how: HeldAs, kept: &[&str]) -> Result<bool> {
        let Parameter { name, var, dead, .. } = parameter;
        if !how.is_multiplied_on(var.device()) {
            return Ok(false);
        }
        if *dead {
            return Ok(true);
        }
        let Some(matrix) = rounded(parameter, how)? else { return Ok(false) };
        self.matrices.insert(name.clone(), matrix);
        let module = name.strip_suffix(".weight");
        Ok(!kept.iter().any(|kept| Some(*kept) == module))
    }

    /// Values of the tensors whose f32 form is gone.
    pub(super) fn freed(&self) -> usize {
        self.freed
    }

    /// Bytes of the matrices.
    pub(super) fn held_bytes(&self) -> usize {
        self.matrices.values().map(Matrix::held_bytes).sum()
    }

    /// A matrix, if it is held here.
    pub(super) fn get(&self, name: &str) -> Option<&Matrix> {
        self.matrices.get(name)
    }

    /// `x Wᵀ + b`, without gradients, if the matrix is held here.
    pub(super) fn project(
        &self,
        x: &Tensor,
        name: &str,
        bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(matrix) = self.get(name) else { return Ok(None) };
        Ok(Some(matrix.linear(&x.detach(), bias.map(Tensor::detach).as_ref())?))
    }
}

/// A parameter as it is to be held, if it is a matrix that is multiplied and its rows can be held so.
fn rounded(parameter: &Parameter, how: HeldAs) -> Result<Option<Matrix>> {
    let Parameter { name, var, role, .. } = parameter;
    let tensor = var.as_tensor().detach();
    let Ok((outputs, inputs)) = tensor.dims2() else { return Ok(None) };
    // Weights of modules are multiplied, other tables are looked up.
    let is_multiplied = name.ends_with(".weight") && *role != TensorRole::Embedding;
    if is_multiplied && how == HeldAs::Halves {
        return Ok(Some(Matrix::Dense(tensor.to_dtype(DType::BF16)?)));
    }
    if !is_multiplied || !inputs.is_multiple_of(32) {
        return Ok(None);
    }
    let on_host = tensor.to_device(&Device::Cpu)?;
    let bytes = QTensor::quantize(&on_host, GgmlDType::Q8_0)?;
    let matrix = QuantisedMatrix::new(BlockFormat::Q8_0, outputs, inputs, &bytes.data()?)?;
    Ok(Some(Matrix::of_blocks(matrix, tensor.device())?))
}

#[cfg(test)]
mod tests;
