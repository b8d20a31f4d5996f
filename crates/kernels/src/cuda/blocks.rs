//! Products with quantised blocks as they are stored, and the values of blocks.
//!
//! Both have the bits that the CPU gives them: activations become the same fixed-point numbers, sums of codes are exact,
//! and floats are added in the same order.

use std::ops::Range;
use std::sync::LazyLock;

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::linear::Addend;
use super::{Argument, Arguments, Launch, Program, aligned};
use crate::gemm::{BLOCK, BlockFormat, GROUP, MOST_ROWS};

const FIXED: &str = include_str!("fixed.cu");

static FIXING: LazyLock<Program> = LazyLock::new(fixing);

/// A program for each type of blocks, so that none is compiled that a run does not need.
static PROGRAMS: LazyLock<Vec<Program>> =
    LazyLock::new(|| BlockFormat::ALL.into_iter().map(program).collect());

/// The program of a type of blocks.
pub(super) fn program(format: BlockFormat) -> Program {
    let text = [&format.definitions(), FIXED, include_str!("blocks.cu")].concat();
    Program::new(&format!("blocks_{}", format.name()), &text, &[]).overlapping()
}

/// The program that makes fixed-point numbers.
pub(super) fn fixing() -> Program {
    Program::new("fixed", FIXED, &[]).overlapping()
}

/// Words of 32 activations of a row: `Fixed` of the kernels.
const WORDS_OF_FIXED: usize = 12;
/// Threads of kernels whose threads have work of their own.
const THREADS: usize = 64;
/// Groups of threads of a block that multiplies: `READERS` of the kernels.
const READERS: usize = 16;
/// Parts of 32 values that a block widens: `WIDENED` of the kernels.
const WIDENED: usize = 8;

/// What blocks of the kernels of [`program`] have. It has that of [`fixing`], too, whose text it needs.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn kernel_blocks() -> Vec<super::Block> {
    let products = ["products_1", "products_4", "products_8", "products_16"];
    let products = products.map(|kernel| (kernel, GROUP * READERS));
    let rest =
        [("widen_f32", GROUP * WIDENED), ("widen_bf16", GROUP * WIDENED), ("widen_rows", THREADS)];
    let all = products.into_iter().chain(rest);
    let all = all.map(|(kernel, threads)| super::Block::plain(kernel, threads));
    all.chain([fixing_block()]).collect()
}

/// The same of [`fixing`].
#[cfg(all(test, feature = "cuda"))]
pub(super) fn fixing_block() -> super::Block {
    super::Block::plain("fix_rows", THREADS)
}

/// An `[outputs, inputs]` matrix of quantised blocks on a device, 16 rows side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) bytes: &'a Tensor,
    pub(crate) format: BlockFormat,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

/// Activations as 8-bit fixed-point numbers, for products with any number of matrices.
#[derive(Debug)]
pub(crate) struct Fixed {
    words: Tensor,
    rows: usize,
    inputs: usize,
}

impl Fixed {
    /// # Shapes
    /// - `x`: `[R, I]` in f32, `I` in blocks of 32
    ///
    /// # Errors
    /// - the kernel cannot be compiled or started
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        let (rows, inputs) = x.dims2()?;
        let blocks = rows * inputs / BLOCK;
        let x = aligned(x)?;
        let arguments = [(&x).into(), rows.into(), inputs.into(), blocks.into()];
        let grid = [blocks.div_ceil(THREADS), 1, 1];
        let [words] = Launch::new(&FIXING, "fix_rows", (grid, THREADS), &arguments)
            .run_as(x.device(), &[(Shape::from(blocks * WORDS_OF_FIXED), DType::U32)])?;
        Ok(Self { words, rows, inputs })
    }
}

/// Most matrices of one start: `MATRICES` of the kernels.
pub(crate) const MOST: usize = 3;

