//! What a frozen network computes in bf16 between its norms and its f32 sums, and what is written in bf16.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, frozen, only, up_to};
use super::optimizer::STEP;
use crate::adamw::{AdamWState, adamw_on_device, adamw_with_halves};
use crate::attention::{Delays, KeyRanges, attention, reference as plain_attention};
use crate::linear::{self, linear, linear_onto};
use crate::rms_norm::{self, rms_norm, rms_norm_as};
use crate::rope::{self, Rope, RopeScaling, RopeTable};
use crate::rows::put_rows;
use crate::swiglu::{self, swiglu};

/// What a result that is rounded to bf16 may be off by, and where ops composed of others round several times.
const ROUNDED: f64 = 1e-2;
const ROUNDED_OFTEN: f64 = 2e-2;
/// The same where sums stay in f32.
const SUMMED: f64 = 1e-4;
const EPS: f64 = 1e-6;

/// Rows of a layer, its width, that of its MLP, and its heads: of queries, of keys, their dim.
type Layer = (usize, usize, usize, [usize; 3]);

const LAYERS: [(Size, Layer); 6] = [
    (Smoke, (66, 40, 72, [4, 2, 16])),
    (Smoke, (70, 33, 39, [3, 1, 20])),
    (Small, (257, 512, 1030, [4, 2, 128])),
    (Small, (130, 768, 2048, [6, 6, 80])),
    (Small, (200, 512, 1024, [4, 2, 256])),
    (Real, (8192, 4096, 14_336, [32, 8, 128])),
];

pub(super) fn activations(size: Size) -> Vec<Case> {
    up_to(size, &LAYERS).flat_map(of_layer).collect()
}

fn of_layer((rows, width, inner, heads): Layer) -> Vec<Case> {
    let half = |name, shape: &[usize]| frozen(name, shape.to_vec()).of(DType::BF16);
    let label = |what: &str| format!("{what}, {rows} rows of {width}");
    let weights = frozen("weight", [width]);
    let [query_heads, _, head_dim] = heads;
    let of_heads = [rows, query_heads, head_dim];
    let table = move |device: &Device| -> Result<RopeTable> {
        let positions: Vec<u32> = (0..rows as u32).map(|t| t * 7).collect();
        Rope::new(head_dim, 1e4, RopeScaling::None)?.table(&positions, device)
    };
    let scale = (3.0 / width as f64).sqrt();
    let matrix = || half("matrix", &[inner, width]).times(scale);
    let plain_norm = |t: &[Tensor]| only(rms_norm::reference(&t[0], &t[1], EPS));
    let linear_of = |t: &[Tensor]| linear::reference(&t[0], &t[1], Some(&t[2]));
    vec![
        Case::new(
            label("norm of f32"),
            [frozen("x", [rows, width]), weights],
            |t| only(rms_norm_as(&t[0], &t[1], EPS, DType::BF16)),
            plain_norm,
        )
        .within(ROUNDED, ROUNDED),
        Case::new(
            label("norm of heads"),
            [half("x", &of_heads), frozen("weight", [head_dim])],
            |t| only(rms_norm(&t[0], &t[1], EPS)),
            plain_norm,
        )
        .within(ROUNDED, ROUNDED),
        Case::new(
            label("rotation"),
            [half("x", &of_heads)],
            move |t| only(rope::rope(&t[0], &table(t[0].device())?)),
            move |t| only(rope::reference(&t[0], &table(&Device::Cpu)?)),
        )
        .within(ROUNDED, ROUNDED),
        Case::new(
            label("gate"),
            [half("gate", &[rows, inner]).times(8.0), half("up", &[rows, inner])],
            |t| only(swiglu(&t[0], &t[1])),
            |t| only(swiglu::reference(&t[0], &t[1])),
        )
        .within(ROUNDED_OFTEN, ROUNDED_OFTEN),
        Case::new(
            label("product"),
            [half("x", &[rows, width]), matrix(), frozen("bias", [inner])],
            |t| only(linear(&t[0], &t[1], Some(&t[2]))),
            move |t| only(linear_of(t)),
        )
        .within(ROUNDED, ROUNDED),
        Case::new(
            label("product onto f32"),
            [
                half("x", &[rows, width]),
                matrix(),
                frozen("bias", [inner]),
                frozen("residual", [rows, inner]),
            ],
            |t| only(linear_onto(&t[3], &t[0], &t[1], Some(&t[2]))),
            move |t| only(&t[3] + linear_of(t)?),
        )
        .within(SUMMED, SUMMED),
        attended(rows, heads),
    ]
}

