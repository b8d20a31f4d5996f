//! What is timed, by size.

use crate::graph::Backward;
use std::cell::{Cell, OnceCell};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};

use super::super::Size::{self, Real, Small, Smoke};
use super::super::blocks::Made;
use super::super::case::{Input, frozen, trained};
use super::super::optimizer::STEP;
use super::{Entry, ROTATED, Work};
use crate::adamw::{AdamWState, adamw_on_device};
use crate::attention::{Delays, KeyRanges, attention, attention_in_one_pass};
use crate::linear::linear;
use crate::linear_cross_entropy::{Inputs, SoftTargets, Teacher, linear_cross_entropy};
use crate::matrix::{BlockFormat, Matrix};
use crate::rms_norm::rms_norm;
use crate::rope::{Rope, RopeScaling};
use crate::rows::select_rows;
use crate::swiglu::swiglu;
use crate::transfer::upload_ahead;

/// Calls of which the host's time is taken.
const CALLS: usize = 200;

pub(super) fn entries(size: Size, device: &Device) -> Vec<Entry> {
    let mut all = attention_entries(size);
    all.extend(map_entries(size));
    all.extend(block_entries(size));
    all.extend(loss_entry(size));
    all.extend(pass_entries(size));
    all.extend(host_entries(size));
    // A CPU's memory is where tensors are; without memory for a source nothing is sent.
    if !matches!(device, Device::Cpu) {
        all.extend(upload_entries(size).unwrap_or_default());
    }
    all
}

/// A number of each size.
fn of(size: Size, [smoke, small, real]: [usize; 3]) -> usize {
    match size {
        Smoke => smoke,
        Small => small,
        Real => real,
    }
}

