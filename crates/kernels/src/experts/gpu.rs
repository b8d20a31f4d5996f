//! A mixture on an NVIDIA GPU: a few starts for all of its experts, however many have rows.
//!
//! Rows are laid out by expert, `[R·k, H]`, multiplied each with its expert's matrices, and added up by row. Passes of few
//! rows are multiplied in f32 with gate and up in one start, then the gated unit in one, then down: a row has the bits that
//! it has alone. Passes of many rows whose products have bf16 factors are multiplied by tiles on tensor cores; the gated unit
//! is computed where gate and up are summed. All else goes the way of single experts, and so do those that occupy a device
//! alone.

use std::ops::Range;
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::{Expert, Routes, Unit};
use crate::composed::FULL_ROWS;
#[cfg(all(test, feature = "cuda"))]
use crate::cuda::Compiled;
use crate::cuda::linear::{FewOfExperts, PIECE, RowsOfExperts};
use crate::cuda::rows::sum_rows_by;
use crate::cuda::{
    Arguments, Block, Launch, Program, address, aligned, block_memory, takes, upload,
};
use crate::dispatch::{Products, products_of};
use crate::matrix::Matrix;

/// With fewer blocks beside each other in tests, which have few pieces and few outputs.
static PROGRAM: LazyLock<Program> = LazyLock::new(|| program(if cfg!(test) { 2 } else { BESIDE }));

fn program(beside: usize) -> Program {
    let text = concat!(include_str!("table.cu"), include_str!("gpu.cu"));
    Program::new("experts", text, &[("BESIDE", beside)]).overlapping()
}

/// As a run has it, to compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn compiled() -> Compiled {
    let plain = |kernel| Block::plain(kernel, THREADS);
    let blocks = [plain("rows_of_visitors"), plain("expert_units"), GATES, OUTPUTS];
    (program(BESIDE), blocks.to_vec())
}

/// Pieces, and tiles of outputs, of blocks that follow each other.
const BESIDE: usize = 8;

/// Threads of a block: `THREADS` of the kernels.
const THREADS: usize = 256;
/// Rows of a block of tiles, and outputs of it: `TILE` of the kernels.
const TILE: usize = 128;
/// Bytes that such a block holds: of rows and of weights `STAGES` times `STEP` values.
const TILE_BYTES: usize = 3 * 64 * 2 * TILE * 2;
const GATES: Block = Block { kernel: "expert_gates", threads: THREADS, memory: TILE_BYTES };
const OUTPUTS: Block = Block { kernel: "expert_outputs", ..GATES };
/// Values that are read at once by products of few rows, and by tiles.
const PAIR: usize = 2;
const AT_ONCE: usize = 8;
/// Places of matrices: `GATE` and `DOWN` of the kernels.
const GATE: usize = 0;
const DOWN: usize = 2;

/// [`super::experts_onto`]; `None` where each expert has to be computed alone. It fails where a kernel cannot be compiled
/// or started.
pub(super) fn experts_onto(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    routes: &Routes,
) -> Result<Option<Tensor>> {
    if !takes(&[residual, x]) {
        return Ok(None);
    }
    let visited: Vec<Visited<'_>> = experts
        .iter()
        .zip(routes.visits())
        .filter(|(_, visits)| !visits.is_empty())
        .map(|(expert, visits)| Visited { expert, visits })
        .collect();
    let Some(sizes) = Sizes::of(x, &visited)? else { return Ok(None) };
    let held = addresses(&visited)?;
    let Some(way) = Way::of(x, &sizes, &visited, &held)? else { return Ok(None) };
    let table = Table::new(routes, &visited, &held, way.rows(), x.device())?;
    let outputs = match way {
        Way::Few(few) => of_few(few, x, &table, &sizes)?,
        Way::Tiles => by_tiles(x, &table, &sizes)?,
    };
    let [from, places, weights] = [table.from, table.places, table.weights];
    sum_rows_by(&outputs, Some(residual), [&from, &places], Some(&weights)).map(Some)
}

/// An expert that has rows, and their places.
struct Visited<'a> {
    expert: &'a Expert,
    visits: Range<usize>,
}

/// What all experts that have rows have in common.
struct Sizes {
    hidden: usize,
    inner: usize,
    /// Of the weights.
    dtype: DType,
    unit: Unit,
}

