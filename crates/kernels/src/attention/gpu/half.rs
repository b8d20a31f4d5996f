//! Ranges of keys with bf16 factors: by warps ([`Kernels::pipelined`]) or by groups of warps ([`Kernels::groups`]).
//! Both have the same kernels with tiles of their own sizes.

use candle_core::{DType, Result, Shape, Tensor};

use super::{Call, Through, result_shapes};
use crate::cuda::{Argument, Arguments, Block, Launch, Program, aligned, exactly};

/// The text of the products of warps, where a warp sums whole heads of keys and where warps share them.
const WHOLE: &str =
    concat!(include_str!("half.cu"), include_str!("pipelined.cu"), include_str!("keys.cu"));
const SHARED: &str =
    concat!(include_str!("half.cu"), include_str!("pipelined.cu"), include_str!("keys_shared.cu"));

const WARP: usize = 32;

/// The widest heads of which a warp's registers hold sums of 32 rows, or two of 16 keys: pipelined.cu, keys.cu.
const NARROW: usize = 128;
/// Bytes that kernels lay out beside tiles for a row of a block's own tile, its bounds, and for a row of the inner tiles
/// of the gradients of keys: these, its normalisers, and whether it sees all keys.
const BESIDE_ROW: usize = 8;
pub(super) const BESIDE_INNER_ROW: usize = 33;
/// Bytes of alignment between what a block lays out: group_tiles.cu has the most.
pub(super) const GAPS: usize = 1024;

/// A kernel, and how its work is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Rows, or keys, of a block's own tile.
    own: usize,
    /// Its memory is that of tiles.
    block: Block,
}

/// The kernels for one width of heads.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) program: Program,
    forward: Cut,
    queries: Cut,
    keys: Cut,
}

/// Sizes of tiles: a block's own one, and the inner ones. Of some inner tiles there are one or two places.
#[derive(Debug, Clone, Copy)]
struct Tiles {
    own: usize,
    inner: usize,
    places: usize,
}

const fn tiles(own: usize, inner: usize, places: usize) -> Tiles {
    Tiles { own, inner, places }
}

/// Tiles of the products of warps, the fastest first. The last ones fit a block of 99 KiB for all heads.
const FORWARD: [Tiles; 3] = [tiles(128, 64, 2), tiles(128, 32, 2), tiles(64, 32, 2)];
const QUERIES: [Tiles; 6] = [
    tiles(128, 32, 2),
    tiles(128, 32, 1),
    tiles(64, 32, 2),
    tiles(64, 32, 1),
    tiles(64, 16, 2),
    tiles(64, 16, 1),
];
const KEYS: Tiles = tiles(128, 64, 2);
const SHARED_KEYS: [Tiles; 5] =
    [tiles(64, 64, 2), tiles(64, 32, 2), tiles(64, 32, 1), tiles(32, 32, 2), tiles(32, 32, 1)];

/// Bytes of a block's tiles by the products of warps.
struct Memory {
    /// Of a block, with what lies beside tiles.
    all: usize,
    head_dim: usize,
}

impl Memory {
    /// Rows are padded, so that eight of them lie in different banks.
    fn rows(&self, count: usize) -> usize {
        count * (self.head_dim.next_multiple_of(16) + 8) * 2
    }

    /// Keys and values take turns at three places.
    fn forward(&self, of: Tiles) -> usize {
        self.rows(of.own + 3 * of.inner)
    }

    /// Queries with gradients of results, or keys with values; the inner tiles are two of keys or queries, and as many of
    /// the others as there are places.
    fn backward(&self, of: Tiles) -> usize {
        self.rows(2 * of.own + (2 + of.places) * of.inner)
    }

    /// The same with weights and slopes.
    fn shared_keys(&self, of: Tiles) -> usize {
        self.backward(of) + 2 * of.own * (of.inner + 8) * 2
    }

