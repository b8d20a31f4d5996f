//! Ranges of keys with bf16 factors: by warps ([`Kernels::pipelined`]) or by groups of warps ([`Kernels::groups`]).
//! Both have the same kernels with tiles of their own sizes.

use candle_core::{DType, Result, Shape, Tensor};

use super::{Call, Through, result_shapes};
use crate::cuda::{Argument, Arguments, Launch, Program, aligned, exactly};

/// Rows, and keys, of a block's own tile, and rows of the inner tiles of the gradients of keys: `ROWS`, `KEYS` and
/// `INNER_ROWS` of half.cu.
const OWN: usize = 128;
const INNER_ROWS: usize = 64;
/// Threads where a block's own tile is keys.
const KEYS_THREADS: usize = 256;
/// Bytes that kernels lay out beside tiles: bounds of rows, normalisers.
const BESIDE: usize = 4096;

/// The kernels for one width of heads.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) program: Program,
    /// Threads where a block's own tile is rows.
    threads: usize,
    /// Bytes of tiles of a block.
    forward: usize,
    queries: usize,
    keys: usize,
}

impl Kernels {
    /// Products of warps; `None` if a block's memory is too small.
    pub(super) fn pipelined(head_dim: usize, memory: usize) -> Option<Self> {
        let text = concat!(include_str!("half.cu"), include_str!("pipelined.cu"));
        let program = Program::new("attention_pipelined", text, &[("HEAD_DIM", head_dim)]);
        // Rows are padded, so that eight of them lie in different banks.
        let rows = |count: usize| count * (head_dim + 8) * 2;
        Self {
            program,
            threads: 128,
            forward: rows(OWN + 4 * 64),
            queries: rows(2 * OWN + 4 * 32),
            keys: rows(2 * OWN + 4 * INNER_ROWS),
        }
        .within(memory)
    }

    /// Products of groups of four warps; `None` if a block's memory is too small.
    pub(super) fn groups(head_dim: usize, memory: usize) -> Option<Self> {
        let text = concat!(include_str!("half.cu"), include_str!("groups.cu"));
        let program = Program::new("attention_groups", text, &[("HEAD_DIM", head_dim)]);
        let rows = |count: usize| count * head_dim * 2;
        Self {
            program: program.for_one_architecture(),
            threads: 256,
            forward: rows(OWN + 4 * 128),
            queries: rows(2 * OWN + 5 * 64),
            keys: rows(2 * OWN + 6 * INNER_ROWS),
        }
        .within(memory)
    }

    fn within(self, memory: usize) -> Option<Self> {
        let most = self.forward.max(self.queries).max(self.keys);
        (most + BESIDE <= memory).then_some(self)
    }

    /// Results of types.
    fn run<const N: usize>(
        &self,
        call: &Call,
        kernel: &str,
        (tiles, threads, memory): (usize, usize, usize),
        arguments: &[Argument<'_>],
        results: &[(Shape, DType); N],
    ) -> Result<[Tensor; N]> {
        let blocks = ([call.dims.kv_heads, tiles, 1], threads);
        let launch = Launch::new(&self.program, kernel, blocks, arguments).with_memory(memory);
        launch.run_as(call.q.device(), results)
    }

    /// The result of the ranges, of the type of the queries, and its log-sum-exp.
    pub(super) fn forward(&self, call: &Call) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = halves([&call.q, &call.k, &call.v])?;
        let Call { tables, dims, .. } = call;
        let of_result = call.q.dtype();
        let arguments = Arguments::of([&q, &k, &v, &tables.start, &tables.end])
            .and([tables.has_singles])
            .and([call.queries, dims.heads, dims.kv_heads])
            .and([call.scale()])
            .and([of_result == DType::BF16]);
        let blocks = (call.tiles(OWN), self.threads, self.forward);
        let [out, log_sum_exp] = result_shapes(call);
        let results = [(out, of_result), (log_sum_exp, DType::F32)];
        self.run(call, "attention_half_forward", blocks, &arguments, &results).map(Into::into)
    }

    /// The queries' gradient by ranges.
    pub(super) fn of_queries(&self, call: &Call, through: &Through<'_>) -> Result<Tensor> {
        let [q, k, v, gradient] = halves([&call.q, &call.k, &call.v, through.gradient])?;
        let Call { tables, dims, .. } = call;
        let arguments = Arguments::of([&q, &k, &v, &gradient])
            .and([through.log_sum_exp, through.delta, &tables.start, &tables.end])
            .and([call.queries, dims.heads, dims.kv_heads])
            .and([call.scale()]);
        let blocks = (call.tiles(OWN), self.threads, self.queries);
        let results = [(call.q.shape().clone(), DType::F32)];
        let kernel = "attention_half_backward_queries";
        let [dq] = self.run(call, kernel, blocks, &arguments, &results)?;
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
        let blocks = (call.keys.div_ceil(OWN), KEYS_THREADS, self.keys);
        let of_keys = (call.k.shape().clone(), DType::F32);
        let results = [of_keys.clone(), of_keys];
        self.run(call, "attention_half_backward_keys", blocks, &arguments, &results)
    }
}

fn halves<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let all: Result<Vec<_>> = tensors.iter().map(|t| aligned(&t.to_dtype(DType::BF16)?)).collect();
    exactly(all?)
}
