//! Figures that are held against the machine instead of PyTorch: products and decoding.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::linear::linear;
use longdraft_models::target::{Tap, Taps};
use rayon::prelude::*;

use super::{glide, median};

/// Shapes of training: rows, inputs, outputs.
pub(super) const PRODUCTS: [(usize, usize, usize); 3] =
    [(1024, 576, 1536), (4096, 576, 1536), (1024, 576, 49_152)];

/// GFLOP/s of f32 products, in the order of [`PRODUCTS`].
pub(super) fn products() -> Vec<f64> {
    let speed = |(rows, inputs, outputs): (usize, usize, usize)| {
        let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &Device::Cpu).expect("x");
        let w = Tensor::rand(-1.0_f32, 1.0, (outputs, inputs), &Device::Cpu).expect("w");
        let mut times: Vec<f64> = (0..7)
            .map(|_| {
                let started = Instant::now();
                linear(&x, &w, None).expect("product");
                started.elapsed().as_secs_f64()
            })
            .collect();
        2e-9 * (rows * inputs * outputs) as f64 / median(&mut times)
    };
    PRODUCTS.into_iter().map(speed).collect()
}

/// The same products in numpy, whose wheels carry OpenBLAS: a program that prints a JSON list.
pub(super) fn products_in_numpy() -> String {
    format!(
        "import numpy as np, time, json\n\
         def speed(m, k, n):\n\
         \x20   a, b = np.random.rand(m, k).astype('f'), np.random.rand(n, k).astype('f')\n\
         \x20   times = []\n\
         \x20   for _ in range(7):\n\
         \x20       t = time.perf_counter(); a @ b.T; times.append(time.perf_counter() - t)\n\
         \x20   return 2e-9 * m * k * n / sorted(times)[3]\n\
         print(json.dumps([speed(*s) for s in {:?}]))",
        PRODUCTS.map(|(m, k, n)| [m, k, n])
    )
}

/// Bytes of weights read per second of plain decoding over the machine's read bandwidth: two
/// threads that sum 1 GiB.
pub(super) fn decode_over_bandwidth() -> (f64, f64) {
    let target = glide::target();
    let config = target.config();
    // Every weight is read once a token; of the tied table, all of it as the head.
    let layer = (2 * config.hidden_size * config.query_size())
        + 2 * config.hidden_size * config.kv_size()
        + 3 * config.hidden_size * config.intermediate_size;
    let weights = layer * config.num_hidden_layers + config.vocab_size * config.hidden_size;
    let mut cache = target.new_cache().expect("cache");
    let taps = Taps::of(&[Tap::FinalHidden]);
    let mut times = Vec::new();
    for position in 0..64 {
        let started = Instant::now();
        let features =
            target.extend(&[position % 100], &[position], &mut cache, &taps).expect("step");
        target.logits(features.final_hidden().expect("tapped")).expect("logits");
        times.push(started.elapsed().as_secs_f64());
    }
    let decoding = (weights * DType::F32.size_in_bytes()) as f64 / median(&mut times);
    let values = vec![1.0_f32; 1 << 28];
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let started = Instant::now();
            let sum: f32 = values.par_chunks(1 << 20).map(sum).sum();
            assert!(sum > 0.0);
            started.elapsed().as_secs_f64()
        })
        .collect();
    let bandwidth = (values.len() * 4) as f64 / median(&mut times);
    (decoding * 1e-9, bandwidth * 1e-9)
}

fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 64];
    for chunk in values.chunks_exact(64) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    lanes.iter().sum()
}
