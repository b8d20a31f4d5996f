//! Quantised blocks as they are stored: products, those of inputs that train, and the values.

use std::cell::OnceCell;
use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Output, frozen, only, trained, up_to};
use crate::linear;
use crate::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use crate::random::CounterRng;

/// Rows, blocks of a row, outputs.
type Map = [usize; 3];

/// Maps for each type of blocks.
const MAPS: [(Size, Map); 5] = [
    (Smoke, [1, 2, 5]),
    (Smoke, [5, 3, 40]),
    (Small, [1, 16, 1000]),
    (Small, [16, 5, 515]),
    (Small, [150, 16, 96]),
];

/// Maps of an 8B model's layers and head.
const REAL: [(Size, (Map, BlockFormat)); 5] = [
    (Real, ([1, 16, 14_336], BlockFormat::Q4K)),
    (Real, ([8, 56, 4096], BlockFormat::Q4K)),
    (Real, ([16, 56, 4096], BlockFormat::Q6K)),
    (Real, ([61, 16, 4096], BlockFormat::Q5K)),
    (Real, ([7, 16, 128_256], BlockFormat::Q6K)),
];

fn maps(size: Size) -> Vec<(Map, BlockFormat)> {
    let small = up_to(size, &MAPS)
        .flat_map(|map| BlockFormat::ALL.into_iter().map(move |format| (map, format)));
    small.chain(up_to(size, &REAL)).collect()
}

/// Blocks of one matrix, made when they are first needed.
#[derive(Clone)]
pub(super) struct Made {
    format: BlockFormat,
    outputs: usize,
    inputs: usize,
    bytes: Rc<OnceCell<Vec<u8>>>,
}

impl Made {
    pub(super) fn new(format: BlockFormat, outputs: usize, inputs: usize) -> Self {
        Self { format, outputs, inputs, bytes: Rc::default() }
    }

    /// Bytes below 64: floats among them are finite and at most 1.8.
    fn bytes(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            let sizes = [self.outputs as u64, self.inputs as u64];
            let mut random = CounterRng::new(0, self.format.name(), &sizes);
            let count = self.outputs * self.inputs / self.format.values() * self.format.bytes();
            // One of a million repeats: drawing all of a head takes seconds.
            let drawn = count.min(1_000_003);
            let period: Vec<u8> = (0..drawn).map(|_| (random.uniform() * 64.0) as u8).collect();
            period.iter().copied().cycle().take(count).collect()
        })
    }

    pub(super) fn matrix(&self) -> Result<QuantisedMatrix> {
        QuantisedMatrix::new(self.format, self.outputs, self.inputs, self.bytes())
    }

    fn shape(&self, rows: usize) -> String {
        let Self { format, outputs, inputs, .. } = self;
        format!("[{rows}, {inputs}] by [{outputs}, {inputs}] of {}", format.name())
    }

    /// The values in f64.
    fn exact(&self) -> Result<Tensor> {
        let mut values = vec![0.0; self.outputs * self.inputs];
        self.format.widen(self.bytes(), &mut values);
        Tensor::from_vec(values, (self.outputs, self.inputs), &Device::Cpu)?.to_dtype(DType::F64)
    }
}

/// A product with the matrix on the device of `x`.
struct Held(OnceCell<Matrix>);

impl Held {
    fn on(&self, made: &Made, device: &Device) -> Result<&Matrix> {
        if self.0.get().is_none() {
            let _ = self.0.set(Matrix::of_blocks(made.matrix()?, device)?);
        }
        self.0.get().ok_or_else(|| candle_core::Error::msg("no matrix"))
    }
}

