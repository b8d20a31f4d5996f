//! Speed of single ops at training shapes: `cargo bench -p longdraft-kernels --bench ops`; after
//! `--`, names of what is wanted alone: products, rounded, blocks, token, cache, recurrence.
//! `longdraft kernel-check --bench` times every op on any device.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::{KeyRanges, attention};
use longdraft_kernels::dispatch::with_rounded_products;
use longdraft_kernels::linear::linear;
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix, linear_each};
use longdraft_kernels::recurrence::{DeltaRows, DeltaSizes, DeltaState, Walk, gated_delta_rule};
use longdraft_kernels::threads::awake;
use rayon::prelude::*;

fn main() {
    rayon::ThreadPoolBuilder::new().num_threads(2).build_global().expect("pool");
    let parts: [(&str, fn()); 6] = [
        ("products", products),
        ("rounded", || with_rounded_products(true, products)),
        ("blocks", blocks),
        ("token", one_token),
        ("cache", cached_attention),
        ("recurrence", recurrence),
    ];
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    rayon::scope(|_| {
        for (name, part) in parts {
            if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
                part();
            }
        }
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
    for (rows, inputs, outputs) in [
        (1024, 576, 1536),
        (4096, 576, 1536),
        (1024, 1536, 576),
        (128, 576, 49_152),
        (1024, 576, 49_152),
        (1024, 49_152, 576),
    ] {
        let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &Device::Cpu).expect("x");
        let w = Tensor::rand(-1.0_f32, 1.0, (outputs, inputs), &Device::Cpu).expect("w");
        let seconds = median(|| {
            linear(&x, &w, None).expect("product");
        });
        let flops = 2e-9 * (rows * inputs * outputs) as f64;
        println!("[{rows}, {inputs}] x [{inputs}, {outputs}]: {:.1} GFLOP/s", flops / seconds);
    }
}

/// A prompt's products with blocks of every type.
fn blocks() {
    let (inputs, outputs) = (1024, 4096);
    for format in BlockFormat::ALL {
        let bytes = vec![17; inputs * outputs / format.values() * format.bytes()];
        let matrix = QuantisedMatrix::new(format, outputs, inputs, &bytes).expect("matrix");
        let matrix = Matrix::Quantised(Arc::new(matrix));
        let speeds = [1, 2, 5, 8, 16, 256].map(|rows| {
            let x = Tensor::rand(-1.0_f32, 1.0, (rows, inputs), &Device::Cpu).expect("x");
            let seconds = median(|| {
                matrix.linear(&x, None).expect("product");
            });
            format!("{:.0}", 1e-9 * (rows * inputs * outputs) as f64 / seconds)
        });
        println!(
            "{}: {} G products/s of 1, 2, 5, 8, 16, 256 rows",
            format.name(),
            speeds.join(", ")
        );
    }
}

/// A gated delta net of Qwen3.5-9B: its products of a prompt, the rule over the same rows, and the rule row by row.
fn recurrence() {
    let sizes =
        DeltaSizes { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, tiled: false };
    let (rows, width) = (512, 4096);
    let values = |count: usize, scale: f32| -> Vec<f32> {
        (0..count).map(|i| scale * ((i as f32 * 0.7).sin() + 1.1)).collect()
    };
    let x = Tensor::from_vec(values(rows * width, 0.1), (rows, width), &Device::Cpu).expect("x");
    let w = Tensor::zeros((sizes.channels(), width), DType::F32, &Device::Cpu).expect("w");
    let seconds = median(|| {
        linear(&x, &w, None).expect("product");
    });
    let products = 2e-9 * (rows * width * sizes.channels()) as f64 / seconds;
    let mixed = values(rows * sizes.channels(), 0.3);
    let gates = values(rows * sizes.value_heads, 0.45);
    let (before, mut after) = (DeltaState::new(sizes), DeltaState::new(sizes));
    let mut run = |count: usize| {
        let (mixed, gates) =
            (&mixed[..count * sizes.channels()], &gates[..count * sizes.value_heads]);
        let of_rows = DeltaRows { mixed, decay: gates, rate: gates };
        median(|| {
            gated_delta_rule(sizes, of_rows, &Walk::chain(count), &before, &mut after)
                .expect("rule");
        })
    };
    // Of a chunk of 64: queries and keys times the matrix, times the keys; sums over earlier rows; the matrix after it.
    let (dk, dv, chunk) = (sizes.key_dim, sizes.value_dim, 64);
    let of_row = 2 * (3 * dk * dv + 2 * dk * chunk + chunk * dv) * sizes.value_heads;
    let rule = 1e-9 * (rows * of_row) as f64 / run(rows);
    println!(
        "{rows} rows of a delta net: products {products:.1} GFLOP/s, the rule {rule:.1} ({:.2} of it)",
        rule / products
    );
    for count in [1, 4, 16] {
        println!("{count} rows of the rule: {:.0} us", 1e6 * run(count));
    }
}

/// GB/s of all threads adding up 1 GiB.
fn read_speed() -> f64 {
    let values = vec![1.0_f32; 1 << 28];
    let seconds = median(|| {
        let sum = |part: &[f32]| {
            let mut lanes = [0.0_f32; 64];
            part.as_chunks::<64>().0.iter().for_each(|chunk| {
                lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x);
            });
            lanes.iter().sum::<f32>()
        };
        assert!(values.par_chunks(1 << 20).map(sum).sum::<f32>() > 0.0);
    });
    1e-9 * (values.len() * 4) as f64 / seconds
}

