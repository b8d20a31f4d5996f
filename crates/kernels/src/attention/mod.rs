//! Grouped-query attention in which every query sees a contiguous range of keys and a few single
//! ones.
//!
//! `o_t = Σ_s softmax_s(q_t · k_s / √D) v_s` over `s ∈ [start_t, end_t)` and the single keys; a
//! query that sees nothing gets exactly 0. Query head `n` reads key-value head `⌊n / (N/K)⌋`; keys
//! are not repeated. Causal, sliding-window, delayed cross-attention, packed documents, EAGLE-3's
//! test-time steps and token trees are all choices of visible keys, see [`KeyRanges`].
//!
//! The fused version is an online softmax over tiles (Milakov and Gimelshein 2018; Dao et al.
//! 2022): memory linear in `T`, nothing of size `[T, T]` is stored. Only the output and the
//! log-sum-exp `[T, N]` are kept; the backward pass recomputes the probabilities:
//! `P = exp(S − lse)`, `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))`, `dQ = dS K / √D`,
//! `dK = dSᵀ Q / √D`. Keys and values that do not train cost no backward work.

mod backward;
mod composed;
mod gpu;
mod keys;
mod part;
mod ranges;
mod reference;
mod tiled;

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Result, Shape, Tensor, bail};
use half::f16;

use crate::composed::CHUNK_VALUES;
use crate::dispatch::{fused, products_of};
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::gemm::{Element, Mat, Room, Threads, matmul_as, rounds};
use crate::graph::Gradients;
use crate::storage::{values_like, with_each_f32};

#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::{Way, programs};
pub(crate) use reference::reference;

pub use keys::{half_keys, is_quantisable, quantised_keys};
pub use ranges::{Delays, KeyRanges, Reach};

/// What [`attention`] of few rows that do not train asks of a pass's inputs ([`crate::repeat`]): ranges as a GPU reads them. Their number
/// depends on that of the queries, and of their single keys in steps of 64.
pub fn words_of_ranges(ranges: &KeyRanges) -> Vec<u32> {
    gpu::tables::words(ranges)
}

/// Attention of `q` over `k`, `v` within `ranges`.
///
/// # Shapes
/// - `q`: `[Tq, N, D]`, `k`, `v`: `[Tk, K, D]`, ranges over `Tq` queries and `Tk` keys → `[Tq, N, D]`
///
/// `k` and `v` may be f16, or blocks of 8 bits of [`quantised_keys`], as a cache holds them; without
/// gradients they are read as they lie. On an NVIDIA GPU bf16 keys and values are, and where queries are bf16 so is the
/// result.
///
/// # Errors
/// - shapes do not fit, or `K` does not divide `N`
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, ranges: &Arc<KeyRanges>) -> Result<Tensor> {
    attend(q, k, v, ranges, Scores::default())
}

/// What becomes of scores before and in the softmax.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores<'a> {
    /// `c` of scores `c · tanh(s / c)` (Gemma 2, Riviere et al. 2024).
    pub softcap: Option<f64>,
    /// A logit of each query head that takes its share of the softmax and has no value, `[N]` in f32: outputs
    /// are multiplied by `σ(lse − sink)`, `lse` being the log-sum-exp of the scores (gpt-oss).
    pub sinks: Option<&'a Tensor>,
}

/// [`attention`] with scores that are bent or share the softmax with sinks, without gradients. The GPU's
/// kernels do neither: tensor ops do it there.
///
/// # Shapes
/// - as [`attention`]
///
/// # Errors
/// - as [`attention`]; an argument trains, a softcap is not positive, or there is not one sink a head
pub fn frozen_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
    scores: Scores<'_>,
) -> Result<Tensor> {
    if let Some(softcap) = scores.softcap.filter(|cap| !(*cap > 0.0 && cap.is_finite())) {
        bail!("attention: positive softcap expected, found {softcap}");
    }
    if [Some(q), Some(k), Some(v), scores.sinks].iter().flatten().any(|t| t.track_op()) {
        bail!("attention: soft-capped scores and sinks have no gradients");
    }
    let heads = q.dims3()?.1;
    if let Some(sinks) = scores.sinks.filter(|sinks| sinks.dims() != [heads]) {
        bail!("attention: sinks {:?} for {heads} heads", sinks.shape());
    }
    attend(q, k, v, ranges, scores)
}

