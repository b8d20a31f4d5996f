//! Attention by tiles on an NVIDIA GPU: memory linear in `T`, scores stay on the chip.
//!
//! Several ways compute ranges of keys ([`Way`]); single keys are added to their result by its log-sum-exp.
//! Passes of few queries without gradients are another program's ([`few`]), in f32 whatever the products are: they
//! are cut into pieces of keys, so that decoding occupies the whole device. Pieces begin at fixed keys, and a
//! row's bits depend on what it sees alone: a node of a token tree has those of the same token in a chain.

mod beside;
mod few;
mod half;
mod one_pass;
pub(super) mod tables;
mod tiles;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::{Dims, KeyRanges};
use crate::composed::FULL_ROWS;
use crate::cuda::{self, Argument, Arguments, Program, block_memory, has_warp_groups};
#[cfg(all(test, feature = "cuda"))]
use crate::cuda::{Block, Compiled};
use crate::dispatch::{Products, products_of};
use crate::factors::{as_factor, input_factor, kept_input};
use crate::graph::{differentiable_by_result, has_wide_gradient, trains};
use crate::settings::one_pass_attention;
use beside::Beside;
use tables::{Cut, Tables, Wanted};

/// Keys of an entry of the tables of queries that see them: `TILE` and `TABLE_KEYS` of the kernels.
pub(super) const TILE: usize = 64;

/// How blocks multiply the tiles of a range of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Every factor is so many bf16 terms: 1, or 3 for f32. Heads of any width.
    Terms(usize),
    /// bf16 factors, tiles are copied ahead. Heads of a multiple of 8 up to 256.
    Pipelined,
    /// bf16 factors, products of groups of warps: compute capability 9.0. Heads of 64 or 128.
    Groups,
    /// The same where all gradients are wanted: scores are formed once for them, by one kernel.
    OnePass,
}

impl Way {
    /// The fastest for these products as far as it was measured, or what [`crate::dispatch::set_one_pass_attention`] asks for.
    pub(super) fn of(products: Products, head_dim: usize, device: &Device) -> Self {
        Self::with(one_pass_attention(), products, head_dim, device)
    }

    /// The same, by one kernel for all gradients where there is one if `one_pass`.
    pub(super) fn with(
        one_pass: bool,
        products: Products,
        head_dim: usize,
        device: &Device,
    ) -> Self {
        if products != Products::Half {
            return Self::Terms(3);
        }
        let by_groups = if one_pass { Self::OnePass } else { Self::Groups };
        let groups = has_warp_groups(device).then_some(by_groups);
        let all = groups.into_iter().chain([Self::Pipelined]);
        all.into_iter().find(|way| way.takes(head_dim)).unwrap_or(Self::Terms(1))
    }

    fn takes(self, head_dim: usize) -> bool {
        match self {
            Self::Terms(_) => true,
            Self::Pipelined => reads_halves(head_dim),
            Self::Groups | Self::OnePass => matches!(head_dim, 64 | 128),
        }
    }

    /// The type in which its kernels read queries, keys and values.
    fn factors(self) -> DType {
        if matches!(self, Self::Terms(_)) { DType::F32 } else { DType::BF16 }
    }
}

/// Whether the kernels of bf16 products read heads of such a width in bf16: multiples of 8 up to 256.
pub(super) fn reads_halves(head_dim: usize) -> bool {
    head_dim > 0 && head_dim <= 256 && head_dim.is_multiple_of(8)
}

/// Whether the kernels take such arguments: f32, or bf16 among them that does not train, or trains by a gradient in f32.
pub(super) fn takes(tensors: [&Tensor; 3]) -> bool {
    let is_half = |t: &Tensor| t.dtype() == DType::BF16 && (!t.track_op() || has_wide_gradient(t));
    let is_read = |t: &&Tensor| t.dtype() == DType::F32 || is_half(t);
    cuda::take(&tensors) && tensors.iter().all(is_read)
}

