//! A target as its file holds it, as an NVIDIA GPU decodes with it, its kernels emulated, against the CPU. It sets what holds
//! for a whole process.
#![cfg(feature = "emulate-cuda")]

use std::path::Path;

use candle_core::{Device, Tensor};
use longdraft_kernels::dispatch::{Ops, set_ops};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::trace::Trace;
use longdraft_models::target_model::{Tap, Taps, Target, TargetOptions};

/// Tokens of a pass with widened weights, then of passes with stored ones.
const PASSES: [usize; 4] = [70, 1, 5, 18];
/// Largest error, in parts of the largest value: products of the first pass round activations to 8 bits on the CPU alone, and
/// later passes read its keys and values.
const ALLOWED: f32 = 5e-2;

/// Logits of every pass, and the kernels that ran.
fn logits(is_traced: bool) -> (Vec<Tensor>, Vec<String>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/target/demonstration.gguf");
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let target = Target::open(path.to_str().expect("a path"), &options).expect("a target");
    assert!(target.holds_blocks() && target.widened().is_empty());
    let ends = target.hold_ends().expect("ends");
    assert_eq!(matches!(ends.head_matrix(), Matrix::OnGpu(_)), is_traced);
    let mut trace = is_traced.then(|| Trace::of(&Device::Cpu).expect("emulated"));
    trace.iter_mut().for_each(|trace| trace.begin().expect("the only one"));
    let mut cache = target.new_cache().expect("a cache");
    let (mut all, mut first) = (Vec::new(), 0_u32);
    for rows in PASSES {
        let positions: Vec<u32> = (first..first + rows as u32).collect();
        let ids: Vec<u32> = positions.iter().map(|i| i * 37 % 300).collect();
        let taps = Taps::of(&[Tap::FinalHidden]);
        let features = target.extend(&ids, &positions, &mut cache, &taps).expect("a pass");
        let last = features.final_hidden.expect("tapped");
        let last = last.narrow(0, rows - 1, 1).expect("a row");
        all.push(ends.logits(&last).expect("logits"));
        first += rows as u32;
    }
    trace.iter_mut().for_each(|trace| trace.end().expect("a trace"));
    (all, trace.iter().flat_map(Trace::ops).map(|op| op.op).collect())
}

#[test]
fn a_stored_target_on_a_gpu_says_what_it_says_on_the_cpu() {
    set_ops(Ops::Fused);
    let (plain, _) = logits(false);
    set_ops(Ops::Emulated);
    let (own, kernels) = logits(true);
    set_ops(Ops::Fused);
    for kernel in ["widen_f32", "widen_rows", "fix_rows", "few_rows_1", "few_rows_8", "few_rows_16"]
    {
        assert!(kernels.iter().any(|name| name == kernel), "{kernel}: {kernels:?}");
    }
    for (pass, (own, plain)) in own.iter().zip(&plain).enumerate() {
        let values = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
        let (own, plain) = (values(own), values(plain));
        let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let off = own.iter().zip(&plain).map(|(own, plain)| (own - plain).abs());
        let off = off.fold(0.0, f32::max) / largest;
        assert!(off < ALLOWED, "pass {pass}: {off:.2e}");
        let chosen =
            |values: &[f32]| (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]));
        assert_eq!(chosen(&own), chosen(&plain), "pass {pass}");
    }
}