/// [`attention`] whose backward pass forms scores once where there is a kernel for that, whatever the settings are.
pub(crate) fn attention_in_one_pass(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Tensor> {
    check_shapes(q, k, v, ranges)?;
    let way = gpu::Way::with(true, products_of(q), q.dim(2)?, q.device());
    if gpu::takes([q, k, v])
        && let Some(out) = gpu::attention_of(way, q, k, v, ranges)?
    {
        return Ok(out);
    }
    attention(q, k, v, ranges)
}

fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
    scores: Scores<'_>,
) -> Result<Tensor> {
    check_shapes(q, k, v, ranges)?;
    let plain = scores.softcap.is_none() && scores.sinks.is_none();
    if plain
        && gpu::takes([q, k, v])
        && let Some(out) = gpu::attention(q, k, v, ranges)?
    {
        return Ok(out);
    }
    if [q, k, v].iter().any(|t| t.dtype() == DType::BF16 && !t.track_op()) {
        let [wide_q, k, v] = [q, k, v].map(|t| t.to_dtype(DType::F32));
        return attend(&wide_q?, &k?, &v?, ranges, scores)?.to_dtype(q.dtype());
    }
    let held_as = |dtype| [k, v].iter().all(|t| t.dtype() == dtype && !t.track_op());
    let blocks = held_as(DType::U8);
    // Beside queries of the same type they are no narrower than these.
    let narrow = blocks || held_as(DType::F16) && q.dtype() != DType::F16;
    // Gradients are computed from f32.
    let is_fused = if narrow {
        fused(&[q]) && k.device().is_cpu() && !q.track_op()
    } else {
        fused(&[q, k, v])
    };
    if narrow && !is_fused {
        let wide = |t: &Tensor| if blocks { keys::widened_keys(t) } else { t.to_dtype(q.dtype()) };
        return attend(q, &wide(k)?, &wide(v)?, ranges, scores);
    }
    if is_fused {
        let (ranges, log_sum_exp) = (Arc::clone(ranges), OnceLock::new());
        let sinks = scores.sinks.map(Tensor::to_vec1::<f32>).transpose()?;
        let (softcap, rounded) = (scores.softcap.map(|cap| cap as f32), rounds_tiles(q, k)?);
        fuse(Attention { ranges, softcap, sinks, rounded, log_sum_exp }, [q, k, v])
    } else {
        composed::within(CHUNK_VALUES, [q, k, v], ranges, scores)
    }
}

/// Whether the products of all tiles have rounded factors: where a product of all queries of a head and all keys would.
fn rounds_tiles(q: &Tensor, k: &Tensor) -> Result<bool> {
    let dims = Dims::new(q.shape(), k.shape())?;
    Ok(rounds((q.dim(0)? * dims.group(), dims.head_dim, k.dim(0)?)))
}

fn check_shapes(q: &Tensor, k: &Tensor, v: &Tensor, ranges: &KeyRanges) -> Result<()> {
    let (queries, heads, head_dim) = q.dims3()?;
    let (keys, kv_heads, key_dim) = k.dims3()?;
    let fits = |t: &Tensor| {
        key_dim == keys::held_dim(t.dtype(), head_dim)
            && (t.dtype() != DType::U8 || keys::is_quantisable(head_dim))
    };
    if v.dims() != k.dims() || !fits(k) || !fits(v) {
        bail!("attention: q {:?}, k {:?}, v {:?} do not fit", q.shape(), k.shape(), v.shape());
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        bail!("attention: {kv_heads} key-value heads do not divide {heads} query heads");
    }
    if ranges.queries() != queries || ranges.max_end() > keys {
        bail!(
            "attention: ranges over {} queries up to key {} do not fit {queries} queries, {keys} keys",
            ranges.queries(),
            ranges.max_end()
        );
    }
    Ok(())
}

/// Sizes of one call; `T` counts are those of the slices.
#[derive(Debug, Clone, Copy)]
struct Dims {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Where scores are bent.
    softcap: Option<f32>,
    /// Whether products have rounded factors.
    rounded: bool,
}

impl Dims {
    fn new(q: &Shape, k: &Shape) -> Result<Self> {
        let (_, heads, head_dim) = q.dims3()?;
        let (_, kv_heads, _) = k.dims3()?;
        Ok(Self { heads, kv_heads, head_dim, softcap: None, rounded: false })
    }