    fn first_of(
        &self,
        all: &[Tiles],
        tiles: impl Fn(&Self, Tiles) -> usize,
        beside: impl Fn(Tiles) -> usize,
    ) -> Option<(Tiles, usize)> {
        let mut sizes = all.iter().map(|&of| (of, tiles(self, of)));
        sizes.find(|&(of, bytes)| bytes + beside(of) + GAPS <= self.all)
    }
}

impl Kernels {
    /// Products of warps; `None` if a block's memory is too small.
    pub(super) fn pipelined(head_dim: usize, memory: usize) -> Option<Self> {
        let memory = Memory { all: memory, head_dim };
        let of_rows = |of: Tiles| BESIDE_ROW * of.own;
        let of_inner_rows = |of: Tiles| 2 * BESIDE_INNER_ROW * of.inner;
        let (forward, forward_bytes) = memory.first_of(&FORWARD, Memory::forward, of_rows)?;
        let (queries, queries_bytes) = memory.first_of(&QUERIES, Memory::backward, of_rows)?;
        let whole = (head_dim <= NARROW)
            .then(|| memory.first_of(&[KEYS], Memory::backward, of_inner_rows))
            .flatten();
        let (keys, keys_bytes) = match whole {
            Some(keys) => keys,
            None => memory.first_of(&SHARED_KEYS, Memory::shared_keys, of_inner_rows)?,
        };
        let text = if whole.is_some() { WHOLE } else { SHARED };
        let numbers = [
            ("HEAD_DIM", head_dim),
            ("FORWARD_ROWS", forward.own),
            ("FORWARD_KEYS", forward.inner),
            ("QUERIES_ROWS", queries.own),
            ("QUERIES_KEYS", queries.inner),
            ("VALUE_PLACES", queries.places),
            ("KEYS", keys.own),
            ("INNER_ROWS", keys.inner),
            ("GRADIENT_PLACES", keys.places),
        ];
        let warp_rows = if head_dim <= NARROW { 32 } else { 16 };
        let threads = |rows: usize| rows / warp_rows * WARP;
        // Two or four warps for 16 keys: see keys.cu, keys_shared.cu.
        let of_keys = if whole.is_some() { 2 * keys.own } else { 4 * keys.own };
        let cuts = [
            (forward.own, threads(forward.own), forward_bytes),
            (queries.own, threads(queries.own), queries_bytes),
            (keys.own, of_keys, keys_bytes),
        ];
        Some(Self::of(Program::new("attention_pipelined", text, &numbers), cuts))
    }

    /// Products of groups of four warps; `None` if a block's memory is too small.
    pub(super) fn groups(head_dim: usize, memory: usize) -> Option<Self> {
        let text = concat!(
            include_str!("half.cu"),
            include_str!("group_tiles.cu"),
            include_str!("groups.cu")
        );
        let Tiles { own, inner, .. } = KEYS;
        let numbers = [("HEAD_DIM", head_dim), ("KEYS", own), ("INNER_ROWS", inner)];
        let program = Program::new("attention_groups", text, &numbers);
        let rows = [own + 4 * 128, 2 * own + 5 * 64, 2 * own + 6 * inner];
        let cuts = rows.map(|rows| (own, 256, rows * head_dim * 2));
        let all = Self::of(program.for_one_architecture(), cuts);
        let most = all.blocks().iter().map(|block| block.memory).max()?;
        let beside = (BESIDE_ROW * own).max(2 * BESIDE_INNER_ROW * inner);
        (most + beside + GAPS <= memory).then_some(all)
    }

    /// For each kernel: rows, or keys, of a block's own tile, a block's threads, and its bytes of tiles.
    fn of(program: Program, [forward, queries, keys]: [(usize, usize, usize); 3]) -> Self {
        let cut = |kernel, (own, threads, memory)| {
            let block = Block { kernel, threads, memory };
            Cut { own, block }
        };
        Self {
            program,
            forward: cut("attention_half_forward", forward),
            queries: cut("attention_half_backward_queries", queries),
            keys: cut("attention_half_backward_keys", keys),
        }
    }