/// `x Wᵀ + addend` of each matrix, `[R, O]` in f32, in one start; all are of one format, and at most [`MOST`]. A row's
/// bits do not depend on the rows beside it.
/// It fails where widths or formats differ, or the kernel cannot be compiled or started.
pub(crate) fn products(maps: &[(Stored<'_>, Addend<'_>)], x: &Fixed) -> Result<Vec<Tensor>> {
    let Some((first, _)) = maps.first().filter(|_| maps.len() <= MOST) else {
        bail!("linear: {} matrices in one start, at most {MOST} are", maps.len())
    };
    for (Stored { outputs, inputs, format, .. }, _) in maps {
        if x.inputs != *inputs {
            bail!("linear: input [{}, {}] for weight [{outputs}, {inputs}]", x.rows, x.inputs);
        }
        if *format != first.format {
            bail!("linear: {} beside {} in one start", format.name(), first.format.name());
        }
    }
    let added: Vec<Option<Tensor>> = maps
        .iter()
        .map(|(_, addend)| addend.tensor().map(Tensor::contiguous).transpose())
        .collect::<Result<_>>()?;
    let mut arguments = Arguments::of([&x.words]).and([x.rows, x.inputs]);
    for place in 0..MOST {
        // What is not there has no outputs.
        let (matrix, addend) = maps.get(place).unwrap_or(&maps[0]);
        let outputs = if place < maps.len() { matrix.outputs } else { 0 };
        let values = added.get(place).and_then(Option::as_ref).unwrap_or(&x.words);
        arguments = arguments.and([matrix.bytes, values]).and([addend.kind(), outputs]);
    }
    let kernel = match x.rows {
        0..=1 => "products_1",
        2..=4 => "products_4",
        5..=8 => "products_8",
        _ => "products_16",
    };
    let groups: usize = maps.iter().map(|(matrix, _)| matrix.outputs.div_ceil(GROUP)).sum();
    let outputs: usize = maps.iter().map(|(matrix, _)| matrix.outputs).sum();
    let blocks = ([groups * x.rows.div_ceil(MOST_ROWS), 1, 1], GROUP * READERS);
    let [all] = Launch::new(&PROGRAMS[first.format as usize], kernel, blocks, &arguments)
        .run(first.bytes.device(), [Shape::from(x.rows * outputs)])?;
    let mut from = 0;
    let mut own = |(matrix, _): &(Stored<'_>, Addend<'_>)| {
        let product = all.narrow(0, from, x.rows * matrix.outputs)?;
        from += x.rows * matrix.outputs;
        product.reshape((x.rows, matrix.outputs))
    };
    maps.iter().map(&mut own).collect()
}

impl Stored<'_> {
    fn run(
        &self,
        kernel: &str,
        (blocks, threads): (usize, usize),
        arguments: &[Argument<'_>],
        result: (Shape, DType),
    ) -> Result<Tensor> {
        let program = &PROGRAMS[self.format as usize];
        let launch = Launch::new(program, kernel, ([blocks, 1, 1], threads), arguments);
        let [out] = launch.run_as(self.bytes.device(), &[result])?;
        Ok(out)
    }

    /// The values of some rows of the matrix in f32 or bf16, `[R, I]`; they begin at a multiple of 16.
    /// It fails where the kernel cannot be compiled or started, or the device has no memory for the values.
    pub(crate) fn widened(&self, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        let kernel = match dtype {
            DType::F32 => "widen_f32",
            DType::BF16 => "widen_bf16",
            other => bail!("blocks are widened to f32 or bf16, not {other:?}"),
        };
        if !rows.start.is_multiple_of(GROUP) || rows.end > self.outputs {
            bail!("rows {rows:?} of {} are not whole groups of {GROUP}", self.outputs);
        }
        let runs = (self.inputs / BLOCK).div_ceil(WIDENED);
        let arguments =
            Arguments::of([self.bytes]).and([rows.start / GROUP, rows.len(), self.inputs]);
        let blocks = (rows.len().div_ceil(GROUP) * runs, GROUP * WIDENED);
        self.run(kernel, blocks, &arguments, ((rows.len(), self.inputs).into(), dtype))
    }

    /// The rows `ids`, which lie within the matrix, in f32, `[T, I]`. It fails as [`widened`](Self::widened) does.
    pub(crate) fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        let places = super::upload_words(ids, self.bytes.device())?;
        let parts = ids.len() * self.inputs / BLOCK;
        let arguments = Arguments::of([self.bytes, &places]).and([parts, self.inputs]);
        let shape = Shape::from((ids.len(), self.inputs));
        self.run("widen_rows", (parts.div_ceil(THREADS), THREADS), &arguments, (shape, DType::F32))
    }
}