    /// The product of a tile, on the calling thread.
    fn product<'d, T: Element>(
        self,
        dst: impl Into<Room<'d>>,
        dst_stride: usize,
        a: Mat<'_>,
        b: Mat<'_, T>,
        accumulate: bool,
    ) {
        matmul_as(self.rounded, dst, dst_stride, a, b, accumulate, Threads::One);
    }

    /// Query heads that share a key-value head.
    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    fn scale(self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Values from one token's queries to the next.
    fn q_stride(self) -> usize {
        self.heads * self.head_dim
    }

    /// Values from one token's keys to the next.
    fn kv_stride(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Query tokens of a tile: enough rows for a good matrix product after stacking the group.
    fn tile_queries(self) -> usize {
        (192 / self.group()).max(1)
    }
}

/// Whether an NVIDIA GPU with bf16 products reads queries, keys and values of heads of such a width in bf16, and keeps them
/// so for the backward pass where the graph lets go of the f32 ones.
pub fn keeps_halves(head_dim: usize) -> bool {
    gpu::reads_halves(head_dim)
}

/// Keys of a tile. Tiles are cut at its multiples, so keys that are dropped by whole tiles leave every bit.
pub const TILE_KEYS: usize = 256;

/// Bytes of the score gradients that a backward pass of [`attention`] on a CPU holds at most while keys train: those of a
/// block of query tokens (`Tq`) and keys (`Tk`). The block's queries, their output gradients and sums, `3 D` values a
/// row of a head, are not counted.
///
/// # Panics
/// - no key-value heads, or more of them than query heads
pub fn held_bytes(
    (queries, keys): (usize, usize),
    (heads, kv_heads): (usize, usize),
    threads: usize,
) -> usize {
    let dims = Dims { heads, kv_heads, head_dim: 1, softcap: None, rounded: false };
    backward::held_values(dims, queries, keys, threads) * size_of::<f32>()
}

struct Attention {
    ranges: Arc<KeyRanges>,
    /// Forward only, as the next.
    softcap: Option<f32>,
    /// `[N]`
    sinks: Option<Vec<f32>>,
    rounded: bool,
    /// `[Tq, N]`, filled by the forward pass.
    log_sum_exp: OnceLock<Vec<f32>>,
}

impl FusedOp<3> for Attention {
    const NAME: &'static str = "attention";
    const READS_RESULT: bool = true;

    fn forward(&self, [q, k, v]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let Self { softcap, rounded, .. } = *self;
        let dims = Dims { softcap, rounded, ..Dims::new(q.shape(), k.shape())? };
        let visible = (self.ranges.as_ref(), self.sinks.as_deref());
        let (shape, q) = (q.shape().clone(), q.f32()?);
        let (out, lse) = match k.dtype() {
            DType::F16 => tiled::forward(q, k.values::<f16>()?, v.values::<f16>()?, dims, visible),
            DType::U8 => {
                let [k, v] = [k.values()?, v.values()?].map(keys::Blocks);
                tiled::forward(q, k, v, dims, visible)
            }
            _ => tiled::forward(q, k.f32()?, v.f32()?, dims, visible),
        };
        // A second forward pass of the same op computes the same values.
        let _ = self.log_sum_exp.set(lse);
        Ok((out, shape))
    }

    fn backward(&self, inputs: [&Input; 3], out: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let train_keys = inputs[1].trains || inputs[2].trains;
        let [q, k, v] = inputs.map(|input| &input.tensor);
        let Some(lse) = self.log_sum_exp.get() else { bail!("attention: backward before forward") };
        if self.softcap.is_some() || self.sinks.is_some() {
            bail!("attention: soft-capped scores and sinks have no gradients");
        }
        let dims = Dims { rounded: self.rounded, ..Dims::new(q.shape(), k.shape())? };
        with_each_f32([q, k, v, out, grad], |[q_values, k_values, v_values, out, grad]| {
            let saved = backward::Saved { q: q_values, k: k_values, v: v_values, out, grad, lse };
            if !train_keys {
                let dq = backward::queries(&saved, dims, &self.ranges);
                return Ok([Some(values_like(q, dq)?), None, None]);
            }
            let [dq, dk, dv] = backward::all(&saved, dims, &self.ranges);
            Ok([Some(values_like(q, dq)?), Some(values_like(k, dk)?), Some(values_like(v, dv)?)])
        })
    }
}

#[cfg(test)]
mod tests;
