//! What attention computes beside ranges of keys, whatever the way: single keys, and the products of a result and
//! its gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::{Call, Programs, Through, of_width, result_shapes};
use crate::cuda::{Argument, Launch, Program, exactly};

const THREADS: usize = 128;
const WARP: usize = 32;

pub(super) fn program(head_dim: usize) -> Program {
    Program::new("attention_rows", include_str!("rows.cu"), &[("HEAD_DIM", head_dim)])
}

/// The kernels for the heads of a call.
pub(super) struct Beside<'a> {
    program: Arc<Program>,
    call: &'a Call,
}

impl<'a> Beside<'a> {
    pub(super) fn of(call: &'a Call) -> Self {
        static KNOWN: Programs = Programs::new(BTreeMap::new());
        Self { program: of_width(&KNOWN, call.dims.head_dim, program), call }
    }

    fn run(
        &self,
        kernel: &str,
        (grid, threads): ([usize; 3], usize),
        arguments: &[Argument<'_>],
        results: &[Shape],
    ) -> Result<Vec<Tensor>> {
        let program = &self.program;
        let launch = Launch { program, kernel, grid, threads, memory: 0, arguments, results };
        launch.run(self.call.q.device())
    }

    /// A warp for each row.
    fn rows(&self) -> ([usize; 3], usize) {
        ([self.call.rows().div_ceil(THREADS / WARP), 1, 1], THREADS)
    }

    /// `rowsum(dO ∘ O)`, `[Tq, N]`.
    pub(super) fn delta(&self, out: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let arguments = [out.into(), gradient.into(), self.call.rows().into()];
        let [_, shape] = result_shapes(self.call);
        let [delta] = exactly(self.run("attention_delta", self.rows(), &arguments, &[shape])?)?;
        Ok(delta)
    }

    /// Result and log-sum-exp of the ranges with the single keys.
    pub(super) fn forward(
        &self,
        of_ranges: &Tensor,
        log_sum_exp: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let Call { tables, dims, q, k, v, .. } = self.call;
        let arguments: [Argument<'_>; 11] = [
            q.into(),
            k.into(),
            v.into(),
            (&tables.singles).into(),
            (&tables.singles_end).into(),
            self.call.rows().into(),
            dims.heads.into(),
            dims.kv_heads.into(),
            self.call.scale(),
            of_ranges.into(),
            log_sum_exp.into(),
        ];
        let shapes = result_shapes(self.call);
        let results = self.run("attention_singles_forward", self.rows(), &arguments, &shapes)?;
        let [out, log_sum_exp] = exactly(results)?;
        Ok((out, log_sum_exp))
    }

    /// The queries' gradient by ranges with that by single keys.
    pub(super) fn of_queries(&self, through: &Through<'_>, of_ranges: &Tensor) -> Result<Tensor> {
        let Call { tables, dims, q, k, v, .. } = self.call;
        let arguments: [Argument<'_>; 13] = [
            q.into(),
            k.into(),
            v.into(),
            through.gradient.into(),
            through.log_sum_exp.into(),
            through.delta.into(),
            (&tables.singles).into(),
            (&tables.singles_end).into(),
            self.call.rows().into(),
            dims.heads.into(),
            dims.kv_heads.into(),
            self.call.scale(),
            of_ranges.into(),
        ];
        let shapes = [q.shape().clone()];
        let kernel = "attention_singles_backward_queries";
        let [dq] = exactly(self.run(kernel, self.rows(), &arguments, &shapes)?)?;
        Ok(dq)
    }

    /// Gradients of the distinct single keys and their values, `[S, K, D]` each.
    pub(super) fn of_keys(&self, through: &Through<'_>) -> Result<[Tensor; 2]> {
        let Call { dims, q, k, v, .. } = self.call;
        let Some(tables) = &self.call.tables.seen_by else { bail!("attention: frozen keys") };
        if tables.count == 0 {
            let nothing = Tensor::zeros(1, DType::F32, q.device())?;
            return Ok([nothing.clone(), nothing]);
        }
        let arguments: [Argument<'_>; 12] = [
            q.into(),
            k.into(),
            v.into(),
            through.gradient.into(),
            through.log_sum_exp.into(),
            through.delta.into(),
            (&tables.single).into(),
            (&tables.queries_from).into(),
            (&tables.queries).into(),
            dims.heads.into(),
            dims.kv_heads.into(),
            self.call.scale(),
        ];
        let shape = Shape::from((tables.count, dims.kv_heads, dims.head_dim));
        let blocks = ([tables.count, dims.kv_heads, 1], WARP);
        let shapes = [shape.clone(), shape];
        exactly(self.run("attention_singles_backward_keys", blocks, &arguments, &shapes)?)
    }
}
