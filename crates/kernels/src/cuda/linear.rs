//! Products of few rows, as decoding has them: one start that reads every weight once, in the type it is
//! held in.

use std::sync::LazyLock;

use candle_core::{DType, Result, Shape, Tensor};

use super::{Argument, Arguments, Launch, Program, aligned, takes};
use crate::composed::FULL_ROWS;

/// A program for each kind of blocks, so that none is compiled that a run does not need.
static PROGRAMS: LazyLock<[Program; KINDS]> = LazyLock::new(|| std::array::from_fn(program));

/// The same for rows of a mixture's experts.
static OF_EXPERTS: LazyLock<[Program; KINDS]> =
    LazyLock::new(|| std::array::from_fn(program_of_experts));

/// `KIND` of the kernels is less.
pub(super) const KINDS: usize = 4;

/// The program of one kind of blocks.
fn program(kind: usize) -> Program {
    Program::new("linear", include_str!("linear.cu"), &[("KIND", kind)]).overlapping()
}

/// The same for rows of a mixture's experts.
fn program_of_experts(kind: usize) -> Program {
    let text = concat!(include_str!("../experts/table.cu"), include_str!("linear.cu"));
    Program::new("linear_experts", text, &[("OF_EXPERTS", 1), ("KIND", kind)]).overlapping()
}

/// Outputs of a tile: `OUTPUTS` of the kernels.
const TILE: usize = 16;
/// Rows that are summed at once: `ROWS` of the kernels.
const ROWS: usize = 8;

/// What blocks of a kernel compute. A row's bits are the same with all of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    /// `KIND` of the kernels.
    kind: usize,
    kernel: &'static str,
    threads: usize,
    outputs: usize,
    rows: usize,
}

impl Blocks {
    const F32: Self =
        Self { kind: 0, kernel: "few_rows_f32", threads: 128, outputs: TILE, rows: ROWS };
    const BF16: Self =
        Self { kind: 1, kernel: "few_rows_bf16", threads: 256, outputs: TILE, rows: ROWS };
    /// With half of the reads of `x`, which count where it has several rows.
    const WIDE: Self =
        Self { kind: 2, kernel: "few_rows_bf16_wide", outputs: 2 * TILE, ..Self::BF16 };
    /// With a quarter of the reads of weights.
    const TALL: Self = Self { kind: 3, kernel: "few_rows_bf16_tall", rows: 4 * ROWS, ..Self::WIDE };
    /// Outputs of which blocks of two tiles occupy a device.
    const MANY: usize = 4096;

    /// The fastest for a start with so many rows and outputs; `None` for other types.
    fn of(dtype: DType, rows: usize, outputs: usize) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::BF16 if rows > ROWS => Some(Self::TALL),
            DType::BF16 if rows > ROWS / 2 && outputs >= Self::MANY => Some(Self::WIDE),
            DType::BF16 => Some(Self::BF16),
            _ => None,
        }
    }
}

/// The programs of one kind of blocks, to compile them without a device.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn compiled(kind: usize) -> [super::Compiled; 2] {
    let own = [Blocks::F32, Blocks::BF16, Blocks::WIDE, Blocks::TALL][kind];
    let block = |name: String| super::Block::plain(name.leak(), own.threads);
    let plain = (1..=MOST).map(|count| block(format!("{}_{count}", own.kernel)));
    let of_experts = (1..=2).map(|count| block(format!("{}_experts_{count}", own.kernel)));
    [(program(kind), plain.collect()), (program_of_experts(kind), of_experts.collect())]
}

/// What is added to a product.
#[derive(Clone, Copy)]
pub(crate) enum Addend<'a> {
    None,
    /// `[O]`, to every row.
    Bias(&'a Tensor),
    /// `[R, O]`
    Residual(&'a Tensor),
}

impl<'a> Addend<'a> {
    pub(crate) fn bias(bias: Option<&'a Tensor>) -> Self {
        bias.map_or(Self::None, Self::Bias)
    }

    /// The kernel's number for it.
    pub(super) fn kind(self) -> usize {
        match self {
            Self::None => 0,
            Self::Bias(_) => 1,
            Self::Residual(_) => 2,
        }
    }

    pub(crate) fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Self::None => None,
            Self::Bias(tensor) | Self::Residual(tensor) => Some(tensor),
        }
    }
}

/// Most products of one start.
const MOST: usize = 3;

