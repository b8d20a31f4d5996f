//! Speed of single ops at training shapes: `cargo bench -p longdraft-kernels --bench ops`.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use longdraft_kernels::attention::{Delays, KeyRanges, attention};
use longdraft_kernels::linear::linear;

fn main() {
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().expect("pool");
    rayon::scope(|_| {
        products();
        few_rows();
        delayed_attention();
    });
}

/// Median of seven runs, in seconds.
fn median(mut run: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

fn products() {
    for (rows, inputs, outputs) in
        [(1024, 576, 1536), (4096, 576, 1536), (1024, 1536, 576), (128, 576, 49_152)]
    {
        let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &Device::Cpu).expect("x");
        let w = Tensor::zeros((outputs, inputs), DType::F32, &Device::Cpu).expect("w");
        let seconds = median(|| {
            linear(&x, &w, None).expect("product");
        });
        let flops = 2e-9 * (rows * inputs * outputs) as f64;
        println!("[{rows}, {inputs}] x [{inputs}, {outputs}]: {:.1} GFLOP/s", flops / seconds);
    }
}

/// Decoding: the weights' bytes over the time of a product with few rows.
fn few_rows() {
    let (inputs, outputs) = (576, 49_152);
    for dtype in [DType::F32, DType::BF16] {
        let w = Tensor::rand(-1.0_f32, 1.0, (outputs, inputs), &Device::Cpu).expect("w");
        let w = w.to_dtype(dtype).expect("w");
        for rows in [1, 2, 5, 8, 12, 16] {
            let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &Device::Cpu).expect("x");
            let seconds = median(|| {
                linear(&x, &w, None).expect("product");
            });
            let bytes = 1e-9 * (inputs * outputs * dtype.size_in_bytes()) as f64;
            println!("{rows} rows, {dtype:?} weights: {:.1} GB/s", bytes / seconds);
        }
    }
}

/// Causal attention with frozen keys: 4 D products per visible pair forward, 6 D backward.
fn delayed_attention() {
    let (tokens, heads, kv_heads, head_dim) = (4096, 9, 3, 64);
    let random = |heads| {
        Tensor::randn(0.0_f32, 1.0, (tokens, heads, head_dim), &Device::Cpu).expect("random")
    };
    let q = Var::from_tensor(&random(heads)).expect("variable");
    let (k, v) = (random(kv_heads), random(kv_heads));
    let ranges = Arc::new(KeyRanges::packed(&vec![0; tokens], None, Delays::Same(1)));
    let forward = median(|| {
        attention(&q, &k, &v, &ranges).expect("attention");
    });
    let both = median(|| {
        let out = attention(&q, &k, &v, &ranges).expect("attention");
        out.sum_all().and_then(|sum| sum.backward()).expect("backward");
    });
    let product = 1e-9 * (tokens * tokens / 2 * heads * head_dim) as f64;
    println!("attention of {tokens}, forward: {:.1} GFLOP/s", 4.0 * product / forward);
    println!("attention of {tokens}, backward: {:.1} GFLOP/s", 6.0 * product / (both - forward));
}
