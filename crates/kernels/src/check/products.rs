//! Products: affine maps of many and of few rows, gated MLPs, mixtures of experts.

use candle_core::{DType, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Input, Output, frozen, only, trained, up_to};
use crate::experts::{self, Expert, Routes, Unit, experts_onto};
use crate::gated_mlp::{self, GatedMlp, gated_mlp_onto};
use crate::linear::{self, linear, linear_exact, linear_onto};
use crate::matrix::{Matrix, linear_each};
use crate::swiglu::Clamped;

/// Rows, inputs, outputs.
type Map = [usize; 3];

const MAPS: [(Size, Map); 9] = [
    (Smoke, [0, 8, 4]),
    (Smoke, [1, 1, 1]),
    (Smoke, [3, 7, 5]),
    (Smoke, [70, 33, 65]),
    (Small, [64, 1000, 130]),
    (Small, [515, 768, 1024]),
    (Real, [2048, 4096, 4096]),
    (Real, [512, 4096, 14_336]),
    (Real, [512, 14_336, 4096]),
];

fn shape_of([rows, inputs, outputs]: Map) -> String {
    format!("[{rows}, {inputs}] by [{outputs}, {inputs}]")
}

/// Weights whose products are of the size of their inputs.
fn weight(input: Input, inputs: usize) -> Input {
    input.times((3.0 / inputs.max(1) as f64).sqrt())
}

/// A map's arguments, which all train.
fn all_trained([rows, inputs, outputs]: Map) -> [Input; 3] {
    [
        trained("x", [rows, inputs]),
        weight(trained("weight", [outputs, inputs]), inputs),
        trained("bias", [outputs]),
    ]
}

/// What a map makes of its arguments, of which the last, the bias, may be missing.
fn mapped(t: &[Tensor]) -> Result<Vec<Output>> {
    only(linear(&t[0], &t[1], t.get(2)))
}

fn reference(t: &[Tensor]) -> Result<Vec<Output>> {
    only(linear::reference(&t[0], &t[1], t.get(2)))
}

pub(super) fn linear_training(size: Size) -> Vec<Case> {
    let all_train = |map: Map| {
        Case::new(format!("{}, all train", shape_of(map)), all_trained(map), mapped, reference)
    };
    let frozen_weight = |(map, dtype): (Map, DType)| {
        let [rows, inputs, outputs] = map;
        let arguments = [
            trained("x", [rows, inputs]),
            weight(frozen("weight", [outputs, inputs]), inputs).of(dtype),
        ];
        let label = format!("{}, frozen {dtype:?}", shape_of(map));
        Case::new(label, arguments, mapped, reference)
    };
    let types = [DType::BF16, DType::F16, DType::F32].into_iter().cycle();
    let frozen = up_to(size, &MAPS).zip(types).map(frozen_weight);
    up_to(size, &MAPS).map(all_train).chain(frozen).collect()
}

pub(super) fn onto(size: Size) -> Vec<Case> {
    let case = |map @ [rows, inputs, outputs]: Map| {
        let arguments = [
            trained("residual", [rows, outputs]),
            trained("x", [rows, inputs]),
            weight(trained("weight", [outputs, inputs]), inputs),
        ];
        let op = |t: &[Tensor]| only(linear_onto(&t[0], &t[1], &t[2], None));
        Case::new(shape_of(map), arguments, op, |t| {
            only(&t[0] + linear::reference(&t[1], &t[2], None)?)
        })
    };
    up_to(size, &MAPS).map(case).collect()
}

/// Factors that stay in f32 whatever the products are: the tolerance is that of f32 either way.
pub(super) fn exact(size: Size) -> Vec<Case> {
    let case = |map: Map| {
        let op = |t: &[Tensor]| only(linear_exact(&t[0], &t[1], Some(&t[2])));
        Case::new(shape_of(map), all_trained(map), op, reference).within(1e-5, 1e-5)
    };
    up_to(size, &MAPS).map(case).collect()
}

/// Maps of a decoding pass, and the type of their weights.
const FEW: [(Size, (Map, DType)); 11] = [
    (Smoke, ([1, 2, 1], DType::F32)),
    (Smoke, ([3, 130, 5], DType::BF16)),
    (Smoke, ([21, 96, 40], DType::F32)),
    (Smoke, ([2, 33, 4], DType::F16)),
    (Small, ([1, 1024, 3000], DType::BF16)),
    (Small, ([8, 1024, 1000], DType::F32)),
    (Small, ([63, 512, 515], DType::BF16)),
    (Small, ([64, 512, 515], DType::BF16)),
    (Real, ([1, 4096, 14_336], DType::BF16)),
    (Real, ([61, 14_336, 4096], DType::BF16)),
    (Real, ([7, 4096, 128_256], DType::BF16)),
];