impl Sizes {
    /// `None` where experts differ, or hold what kernels do not read.
    fn of(x: &Tensor, visited: &[Visited<'_>]) -> Result<Option<Self>> {
        let hidden = x.dim(1)?;
        let Some(first) = visited.first().map(|first| first.expert) else { return Ok(None) };
        let Some(gate) = first.gate.dense() else { return Ok(None) };
        let own = Self { hidden, inner: gate.dim(0)?, dtype: gate.dtype(), unit: first.unit };
        let known = matches!(own.dtype, DType::F32 | DType::BF16);
        let some = own.inner > 0 && hidden > 0;
        let alike = visited.iter().all(|visited| own.fits(visited.expert, x.device()));
        Ok((known && some && alike).then_some(own))
    }

    fn fits(&self, expert: &Expert, device: &Device) -> bool {
        let Self { hidden, inner, dtype, unit } = *self;
        let reads = |t: &Tensor, dims: &[usize], of: DType| {
            let is_there = t.device().same_device(device) && t.is_contiguous();
            is_there && t.dims() == dims && t.dtype() == of && !t.track_op()
        };
        let inward = [inner, hidden];
        let matrices =
            [(&expert.gate, inward), (&expert.up, inward), (&expert.down, [hidden, inner])];
        let biases = expert.biases.iter().flatten().zip([inner, inner, hidden]);
        expert.unit == unit
            && matrices
                .iter()
                .all(|(matrix, dims)| matrix.dense().is_some_and(|w| reads(w, dims, dtype)))
            && biases.into_iter().all(|(bias, width)| reads(bias, &[width], DType::F32))
    }
}

/// Where every expert's matrices and biases lie, as `table.cu` says.
fn addresses(visited: &[Visited<'_>]) -> Result<Vec<[u64; 6]>> {
    let of = |expert: &Expert| -> Result<[u64; 6]> {
        let mut all = [0; 6];
        let matrices = [&expert.gate, &expert.up, &expert.down].into_iter().map(Matrix::dense);
        let biases = expert.biases.iter().flatten().map(Some);
        for (place, tensor) in all.iter_mut().zip(matrices.chain(biases)) {
            *place = tensor.map_or(Ok(0), address)?;
        }
        Ok(all)
    };
    visited.iter().map(|visited| of(visited.expert)).collect()
}

/// Whether the product of an expert with so many rows and outputs occupies a large device alone, by some 256 tiles. Then the
/// library multiplies expert by expert, as other layers.
fn occupies(rows: usize, outputs: usize) -> bool {
    rows * outputs >= 256 * TILE * TILE
}

/// Whether `rows_of_visitors` can count the pairs of so many rows.
fn is_counted(rows: usize, hidden: usize) -> bool {
    u32::try_from(rows * hidden / PAIR).is_ok()
}

/// How the rows of experts are multiplied.
enum Way {
    Few(FewOfExperts),
    Tiles,
}

impl Way {
    fn of(
        x: &Tensor,
        sizes: &Sizes,
        visited: &[Visited<'_>],
        held: &[[u64; 6]],
    ) -> Result<Option<Self>> {
        // Whether so many values are read at once of rows and weights.
        let fits = |at_once: usize| {
            let bytes = (at_once * sizes.dtype.size_in_bytes()) as u64;
            [sizes.hidden, sizes.inner].iter().all(|width| width.is_multiple_of(at_once))
                && held.iter().flat_map(|all| &all[..3]).all(|at| at.is_multiple_of(bytes))
        };
        if x.dim(0)? < FULL_ROWS {
            let most = visited.iter().map(|visited| visited.visits.len()).max().unwrap_or(0);
            let few = FewOfExperts::of(sizes.dtype, most, visited.len() * sizes.inner);
            return Ok(few.filter(|_| fits(PAIR)).map(Self::Few));
        }
        let rounds = sizes.dtype == DType::BF16 && products_of(x) == Products::Half;
        let rows: usize = visited.iter().map(|visited| visited.visits.len()).sum();
        let takes = rounds
            && fits(AT_ONCE)
            && is_counted(rows, sizes.hidden)
            && !occupies(rows / visited.len().max(1), sizes.inner)
            && block_memory(x.device())? >= TILE_BYTES;
        Ok(takes.then_some(Self::Tiles))
    }

    /// Most rows of a piece.
    fn rows(&self) -> usize {
        match self {
            Self::Few(few) => few.rows(),
            Self::Tiles => TILE,
        }
    }
}

/// What kernels read beside rows and matrices, brought over at once; u32, or the bits of f32.
struct Table {
    visitors: Tensor,
    /// Of inputs.
    factors: Option<Tensor>,
    pieces: Tensor,
    held: Tensor,
    from: Tensor,
    places: Tensor,
    weights: Tensor,
}

impl Table {
    fn new(
        routes: &Routes,
        visited: &[Visited<'_>],
        held: &[[u64; 6]],
        rows: usize,
        device: &Device,
    ) -> Result<Self> {
        let words_of = |address: &u64| [*address as u32, (*address >> 32) as u32];
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let sums = routes.sums();
        let parts: [Vec<u32>; 7] = [
            routes.visitors.clone(),
            routes.of_inputs.as_deref().map(bits).unwrap_or_default(),
            pieces(visited, rows),
            held.iter().flatten().flat_map(words_of).collect(),
            sums.from,
            sums.places,
            sums.weights.as_deref().map(bits).unwrap_or_default(),
        ];
        let words = upload(&parts.concat(), device)?;
        let mut first = 0;
        let mut next = |part: &Vec<u32>| {
            first += part.len();
            words.narrow(0, first - part.len(), part.len())
        };
        let [visitors, factors, pieces, held, from, places, weights] =
            parts.each_ref().map(&mut next);
        let factors = routes.of_inputs.is_some().then_some(factors).transpose()?;
        Ok(Self {
            visitors: visitors?,
            factors,
            pieces: pieces?,
            held: held?,
            from: from?,
            places: places?,
            weights: weights?,
        })
    }

    /// The rows of all experts, `[V, H]`, in a type.
    fn rows_of(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let x = aligned(x)?;
        let (width, all) = (x.dim(1)?, self.visitors.elem_count());
        let pairs = all * width / 2;
        let factors = self.factors.as_ref();
        let arguments = Arguments::of([&x, &self.visitors, factors.unwrap_or(&x)])
            .and([factors.is_some()])
            .and([width, pairs])
            .and([dtype == DType::BF16]);
        let [rows] = Launch::new(&PROGRAM, "rows_of_visitors", blocks(pairs), &arguments)
            .run_as(x.device(), &[(Shape::from((all, width)), dtype)])?;
        Ok(rows)
    }
}

/// A thread for each of `count`.
fn blocks(count: usize) -> ([usize; 3], usize) {
    ([count.div_ceil(THREADS), 1, 1], THREADS)
}

/// The pieces of experts that have rows, as `table.cu` says.
fn pieces(visited: &[Visited<'_>], rows: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for (expert, Visited { visits, .. }) in visited.iter().enumerate() {
        for first in visits.clone().step_by(rows) {
            let count = rows.min(visits.end - first);
            all.extend([expert, first, count].map(|number| number as u32));
        }
    }
    all
}

/// Kind and numbers of a unit, as the kernels have them.
fn numbers_of(unit: Unit) -> (usize, [f64; 2]) {
    match unit {
        Unit::Silu => (0, [0.0; 2]),
        Unit::GeluTanh => (1, [0.0; 2]),
        Unit::Clamped(bounds) => (2, [bounds.alpha, bounds.limit]),
    }
}

/// The outputs of all experts, `[V, H]`, by products of few rows.
fn of_few(few: FewOfExperts, x: &Tensor, table: &Table, sizes: &Sizes) -> Result<Tensor> {
    let Table { pieces, held, .. } = table;
    let gated = {
        let inputs = table.rows_of(x, DType::F32)?;
        let rows = RowsOfExperts { x: &inputs, pieces, held };
        let [gate, up] = few.products(&rows, GATE, sizes.inner)?;
        let (kind, numbers) = numbers_of(sizes.unit);
        let count = gate.elem_count();
        let arguments = Arguments::of([&gate, &up]).and([kind]).and(numbers).and([count]);
        let [gated] = Launch::new(&PROGRAM, "expert_units", blocks(count), &arguments)
            .run(x.device(), [gate.shape().clone()])?;
        gated
    };
    let [outputs] = few.products(&RowsOfExperts { x: &gated, pieces, held }, DOWN, sizes.hidden)?;
    Ok(outputs)
}

/// The same by tiles of bf16 factors.
fn by_tiles(x: &Tensor, table: &Table, sizes: &Sizes) -> Result<Tensor> {
    let Sizes { hidden, inner, .. } = *sizes;
    let count = table.pieces.elem_count() / PIECE;
    let all = table.visitors.elem_count();
    let gated = {
        let rows = table.rows_of(x, DType::BF16)?;
        let (kind, numbers) = numbers_of(sizes.unit);
        let arguments = Arguments::of([&rows, &table.pieces, &table.held])
            .and([count, hidden, inner, kind])
            .and(numbers);
        let grid = [count * inner.div_ceil(TILE / 2), 1, 1];
        let [gated] = Launch::of(&PROGRAM, GATES, grid, &arguments)
            .run_as(x.device(), &[(Shape::from((all, inner)), DType::BF16)])?;
        gated
    };
    let arguments = Arguments::of([&gated, &table.pieces, &table.held]).and([count, inner, hidden]);
    let grid = [count * hidden.div_ceil(TILE), 1, 1];
    let [outputs] = Launch::of(&PROGRAM, OUTPUTS, grid, &arguments)
        .run(x.device(), [Shape::from((all, hidden))])?;
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::{is_counted, occupies};

    #[test]
    fn the_library_has_what_occupies_a_device() {
        // Rows of 4096 tokens: of Mixtral 8x7B, Qwen3-30B-A3B, gpt-oss-20b.
        assert!(occupies(4096 * 2 / 8, 14_336));
        assert!(!occupies(4096 * 8 / 128, 768));
        assert!(!occupies(4096 * 4 / 32, 2880));
    }

    /// A pass with more goes the way of single experts, in place of an error.
    #[test]
    fn rows_have_as_many_pairs_as_a_kernel_counts() {
        assert!(is_counted(1 << 20, 8190));
        assert!(!is_counted(1 << 20, 8192));
    }
}
