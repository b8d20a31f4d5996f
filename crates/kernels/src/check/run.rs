//! Running cases.

use crate::graph::Backward;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use candle_core::{DType, Device, Error, Result, Tensor};

use super::case::{Case, Expected, Function, Input, Leaf};
use super::compare::{Outcome, error, on_host, same_bits};
use super::{OPS, Op, Size};
use crate::dispatch::{Products, has_half_products, has_kernels, set_products};
use crate::random::CounterRng;

/// Blocks of memory that are filled with NaN have at most so many values in all: 1 GiB.
const MOST_POISON: usize = 1 << 28;

/// What to check.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where.
    pub device: Device,
    /// How large.
    pub size: Size,
    /// Runs of every case, at least 1.
    pub repeat: usize,
    /// Beginnings of the ops' names; all ops if there is none.
    pub names: Vec<String>,
}

/// What became of a case under one type of products.
#[derive(Debug, Clone)]
pub struct Report {
    /// The op.
    pub name: &'static str,
    /// Sizes and kind.
    pub shape: String,
    /// Type of products.
    pub products: Products,
    /// The figures, or why there are none.
    pub outcome: std::result::Result<Measured, String>,
}

/// A case that ran.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Largest relative error of a result or gradient; NaN where a value is none.
    pub max_error: f64,
    /// Which result or gradient has it.
    pub worst: String,
    /// Largest error that passes.
    pub tolerance: f64,
    /// Whether all runs had the same bits.
    pub equal_bits: bool,
    /// Time of the last run, forward and backward, in milliseconds.
    pub milliseconds: f64,
}

impl Report {
    /// Whether it ran, came near enough, and did so with the same bits every time.
    pub fn passed(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|m| m.max_error <= m.tolerance && m.equal_bits)
    }
}

/// Runs every case and hands its report on at once. Errors and panics of a case are its report's, and
/// keep no other case from running. Products are f32 afterwards.
pub fn check(options: &Options, mut report: impl FnMut(&Report)) {
    let wanted = |op: &&Op| {
        let begins = |name: &String| op.name.starts_with(name.as_str());
        options.names.is_empty() || options.names.iter().any(begins)
    };
    let cases = |op: &Op| (op.name, op.multiplies, (op.cases)(options.size));
    check_ops(OPS.iter().filter(wanted).map(cases), options, &mut report);
}

/// An op's name, whether the type of products enters, and its cases.
type Checked = (&'static str, bool, Vec<Case>);

pub(super) fn check_ops(
    ops: impl IntoIterator<Item = Checked>,
    options: &Options,
    report: &mut dyn FnMut(&Report),
) {
    for (name, multiplies, cases) in ops {
        for case in cases {
            if !case.of_kernels || has_kernels(&options.device) {
                check_case((name, multiplies), &case, options, report);
            }
        }
    }
    set_products(Products::Single);
}

fn check_case(
    (name, multiplies): (&'static str, bool),
    case: &Case,
    options: &Options,
    report: &mut dyn FnMut(&Report),
) {
    set_products(Products::Single);
    let prepared = caught(|| Prepared::new(case));
    for products in products_of(&options.device) {
        set_products(products);
        let outcome = match &prepared {
            Ok(prepared) => {
                caught(|| prepared.measure(multiplies && products == Products::Half, options))
            }
            Err(problem) => Err(format!("the reference: {problem}")),
        };
        report(&Report { name, shape: case.shape.clone(), products, outcome });
    }
}

/// The types of products that a device has.
pub(super) fn products_of(device: &Device) -> impl Iterator<Item = Products> {
    let half = has_half_products(device).then_some(Products::Half);
    [Products::Single].into_iter().chain(half)
}

/// The result of `work`, or what it failed with, be it a panic.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| without_backtrace(&error.to_string())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("panic: {}", text.unwrap_or("without a message")))
        }
    }
}

/// candle writes where an error came from below it, if the environment asks for backtraces.
fn without_backtrace(text: &str) -> String {
    text.split("\n   0: ").next().unwrap_or_default().trim_end().to_owned()
}

/// A case's inputs and what is expected in f64.
struct Prepared<'a> {
    case: &'a Case,
    inputs: Vec<Tensor>,
    expected: Option<Vec<Outcome>>,
}

impl<'a> Prepared<'a> {
    fn new(case: &'a Case) -> Result<Self> {
        let inputs = case.inputs.iter().map(Input::on_host).collect::<Result<Vec<_>>>()?;
        let expected = match &case.expected {
            Expected::InF64(reference) => {
                let wide = |t: &Tensor| t.to_dtype(DType::F64);
                let leaves = leaves(&case.inputs, inputs.iter().map(wide))?;
                Some(outcomes(reference, &case.inputs, &leaves)?)
            }
            Expected::OnDevice(_) => None,
        };
        Ok(Self { case, inputs, expected })
    }

