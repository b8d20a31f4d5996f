//! Layers that carry a state: the gated delta rule and the short convolution. What they read is frozen.

use candle_core::{D, DType, Device, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Input, Output, frozen, only, up_to};
use super::compare::on_host;
use crate::recurrence::{
    Convolution, DeltaRows, DeltaSizes, DeltaState, Walk, causal_convolution, gated_delta_rule,
    reference,
};

/// Largest error: a row is made of all rows before it.
const ERROR: f64 = 5e-5;

const fn sizes(
    (key_heads, value_heads): (usize, usize),
    (key_dim, value_dim): (usize, usize),
    tiled: bool,
) -> DeltaSizes {
    DeltaSizes { key_heads, value_heads, key_dim, value_dim, tiled }
}

/// Sizes and rows.
const DELTA: [(Size, (DeltaSizes, usize)); 8] = [
    (Smoke, (sizes((1, 1), (1, 1), false), 3)),
    (Smoke, (sizes((2, 4), (8, 12), false), 70)),
    (Smoke, (sizes((2, 6), (5, 33), true), 129)),
    (Smoke, (sizes((3, 3), (64, 16), true), 1)),
    (Small, (sizes((4, 8), (64, 64), false), 200)),
    (Small, (sizes((2, 4), (128, 128), true), 321)),
    (Small, (sizes((4, 4), (96, 40), false), 65)),
    (Real, (sizes((16, 32), (128, 128), false), 1000)),
];

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    on_host(tensor)?.flatten_all()?.to_vec1()
}

/// From numbers between −1 and 1 to gates between 0 and 1.
fn gate(x: &Tensor) -> Result<Tensor> {
    x.affine(0.5, 0.5)
}

/// Outputs and the state after rows that come in parts of some lengths.
fn in_parts(sizes: DeltaSizes, t: &[Tensor], part: usize) -> Result<Vec<Output>> {
    let (mixed, decay, rate) = (values(&t[0])?, values(&gate(&t[1])?)?, values(&gate(&t[2])?)?);
    let rows = t[0].dim(0)?;
    let mut state = DeltaState::of_matrices(sizes, &values(&t[3])?);
    let mut out = Vec::with_capacity(rows * sizes.values());
    for first in (0..rows).step_by(part) {
        let count = part.min(rows - first);
        let of = |all: &'_ [f32], width: usize| all[first * width..][..count * width].to_vec();
        let heads = sizes.value_heads;
        let (mixed, decay, rate) =
            (of(&mixed, sizes.channels()), of(&decay, heads), of(&rate, heads));
        let own = DeltaRows { mixed: &mixed, decay: &decay, rate: &rate };
        let mut after = DeltaState::new(sizes);
        out.extend(gated_delta_rule(sizes, own, &Walk::chain(count), &state, &mut after)?);
        state = after;
    }
    let device = t[0].device();
    let out = Tensor::from_vec(out, (rows, sizes.value_heads, sizes.value_dim), &Device::Cpu)?;
    let state = Tensor::from_vec(state.matrices(sizes), t[3].dims(), &Device::Cpu)?;
    Ok(vec![
        Output::new("result", out.to_device(device)?),
        Output::new("state", state.to_device(device)?),
    ])
}

fn inputs(sizes: DeltaSizes, rows: usize) -> [Input; 4] {
    [
        frozen("mixed", [rows, sizes.channels()]),
        frozen("decay", [rows, sizes.value_heads]),
        frozen("rate", [rows, sizes.value_heads]),
        frozen("state", [sizes.value_heads, sizes.key_dim, sizes.value_dim]),
    ]
}

fn shape(sizes: DeltaSizes, rows: usize) -> String {
    let DeltaSizes { key_heads, value_heads, key_dim, value_dim, tiled } = sizes;
    let order = if tiled { ", tiled" } else { "" };
    format!("T {rows}, heads {value_heads}/{key_heads}, D {key_dim}x{value_dim}{order}")
}

pub(super) fn delta_rule(size: Size) -> Vec<Case> {
    let case = |(sizes, rows): (DeltaSizes, usize)| {
        let op = move |t: &[Tensor]| in_parts(sizes, t, rows.max(1));
        let case = Case::new(shape(sizes, rows), inputs(sizes, rows), op, move |t| {
            let gates = (gate(&t[1])?, gate(&t[2])?);
            let (out, state) = reference(sizes, &t[0], (&gates.0, &gates.1), &t[3])?;
            Ok(vec![Output::new("result", out.to_dtype(DType::F64)?), Output::new("state", state)])
        });
        case.within(ERROR, ERROR)
    };
    up_to(size, &DELTA).map(case).collect()
}

/// Rows have the bits that they have one by one.
pub(super) fn delta_row_bits(size: Size) -> Vec<Case> {
    let case = |(sizes, rows): (DeltaSizes, usize)| {
        let op = move |t: &[Tensor]| in_parts(sizes, t, rows.max(1));
        Case::same(shape(sizes, rows), inputs(sizes, rows), op, move |t| in_parts(sizes, t, 1))
    };
    up_to(size, &DELTA).map(case).collect()
}

/// Rows, channels, taps, and whether there are a bias and a SiLU.
const CONVOLUTIONS: [(Size, (usize, usize, usize, bool)); 6] = [
    (Smoke, (2, 8, 4, true)),
    (Smoke, (1, 3, 1, false)),
    (Smoke, (20, 17, 4, true)),
    (Small, (300, 2048, 3, false)),
    (Small, (130, 1000, 4, true)),
    (Real, (4096, 8192, 4, true)),
];

pub(super) fn convolutions(size: Size) -> Vec<Case> {
    let case = |(rows, channels, taps, bent): (usize, usize, usize, bool)| {
        let inputs = [
            frozen("x", [rows, channels]),
            frozen("weight", [channels, taps]),
            frozen("bias", [channels]),
            frozen("before", [taps - 1, channels]),
        ];
        let op = move |t: &[Tensor]| {
            let bias = bent.then(|| values(&t[2])).transpose()?;
            let own = Convolution::new(&values(&t[1])?, bias, channels, bent)?;
            let out =
                causal_convolution(&own, &values(&t[0])?, &Walk::chain(rows), &values(&t[3])?)?;
            only(Tensor::from_vec(out, (rows, channels), &Device::Cpu)?.to_device(t[0].device()))
        };
        let shape = format!("T {rows}, C {channels}, {taps} taps, bias and SiLU {bent}");
        Case::new(shape, inputs, op, move |t| {
            let all = Tensor::cat(&[&t[3], &t[0]], 0)?;
            let mut sum = t[0].zeros_like()?;
            if bent {
                sum = sum.broadcast_add(&t[2])?;
            }
            for tap in 0..taps {
                let weight = t[1].narrow(1, tap, 1)?.squeeze(D::Minus1)?;
                sum = (sum + all.narrow(0, tap, rows)?.broadcast_mul(&weight)?)?;
            }
            only(if bent { &sum / (sum.neg()?.exp()? + 1.0)? } else { Ok(sum) })
        })
    };
    up_to(size, &CONVOLUTIONS).map(case).collect()
}