fn entry(
    (name, shape): (&'static str, String),
    multiplies: bool,
    inputs: impl Into<Vec<Input>>,
    work: Work,
    run: impl Fn(&[Tensor]) -> Result<()> + 'static,
) -> Entry {
    Entry { name, shape, multiplies, inputs: inputs.into(), work, run: Box::new(run) }
}

type Attention = fn(&Tensor, &Tensor, &Tensor, &Arc<KeyRanges>) -> Result<Tensor>;

/// A causal document: forward, and forward with backward, which are two and seven products.
fn attention_entries(size: Size) -> Vec<Entry> {
    let calls: &[(usize, usize)] = match size {
        Smoke => &[(40, 64)],
        Small => &[(512, 64), (512, 128)],
        Real => &[(4096, 64), (4096, 128), (4096, 256), (32_768, 64), (32_768, 128)],
    };
    let (heads, kv_heads) = if size == Real { (32, 8) } else { (4, 2) };
    let mut all = Vec::new();
    for &(tokens, head_dim) in calls {
        let ranges = Arc::new(KeyRanges::packed(&vec![0; tokens], None, Delays::Same(0)));
        let shape = format!("T {tokens}, heads {heads}/{kv_heads}, D {head_dim}, causal");
        let pairs = tokens as f64 * (tokens + 1) as f64 / 2.0;
        let product = 2.0 * heads as f64 * head_dim as f64 * pairs;
        let sizes = [[tokens, heads, head_dim], [tokens, kv_heads, head_dim]];
        let [q, kv] = sizes;
        let seen = Arc::clone(&ranges);
        let inputs = [frozen("q", q), frozen("k", kv), frozen("v", kv)];
        let work = Work::Operations(2.0 * product);
        all.push(entry(("attention", shape.clone()), true, inputs, work, move |t| {
            attention(&t[0], &t[1], &t[2], &seen).map(drop)
        }));
        let mut ways: Vec<(_, Attention)> = vec![("attention_training", attention)];
        if matches!(head_dim, 64 | 128) {
            ways.push(("attention_training_one_pass", attention_in_one_pass));
        }
        for (name, attention) in ways {
            let inputs = [trained("q", q), trained("k", kv), trained("v", kv)];
            let (work, ranges) = (Work::Operations(7.0 * product), Arc::clone(&ranges));
            all.push(entry((name, shape.clone()), true, inputs, work, move |t| {
                // Its own gradient: one pass less than a sum of squares.
                let out = attention(&t[0], &t[1], &t[2], &ranges)?;
                out.gradients().map(drop)
            }));
        }
    }
    all
}

/// Products of an 8B model's layer and heads: many rows, and one.
fn map_entries(size: Size) -> Vec<Entry> {
    let maps: &[[usize; 2]] = match size {
        Smoke => &[[32, 64]],
        Small => &[[1024, 1024], [1024, 2048]],
        Real => &[
            [4096, 4096],
            [4096, 1024],
            [4096, 14_336],
            [14_336, 4096],
            [12_288, 4096],
            [4096, 32_000],
        ],
    };
    let rows = of(size, [70, 512, 8192]);
    let mut all = Vec::new();
    for &[inputs, outputs] in maps {
        let products = 2.0 * (rows * inputs * outputs) as f64;
        let shape = format!("[{rows}, {inputs}] by [{outputs}, {inputs}] in bf16");
        let weight = || frozen("weight", [outputs, inputs]).of(DType::BF16);
        let arguments = [frozen("x", [rows, inputs]), weight()];
        all.push(entry(("linear", shape), true, arguments, Work::Operations(products), |t| {
            linear(&t[0], &t[1], None).map(drop)
        }));
        let shape = format!("[1, {inputs}] by [{outputs}, {inputs}] in bf16");
        let arguments = [frozen("x", [1, inputs]), weight()];
        let read = Work::Bytes((2 * inputs * outputs) as f64);
        all.push(entry(("few_rows", shape), false, arguments, read, |t| {
            linear(&t[0], &t[1], None).map(drop)
        }));
    }
    all
}

/// Passes over an 8B model's matrices as a file of Q4_K_M holds them. Copies are read in turn, as a pass reads other layers between.
/// Of 512 rows a product in f32 or bf16 might be faster.
fn block_entries(size: Size) -> Vec<Entry> {
    let maps: &[[usize; 2]] = match size {
        Smoke => &[[256, 64]],
        Small => &[[1024, 2048]],
        Real => &[[4096, 4096], [4096, 14_336], [14_336, 4096], [4096, 128_256]],
    };
    let mut all = Vec::new();
    for &[inputs, outputs] in maps {
        let format = if outputs > 100_000 { BlockFormat::Q6K } else { BlockFormat::Q4K };
        let bytes = inputs * outputs / format.values() * format.bytes();
        let copies = of(size, [1, 2, ROTATED.div_ceil(bytes)]);
        let turns = Rc::new(Turns::new(Made::new(format, outputs, inputs), copies));
        for rows in [1, 4, 8, 16, 64, 512] {
            let shape = format!("[{rows}, {inputs}] by [{outputs}, {inputs}] of {}", format.name());
            let arguments = [frozen("x", [rows, inputs])];
            let (turns, read) = (Rc::clone(&turns), Work::Bytes(bytes as f64));
            all.push(entry(("block_products", shape), false, arguments, read, move |t| {
                turns.next(t[0].device())?.linear(&t[0], None).map(drop)
            }));
        }
    }
    all
}

/// Copies of a matrix on a device, made when the first is asked for.
struct Turns {
    made: Made,
    copies: usize,
    held: OnceCell<Vec<Matrix>>,
    turn: Cell<usize>,
}

impl Turns {
    fn new(made: Made, copies: usize) -> Self {
        Self { made, copies, held: OnceCell::new(), turn: Cell::new(0) }
    }

    /// The copy whose turn it is.
    fn next(&self, device: &Device) -> Result<&Matrix> {
        if self.held.get().is_none() {
            let copy = |_| Matrix::of_blocks(self.made.matrix()?, device);
            let _ = self.held.set((0..self.copies).map(copy).collect::<Result<_>>()?);
        }
        let turn = self.turn.replace((self.turn.get() + 1) % self.copies);
        let held = self.held.get().and_then(|all| all.get(turn));
        held.ok_or_else(|| candle_core::Error::msg("no copy"))
    }
}

/// A chunk of a loss with a full teacher; products of both heads and two gradients' worth.
fn loss_entry(size: Size) -> Vec<Entry> {
    let (rows, width) = (of(size, [9, 64, 261]), of(size, [8, 64, 4096]));
    let vocabulary = of(size, [50, 8192, 128_256]);
    let labels: Vec<u32> = (0..rows as u32).collect();
    let labels: Vec<u32> = labels.iter().map(|row| row % vocabulary as u32).collect();
    let head = |name| frozen(name, [vocabulary, width]).times(0.02).of(DType::BF16);
    let inputs = [
        trained("hidden", [rows, width]),
        head("head"),
        frozen("teacher's states", [rows, width]),
        head("teacher's head"),
    ];
    let products = Work::Operations(6.0 * (rows * width * vocabulary) as f64);
    let shape = format!("[{rows}, {width}], V {vocabulary}, full teacher, frozen head");
    vec![entry(("linear_cross_entropy", shape), true, inputs, products, move |t| {
        let inputs = Inputs {
            soft: SoftTargets::Full,
            soft_weight: 0.9,
            teacher: Some(Teacher { hidden: &t[2], rows: None, head: (&t[3]).into() }),
            ..Inputs::of_labels(&t[0], &t[1], &labels)
        };
        linear_cross_entropy(&inputs)?.loss_sum.gradients().map(drop)
    })]
}

/// Passes over memory.
fn pass_entries(size: Size) -> Vec<Entry> {
    let (rows, width) = (of(size, [9, 512, 32_768]), of(size, [32, 1024, 4096]));
    let values = (4 * rows * width) as f64;
    let shape = format!("[{rows}, {width}]");
    let x = || frozen("x", [rows, width]);
    let mut all = vec![
        entry(("cast", shape.clone()), false, [x()], Work::Bytes(1.5 * values), |t| {
            t[0].to_dtype(DType::BF16).map(drop)
        }),
        entry(("broadcast_mul", shape.clone()), false, [x()], Work::Bytes(2.0 * values), |t| {
            t[0].broadcast_mul(&Tensor::new(0.5_f32, t[0].device())?).map(drop)
        }),
        entry(
            ("rms_norm", shape.clone()),
            false,
            [x(), frozen("weight", [width])],
            Work::Bytes(2.0 * values),
            |t| rms_norm(&t[0], &t[1], 1e-5).map(drop),
        ),
        entry(
            ("swiglu", shape.clone()),
            false,
            [x(), frozen("up", [rows, width])],
            Work::Bytes(3.0 * values),
            |t| swiglu(&t[0], &t[1]).map(drop),
        ),
    ];
    let ids: Vec<u32> = (0..rows as u32).rev().collect();
    let chosen = Work::Bytes(2.0 * values);
    all.push(entry(("select_rows", shape.clone()), false, [x()], chosen, move |t| {
        select_rows(&t[0], &ids).map(drop)
    }));
    let ids: Vec<u32> = (0..rows as u32).rev().collect();
    let arguments = [x(), frozen("added", [rows, width])];
    all.push(entry(("index_add", shape), false, arguments, Work::Bytes(3.0 * values), move |t| {
        let ids = Tensor::from_slice(&ids, ids.len(), t[0].device())?;
        t[0].index_add(&ids, &t[1], 0).map(drop)
    }));
    all.extend([rotation(size, rows, width), step(size)]);
    all
}

fn rotation(size: Size, rows: usize, width: usize) -> Entry {
    let head_dim = of(size, [16, 64, 128]);
    let inputs = [frozen("x", [rows, width / head_dim, head_dim])];
    let shape = format!("[{rows}, {}, {head_dim}]", width / head_dim);
    let bytes = Work::Bytes(2.0 * (4 * rows * width) as f64);
    // The table is made once: its transfer is no part of the pass.
    let table = std::cell::RefCell::new(None);
    entry(("rope", shape), false, inputs, bytes, move |t| {
        let mut table = table.borrow_mut();
        if table.is_none() {
            let positions: Vec<u32> = (0..rows as u32).collect();
            let rope = Rope::new(head_dim, 1e4, RopeScaling::None)?;
            *table = Some(rope.table(&positions, t[0].device())?);
        }
        let Some(table) = &*table else { return Ok(()) };
        crate::rope::rope(&t[0], table).map(drop)
    })
}

fn step(size: Size) -> Entry {
    let count = of(size, [500, 1 << 20, 425_000_000]);
    let inputs =
        ["values", "first moment", "second moment", "gradient"].map(|name| frozen(name, [count]));
    let bytes = Work::Bytes(28.0 * count as f64);
    entry(("adamw", format!("{count} values")), false, inputs, bytes, |t| {
        let [theta, first, second] = [&t[0], &t[1], &t[2]].map(Tensor::clone);
        adamw_on_device(&STEP, &AdamWState { theta, first, second }, &t[3]).map(drop)
    })
}

/// The host's part of starts and allocations.
fn host_entries(size: Size) -> Vec<Entry> {
    let one = || frozen("x", [32]);
    let block = of(size, [1 << 10, 1 << 20, 1 << 28]);
    let label = format!("{block} values of zero, given back at once");
    vec![
        entry(("start", "our kernel".to_owned()), false, [one()], Work::Calls(CALLS), |t| {
            (0..CALLS).try_for_each(|_| swiglu(&t[0], &t[0]).map(drop))
        }),
        entry(("start", "candle's op".to_owned()), false, [one()], Work::Calls(CALLS), |t| {
            (0..CALLS).try_for_each(|_| (&t[0] + &t[0]).map(drop))
        }),
        entry(("allocation", label), false, [one()], Work::Calls(1), move |t| {
            Tensor::zeros(block, DType::F32, t[0].device()).map(drop)
        }),
    ]
}

/// From pageable and from page-locked memory.
fn upload_entries(size: Size) -> Result<Vec<Entry>> {
    let count = of(size, [1000, 1 << 22, 1 << 26]);
    let source = Tensor::ones(count, DType::F32, &Device::Cpu)?;
    let own = source.clone();
    let bytes = Work::Bytes(4.0 * count as f64);
    let name = |memory: &str| ("upload", format!("{count} values, {memory}"));
    Ok(vec![
        entry(name("pageable"), false, [frozen("x", [1])], bytes, move |t| {
            source.to_device(t[0].device()).map(drop)
        }),
        entry(name("page-locked"), false, [frozen("x", [1])], bytes, move |t| {
            upload_ahead(&own, t[0].device()).map(drop)
        }),
    ])
}