/// As [`super::attention`]; `None` where a head is too wide for the device's blocks.
/// It fails where the device has no memory, or the kernels cannot be compiled.
pub(super) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    attention_of(Way::of(products_of(q), q.dim(2)?, q.device()), q, k, v, ranges)
}

/// The same in one way.
pub(super) fn attention_of(
    way: Way,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    attention_within((way, block_memory(q.device())?), q, k, v, ranges)
}

/// The same where a block has so much memory.
pub(super) fn attention_within(
    (way, memory): (Way, usize),
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    ranges: &Arc<KeyRanges>,
) -> Result<Option<Tensor>> {
    let is_trained = trains(&[q, k, v]);
    if !is_trained && q.dim(0)? <= FULL_ROWS {
        let out = few::attention(q, k, v, ranges)?;
        return out.map(|out| out.to_dtype(q.dtype())).transpose();
    }
    let Some(call) = Call::new((way, memory), [q, k, v], ranges)? else { return Ok(None) };
    let (out, log_sum_exp) = call.forward()?;
    if !is_trained {
        return out.to_dtype(q.dtype()).map(Some);
    }
    let wanted = [q.track_op(), k.track_op() || v.track_op()];
    let kept = call.kept([q, k, v]);
    differentiable_by_result("attention", [q, k, v], out, move |out, gradient| {
        kept.with_factors()?.backward(out, &log_sum_exp, &gradient.contiguous()?, wanted)
    })
    .map(Some)
}

/// The kernels of one way for one width of heads.
#[derive(Debug)]
enum Kernels {
    Tiles(tiles::Kernels),
    Half(half::Kernels),
    OnePass(half::Kernels, one_pass::Kernel),
}

impl Kernels {
    /// With the largest tiles that a block's memory holds; `None` if it holds none.
    fn new(way: Way, head_dim: usize, memory: usize) -> Option<Self> {
        match way {
            Way::Terms(terms) => tiles::Kernels::new(head_dim, terms, memory).map(Self::Tiles),
            Way::Pipelined => half::Kernels::pipelined(head_dim, memory).map(Self::Half),
            Way::Groups => half::Kernels::groups(head_dim, memory).map(Self::Half),
            Way::OnePass => {
                let kernel = one_pass::Kernel::new(head_dim, memory)?;
                half::Kernels::groups(head_dim, memory).map(|half| Self::OnePass(half, kernel))
            }
        }
    }

    /// The same for later calls of the process.
    fn of(way: Way, head_dim: usize, memory: usize) -> Option<Arc<Self>> {
        type Known = ((Way, usize, usize), Option<Arc<Kernels>>);
        static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
        let key = (way, head_dim, memory);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernels)) = known.iter().find(|(other, _)| *other == key) {
            return kernels.clone();
        }
        let kernels = Self::new(way, head_dim, memory).map(Arc::new);
        known.push((key, kernels.clone()));
        kernels
    }

    #[cfg(all(test, feature = "cuda"))]
    fn into_compiled(self) -> Vec<Compiled> {
        let with = |blocks: [Block; 3], program| vec![(program, blocks.to_vec())];
        match self {
            Self::Tiles(kernels) => with(kernels.blocks(), kernels.program),
            Self::Half(kernels) => with(kernels.blocks(), kernels.program),
            // The other kernels are those of `Way::Groups`.
            Self::OnePass(_, kernel) => vec![(kernel.program, vec![kernel.block])],
        }
    }
}