pub(super) fn few_rows(size: Size) -> Vec<Case> {
    let case = |(map, dtype): (Map, DType)| {
        let [rows, inputs, outputs] = map;
        let arguments = [
            frozen("x", [rows, inputs]),
            weight(frozen("weight", [outputs, inputs]), inputs).of(dtype),
            frozen("bias", [outputs]),
        ];
        Case::new(format!("{}, {dtype:?}", shape_of(map)), arguments, mapped, reference)
    };
    up_to(size, &FEW).map(case).collect()
}

/// Rows that go through two maps in one start have the bits that each has alone in one map.
pub(super) fn few_rows_bits(size: Size) -> Vec<Case> {
    let case = |(map, dtype): (Map, DType)| {
        let [rows, inputs, outputs] = map;
        let matrix = |name| weight(frozen(name, [outputs, inputs]), inputs).of(dtype);
        let arguments = [frozen("x", [rows, inputs]), matrix("first"), matrix("second")];
        let op = |t: &[Tensor]| {
            let [first, second] = [&t[1], &t[2]].map(|t| Matrix::Dense(t.clone()));
            let [first, second] = linear_each(&t[0], [(&first, None), (&second, None)])?;
            Ok(vec![Output::new("first", first), Output::new("second", second)])
        };
        let alone = move |t: &[Tensor]| {
            let of = |weight: &Tensor| -> Result<Tensor> {
                let row = |row: usize| linear(&t[0].narrow(0, row, 1)?, weight, None);
                Tensor::cat(&(0..rows).map(row).collect::<Result<Vec<_>>>()?, 0)
            };
            Ok(vec![Output::new("first", of(&t[1])?), Output::new("second", of(&t[2])?)])
        };
        Case::same(format!("{}, {dtype:?}", shape_of(map)), arguments, op, alone)
    };
    // Passes of 64 rows and more are the library's on a device.
    up_to(size, &FEW).filter(|([rows, ..], _)| *rows < 64).map(case).collect()
}

/// Rows, width, inner width.
const MLPS: [(Size, [usize; 3]); 6] = [
    (Smoke, [0, 3, 5]),
    (Smoke, [1, 1, 1]),
    (Smoke, [70, 33, 65]),
    (Small, [5, 768, 2048]),
    (Small, [300, 512, 1376]),
    (Real, [512, 4096, 14_336]),
];

pub(super) fn gated(size: Size) -> Vec<Case> {
    fn mlp(t: &[Tensor]) -> GatedMlp<'_> {
        GatedMlp { gate: &t[2], up: &t[3], down: &t[4] }
    }
    let case = |[rows, width, inner]: [usize; 3]| {
        let arguments = [
            trained("residual", [rows, width]),
            trained("x", [rows, width]),
            weight(trained("gate", [inner, width]), width),
            weight(trained("up", [inner, width]), width),
            weight(trained("down", [width, inner]), inner),
        ];
        let shape = format!("[{rows}, {width}], inner width {inner}");
        let op = |t: &[Tensor]| only(gated_mlp_onto(&t[0], &t[1], &mlp(t)));
        // Gradients of the first matrices go through three rounded products.
        Case::new(shape, arguments, op, |t| only(gated_mlp::reference(&t[0], &t[1], &mlp(t))))
            .within(1e-5, 4e-2)
    };
    up_to(size, &MLPS).map(case).collect()
}

/// Rows, experts, those of a row, width, inner width, and the type of weights.
type Mixture = ([usize; 5], DType);

const MIXTURES: [(Size, Mixture); 8] = [
    (Smoke, ([1, 1, 1, 8, 4], DType::F32)),
    (Smoke, ([7, 8, 2, 24, 16], DType::BF16)),
    (Smoke, ([70, 5, 3, 16, 8], DType::F32)),
    (Smoke, ([70, 3, 2, 24, 72], DType::BF16)),
    (Small, ([1, 32, 4, 256, 128], DType::BF16)),
    (Small, ([300, 16, 4, 256, 96], DType::BF16)),
    (Small, ([63, 12, 3, 256, 200], DType::BF16)),
    (Real, ([2048, 64, 8, 1024, 512], DType::BF16)),
];

