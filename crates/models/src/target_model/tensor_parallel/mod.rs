//! Layers that ranks share (tensor parallel): each holds some heads and a part of the MLP's inner width.
//!
//! ```text
//! M ranks            outputs of a rank          inputs of a rank
//! q, k, v            its heads: N·D/M, K·D/M    all H
//! o                  all H                      its heads: N·D/M
//! gate, up           I/M inner states           all H
//! down               all H                      the same I/M
//! ```
//!
//! Outputs that one rank makes are inputs of the same rank, so that a layer needs two sums over the ranks:
//! after `o` and after `down` (Megatron-LM: Shoeybi et al. 2019, <https://arxiv.org/abs/1909.08053>).
//! Sums run in the order of the ranks, or that of their devices where these exchange tensors themselves. All
//! ranks go on from the same bits. The first rank adds the residual stream and the biases of `o` and `down`.
//! Norms, routers, embedding table and head are whole everywhere. Every expert of a mixture is cut like an MLP.
//!
//! A pass is a collective: the ranks run each other's rows in turn ([`super::Target::forward`]). Differs
//! from one rank by the rounding of sums in f32.

mod turns;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::Matrix;

use super::spread::Ranks;
use crate::config::TargetConfig;
use crate::error::{Problems, Result, refused};

/// What a rank holds of every layer; by default all of it.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerShare {
    ranks: Option<Arc<dyn Ranks>>,
}

impl LayerShare {
    /// This rank's share of the layers of a target.
    /// It fails where heads or inner width cannot be divided by the number of ranks.
    pub(super) fn of(config: &TargetConfig, ranks: Option<&Arc<dyn Ranks>>) -> Result<Self> {
        let ranks = ranks.filter(|ranks| ranks.size() > 1).cloned();
        let problems = ranks.as_ref().map(|ranks| config.sharing_problems(ranks.size()));
        Problems(problems.unwrap_or_default()).into_result(Path::new("target configuration"))?;
        Ok(Self { ranks })
    }

    /// Ranks that share a layer.
    pub(super) fn size(&self) -> usize {
        self.ranks.as_ref().map_or(1, |ranks| ranks.size())
    }

    /// They, where there are several.
    pub(super) fn ranks(&self) -> Option<&dyn Ranks> {
        self.ranks.as_deref()
    }

    /// This rank's part of a width.
    fn part_of(&self, width: usize) -> Range<usize> {
        let (rank, part) =
            (self.ranks.as_ref().map_or(0, |ranks| ranks.rank()), width / self.size());
        part * rank..part * (rank + 1)
    }

    /// This rank's outputs of `[O, I]`.
    pub(super) fn outputs(&self, matrix: Matrix) -> Result<Matrix> {
        if self.ranks.is_none() {
            return Ok(matrix);
        }
        let (outputs, _) = matrix.dims()?;
        let rows: Vec<u32> = self.part_of(outputs).map(|row| row as u32).collect();
        Ok(matrix.select(&rows)?)
    }

    /// This rank's inputs of `[O, I]`; `name` is for the error. It fails where quantised blocks would be cut.
    pub(super) fn inputs(&self, name: &str, matrix: Matrix) -> Result<Matrix> {
        let Some(ranks) = &self.ranks else { return Ok(matrix) };
        let (_, inputs) = matrix.dims()?;
        matrix.columns(self.part_of(inputs)).map_err(|error| {
            let ranks = ranks.size();
            refused(format!(
                "`{name}` shared by {ranks} ranks: {error}; share it by fewer, or hold it as f32"
            ))
        })
    }

    /// This rank's part of a bias `[O]` of outputs that are shared.
    pub(super) fn output_bias(&self, bias: &Tensor) -> Result<Tensor> {
        if self.ranks.is_none() {
            return Ok(bias.clone());
        }
        let part = self.part_of(bias.dim(0)?);
        Ok(bias.narrow(0, part.start, part.len())?.force_contiguous()?)
    }

    /// What counts once in a sum over the ranks: itself on the first one, zeros on the others.
    pub(super) fn start(&self, once: &Tensor) -> Result<Tensor> {
        match &self.ranks {
            Some(ranks) if ranks.rank() > 0 => Ok(once.zeros_like()?),
            _ => Ok(once.clone()),
        }
    }

    /// `residual` plus what every rank's part adds to the sum that it is given, `[T, H]`.
    pub(super) fn onto(
        &self,
        residual: &Tensor,
        part: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let part = part(&self.start(residual)?)?;
        self.sum(part)
    }

    /// Everybody's tensors of one shape, summed in f32, on all of them: in the order of the ranks, or where devices
    /// exchange tensors, in theirs.
    pub(super) fn sum(&self, part: Tensor) -> Result<Tensor> {
        let Some(ranks) = &self.ranks else { return Ok(part) };
        if let Some(devices) = ranks.devices().filter(|devices| devices.takes(&part)) {
            let dtype = part.dtype();
            let sums = devices.all_reduce(&[part.to_dtype(DType::F32)?])?;
            return Ok(sums[0].to_dtype(dtype)?);
        }
        let (shape, dtype, device) = (part.shape().clone(), part.dtype(), part.device().clone());
        let values: Vec<f32> = part.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        drop(part);
        let sums = summed(ranks.as_ref(), values);
        Ok(Tensor::from_vec(sums, shape, &device)?.to_dtype(dtype)?)
    }

    /// Everybody's tensors of one shape side by side along `dim`, on all ranks.
    pub(super) fn whole(&self, part: &Tensor, dim: usize) -> Result<Tensor> {
        let Some(ranks) = &self.ranks else { return Ok(part.clone()) };
        if let Some(devices) = ranks.devices().filter(|devices| devices.takes(part)) {
            let all = devices.all_gather(std::slice::from_ref(part))?;
            let parts = (0..ranks.size()).map(|rank| all[0].get(rank));
            return Ok(Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, dim)?);
        }
        let own: Vec<f32> = part.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let mut all = vec![0.0_f32; own.len() * ranks.size()];
        ranks.all_gather(bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut all));
        let parts = all.chunks(own.len().max(1));
        let parts = parts.map(|values| Tensor::from_slice(values, part.shape(), &Device::Cpu));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        drop(all);
        Ok(Tensor::cat(&parts, dim)?.to_dtype(part.dtype())?.to_device(part.device())?)
    }
}

/// Sums of everybody's values: every rank sums its part of them, and hands it to all.
fn summed(ranks: &dyn Ranks, values: Vec<f32>) -> Vec<f32> {
    let (count, size) = (values.len(), ranks.size());
    let part = count.div_ceil(size);
    let of_rank = |rank: usize| count.saturating_sub(part * rank).min(part);
    let mut own = ranks.sum_parts(&values, &(0..size).map(of_rank).collect::<Vec<_>>());
    drop(values);
    // Only the last parts are shorter: what fills them up lies after all values.
    own.resize(part, 0.0);
    own.shrink_to_fit();
    let mut all = vec![0.0; part * size];
    ranks.all_gather(bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut all));
    all.truncate(count);
    all
}