/// The programs for one width of heads where blocks have so much memory, to compile them without a device:
/// that of a way, if it takes such heads, and what all ways have beside it.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn programs(way: Way, head_dim: usize, memory: usize) -> Vec<Compiled> {
    let takes = way.takes(head_dim);
    let own = takes.then(|| Kernels::new(way, head_dim, memory)).flatten();
    let beside = [beside::program(head_dim), beside::program_of_halves(head_dim)];
    let beside = beside.map(|program| (program, beside::blocks().to_vec()));
    let few = [few::program(head_dim), few::program_of_halves(head_dim)];
    let few = few.map(|program| (program, few::blocks(head_dim).to_vec()));
    own.map(Kernels::into_compiled).into_iter().flatten().chain(beside).chain(few).collect()
}

/// One call's arguments, detached and contiguous, as the kernels of its way read them.
struct Call {
    kernels: Arc<Kernels>,
    tables: Arc<Tables>,
    dims: Dims,
    queries: usize,
    keys: usize,
    /// Of queries, keys and values.
    factors: DType,
    /// Of the result of ranges: bf16 where queries came so, nothing trains and no single keys are added to it.
    of_result: DType,
    q: Arc<Tensor>,
    k: Arc<Tensor>,
    v: Arc<Tensor>,
}

impl Call {
    fn new(
        (way, memory): (Way, usize),
        [q, k, v]: [&Tensor; 3],
        ranges: &Arc<KeyRanges>,
    ) -> Result<Option<Self>> {
        let dims = Dims::new(q.shape(), k.shape())?;
        let device = q.device();
        let Some(kernels) = Kernels::of(way, dims.head_dim, memory) else { return Ok(None) };
        let trained_keys = (k.track_op() || v.track_op()).then(|| k.dim(0)).transpose()?;
        let one_pass = (way == Way::OnePass && q.track_op() && trained_keys.is_some()).then(|| {
            let rows = one_pass::inner_rows(dims.head_dim);
            Cut { keys: one_pass::KEYS, rows, group: dims.group() }
        });
        let tables = Tables::of(ranges, Wanted { trained_keys, one_pass }, device)?;
        let factors = way.factors();
        let is_half = q.dtype() == factors && !tables.has_singles && !trains(&[q, k, v]);
        Ok(Some(Self {
            kernels,
            dims,
            queries: q.dim(0)?,
            keys: k.dim(0)?,
            factors,
            of_result: if is_half { factors } else { DType::F32 },
            q: input_factor(q, factors)?,
            k: input_factor(k, factors)?,
            v: input_factor(v, factors)?,
            tables,
        }))
    }

    /// The same with what the graph keeps of the arguments for the backward pass: their factors, where it lets go of
    /// the arguments themselves.
    fn kept(self, [q, k, v]: [&Tensor; 3]) -> Self {
        let (q, k, v) = (kept_input(q, &self.q), kept_input(k, &self.k), kept_input(v, &self.v));
        Self { q, k, v, ..self }
    }

    /// The call of what was kept.
    fn with_factors(&self) -> Result<Self> {
        let factor = |kept: &Tensor| as_factor(kept, self.factors).map(Arc::new);
        Ok(Self {
            kernels: Arc::clone(&self.kernels),
            tables: Arc::clone(&self.tables),
            q: factor(&self.q)?,
            k: factor(&self.k)?,
            v: factor(&self.v)?,
            ..*self
        })
    }

    /// Queries, keys and values.
    fn arguments(&self) -> [&Tensor; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// (token, query head) pairs.
    fn rows(&self) -> usize {
        self.queries * self.dims.heads
    }

    /// Tiles of so many (token, head) rows that share a key-value head.
    fn tiles(&self, rows: usize) -> usize {
        (self.queries * self.dims.group()).div_ceil(rows)
    }

    fn scale(&self) -> Argument<'_> {
        Argument::F32(self.dims.scale())
    }

    /// The result and its log-sum-exp `[Tq, N]`.
    fn forward(&self) -> Result<(Tensor, Tensor)> {
        let (out, log_sum_exp) = match &*self.kernels {
            Kernels::Tiles(tiles) => tiles.forward(self)?,
            Kernels::Half(half) | Kernels::OnePass(half, _) => half.forward(self)?,
        };
        if !self.tables.has_singles {
            return Ok((out, log_sum_exp));
        }
        Beside::of(self).forward(&out, &log_sum_exp)
    }

