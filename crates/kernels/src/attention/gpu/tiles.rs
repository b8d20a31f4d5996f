//! Ranges of keys with factors in bf16 terms, 64 rows a block.

use candle_core::{Result, Shape, Tensor};

use super::{Call, TILE, Through, result_shapes};
use crate::cuda::{Argument, Arguments, Block, Launch, Program};

/// `32 * WARPS` of the kernels.
const THREADS: usize = 128;

/// The kernels for one width of heads, and how large their tiles are.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) program: Program,
    forward: Block,
    queries: Block,
    keys: Block,
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
        let block = |kernel, memory| Block { kernel, threads: THREADS, memory };
        Some(Self {
            program: Program::new("attention_tiles", include_str!("tiles.cu"), &numbers),
            forward: block("attention_forward", forward(forward_keys)),
            queries: block("attention_backward_queries", queries(inner)),
            keys: block("attention_backward_keys", keys(inner)),
        })
    }

    /// What blocks of each kernel have.
    #[cfg(all(test, feature = "cuda"))]
    pub(super) fn blocks(&self) -> [Block; 3] {
        [self.forward, self.queries, self.keys]
    }

    fn run<const N: usize>(
        &self,
        call: &Call,
        (block, tiles): (Block, usize),
        arguments: &[Argument<'_>],
        results: [Shape; N],
    ) -> Result<[Tensor; N]> {
        let grid = [tiles, call.dims.kv_heads, 1];
        Launch::of(&self.program, block, grid, arguments).run(call.q.device(), results)
    }

    /// As [`Call::forward`], without single keys.
    pub(super) fn forward(&self, call: &Call) -> Result<(Tensor, Tensor)> {
        let Call { tables, dims, .. } = call;
        let arguments = Arguments::of(call.arguments())
            .and([&tables.start, &tables.end])
            .and([tables.has_singles])
            .and([call.queries, call.keys, dims.heads, dims.kv_heads])
            .and([call.scale()]);
        let blocks = (self.forward, call.tiles(TILE));
        let results = result_shapes(call);
        self.run(call, blocks, &arguments, results).map(Into::into)
    }

    /// The queries' gradient by ranges.
    pub(super) fn of_queries(&self, call: &Call, through: &Through<'_>) -> Result<Tensor> {
        let Call { q, tables, dims, .. } = call;
        let arguments = Arguments::of(call.arguments())
            .and([through.gradient, through.log_sum_exp, through.delta])
            .and([&tables.start, &tables.end])
            .and([call.queries, call.keys, dims.heads, dims.kv_heads])
            .and([call.scale()]);
        let blocks = (self.queries, call.tiles(TILE));
        let [dq] = self.run(call, blocks, &arguments, [q.shape().clone()])?;
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
        let blocks = (self.keys, call.keys.div_ceil(TILE));
        let shapes = [call.k.shape().clone(), call.k.shape().clone()];
        self.run(call, blocks, &arguments, shapes)
    }
}
