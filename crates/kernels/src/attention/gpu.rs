//! Attention by tiles on an NVIDIA GPU: memory linear in `T`, scores stay on the chip.
//!
//! Factors are bf16 with [`Products::Half`], else f32 in three bf16 terms each. Passes of few queries
//! without gradients are cut into pieces of keys, so that decoding occupies the whole device; pieces
//! begin at fixed keys, and a row's bits depend on what it sees alone: a node of a token tree has those of
//! the same token in a chain.

pub(super) mod tables;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Shape, Tensor, bail};

use super::{Dims, KeyRanges, TILE_KEYS};
use crate::composed::{FULL_ROWS, differentiable};
use crate::cuda::{Argument, Launch, Program, block_memory, exactly};
use crate::dispatch::{Products, products_of};
use tables::{SeenBy, Tables};

/// Rows of a block's own tile, and its threads: `TILE` and `32 * WARPS` of the kernels.
pub(super) const TILE: usize = 64;
const THREADS: usize = 128;
/// Keys of a piece, a multiple of every tile of keys.
const PIECE: usize = TILE_KEYS;

/// As [`super::attention`]; `None` where a head is too wide for the device's blocks.
///
/// # Errors
/// - the device has no memory, or the kernels cannot be compiled
pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    let terms = if products_of(q) == Products::Half { 1 } else { 3 };
    attention_of(terms, q, k, v, ranges)
}

/// The same with factors of so many bf16 terms.
pub(super) fn attention_of(
    terms: usize,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    let Some(call) = Call::new(terms, [q, k, v], ranges)? else { return Ok(None) };
    let tracked = [q, k, v].iter().any(|t| t.track_op());
    let few = !tracked && call.queries <= FULL_ROWS;
    let pieces = if few { ranges.max_end_in_order().div_ceil(PIECE).max(1) } else { 1 };
    let (out, softmax) = call.forward(pieces, few && call.tables.has_singles)?;
    if pieces > 1 {
        return Ok(Some(call.joined(&out, &softmax, pieces)?));
    }
    let wanted = [q.track_op(), k.track_op() || v.track_op()];
    let result = out.clone();
    differentiable("attention", [q, k, v], out, move |gradient| {
        call.backward(&result, &softmax, &gradient.contiguous()?, wanted)
    })
    .map(Some)
}

/// The kernels for one width of heads, and how large their tiles are.
struct Kernels {
    program: Program,
    forward_memory: usize,
    backward_queries_memory: usize,
    backward_keys_memory: usize,
}

impl Kernels {
    /// With the largest tiles that a block's memory holds; `None` if it holds none.
    fn new(head_dim: usize, terms: usize, memory: usize) -> Option<Self> {
        let dim = head_dim.next_multiple_of(16);
        // Bytes of `count` rows as they are, and of as many columns.
        let plain = |count: usize| count * (dim + 8) * terms * 2;
        let across = |count: usize| dim * (count + 8) * terms * 2;
        let forward = |keys: usize| plain(TILE) + plain(keys) + across(keys);
        let queries = |inner: usize| 2 * (plain(TILE) + plain(inner)) + across(inner);
        let keys = |inner: usize| 2 * (plain(TILE) + plain(inner) + across(inner));
        // Two sums of a wide head leave registers for 32 rows of the inner tile.
        let widest = if head_dim > 64 { 32 } else { 64 };
        // What the kernels lay out beside: bounds of rows, normalisers.
        let memory = memory.saturating_sub(2048);
        let sizes = [64, 32, 16];
        let forward_keys = sizes.into_iter().find(|&keys| forward(keys) <= memory)?;
        let fits = |&inner: &usize| inner <= widest && keys(inner).max(queries(inner)) <= memory;
        let inner = sizes.into_iter().find(fits)?;
        let numbers = [
            ("HEAD_DIM", head_dim),
            ("TERMS", terms),
            ("FORWARD_KEYS", forward_keys),
            ("BACKWARD_INNER", inner),
        ];
        Some(Self {
            program: Program::new("attention", include_str!("gpu.cu"), &numbers),
            forward_memory: forward(forward_keys),
            backward_queries_memory: queries(inner),
            backward_keys_memory: keys(inner),
        })
    }

