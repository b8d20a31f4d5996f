//! One block of the baseline: attention and MLP between mixes and scales.

use std::sync::Arc;

use candle_core::{D, Tensor};
use longdraft_kernels::attention::{KeyRanges, attention};
use longdraft_kernels::channel_scale::{add_scaled, scale_channels};
use longdraft_kernels::graph::{cat, narrow, reshape, scale};
use longdraft_kernels::linear::linear;
use longdraft_kernels::relu_squared::relu_squared;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{RopeTable, rope};

use super::LanguageModelConfig;
use crate::error::Result;

/// Norm over the last dimension without a learned weight.
pub(super) fn norm(x: &Tensor, eps: f64) -> Result<Tensor> {
    let ones = Tensor::ones(x.dim(D::Minus1)?, x.dtype(), x.device())?;
    Ok(rms_norm(x, &ones, eps)?)
}

/// What all blocks of a pass share.
pub(super) struct Pass<'a> {
    pub(super) config: &'a LanguageModelConfig,
    pub(super) ranges: &'a Arc<KeyRanges>,
    pub(super) table: &'a RopeTable,
    /// The normed embedding, `[T, d]`.
    pub(super) x0: &'a Tensor,
}

/// A block's tensors.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub(super) c_q: Tensor,
    pub(super) c_k: Tensor,
    pub(super) c_v: Tensor,
    pub(super) attn_proj: Tensor,
    pub(super) q_gain: Tensor,
    pub(super) fc: Tensor,
    pub(super) mlp_proj: Tensor,
    pub(super) attn_scale: Tensor,
    pub(super) mlp_scale: Tensor,
    pub(super) resid_mix: Tensor,
}

impl Block {
    /// From the tensors of one block by name.
    pub(super) fn new(tensor: impl Fn(&str) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            c_q: tensor("attn.c_q.weight")?,
            c_k: tensor("attn.c_k.weight")?,
            c_v: tensor("attn.c_v.weight")?,
            attn_proj: tensor("attn.proj.weight")?,
            q_gain: tensor("attn.q_gain")?,
            fc: tensor("mlp.fc.weight")?,
            mlp_proj: tensor("mlp.proj.weight")?,
            attn_scale: tensor("attn_scale")?,
            mlp_scale: tensor("mlp_scale")?,
            resid_mix: tensor("resid_mix")?,
        })
    }

    /// `[T, d]` → `[T, d]`.
    pub(super) fn forward(&self, x: &Tensor, layer: usize, pass: &Pass<'_>) -> Result<Tensor> {
        let mix = |row| -> Result<Tensor> { Ok(self.resid_mix.narrow(0, row, 1)?.squeeze(0)?) };
        let x = add_scaled(&scale_channels(x, &mix(0)?)?, pass.x0, &mix(1)?)?;
        let x = add_scaled(&x, &self.attention(&input(&x, layer, pass)?, pass)?, &self.attn_scale)?;
        let inner = linear(&input(&x, layer, pass)?, &self.fc, None)?;
        let inner = relu_squared(&inner, pass.config.activation.slope())?;
        Ok(add_scaled(&x, &linear(&inner, &self.mlp_proj, None)?, &self.mlp_scale)?)
    }

    fn attention(&self, normed: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let config = pass.config;
        let (tokens, width) = normed.dims2()?;
        let (heads, kv_heads, dim) =
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim());
        let project = |weight: &Tensor, heads: usize| -> Result<Tensor> {
            Ok(reshape(&linear(normed, weight, None)?, (tokens, heads, dim))?)
        };
        let turned = |x: &Tensor| -> Result<Tensor> { turn(&norm(x, config.rms_norm_eps)?, pass) };
        let q = turned(&project(&self.c_q, heads)?)?;
        let k = turned(&project(&self.c_k, kv_heads)?)?;
        let v = project(&self.c_v, kv_heads)?;
        let gain = self.q_gain.unsqueeze(1)?.broadcast_as((heads, dim))?.contiguous()?;
        let gain = gain.reshape(heads * dim)?;
        let q = scale_channels(&reshape(&q, (tokens, width))?, &gain)?;
        let out = attention(&reshape(&q, (tokens, heads, dim))?, &k, &v, pass.ranges)?;
        let out = if config.exclusive_attention { exclude_own(&out, &v)? } else { out };
        Ok(linear(&reshape(&out, (tokens, width))?, &self.attn_proj, None)?)
    }
}

/// The normed stream that a branch of block `layer` reads.
fn input(x: &Tensor, layer: usize, pass: &Pass<'_>) -> Result<Tensor> {
    let normed = norm(x, pass.config.rms_norm_eps)?;
    if pass.config.depth_scaled_norm {
        return Ok(scale(&normed, 1.0 / ((layer + 1) as f64).sqrt())?);
    }
    Ok(normed)
}

/// RoPE on the leading dimensions of every head.
fn turn(x: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
    let (turning, dim) = (pass.config.rope_dimensions(), pass.config.head_dim());
    if turning == dim {
        return Ok(rope(x, pass.table)?);
    }
    let front = rope(&narrow(x, 2, 0, turning)?, pass.table)?;
    Ok(cat(&[&front, &narrow(x, 2, turning, dim - turning)?], 2)?)
}

/// `o − (o · v̂) v̂` with each token's own value.
fn exclude_own(out: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (tokens, heads, dim) = out.dims3()?;
    let kv_heads = v.dim(1)?;
    let grouped = reshape(out, (tokens, kv_heads, heads / kv_heads, dim))?;
    let v = v.unsqueeze(2)?;
    let length = (v.sqr()?.sum_keepdim(3)? + 1e-12)?;
    let along = grouped.broadcast_mul(&v)?.sum_keepdim(3)?.broadcast_div(&length)?;
    let rest = (grouped - along.broadcast_mul(&v)?)?;
    Ok(reshape(&rest, (tokens, heads, dim))?)
}