    /// What blocks of each kernel have.
    pub(super) fn blocks(&self) -> [Block; 3] {
        [self.forward, self.queries, self.keys].map(|cut| cut.block)
    }

    /// Results of types.
    fn run<const N: usize>(
        &self,
        call: &Call,
        (cut, tiles): (Cut, usize),
        arguments: &[Argument<'_>],
        results: &[(Shape, DType); N],
    ) -> Result<[Tensor; N]> {
        let grid = [call.dims.kv_heads, tiles, 1];
        Launch::of(&self.program, cut.block, grid, arguments).run_as(call.q.device(), results)
    }

    /// The result of the ranges, of the type of the queries, and its log-sum-exp.
    pub(super) fn forward(&self, call: &Call) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = halves([&call.q, &call.k, &call.v])?;
        let Call { tables, dims, .. } = call;
        let arguments = Arguments::of([&q, &k, &v, &tables.start, &tables.end])
            .and([tables.has_singles])
            .and([call.queries, dims.heads, dims.kv_heads])
            .and([call.scale()])
            .and([call.of_result == DType::BF16]);
        let blocks = (self.forward, call.tiles(self.forward.own));
        let [out, log_sum_exp] = result_shapes(call);
        let results = [(out, call.of_result), (log_sum_exp, DType::F32)];
        self.run(call, blocks, &arguments, &results).map(Into::into)
    }

    /// The queries' gradient by ranges.
    pub(super) fn of_queries(&self, call: &Call, through: &Through<'_>) -> Result<Tensor> {
        let [q, k, v, gradient] = halves([&call.q, &call.k, &call.v, through.gradient])?;
        let Call { tables, dims, .. } = call;
        let arguments = Arguments::of([&q, &k, &v, &gradient])
            .and([through.log_sum_exp, through.delta, &tables.start, &tables.end])
            .and([call.queries, dims.heads, dims.kv_heads])
            .and([call.scale()]);
        let blocks = (self.queries, call.tiles(self.queries.own));
        let results = [(call.q.shape().clone(), DType::F32)];
        let [dq] = self.run(call, blocks, &arguments, &results)?;
        Ok(dq)
    }

    /// The gradients of keys and values, with those of single keys.
    pub(super) fn of_keys(
        &self,
        call: &Call,
        through: &Through<'_>,
        singles: &[Tensor; 2],
    ) -> Result<[Tensor; 2]> {
        let [q, k, v, gradient] = halves([&call.q, &call.k, &call.v, through.gradient])?;
        let arguments = call.arguments_of_keys([&q, &k, &v, &gradient], through, singles)?;
        let blocks = (self.keys, call.keys.div_ceil(self.keys.own));
        let of_keys = (call.k.shape().clone(), DType::F32);
        let results = [of_keys.clone(), of_keys];
        self.run(call, blocks, &arguments, &results)
    }
}

pub(super) fn halves<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let all: Result<Vec<_>> = tensors.iter().map(|t| aligned(&t.to_dtype(DType::BF16)?)).collect();
    exactly(all?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of compute capability 8.6, 8.9 and 12.0 have the least memory.
    #[test]
    fn some_tiles_of_warps_fit_every_gpu_for_all_heads() {
        let memories = [99 << 10, 163 << 10, 227 << 10];
        for head_dim in (8..=256).step_by(8) {
            for memory in memories {
                let kernels = Kernels::pipelined(head_dim, memory).expect("tiles that fit");
                for Cut { own, block } in [kernels.forward, kernels.queries, kernels.keys] {
                    let fits = block.memory < memory && block.threads <= 256 && own >= 32;
                    assert!(fits, "{head_dim} {memory} {block:?}");
                }
            }
        }
        assert!(Kernels::pipelined(256, 64 << 10).is_none());
        // With little memory a block has smaller tiles, not fewer kernels.
        let own = |memory| Kernels::pipelined(256, memory).map(|of| of.keys.own);
        assert_eq!(memories.map(own), [Some(32), Some(64), Some(64)]);
    }
}