    /// The same for later calls of the process.
    fn of(head_dim: usize, terms: usize, device: &Device) -> Result<Option<Arc<Self>>> {
        type Known = ((usize, usize, usize), Option<Arc<Kernels>>);
        static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
        let key = (head_dim, terms, block_memory(device)?);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernels)) = known.iter().find(|(other, _)| *other == key) {
            return Ok(kernels.clone());
        }
        let kernels = Self::new(key.0, key.1, key.2).map(Arc::new);
        known.push((key, kernels.clone()));
        Ok(kernels)
    }
}

/// The program for one width of heads where blocks have so much memory, to compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn program(head_dim: usize, terms: usize, memory: usize) -> Option<Program> {
    Kernels::new(head_dim, terms, memory).map(|kernels| kernels.program)
}

/// One call's arguments, detached and contiguous.
struct Call {
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    dims: Dims,
    queries: usize,
    keys: usize,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Call {
    fn new(terms: usize, [q, k, v]: [&Tensor; 3], ranges: &Arc<KeyRanges>) -> Result<Option<Self>> {
        let dims = Dims::new(q.shape(), k.shape())?;
        let device = q.device();
        let Some(kernels) = Kernels::of(dims.head_dim, terms, device)? else { return Ok(None) };
        let trained_keys = (k.track_op() || v.track_op()).then(|| k.dim(0)).transpose()?;
        let plain = |t: &Tensor| t.detach().contiguous();
        Ok(Some(Self {
            kernels,
            tables: Tables::of(ranges, trained_keys, device)?,
            dims,
            queries: q.dim(0)?,
            keys: k.dim(0)?,
            q: plain(q)?,
            k: plain(k)?,
            v: plain(v)?,
        }))
    }

    /// Tiles of (token, head) rows that share a key-value head.
    fn tiles(&self) -> usize {
        (self.queries * self.dims.group()).div_ceil(TILE)
    }

    fn scale(&self) -> Argument<'_> {
        Argument::F32(self.dims.scale())
    }