fn attended(rows: usize, [heads, kv_heads, head_dim]: [usize; 3]) -> Case {
    let half = |name, heads| frozen(name, [rows, heads, head_dim]).of(DType::BF16);
    let inputs = [half("q", heads).times(3.0), half("k", kv_heads), half("v", kv_heads)];
    // Scores of all rows of a long one would not fit the reference.
    let window = (rows > 1024).then_some(256);
    let documents: Vec<i32> = (0..rows).map(|t| (t / 700) as i32).collect();
    let ranges = Arc::new(KeyRanges::packed(&documents, window, Delays::Same(0)));
    let seen = Arc::clone(&ranges);
    let label = format!("attention, {rows} rows, heads {heads}/{kv_heads}, D {head_dim}");
    Case::new(
        label,
        inputs,
        move |t| only(attention(&t[0], &t[1], &t[2], &ranges)),
        move |t| only(plain_attention(&t[0], &t[1], &t[2], &seen)),
    )
    .within(ROUNDED_OFTEN, ROUNDED_OFTEN)
}

/// Rows and their width.
const WRITTEN: [(Size, [usize; 2]); 4] =
    [(Smoke, [3, 24]), (Smoke, [5, 13]), (Small, [65, 1024]), (Real, [4096, 4096])];

/// Heads that train, rounded for attention while they are turned or afterwards.
fn turned(rows: usize) -> Case {
    let turn = move |t: &[Tensor], is_attended: bool| {
        let positions: Vec<u32> = (0..rows as u32).map(|t| t * 7).collect();
        let table = Rope::new(128, 1e4, RopeScaling::None)?.table(&positions, t[0].device())?;
        let table = if is_attended { table.attended() } else { table };
        let heads = Var::from_tensor(&t[0])?;
        only(rope::rope(&heads, &table)?.detach().to_dtype(DType::BF16))
    };
    let inputs = [frozen("x", [rows, 3, 128])];
    let label = format!("turned heads, [{rows}, 3, 128]");
    Case::same(label, inputs, move |t| turn(t, true), move |t| turn(t, false))
}

/// Values that are rounded while they are written have the bits of those that are rounded afterwards.
pub(super) fn written(size: Size) -> Vec<Case> {
    let case = |[rows, width]: [usize; 2]| {
        let inputs = ["theta", "first", "gradient"].map(|name| frozen(name, [rows, width]));
        let state = |t: &[Tensor]| -> Result<AdamWState> {
            Ok(AdamWState { theta: t[0].clone(), first: t[1].clone(), second: t[1].sqr()? })
        };
        let copy = move |t: &[Tensor]| only(Ok(adamw_with_halves(&STEP, &state(t)?, &t[2])?.1));
        let rounded = move |t: &[Tensor]| {
            only(adamw_on_device(&STEP, &state(t)?, &t[2])?.theta.to_dtype(DType::BF16))
        };
        let label = format!("the optimizer's copy, [{rows}, {width}]");
        let optimizer = Case::same(label, inputs, copy, rounded);
        let cache = move |t: &[Tensor]| -> Result<Tensor> {
            Tensor::zeros((rows + 7, width), DType::BF16, t[0].device())
        };
        let put = move |t: &[Tensor]| {
            let cache = cache(t)?;
            put_rows(&cache, &t[0], 2)?;
            only(Ok(cache))
        };
        let set = move |t: &[Tensor]| {
            let cache = cache(t)?;
            cache.slice_set(&t[0].to_dtype(DType::BF16)?, 0, 2)?;
            only(Ok(cache))
        };
        let label = format!("rows of a cache, [{rows}, {width}]");
        let of_cache = Case::same(label, [frozen("rows", [rows, width])], put, set);
        [optimizer, of_cache, turned(rows)]
    };
    up_to(size, &WRITTEN).flat_map(case).collect()
}
