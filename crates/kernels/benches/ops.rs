//! Speed of f32 products at training shapes: `cargo bench -p longdraft-kernels --bench matmul`.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::linear::linear;

fn main() {
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().expect("pool");
    let device = Device::Cpu;
    for (rows, inputs, outputs) in [
        (1024, 576, 1536),
        (4096, 576, 1536),
        (1024, 1536, 576),
        (1024, 576, 576),
        (128, 576, 49_152),
        (1024, 576, 49_152),
    ] {
        let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &device).expect("x");
        let w = Tensor::zeros((outputs, inputs), DType::F32, &device).expect("w");
        let seconds = rayon::scope(|_| {
            let mut times: Vec<f64> = (0..7)
                .map(|_| {
                    let started = Instant::now();
                    linear(&x, &w, None).expect("product");
                    started.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[3]
        });
        let flops = 2.0 * (rows * inputs * outputs) as f64;
        println!(
            "[{rows}, {inputs}] x [{inputs}, {outputs}]: {:.1} GFLOP/s",
            flops / seconds / 1e9
        );
    }
}