    fn run(
        &self,
        kernel: &str,
        (grid, threads, memory): ([usize; 3], usize, usize),
        arguments: &[Argument<'_>],
        results: &[Shape],
    ) -> Result<Vec<Tensor>> {
        let program = &self.kernels.program;
        Launch { program, kernel, grid, threads, memory, arguments, results }.run(self.q.device())
    }

    /// The result and its log-sum-exp `[Tq, N]`, or their pieces; single keys beside the ranges or
    /// in order after them.
    fn forward(&self, pieces: usize, in_order: bool) -> Result<(Tensor, Tensor)> {
        let Dims { heads, kv_heads, head_dim, .. } = self.dims;
        let tables = &self.tables;
        let arguments: [Argument<'_>; 15] = [
            (&self.q).into(),
            (&self.k).into(),
            (&self.v).into(),
            (&tables.start).into(),
            (&tables.end).into(),
            (&tables.singles).into(),
            (&tables.singles_end).into(),
            tables.has_singles.into(),
            in_order.into(),
            self.queries.into(),
            self.keys.into(),
            heads.into(),
            kv_heads.into(),
            PIECE.into(),
            self.scale(),
        ];
        let (queries, two) = (self.queries, if pieces > 1 { 2 } else { 1 });
        let shapes = if pieces > 1 {
            [
                Shape::from((pieces, queries, heads * head_dim)),
                Shape::from((pieces, queries * heads, two)),
            ]
        } else {
            [self.q.shape().clone(), Shape::from((queries, heads))]
        };
        let blocks = ([self.tiles(), kv_heads, pieces], THREADS, self.kernels.forward_memory);
        let results = self.run("attention_forward", blocks, &arguments, &shapes)?;
        let [out, softmax] = exactly(results)?;
        Ok((out, softmax))
    }

    /// The pieces' result, `[Tq, N, D]`.
    fn joined(&self, parts: &Tensor, softmax: &Tensor, pieces: usize) -> Result<Tensor> {
        let rows = self.queries * self.dims.heads;
        let arguments = [parts.into(), softmax.into(), pieces.into(), rows.into()];
        let shapes = [self.q.shape().clone()];
        let blocks = ([rows, 1, 1], THREADS, 0);
        let [out] = exactly(self.run("attention_join", blocks, &arguments, &shapes)?)?;
        Ok(out)
    }

    fn backward(
        &self,
        out: &Tensor,
        lse: &Tensor,
        gradient: &Tensor,
        [want_q, want_keys]: [bool; 2],
    ) -> Result<[Option<Tensor>; 3]> {
        let rows = self.queries * self.dims.heads;
        let arguments = [out.into(), gradient.into(), rows.into()];
        let blocks = ([rows.div_ceil(THREADS / 32), 1, 1], THREADS, 0);
        let shapes = [Shape::from((self.queries, self.dims.heads))];
        let [delta] = exactly(self.run("attention_delta", blocks, &arguments, &shapes)?)?;
        let through = Through { gradient, lse, delta: &delta };
        let dq = want_q.then(|| self.of_queries(&through)).transpose()?;
        if !want_keys {
            return Ok([dq, None, None]);
        }
        let [dk, dv] = self.of_keys(&through)?;
        Ok([dq, Some(dk), Some(dv)])
    }

    fn of_queries(&self, through: &Through<'_>) -> Result<Tensor> {
        let tables = &self.tables;
        let arguments: [Argument<'_>; 16] = [
            (&self.q).into(),
            (&self.k).into(),
            (&self.v).into(),
            through.gradient.into(),
            through.lse.into(),
            through.delta.into(),
            (&tables.start).into(),
            (&tables.end).into(),
            (&tables.singles).into(),
            (&tables.singles_end).into(),
            tables.has_singles.into(),
            self.queries.into(),
            self.keys.into(),
            self.dims.heads.into(),
            self.dims.kv_heads.into(),
            self.scale(),
        ];
        let memory = self.kernels.backward_queries_memory;
        let blocks = ([self.tiles(), self.dims.kv_heads, 1], THREADS, memory);
        let shapes = [self.q.shape().clone()];
        let [dq] = exactly(self.run("attention_backward_queries", blocks, &arguments, &shapes)?)?;
        Ok(dq)
    }

    fn of_keys(&self, through: &Through<'_>) -> Result<[Tensor; 2]> {
        let Some(tables) = &self.tables.seen_by else { bail!("attention: frozen keys") };
        let [singles_dk, singles_dv] = self.of_singles(through, tables)?;
        let arguments: [Argument<'_>; 18] = [
            (&self.q).into(),
            (&self.k).into(),
            (&self.v).into(),
            through.gradient.into(),
            through.lse.into(),
            through.delta.into(),
            (&self.tables.start).into(),
            (&self.tables.end).into(),
            (&tables.from).into(),
            (&tables.until).into(),
            (&tables.slot).into(),
            (&singles_dk).into(),
            (&singles_dv).into(),
            self.tables.has_singles.into(),
            self.keys.into(),
            self.dims.heads.into(),
            self.dims.kv_heads.into(),
            self.scale(),
        ];
        let memory = self.kernels.backward_keys_memory;
        let blocks = ([self.keys.div_ceil(TILE), self.dims.kv_heads, 1], THREADS, memory);
        let shapes = [self.k.shape().clone(), self.k.shape().clone()];
        exactly(self.run("attention_backward_keys", blocks, &arguments, &shapes)?)
    }

    /// Gradients of the distinct single keys, `[S, K, D]` each.
    fn of_singles(&self, through: &Through<'_>, tables: &SeenBy) -> Result<[Tensor; 2]> {
        if tables.count == 0 {
            let nothing = Tensor::zeros(1, candle_core::DType::F32, self.q.device())?;
            return Ok([nothing.clone(), nothing]);
        }
        let Dims { heads, kv_heads, head_dim, .. } = self.dims;
        let arguments: [Argument<'_>; 12] = [
            (&self.q).into(),
            (&self.k).into(),
            (&self.v).into(),
            through.gradient.into(),
            through.lse.into(),
            through.delta.into(),
            (&tables.single).into(),
            (&tables.queries_from).into(),
            (&tables.queries).into(),
            heads.into(),
            kv_heads.into(),
            self.scale(),
        ];
        let shape = Shape::from((tables.count, kv_heads, head_dim));
        let blocks = ([tables.count, kv_heads, 1], 32, 0);
        let shapes = [shape.clone(), shape];
        exactly(self.run("attention_backward_singles", blocks, &arguments, &shapes)?)
    }
}

/// What comes back to the backward pass.
struct Through<'a> {
    gradient: &'a Tensor,
    lse: &'a Tensor,
    delta: &'a Tensor,
}
