//! What attention computes beside ranges of keys, whatever the way: single keys, and the products of a result and
//! its gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::{Call, Programs, Through, of_width, result_shapes};
#[cfg(all(test, feature = "cuda"))]
use crate::cuda::Block;
use crate::cuda::{Argument, Arguments, Launch, Program};

const THREADS: usize = 128;
const WARP: usize = 32;

/// The program for one width of heads, whose queries, keys and values are f32.
pub(super) fn program(head_dim: usize) -> Program {
    program_of(head_dim, false)
}

/// The same with bf16 ones.
pub(super) fn program_of_halves(head_dim: usize) -> Program {
    program_of(head_dim, true)
}

fn program_of(head_dim: usize, halves: bool) -> Program {
    let numbers = [("HEAD_DIM", head_dim), ("HALVES", usize::from(halves))];
    Program::new("attention_rows", include_str!("rows.cu"), &numbers)
}

/// What blocks of its kernels have.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn blocks() -> [Block; 4] {
    [
        Block::plain("attention_delta", THREADS),
        Block::plain("attention_singles_forward", THREADS),
        Block::plain("attention_singles_backward_queries", THREADS),
        Block::plain("attention_singles_backward_keys", WARP),
    ]
}

/// The kernels for the heads of a call.
pub(super) struct Beside<'a> {
    program: Arc<Program>,
    call: &'a Call,
}

impl<'a> Beside<'a> {
    pub(super) fn of(call: &'a Call) -> Self {
        static KNOWN: Programs = Programs::new(BTreeMap::new());
        static OF_HALVES: Programs = Programs::new(BTreeMap::new());
        let head_dim = call.dims.head_dim;
        let program = match call.factors {
            DType::BF16 => of_width(&OF_HALVES, head_dim, program_of_halves),
            _ => of_width(&KNOWN, head_dim, program),
        };
        Self { program, call }
    }

    fn run<const N: usize>(
        &self,
        kernel: &str,
        blocks: ([usize; 3], usize),
        arguments: &[Argument<'_>],
        results: [Shape; N],
    ) -> Result<[Tensor; N]> {
        let launch = Launch::new(&self.program, kernel, blocks, arguments);
        launch.run(self.call.q.device(), results)
    }

    /// A warp for each row.
    fn rows(&self) -> ([usize; 3], usize) {
        ([self.call.rows().div_ceil(THREADS / WARP), 1, 1], THREADS)
    }

    /// `rowsum(dO ∘ O)`, `[Tq, N]`.
    pub(super) fn delta(&self, out: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let arguments = [out.into(), gradient.into(), self.call.rows().into()];
        let [_, shape] = result_shapes(self.call);
        let [delta] = self.run("attention_delta", self.rows(), &arguments, [shape])?;
        Ok(delta)
    }

    /// Result and log-sum-exp of the ranges with the single keys.
    pub(super) fn forward(
        &self,
        of_ranges: &Tensor,
        log_sum_exp: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let Call { tables, dims, .. } = self.call;
        let arguments = Arguments::of(self.call.arguments())
            .and([&tables.singles, &tables.singles_end])
            .and([self.call.rows(), dims.heads, dims.kv_heads])
            .and([self.call.scale()])
            .and([of_ranges, log_sum_exp]);
        let shapes = result_shapes(self.call);
        self.run("attention_singles_forward", self.rows(), &arguments, shapes).map(Into::into)
    }

    /// The queries' gradient by ranges with that by single keys.
    pub(super) fn of_queries(&self, through: &Through<'_>, of_ranges: &Tensor) -> Result<Tensor> {
        let Call { tables, dims, q, .. } = self.call;
        let arguments = Arguments::of(self.call.arguments())
            .and([through.gradient, through.log_sum_exp, through.delta])
            .and([&tables.singles, &tables.singles_end])
            .and([self.call.rows(), dims.heads, dims.kv_heads])
            .and([self.call.scale()])
            .and([of_ranges]);
        let kernel = "attention_singles_backward_queries";
        let [dq] = self.run(kernel, self.rows(), &arguments, [q.shape().clone()])?;
        Ok(dq)
    }

    /// Gradients of the distinct single keys and their values, `[S, K, D]` each.
    pub(super) fn of_keys(&self, through: &Through<'_>) -> Result<[Tensor; 2]> {
        let Call { dims, q, .. } = self.call;
        let Some(tables) = &self.call.tables.seen_by else { bail!("attention: frozen keys") };
        if tables.count == 0 {
            let nothing = Tensor::zeros(1, DType::F32, q.device())?;
            return Ok([nothing.clone(), nothing]);
        }
        let arguments = Arguments::of(self.call.arguments())
            .and([through.gradient, through.log_sum_exp, through.delta])
            .and([&tables.single, &tables.queries_from, &tables.queries])
            .and([dims.heads, dims.kv_heads])
            .and([self.call.scale()]);
        let shape = Shape::from((tables.count, dims.kv_heads, dims.head_dim));
        let blocks = ([tables.count, dims.kv_heads, 1], WARP);
        let shapes = [shape.clone(), shape];
        self.run("attention_singles_backward_keys", blocks, &arguments, shapes)
    }
}
