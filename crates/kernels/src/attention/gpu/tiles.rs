//! Ranges of keys with factors in bf16 terms, 64 rows a block.

use candle_core::{Result, Shape, Tensor};

use super::{Call, TILE, Through, result_shapes};
use crate::cuda::{Argument, Launch, Program, exactly};

/// `32 * WARPS` of the kernels.
const THREADS: usize = 128;

/// The kernels for one width of heads, and how large their tiles are.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) program: Program,
    /// Bytes of tiles of a block.
    forward: usize,
    queries: usize,
    keys: usize,
}

impl Kernels {
    /// With the largest tiles that a block's memory holds; `None` if it holds none.
    pub(super) fn new(head_dim: usize, terms: usize, memory: usize) -> Option<Self> {
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
            program: Program::new("attention_tiles", include_str!("tiles.cu"), &numbers),
            forward: forward(forward_keys),
            queries: queries(inner),
            keys: keys(inner),
        })
    }

    fn run(
        &self,
        call: &Call,
        kernel: &str,
        (grid, memory): ([usize; 3], usize),
        arguments: &[Argument<'_>],
        results: &[Shape],
    ) -> Result<Vec<Tensor>> {
        let (program, threads) = (&self.program, THREADS);
        let launch = Launch { program, kernel, grid, threads, memory, arguments, results };
        launch.run(call.q.device())
    }

    /// Tiles of (token, head) rows that share a key-value head.
    fn tiles(call: &Call) -> usize {
        (call.queries * call.dims.group()).div_ceil(TILE)
    }

    /// As [`Call::forward`], without single keys.
    pub(super) fn forward(&self, call: &Call) -> Result<(Tensor, Tensor)> {
        let arguments: [Argument<'_>; 11] = [
            (&call.q).into(),
            (&call.k).into(),
            (&call.v).into(),
            (&call.tables.start).into(),
            (&call.tables.end).into(),
            call.tables.has_singles.into(),
            call.queries.into(),
            call.keys.into(),
            call.dims.heads.into(),
            call.dims.kv_heads.into(),
            call.scale(),
        ];
        let blocks = ([Self::tiles(call), call.dims.kv_heads, 1], self.forward);
        let shapes = result_shapes(call);
        let results = self.run(call, "attention_forward", blocks, &arguments, &shapes)?;
        let [out, log_sum_exp] = exactly(results)?;
        Ok((out, log_sum_exp))
    }

    /// The queries' gradient by ranges.
    pub(super) fn of_queries(&self, call: &Call, through: &Through<'_>) -> Result<Tensor> {
        let arguments: [Argument<'_>; 13] = [
            (&call.q).into(),
            (&call.k).into(),
            (&call.v).into(),
            through.gradient.into(),
            through.log_sum_exp.into(),
            through.delta.into(),
            (&call.tables.start).into(),
            (&call.tables.end).into(),
            call.queries.into(),
            call.keys.into(),
            call.dims.heads.into(),
            call.dims.kv_heads.into(),
            call.scale(),
        ];
        let blocks = ([Self::tiles(call), call.dims.kv_heads, 1], self.queries);
        let shapes = [call.q.shape().clone()];
        let kernel = "attention_backward_queries";
        let [dq] = exactly(self.run(call, kernel, blocks, &arguments, &shapes)?)?;
        Ok(dq)
    }

    /// The gradients of keys and values, with those of single keys.
    pub(super) fn of_keys(
        &self,
        call: &Call,
        through: &Through<'_>,
        singles: &[Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let arguments = call.arguments_of_keys(
            [&call.q, &call.k, &call.v, through.gradient],
            through,
            singles,
        )?;
        let blocks = ([call.keys.div_ceil(TILE), call.dims.kv_heads, 1], self.keys);
        let shapes = [call.k.shape().clone(), call.k.shape().clone()];
        exactly(self.run(call, "attention_backward_keys", blocks, &arguments, &shapes)?)
    }
}