    /// `rounded`: products have 16-bit factors.
    fn measure(&self, rounded: bool, options: &Options) -> Result<Measured> {
        let (case, device) = (self.case, &options.device);
        let leaves = leaves(&case.inputs, self.inputs.iter().map(|t| moved(t, device)))?;
        let on_device = match &case.expected {
            Expected::OnDevice(other) => Some(outcomes(other, &case.inputs, &leaves)?),
            Expected::InF64(_) => None,
        };
        let nothing = Vec::new();
        let expected = on_device.as_ref().or(self.expected.as_ref()).unwrap_or(&nothing);
        let mut first: Option<Vec<Outcome>> = None;
        let (mut equal_bits, mut milliseconds) = (true, 0.0);
        for _ in 0..options.repeat.max(1) {
            poison(device, expected)?;
            device.synchronize()?;
            let start = Instant::now();
            let results = results(&case.op, &case.inputs, &leaves)?;
            device.synchronize()?;
            milliseconds = start.elapsed().as_secs_f64() * 1e3;
            let results = to_host(results)?;
            match &first {
                Some(first) => equal_bits &= same_bits(first, &results)?,
                None => first = Some(results),
            }
        }
        let (max_error, worst) = largest_error(&first.unwrap_or_default(), expected, rounded)?;
        let tolerance = case.tolerances[usize::from(rounded)];
        Ok(Measured { max_error, worst, tolerance, equal_bits, milliseconds })
    }
}

/// Error and name of the result that is furthest off. `rounded` leaves out choices.
fn largest_error(got: &[Outcome], want: &[Outcome], rounded: bool) -> Result<(f64, String)> {
    if got.len() != want.len() {
        candle_core::bail!("{} results, expected {}", got.len(), want.len());
    }
    let mut worst = (0.0_f64, String::new());
    for (got, want) in got.iter().zip(want) {
        if rounded && got.is_choice {
            continue;
        }
        let error = error(&got.values, &want.values)?;
        if error > worst.0 || error.is_nan() || worst.1.is_empty() {
            worst = (error, got.name.clone());
        }
        if worst.0.is_nan() {
            break;
        }
    }
    Ok(worst)
}

fn moved(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if tensor.elem_count() == 0 {
        return Tensor::zeros(tensor.shape(), tensor.dtype(), device);
    }
    tensor.to_device(device)
}

fn leaves(inputs: &[Input], values: impl Iterator<Item = Result<Tensor>>) -> Result<Vec<Leaf>> {
    inputs.iter().zip(values).map(|(input, values)| input.leaf(values?)).collect()
}

/// Results and, where they train, gradients along a fixed random direction.
fn results(function: &Function, inputs: &[Input], leaves: &[Leaf]) -> Result<Vec<Outcome>> {
    let arguments: Vec<Tensor> = leaves.iter().map(Leaf::tensor).collect();
    let outputs = function(&arguments)?;
    let trains = leaves.iter().any(|leaf| leaf.variable().is_some());
    let mut gradients = Vec::new();
    // candle starts kernels for what has no values.
    if let Some(first) = outputs.first()
        && trains
        && first.tensor.elem_count() > 0
    {
        let along = direction(&first.tensor)?;
        let store = (&first.tensor * along)?.sum_all()?.gradients()?;
        for (input, leaf) in inputs.iter().zip(leaves) {
            let Some(variable) = leaf.variable() else { continue };
            let Some(gradient) = store.get(variable) else {
                return Err(Error::msg(format!("no gradient of {}", input.name)));
            };
            let name = format!("gradient of {}", input.name);
            gradients.push(Outcome { name, values: gradient.clone(), is_choice: false });
        }
    }
    let outputs = outputs.into_iter().map(|output| Outcome {
        name: output.name.to_owned(),
        values: output.tensor.detach(),
        is_choice: output.is_choice,
    });
    Ok(outputs.chain(gradients).collect())
}

fn outcomes(function: &Function, inputs: &[Input], leaves: &[Leaf]) -> Result<Vec<Outcome>> {
    to_host(results(function, inputs, leaves)?)
}

fn to_host(results: Vec<Outcome>) -> Result<Vec<Outcome>> {
    let host = |result: Outcome| Ok(Outcome { values: on_host(&result.values)?, ..result });
    results.into_iter().map(host).collect()
}

/// What a result is multiplied with, so that every value of it counts.
fn direction(like: &Tensor) -> Result<Tensor> {
    let mut rng = CounterRng::new(0, "direction", &[like.elem_count() as u64]);
    let values: Vec<f32> =
        (0..like.elem_count()).map(|_| (2.0 * rng.uniform() - 1.0) as f32).collect();
    let values = Tensor::from_vec(values, like.shape(), &Device::Cpu)?.to_dtype(like.dtype())?;
    values.to_device(like.device())
}

/// Fills memory with NaN and gives it back: a block of every expected size, and one for what lies
/// between. A device's pool hands it out to the next results.
fn poison(device: &Device, expected: &[Outcome]) -> Result<()> {
    let mut left = MOST_POISON;
    let mut held = Vec::new();
    let sizes = expected.iter().map(|result| result.values.elem_count());
    let total = sizes.clone().sum();
    for count in sizes.chain([total]).filter(|count| *count > 0) {
        let count = count.min(left);
        left -= count;
        if count > 0 {
            held.push(Tensor::full(f32::NAN, count, device)?);
        }
    }
    drop(held);
    Ok(())
}
