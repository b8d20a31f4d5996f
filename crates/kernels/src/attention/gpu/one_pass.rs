//! The whole backward pass of ranges of keys with bf16 factors in one kernel, by groups of warps: one_pass.cu.

use candle_core::{DType, Result, Tensor, bail};

use super::half::{BESIDE_INNER_ROW, GAPS, halves};
use super::{Call, Through};
use crate::cuda::{Arguments, Block, Launch, Program};

/// Keys of a block's own tile.
pub(super) const KEYS: usize = 128;

/// The kernel for one width of heads.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) program: Program,
    pub(super) block: Block,
    /// Of an inner tile.
    rows: usize,
}

/// Rows of an inner tile: a group multiplies 64 by 64 values of the queries' gradient.
pub(super) const fn inner_rows(head_dim: usize) -> usize {
    if head_dim > 64 { 64 } else { 128 }
}

impl Kernel {
    /// For heads of 64 or 128; `None` if a block's memory is too small.
    pub(super) fn new(head_dim: usize, memory: usize) -> Option<Self> {
        let text = concat!(
            include_str!("half.cu"),
            include_str!("group_tiles.cu"),
            include_str!("one_pass.cu")
        );
        let rows = inner_rows(head_dim);
        let numbers = [("HEAD_DIM", head_dim), ("KEYS", KEYS), ("INNER_ROWS", rows)];
        let program = Program::new("attention_one_pass", text, &numbers).for_one_architecture();
        // Keys and values; two places for queries and gradients of results; slopes; padded rows of f32.
        let halves = (2 * KEYS + 4 * rows) * head_dim + KEYS * rows;
        let bytes = 2 * halves + 4 * rows * (head_dim + 8);
        let block = Block { kernel: "attention_half_backward", threads: 256, memory: bytes };
        let fits = bytes + 2 * BESIDE_INNER_ROW * rows + GAPS <= memory;
        fits.then_some(Self { program, block, rows })
    }

    /// The gradients of queries by ranges, and those of keys and values with those of single keys.
    pub(super) fn backward(
        &self,
        call: &Call,
        through: &Through<'_>,
        singles: &[Tensor; 2],
    ) -> Result<[Tensor; 3]> {
        let [q, k, v, gradient] = halves([&call.q, &call.k, &call.v, through.gradient])?;
        let Call { tables, dims, .. } = call;
        let (Some(seen_by), Some(visits)) = (&tables.seen_by, &tables.visits) else {
            bail!("attention: one pass for frozen keys")
        };
        let tiles = dims.kv_heads * call.tiles(self.rows);
        // The kernel writes into these.
        let turns = Tensor::zeros(1 + tiles, DType::U32, q.device())?;
        let arguments = Arguments::of([&q, &k, &v, &gradient, through.log_sum_exp, through.delta])
            .and([&tables.start, &tables.end])
            .and(visits.all())
            .and([&seen_by.slot, &singles[0], &singles[1], &turns])
            .and([tables.has_singles])
            .and([call.queries, call.keys, dims.heads, dims.kv_heads])
            .and([call.scale()]);
        let grid = [dims.kv_heads * call.keys.div_ceil(KEYS), 1, 1];
        let shapes = [&call.q, &call.k, &call.v].map(|t| t.shape().clone());
        Launch::of(&self.program, self.block, grid, &arguments).run(call.q.device(), shapes)
    }
}
