//! Floating-point operations of a step, and the time they take.
//!
//! A product `[r, i] · [i, o]` is `2 r i o` operations; a backward pass that reaches weights and inputs
//! is two more products, one that stops at the weights one more.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::linear::linear;
use longdraft_models::weights::TensorSpec;
use longdraft_models::{StepProducts, TargetConfig};

use crate::links::Links;

/// Operations of the target's forward pass over a token: `2` for every value of the matrices that the
/// token visits, attention over half of a row, `2 T N·D` a layer that attends, as in one document, and `6` for every
/// value of recurrent states.
pub(crate) fn of_target(config: &TargetConfig, specs: &[TensorSpec], row_tokens: u64) -> f64 {
    let experts = config.experts.as_ref();
    let share = experts.map_or(1.0, |e| e.num_experts_per_tok as f64 / e.num_experts as f64);
    let of_spec = |spec: &TensorSpec| {
        let values: f64 = spec.shape.iter().map(|size| *size as f64).product();
        if spec.name.contains(".experts.") { share * values } else { values }
    };
    let layers =
        specs.iter().filter(|spec| spec.name.contains(".layers.") && spec.shape.len() == 2);
    let attention = 2.0 * row_tokens as f64 * config.query_size() as f64;
    // The delta rule reads and corrects its state: three products of a row with it.
    let states = 6.0 * config.state_values() as f64;
    2.0 * layers.map(of_spec).sum::<f64>() + attention * config.attention_layers() as f64 + states
}

/// What a rank can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// 10⁹ floating-point operations a second.
    pub gflops: f64,
    /// What connects it with others.
    pub links: Links,
}

impl Speed {
    /// 10⁹ operations a second of this build on this machine, from products of some hundred
    /// milliseconds whose factors are those of a training; 1 if no product can be made.
    pub fn measured_gflops(products: StepProducts) -> f64 {
        products.within(Self::gflops_now)
    }

    fn gflops_now() -> f64 {
        const SIZE: usize = 768;
        const LONG_ENOUGH: f64 = 0.2;
        let tensor = || Tensor::ones((SIZE, SIZE), DType::F32, &Device::Cpu);
        let (Ok(x), Ok(weight)) = (tensor(), tensor()) else { return 1.0 };
        // The first product also starts the threads.
        let warm = linear(&x, &weight, None);
        let (started, mut products) = (Instant::now(), 0);
        while warm.is_ok() && started.elapsed().as_secs_f64() < LONG_ENOUGH {
            products += usize::from(linear(&x, &weight, None).is_ok());
        }
        let operations = 2.0 * (SIZE * SIZE * SIZE * products) as f64;
        (1e-9 * operations / started.elapsed().as_secs_f64()).max(1.0)
    }
}