/// The clamped unit of a mixture with biases.
const CLAMPED: Clamped = Clamped { alpha: 1.702, limit: 0.4 };

/// Inputs of a mixture: what comes in, what its router says, and its experts; biases where its unit is clamped.
fn inputs_of((sizes, dtype): Mixture, is_clamped: bool) -> Vec<Input> {
    let [rows, count, _, width, inner] = sizes;
    let inward = |name| weight(frozen(name, [count * inner, width]), width).of(dtype);
    let mut inputs = vec![
        frozen("residual", [rows, width]),
        frozen("x", [rows, width]),
        frozen("router logits", [rows, count]).times(3.0),
        inward("gate"),
        inward("up"),
        weight(frozen("down", [count * width, inner]), inner).of(dtype),
    ];
    if is_clamped {
        let bias = |name, outputs: usize| frozen(name, [count * outputs]).times(0.2);
        inputs.extend([bias("gate bias", inner), bias("up bias", inner)]);
        inputs.push(bias("down bias", width));
    }
    inputs
}

/// The experts of a case's inputs.
fn experts_of(t: &[Tensor], count: usize) -> Result<Vec<Expert>> {
    let part = |all: &Tensor, expert: usize| -> Result<Tensor> {
        let rows = all.dim(0)? / count;
        all.narrow(0, expert * rows, rows)
    };
    let matrix = |all: &Tensor, expert: usize| part(all, expert).map(Matrix::Dense);
    let expert = |e| -> Result<Expert> {
        let (gate, up, down) = (matrix(&t[3], e)?, matrix(&t[4], e)?, matrix(&t[5], e)?);
        let (mut biases, mut unit) = (None, Unit::Silu);
        if let [_, _, _, _, _, _, of_gate, of_up, of_down] = t {
            biases = Some([part(of_gate, e)?, part(of_up, e)?, part(of_down, e)?]);
            unit = Unit::Clamped(CLAMPED);
        }
        Ok(Expert { gate, up, down, biases, unit })
    };
    (0..count).map(expert).collect()
}

/// A mixture's output for some rows.
fn mixed(
    t: &[Tensor],
    (first, rows): (usize, usize),
    [count, per_row]: [usize; 2],
) -> Result<Tensor> {
    let [residual, x, logits] = [&t[0], &t[1], &t[2]].map(|t| t.narrow(0, first, rows));
    let routes = Routes::choose(&logits?, per_row, true)?;
    experts_onto(&residual?, &x?, &experts_of(t, count)?, &routes)
}

fn shape_of_mixture(([rows, count, per_row, width, inner], dtype): Mixture) -> String {
    format!("[{rows}, {width}], {per_row} of {count} experts of width {inner}, {dtype:?}")
}

fn mixture_cases(size: Size, is_clamped: bool) -> Vec<Case> {
    let case = |mixture: Mixture| {
        let ([rows, count, per_row, ..], _) = mixture;
        let op = move |t: &[Tensor]| only(mixed(t, (0, rows), [count, per_row]));
        let inputs = inputs_of(mixture, is_clamped);
        Case::new(shape_of_mixture(mixture), inputs, op, move |t| {
            let all = experts_of(t, count)?;
            only(experts::reference(&t[0], &t[1], &all, &t[2], per_row, true))
        })
    };
    up_to(size, &MIXTURES).map(case).collect()
}

pub(super) fn mixtures(size: Size) -> Vec<Case> {
    mixture_cases(size, false)
}

/// With biases and a clamped unit.
pub(super) fn clamped_mixtures(size: Size) -> Vec<Case> {
    mixture_cases(size, true)
}

/// Few rows, each with the bits that it has alone.
pub(super) fn mixture_bits(size: Size) -> Vec<Case> {
    let case = |mixture: Mixture| {
        let ([rows, count, per_row, ..], _) = mixture;
        let op = move |t: &[Tensor]| only(mixed(t, (0, rows), [count, per_row]));
        let alone = move |t: &[Tensor]| {
            let row = |row: usize| mixed(t, (row, 1), [count, per_row]);
            only(Tensor::cat(&(0..rows).map(row).collect::<Result<Vec<_>>>()?, 0))
        };
        Case::same(shape_of_mixture(mixture), inputs_of(mixture, true), op, alone).of_kernels()
    };
    up_to(size, &MIXTURES).filter(|([rows, ..], _)| *rows < 64).map(case).collect()
}
