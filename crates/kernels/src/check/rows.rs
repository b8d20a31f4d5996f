//! Norms, rotations, gates and factors.

use candle_core::{Device, Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, only, trained, up_to};
use crate::channel_scale::{self, add_scaled, scale_channels};
use crate::geglu::{self, geglu};
use crate::relu_squared::{self, relu_squared};
use crate::rms_norm::{self, rms_norm};
use crate::rope::{self, Rope, RopeScaling, RopeTable};
use crate::swiglu::{self, swiglu};

const EPS: f64 = 1e-5;

/// Rows and their width.
const MATRICES: [(Size, [usize; 2]); 9] = [
    (Smoke, [0, 64]),
    (Smoke, [1, 1]),
    (Smoke, [3, 17]),
    (Smoke, [140, 321]),
    (Small, [1, 4096]),
    (Small, [515, 1000]),
    (Small, [129, 2048]),
    (Real, [8192, 4096]),
    (Real, [4096, 14_336]),
];

fn shape_of(size: &[usize]) -> String {
    format!("{size:?}")
}

pub(super) fn norms(size: Size) -> Vec<Case> {
    let heads = [(Smoke, [5, 3, 48]), (Small, [100, 32, 128]), (Real, [8192, 32, 128])];
    let matrices = up_to(size, &MATRICES).map(|shape| shape.to_vec());
    let heads = up_to(size, &heads).map(|shape| shape.to_vec());
    let case = |shape: Vec<usize>| {
        let width = shape[shape.len() - 1];
        let inputs = [trained("x", shape.clone()), trained("weight", [width])];
        let op = |t: &[Tensor]| only(rms_norm(&t[0], &t[1], EPS));
        Case::new(shape_of(&shape), inputs, op, |t| only(rms_norm::reference(&t[0], &t[1], EPS)))
    };
    matrices.chain(heads).map(case).collect()
}

/// Tokens, heads, head dim.
const HEADS: [(Size, [usize; 3]); 8] = [
    (Smoke, [0, 2, 64]),
    (Smoke, [1, 1, 2]),
    (Smoke, [33, 3, 80]),
    (Small, [130, 4, 64]),
    (Small, [257, 8, 128]),
    (Small, [70, 2, 256]),
    (Real, [4096, 32, 128]),
    (Real, [32_768, 8, 64]),
];

pub(super) fn rotations(size: Size) -> Vec<Case> {
    let case = |[tokens, heads, head_dim]: [usize; 3]| {
        let table = move |device: &Device| -> Result<RopeTable> {
            let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 7).collect();
            Rope::new(head_dim, 1e4, RopeScaling::None)?.table(&positions, device)
        };
        let inputs = [trained("x", [tokens, heads, head_dim])];
        let op = move |t: &[Tensor]| only(rope::rope(&t[0], &table(t[0].device())?));
        Case::new(shape_of(&[tokens, heads, head_dim]), inputs, op, move |t| {
            only(rope::reference(&t[0], &table(&Device::Cpu)?))
        })
    };
    up_to(size, &HEADS).map(case).collect()
}

/// A gated unit, and its reference.
type Gates = [fn(&Tensor, &Tensor) -> Result<Tensor>; 2];

fn of_gates(label: String, [unit, reference]: Gates, (shape, largest): ([usize; 2], f64)) -> Case {
    let inputs = [trained("gate", shape).times(largest), trained("up", shape)];
    let op = move |t: &[Tensor]| only(unit(&t[0], &t[1]));
    Case::new(label, inputs, op, move |t| only(reference(&t[0], &t[1])))
}

pub(super) fn gates(size: Size) -> Vec<Case> {
    let both: Gates = [swiglu, swiglu::reference];
    let case = |shape: [usize; 2]| of_gates(shape_of(&shape), both, (shape, 8.0));
    let extreme = of_gates("[7, 33], gates up to 500".to_owned(), both, ([7, 33], 500.0));
    up_to(size, &MATRICES).map(case).chain([extreme]).collect()
}

pub(super) fn gelu_gates(size: Size) -> Vec<Case> {
    let both: Gates = [geglu, geglu::reference];
    let case = |shape: [usize; 2]| of_gates(shape_of(&shape), both, (shape, 4.0));
    up_to(size, &MATRICES).map(case).collect()
}

pub(super) fn squares(size: Size) -> Vec<Case> {
    let case = |(shape, slope): ([usize; 2], f64)| {
        let label = format!("{shape:?}, slope {slope}");
        let op = move |t: &[Tensor]| only(relu_squared(&t[0], slope));
        Case::new(label, [trained("x", shape)], op, move |t| {
            only(relu_squared::reference(&t[0], slope))
        })
    };
    up_to(size, &MATRICES).zip([0.0, 0.5].into_iter().cycle()).map(case).collect()
}

pub(super) fn scales(size: Size) -> Vec<Case> {
    let case = |shape: [usize; 2]| {
        let inputs = [trained("x", shape), trained("weight", [shape[1]])];
        let op = |t: &[Tensor]| only(scale_channels(&t[0], &t[1]));
        Case::new(shape_of(&shape), inputs, op, |t| only(t[0].broadcast_mul(&t[1])))
    };
    up_to(size, &MATRICES).map(case).collect()
}

pub(super) fn scaled_sums(size: Size) -> Vec<Case> {
    let case = |shape: [usize; 2]| {
        let inputs =
            [trained("residual", shape), trained("x", shape), trained("weight", [shape[1]])];
        let op = |t: &[Tensor]| only(add_scaled(&t[0], &t[1], &t[2]));
        Case::new(shape_of(&shape), inputs, op, |t| {
            only(channel_scale::reference(&t[0], &t[1], &t[2]))
        })
    };
    up_to(size, &MATRICES).map(case).collect()
}