/// [`each_row`] of fewer than [`FULL_ROWS`] rows; the library is faster with more. It fails as [`each_row`] does.
pub(crate) fn few_rows<const N: usize>(
    x: &Tensor,
    maps: &[(&Tensor, Addend<'_>); N],
) -> Result<Option<[Tensor; N]>> {
    if x.dim(0)? < FULL_ROWS { each_row(x, maps) } else { Ok(None) }
}

/// `x Wᵀ + addend` of `[R, I]` and every `[O, I]` in f32, in one start; `None` where the library has to do
/// it: nothing may train, matrices be more than three or of another type. A row's bits do not depend on
/// the rows beside it. It fails where the kernel cannot be compiled or started.
pub(crate) fn each_row<const N: usize>(
    x: &Tensor,
    maps: &[(&Tensor, Addend<'_>); N],
) -> Result<Option<[Tensor; N]>> {
    let (rows, inputs) = x.dims2()?;
    let addends = maps.iter().filter_map(|(_, addend)| addend.tensor());
    let mut all = maps.iter().map(|(weight, _)| *weight).chain(addends).chain([x]);
    let dtype = maps.first().map(|(weight, _)| weight.dtype());
    let outputs = maps.iter().map(|(weight, _)| weight.dim(0)).sum::<Result<usize>>()?;
    let Some(blocks) = dtype.and_then(|dtype| Blocks::of(dtype, rows, outputs)) else {
        return Ok(None);
    };
    let fits = |(weight, addend): &(&Tensor, Addend<'_>)| {
        weight.is_contiguous()
            && Some(weight.dtype()) == dtype
            && addend.tensor().is_none_or(|t| t.is_contiguous() && t.dtype() == DType::F32)
    };
    if rows == 0
        || N > MOST
        || all.any(Tensor::track_op)
        || !takes(&[x])
        || inputs == 0
        || !inputs.is_multiple_of(2)
        || !maps.iter().all(fits)
    {
        return Ok(None);
    }
    let x = aligned(x)?;
    let outputs = maps.each_ref().map(|(weight, _)| weight.dims()[0]);
    let mut arguments = Arguments::of([&x]).and([rows, inputs]);
    for ((weight, addend), outputs) in maps.iter().zip(outputs) {
        let added = addend.tensor().unwrap_or(&x);
        arguments = arguments.and([*weight, added]).and([addend.kind(), outputs]);
    }
    let columns: usize = outputs.iter().map(|outputs| outputs.div_ceil(blocks.outputs)).sum();
    let grid = [columns * rows.div_ceil(blocks.rows), 1, 1];
    let (program, kernel) = (&PROGRAMS[blocks.kind], format!("{}_{N}", blocks.kernel));
    Launch::new(program, &kernel, (grid, blocks.threads), &arguments)
        .run(x.device(), outputs.map(|outputs| Shape::from((rows, outputs))))
        .map(Some)
}

/// Rows of several experts, one expert's after the other's, and where their matrices lie; `experts/table.cu` says how.
#[derive(Debug)]
pub(crate) struct RowsOfExperts<'a> {
    /// `[V, I]` in f32.
    pub(crate) x: &'a Tensor,
    pub(crate) pieces: &'a Tensor,
    pub(crate) held: &'a Tensor,
}

/// How rows of experts are multiplied that are few for each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FewOfExperts(Blocks);

impl FewOfExperts {
    /// For weights of a type, at most so many rows of an expert, and so many outputs of all of them; `None` for other types.
    pub(crate) fn of(dtype: DType, most: usize, outputs: usize) -> Option<Self> {
        Blocks::of(dtype, most, outputs).map(Self)
    }

    /// Most rows of a piece.
    pub(crate) fn rows(self) -> usize {
        self.0.rows
    }

    /// `x Wᵀ + b` with matrix `first` of every expert, and those after it: a row has the bits that [`few_rows`] gives it.
    /// Every matrix has an even number of inputs. It fails where the kernel cannot be compiled or started.
    pub(crate) fn products<const N: usize>(
        self,
        rows: &RowsOfExperts<'_>,
        first: usize,
        outputs: usize,
    ) -> Result<[Tensor; N]> {
        let ((all, inputs), blocks) = (rows.x.dims2()?, self.0);
        let x = aligned(rows.x)?;
        let pieces = rows.pieces.elem_count() / PIECE;
        let arguments = Arguments::of([Argument::from(&x), rows.pieces.into(), rows.held.into()])
            .and([first, inputs, outputs]);
        let grid = [pieces * N * outputs.div_ceil(blocks.outputs), 1, 1];
        let (program, kernel) =
            (&OF_EXPERTS[blocks.kind], format!("{}_experts_{N}", blocks.kernel));
        let shape = Shape::from((all, outputs));
        Launch::new(program, &kernel, (grid, blocks.threads), &arguments)
            .run(x.device(), std::array::from_fn(|_| shape.clone()))
    }
}

/// Numbers of a piece in `experts/table.cu`.
pub(crate) const PIECE: usize = 3;

#[cfg(test)]
mod tests {
    use crate::graph::Backward;
    use candle_core::{DType, Result, Tensor};

    use super::super::emulator::emulated;
    use super::Blocks;
    use crate::linear::{linear, linear_onto};
    use crate::matrix::{Matrix, linear_each};
    use crate::test_support::{Noise, assert_close, bits};

    #[test]
    fn few_rows_match_the_cpu_and_have_the_bits_that_they_have_alone() -> Result<()> {
        let mut noise = Noise::new(7);
        for (rows, inputs, outputs) in
            [(1, 2, 1), (3, 130, 5), (8, 64, 33), (21, 96, 40), (9, 1080, 17), (5, 8, 4097)]
        {
            let (x, weight) = (noise.tensor(&[rows, inputs]), noise.tensor(&[outputs, inputs]));
            let bias = noise.tensor(&[outputs]);
            for dtype in [DType::F32, DType::BF16] {
                let weight = weight.to_dtype(dtype)?;
                let plain = linear(&x, &weight, Some(&bias))?;
                let own = emulated(|| linear(&x, &weight, Some(&bias)))?;
                assert_close("product", &own, &plain, 2e-6);
                for row in 0..rows {
                    let one = x.narrow(0, row, 1)?;
                    let alone = emulated(|| linear(&one, &weight, Some(&bias)))?;
                    assert_eq!(bits(&alone), bits(&own.narrow(0, row, 1)?), "row {row}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_grow_with_the_rows() {
        let of = |dtype, rows, outputs| Blocks::of(dtype, rows, outputs);
        assert_eq!(of(DType::BF16, 1, 1 << 17), Some(Blocks::BF16));
        assert_eq!(of(DType::BF16, 8, 4095), Some(Blocks::BF16));
        assert_eq!(of(DType::BF16, 5, 4096), Some(Blocks::WIDE));
        assert_eq!(of(DType::BF16, 9, 16), Some(Blocks::TALL));
        assert_eq!(of(DType::F32, 9, 4096), Some(Blocks::F32));
        assert_eq!(of(DType::F16, 1, 16), None);
    }

    /// A matrix that does not begin at a multiple of 16 bytes is read by pairs; rows that do not are copied.
    #[test]
    fn matrices_and_rows_at_odd_places_have_the_values_of_others() -> Result<()> {
        let mut noise = Noise::new(17);
        for (width, dtype) in [(64, DType::F32), (64, DType::BF16), (66, DType::BF16)] {
            let (own, store) = (noise.tensor(&[3, width]), noise.tensor(&[5 * width + 2]));
            let weight = store.to_dtype(dtype)?.narrow(0, 2, 5 * width)?.reshape((5, width))?;
            let flat = Tensor::cat(&[&noise.tensor(&[2]), &own.flatten_all()?], 0)?;
            let shifted = flat.narrow(0, 2, 3 * width)?.reshape((3, width))?;
            assert_eq!(shifted.layout().start_offset(), 2);
            let plain = linear(&own, &weight, None)?;
            let [at_odd, at_even] = [&shifted, &own].map(|x| emulated(|| linear(x, &weight, None)));
            assert_close("odd place", at_odd.as_ref().expect("product"), &plain, 2e-6);
            assert_eq!(at_odd?.to_vec2::<f32>()?, at_even?.to_vec2::<f32>()?);
        }
        Ok(())
    }

    #[test]
    fn several_products_and_additions_of_one_start_have_the_bits_of_single_ones() -> Result<()> {
        let mut noise = Noise::new(9);
        for (rows, sizes) in [(1, [8, 3, 5]), (5, [33, 4, 7]), (9, [4, 16, 1])] {
            let x = noise.tensor(&[rows, 64]);
            for dtype in [DType::F32, DType::BF16] {
                let weights = sizes.map(|size| noise.tensor(&[size, 64]).to_dtype(dtype));
                let weights = weights.into_iter().collect::<Result<Vec<_>>>()?;
                let matrices: Vec<Matrix> = weights.iter().cloned().map(Matrix::Dense).collect();
                let bias = noise.tensor(&[sizes[1]]);
                let maps =
                    [(&matrices[0], None), (&matrices[1], Some(&bias)), (&matrices[2], None)];
                let together = emulated(|| linear_each(&x, maps))?;
                for (i, own) in together.iter().enumerate() {
                    let plain = emulated(|| linear(&x, &weights[i], None))?;
                    let plain = if i == 1 { plain.broadcast_add(&bias)? } else { plain };
                    assert_eq!(
                        own.to_vec2::<f32>()?,
                        plain.to_vec2::<f32>()?,
                        "{i} of {rows} rows"
                    );
                }
                let residual = noise.tensor(&[rows, sizes[0]]);
                let onto = emulated(|| linear_onto(&residual, &x, &weights[0], None))?;
                let plain = (&residual + emulated(|| linear(&x, &weights[0], None))?)?;
                assert_eq!(onto.to_vec2::<f32>()?, plain.to_vec2::<f32>()?);
            }
        }
        Ok(())
    }

    #[test]
    fn rows_that_train_and_odd_widths_go_the_composed_way() -> Result<()> {
        let mut noise = Noise::new(8);
        let (x, weight) = (noise.var(&[3, 7]), noise.tensor(&[4, 7]));
        let plain = linear(&x, &weight, None)?.sqr()?.sum_all()?.gradients()?;
        let own = emulated(|| linear(&x, &weight, None)?.sqr()?.sum_all()?.gradients())?;
        assert_close("dx", own.get(&x).expect("own"), plain.get(&x).expect("cpu"), 1e-5);
        let own = emulated(|| linear(&x.detach(), &weight, None))?;
        assert_close("odd", &own, &linear(&x.detach(), &weight, None)?, 2e-6);
        Ok(())
    }
}