    fn backward(
        &self,
        out: &Tensor,
        log_sum_exp: &Tensor,
        gradient: &Tensor,
        [want_q, want_keys]: [bool; 2],
    ) -> Result<[Option<Tensor>; 3]> {
        let beside = Beside::of(self);
        let delta = beside.delta(out, gradient)?;
        let through = Through { gradient, log_sum_exp, delta: &delta };
        if let (Kernels::OnePass(_, kernel), true, true) = (&*self.kernels, want_q, want_keys) {
            let singles = beside.of_keys(&through)?;
            let [dq, dk, dv] = kernel.backward(self, &through, &singles)?;
            return Ok([Some(self.with_singles(&beside, &through, dq)?), Some(dk), Some(dv)]);
        }
        let dq = want_q.then(|| self.of_queries(&beside, &through)).transpose()?;
        if !want_keys {
            return Ok([dq, None, None]);
        }
        let singles = beside.of_keys(&through)?;
        let [dk, dv] = match &*self.kernels {
            Kernels::Tiles(tiles) => tiles.of_keys(self, &through, &singles)?,
            Kernels::Half(half) | Kernels::OnePass(half, _) => {
                half.of_keys(self, &through, &singles)?
            }
        };
        Ok([dq, Some(dk), Some(dv)])
    }

    /// What the kernels of gradients of keys are given: `factors` are queries, keys, values and the gradient of the
    /// result as they multiply them, `singles` the gradients of single keys.
    fn arguments_of_keys<'a>(
        &'a self,
        [q, k, v, gradient]: [&'a Tensor; 4],
        through: &Through<'a>,
        [singles_dk, singles_dv]: &'a [Tensor; 2],
    ) -> Result<Arguments<'a>> {
        let Some(seen_by) = &self.tables.seen_by else { bail!("attention: frozen keys") };
        Ok(Arguments::of([q, k, v, gradient, through.log_sum_exp, through.delta])
            .and([&self.tables.start, &self.tables.end])
            .and([&seen_by.from, &seen_by.until, &seen_by.slot, singles_dk, singles_dv])
            .and([self.tables.has_singles])
            .and([self.keys, self.dims.heads, self.dims.kv_heads])
            .and([self.scale()]))
    }

    fn of_queries(&self, beside: &Beside<'_>, through: &Through<'_>) -> Result<Tensor> {
        let dq = match &*self.kernels {
            Kernels::Tiles(tiles) => tiles.of_queries(self, through)?,
            Kernels::Half(half) | Kernels::OnePass(half, _) => half.of_queries(self, through)?,
        };
        self.with_singles(beside, through, dq)
    }

    /// The queries' gradient by ranges with that by single keys, if there are some.
    fn with_singles(
        &self,
        beside: &Beside<'_>,
        through: &Through<'_>,
        dq: Tensor,
    ) -> Result<Tensor> {
        if self.tables.has_singles { beside.of_queries(through, &dq) } else { Ok(dq) }
    }
}

/// Programs by the width of heads.
type Programs = Mutex<BTreeMap<usize, Arc<Program>>>;

/// The program for one width of heads, made once in a process.
fn of_width(known: &Programs, head_dim: usize, program: fn(usize) -> Program) -> Arc<Program> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(known.entry(head_dim).or_insert_with(|| Arc::new(program(head_dim))))
}

/// What comes back to the backward pass.
struct Through<'a> {
    gradient: &'a Tensor,
    log_sum_exp: &'a Tensor,
    delta: &'a Tensor,
}

/// Shapes of a result and its log-sum-exp.
fn result_shapes(call: &Call) -> [Shape; 2] {
    [call.q.shape().clone(), Shape::from((call.queries, call.dims.heads))]
}
