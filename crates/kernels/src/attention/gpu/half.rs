//! Ranges of keys with bf16 factors: by warps ([`Kernels::pipelined`]) or by groups of warps ([`Kernels::groups`]).
//! Both have the same kernels with tiles of their own sizes.

use candle_core::{DType, Result, Shape, Tensor};

use super::{Call, Through, result_shapes};
use crate::cuda::{Argument, Launch, Program, aligned, exactly};

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
        results: [(Shape, DType); N],
    ) -> Result<[Tensor; N]> {
        let (program, grid) = (&self.program, [call.dims.kv_heads, tiles, 1]);
        let (results, types): (Vec<_>, Vec<_>) = results.into_iter().unzip();
        let results = &results;
        let launch = Launch { program, kernel, grid, threads, memory, arguments, results };
        exactly(launch.run_as(call.q.device(), &types)?)
    }

    /// Tiles of (token, head) rows that share a key-value head.
    fn tiles(call: &Call) -> usize {
        (call.queries * call.dims.group()).div_ceil(OWN)
    }

    /// The result of the ranges, of the type of the queries, and its log-sum-exp.
    pub(super) fn forward(&self, call: &Call) -> Result<(Tensor, Tensor)> {
        let [q, k, v] = halves([&call.q, &call.k, &call.v])?;
        let tables = &call.tables;
        let of_result = call.q.dtype();
        let arguments: [Argument<'_>; 11] = [
            (&q).into(),
            (&k).into(),
            (&v).into(),
            (&tables.start).into(),
            (&tables.end).into(),
            tables.has_singles.into(),
            call.queries.into(),
            call.dims.heads.into(),
            call.dims.kv_heads.into(),
            call.scale(),
            (of_result == DType::BF16).into(),
        ];
        let blocks = (Self::tiles(call), self.threads, self.forward);
        let [out, log_sum_exp] = result_shapes(call);
        let results = [(out, of_result), (log_sum_exp, DType::F32)];
        let results = self.run(call, "attention_half_forward", blocks, &arguments, results)?;
        Ok(results.into())
    }

    /// The queries' gradient by ranges.
    pub(super) fn of_queries(&self, call: &Call, through: &Through<'_>) -> Result<Tensor> {
        let [q, k, v, gradient] = halves([&call.q, &call.k, &call.v, through.gradient])?;
        let arguments: [Argument<'_>; 12] = [
            (&q).into(),
            (&k).into(),
            (&v).into(),
            (&gradient).into(),
            through.log_sum_exp.into(),
            through.delta.into(),
            (&call.tables.start).into(),
            (&call.tables.end).into(),
            call.queries.into(),
            call.dims.heads.into(),
            call.dims.kv_heads.into(),
            call.scale(),
        ];
        let blocks = (Self::tiles(call), self.threads, self.queries);
        let results = [(call.q.shape().clone(), DType::F32)];
        let kernel = "attention_half_backward_queries";
        let [dq] = self.run(call, kernel, blocks, &arguments, results)?;
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
        self.run(call, "attention_half_backward_keys", blocks, &arguments, results)
    }
}

fn halves<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let all: Result<Vec<_>> = tensors.iter().map(|t| aligned(&t.to_dtype(DType::BF16)?)).collect();
    exactly(all?)
}
