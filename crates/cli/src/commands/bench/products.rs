//! What the CPU itself can do: f32 products at training shapes, and reading memory.

use std::time::Instant;

use candle_core::Device;
use longdraft_kernels::linear::linear;
use longdraft_records::median;
use rayon::prelude::*;
use serde_json::{Map, json};

use super::{Cases, object, shape};
use crate::failure::Result;

/// Rows, inputs, outputs.
const SHAPES: [(usize, usize, usize); 3] =
    [(1024, 576, 1536), (4096, 576, 1536), (1024, 576, 49_152)];

const REPETITIONS: usize = 7;

/// GFLOP/s of every shape, in one line.
pub(super) fn run(cases: &mut Cases) {
    let about = object(json!({
        "impl": "longdraft", "case": "products", "device": "cpu", "dtype": "f32",
        "threads": rayon::current_num_threads(), "shapes": SHAPES,
    }));
    cases.case(about, || {
        let speeds: Vec<f64> = SHAPES.into_iter().map(speed).collect::<Result<_>>()?;
        Ok(Map::from_iter([("gflop_s".to_owned(), json!(speeds))]))
    });
}

fn speed((rows, inputs, outputs): (usize, usize, usize)) -> Result<f64> {
    let x = shape::normal(1.0, &[rows, inputs], &Device::Cpu)?;
    let weight = shape::normal(1.0, &[outputs, inputs], &Device::Cpu)?;
    let times = (0..REPETITIONS).map(|_| {
        let started = Instant::now();
        linear(&x, &weight, None)?;
        Ok(started.elapsed().as_secs_f64())
    });
    let times: Vec<f64> = times.collect::<Result<_>>()?;
    Ok(2e-9 * (rows * inputs * outputs) as f64 / median(&times))
}

/// GB/s of summing a GiB of f32.
pub(super) fn read_bandwidth() -> f64 {
    let values = vec![1.0_f32; 1 << 28];
    let times: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let started = Instant::now();
            let sum: f32 = values.par_chunks(1 << 20).map(sum).sum();
            std::hint::black_box(sum);
            started.elapsed().as_secs_f64()
        })
        .collect();
    1e-9 * (values.len() * size_of::<f32>()) as f64 / median(&times)
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
