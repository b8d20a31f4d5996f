//! Attention from plain tensor ops: `[N, Tq, Tk]` scores are materialised.

use candle_core::{D, DType, Result, Tensor};

use super::{KeyRanges, check_shapes};

/// As [`super::attention`], for any device and float type, differentiable in `q`, `k` and `v`.
pub(crate) fn reference(q: &Tensor, k: &Tensor, v: &Tensor, ranges: &KeyRanges) -> Result<Tensor> {
    check_shapes(q, k, v, ranges)?;
    let (queries, heads, head_dim) = q.dims3()?;
    if queries == 0 {
        return Ok(q.clone());
    }
    let (keys, kv_heads, _) = k.dims3()?;
    let group = heads / kv_heads;
    let wide = match q.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    // [K, G·Tq, D] against [K, D, Tk]
    let q_grouped = q
        .to_dtype(wide)?
        .reshape((queries, kv_heads, group, head_dim))?
        .permute((1, 2, 0, 3))?
        .reshape((kv_heads, group * queries, head_dim))?;
    let k_t = k.to_dtype(wide)?.permute((1, 2, 0))?.contiguous()?;
    let v_t = v.to_dtype(wide)?.transpose(0, 1)?.contiguous()?;
    let visible = visibility(ranges, keys, q)?.to_dtype(wide)?;
    let scores = (q_grouped.matmul(&k_t)? / (head_dim as f64).sqrt())?
        .reshape((kv_heads, group, queries, keys))?;
    let hidden_bias = ((&visible - 1.0)? * 1e30)?;
    let masked = scores.broadcast_add(&hidden_bias)?;
    let max = masked.max_keepdim(D::Minus1)?.detach();
    let weights = masked.broadcast_sub(&max)?.exp()?.broadcast_mul(&visible)?;
    let total = weights.sum_keepdim(D::Minus1)?;
    // A row without keys divides 0 by 1.
    let total = (&total + total.eq(0.0)?.to_dtype(wide)?)?;
    let out = weights
        .reshape((kv_heads, group * queries, keys))?
        .matmul(&v_t)?
        .reshape((kv_heads, group, queries, head_dim))?
        .broadcast_div(&total)?;
    out.permute((2, 0, 1, 3))?.reshape((queries, heads, head_dim))?.to_dtype(q.dtype())
}

fn visibility(ranges: &KeyRanges, keys: usize, like: &Tensor) -> Result<Tensor> {
    let mut visible = vec![0.0_f32; ranges.queries() * keys];
    for t in 0..ranges.queries() {
        let range = ranges.of(t);
        visible[t * keys + range.start..t * keys + range.end].fill(1.0);
        for &key in ranges.singles_of(t) {
            visible[t * keys + key as usize] = 1.0;
        }
    }
    Tensor::from_vec(visible, (ranges.queries(), keys), like.device())
}