/// Products have the values of the CPU's kernel, whatever the type of other products is.
pub(super) fn products(size: Size) -> Vec<Case> {
    let case = |([rows, blocks, outputs], format): (Map, BlockFormat)| {
        let inputs = blocks * format.values();
        let made = Made::new(format, outputs, inputs);
        let (own, held) = (made.clone(), Held(OnceCell::new()));
        let arguments = [
            frozen("x", [rows, inputs]),
            frozen("bias", [outputs]),
            frozen("residual", [rows, outputs]),
        ];
        let op = move |t: &[Tensor]| {
            let matrix = held.on(&own, t[0].device())?;
            let product = Output::new("product", matrix.linear(&t[0], Some(&t[1]))?);
            Ok(vec![product, Output::new("sum", matrix.linear_onto(&t[2], &t[0], None)?)])
        };
        let of_cpu = made.clone();
        let expected = move |t: &[Tensor]| {
            let x = t[0].to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            let product = of_cpu.matrix()?.product(&x, rows);
            let product = Tensor::from_vec(product, (rows, outputs), &Device::Cpu)?;
            let onto = |addend: &Tensor| addend.to_dtype(DType::F32)?.broadcast_add(&product);
            Ok(vec![Output::new("product", onto(&t[1])?), Output::new("sum", onto(&t[2])?)])
        };
        Case::new(made.shape(rows), arguments, op, expected).within(0.0, 0.0).of_kernels()
    };
    maps(size).into_iter().map(case).collect()
}

/// Inputs that train meet widened weights. The values of a block have a common mean. Rows are positive, so that their sums
/// do not nearly cancel: 16-bit factors would be a few percent off.
pub(super) fn widened(size: Size) -> Vec<Case> {
    let case = |([_, blocks, outputs], format): (Map, BlockFormat)| {
        let inputs = blocks * format.values();
        let made = Made::new(format, outputs, inputs);
        let (own, held) = (made.clone(), Held(OnceCell::new()));
        let rows = 70;
        let scale = (3.0 / inputs as f64).sqrt();
        let arguments = [trained("x", [rows, inputs]).times(scale)];
        let op = move |t: &[Tensor]| {
            let x = t[0].abs()?;
            only(match held.on(&own, x.device())? {
                // Blocks of a CPU take no gradients.
                matrix @ Matrix::Quantised(_) => linear::linear(&x, &matrix.to_dense()?, None),
                matrix => matrix.linear(&x, None),
            })
        };
        let wide = made.clone();
        let expected =
            move |t: &[Tensor]| only(linear::reference(&t[0].abs()?, &wide.exact()?, None));
        Case::new(made.shape(rows), arguments, op, expected).of_kernels()
    };
    maps(size).into_iter().map(case).collect()
}

/// All values, and those of some rows, as an embedding has them.
pub(super) fn values(size: Size) -> Vec<Case> {
    let case = |([rows, blocks, outputs], format): (Map, BlockFormat)| {
        let inputs = blocks * format.values();
        let made = Made::new(format, outputs, inputs);
        let ids: Vec<u32> = (0..rows).map(|row| (row * 37 % outputs) as u32).collect();
        let (own, held, places) = (made.clone(), Held(OnceCell::new()), ids.clone());
        let op = move |t: &[Tensor]| {
            let matrix = held.on(&own, t[0].device())?;
            let all = Output::new("values", matrix.to_dense()?.to_dtype(DType::F32)?);
            Ok(vec![all, Output::new("rows", matrix.rows(&places)?)])
        };
        let wide = made.clone();
        let expected = move |_: &[Tensor]| {
            let all = wide.exact()?;
            let rows = all.index_select(&Tensor::new(ids.as_slice(), &Device::Cpu)?, 0)?;
            Ok(vec![Output::new("values", all), Output::new("rows", rows)])
        };
        let shape = format!("[{outputs}, {inputs}] of {}", format.name());
        Case::new(shape, [frozen("device", [1])], op, expected).within(0.0, 4e-3).of_kernels()
    };
    // A head's values in f64 take gigabytes.
    maps(size).into_iter().filter(|([.., outputs], _)| *outputs < 100_000).map(case).collect()
}