/// Weights of SmolLM2-135M in the groups in which one decoded token reads them.
struct Weights {
    /// Queries, keys and values; output; gate and up; down.
    layers: Vec<([Matrix; 3], Matrix, [Matrix; 2], Matrix)>,
    head: Matrix,
    bytes: usize,
}

impl Weights {
    fn of(mut matrix: impl FnMut(usize, usize) -> (Matrix, usize)) -> Self {
        let mut bytes = 0;
        let mut next = |inputs, outputs| {
            let (matrix, size) = matrix(inputs, outputs);
            bytes += size;
            matrix
        };
        let mut layer = || {
            let attention = [576, 192, 192].map(|outputs| next(576, outputs));
            let output = next(576, 576);
            (attention, output, [1536; 2].map(|outputs| next(576, outputs)), next(1536, 576))
        };
        let layers = (0..30).map(|_| layer()).collect();
        let head = next(576, 49_152);
        Self { layers, head, bytes }
    }

    fn dense(dtype: DType) -> Self {
        Self::of(|inputs, outputs| {
            let w = Tensor::rand(-1.0_f32, 1.0, (outputs, inputs), &Device::Cpu).expect("w");
            (Matrix::Dense(w.to_dtype(dtype).expect("w")), inputs * outputs * dtype.size_in_bytes())
        })
    }

    fn quantised(layers: BlockFormat, head: BlockFormat) -> Self {
        Self::of(|inputs, outputs| {
            let format = if outputs > 10_000 { head } else { layers };
            let bytes = vec![17; inputs * outputs / format.values() * format.bytes()];
            let size = bytes.len();
            let matrix = QuantisedMatrix::new(format, outputs, inputs, &bytes).expect("matrix");
            (Matrix::Quantised(Arc::new(matrix)), size)
        })
    }

    fn pass(&self, narrow: &Tensor, wide: &Tensor) {
        for ([q, k, v], output, [gate, up], down) in &self.layers {
            linear_each(narrow, [(q, None), (k, None), (v, None)]).expect("product");
            output.linear(narrow, None).expect("product");
            linear_each(narrow, [(gate, None), (up, None)]).expect("product");
            down.linear(wide, None).expect("product");
        }
        self.head.linear(narrow, None).expect("product");
    }
}

/// The products of one decoded token, in the order in which the model asks for them; the least of
/// many passes that take turns, because other work on the machine only adds.
fn one_token() {
    const ROWS: [usize; 4] = [1, 4, 5, 8];
    let all = [
        ("f32", Weights::dense(DType::F32)),
        ("bf16", Weights::dense(DType::BF16)),
        ("Q4_1, head Q8_0", Weights::quantised(BlockFormat::Q4_1, BlockFormat::Q8_0)),
        ("Q5_0, head Q8_0", Weights::quantised(BlockFormat::Q5_0, BlockFormat::Q8_0)),
    ];
    for (name, weights) in all {
        let inputs = ROWS.map(|rows| {
            [576, 1536]
                .map(|size| Tensor::rand(-1.0_f32, 1.0, (rows, size), &Device::Cpu).expect("x"))
        });
        let mut least = [f64::INFINITY; ROWS.len()];
        for _ in 0..60 {
            for (least, [narrow, wide]) in least.iter_mut().zip(&inputs) {
                awake(|| {
                    let started = Instant::now();
                    weights.pass(narrow, wide);
                    *least = least.min(started.elapsed().as_secs_f64());
                });
            }
        }
        for (rows, least_of_rows) in ROWS.into_iter().zip(least) {
            println!(
                "all products of a token, {name}, {rows} rows: {:.2} ms, {:.1} GB/s, {:.2} of one \
                 row's time",
                1e3 * least_of_rows,
                1e-9 * weights.bytes as f64 / least_of_rows,
                least_of_rows / least[0]
            );
        }
    }
    println!("reading alone: {:.1} GB/s", read_speed());
}

/// A pass's attention over a cache in f16, all layers of a model of 135 M parameters.
fn cached_attention() {
    let (layers, heads, kv_heads, head_dim) = (30, 9, 3, 64);
    for cached in [200, 1024, 4096, 8192] {
        let held = || {
            let held = Tensor::randn(0.0_f32, 1.0, (cached + 16, kv_heads, head_dim), &Device::Cpu);
            held.and_then(|held| held.to_dtype(DType::F16)).expect("keys")
        };
        let caches: Vec<[Tensor; 2]> = (0..layers).map(|_| [held(), held()]).collect();
        let mut one_row = None;
        for rows in [1, 3, 5, 8, 16] {
            let q = Tensor::randn(0.0_f32, 1.0, (rows, heads, head_dim), &Device::Cpu).expect("q");
            let ranges = Arc::new(KeyRanges::appended(cached, rows));
            let seconds = awake(|| {
                median(|| {
                    for held in &caches {
                        let [k, v] =
                            held.each_ref().map(|t| t.narrow(0, 0, cached + rows).expect("keys"));
                        attention(&q, &k, &v, &ranges).expect("attention");
                    }
                })
            });
            let one_row = *one_row.get_or_insert(seconds);
            let bytes = 4e-9 * (layers * cached * kv_heads * head_dim) as f64;
            println!(
                "{rows} rows over {cached} cached tokens: {:.2} ms, {:.2} of one row, {:.1} GB/s",
                1e3 * seconds,
                seconds / one_row,
                bytes / seconds
            );
        }
    }
}
