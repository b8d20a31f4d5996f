//! The time that a step takes, at a speed that was measured or by a roofline.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::linear::linear;
use longdraft_models::StepProducts;
use serde::Serialize;

use crate::communication::Sent;
use crate::estimate::Estimate;
use crate::links::Links;
use crate::machine::Gpu;
use crate::roofline::{self, Part, PartTime};

/// What a rank can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// How fast it computes.
    pub pace: Pace,
    /// What connects it with others.
    pub links: Links,
}

/// How fast a rank computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// So many 10⁹ floating-point operations a second, whatever they are.
    Gflops(f64),
    /// As a GPU whose limits are known, by a roofline ([`crate::Estimate::parts`]).
    Gpu(&'static Gpu),
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

impl Estimate {
    /// What a step takes at a speed, by estimate: its work, then collectives but for those that are under way while the
    /// target computes.
    pub fn time(&self, speed: &Speed) -> StepTime {
        let [work, of_target] = match speed.pace {
            Pace::Gflops(gflops) => {
                [self.operations, self.target_operations].map(|number| number / (1e9 * gflops))
            }
            Pace::Gpu(gpu) => {
                let parts = self.parts(gpu);
                let of_target = parts.iter().find(|part| part.part == Part::Target);
                [PartTime::total(&parts), of_target.map_or(0.0, |part| part.seconds)]
            }
        };
        let of = |sent: &Sent| (speed.links.seconds(sent), sent.is_beside);
        let collectives: Vec<(f64, bool)> = self.sent.iter().map(of).collect();
        let beside = collectives.iter().filter(|(_, is_beside)| *is_beside);
        let beside: f64 = beside.map(|(seconds, _)| seconds).sum();
        StepTime {
            work,
            collectives: collectives.iter().map(|(seconds, _)| seconds).sum(),
            beside: beside.min(of_target),
        }
    }

    /// Whether its parts on a GPU are known: not those of pretraining.
    pub fn has_parts(&self) -> bool {
        !self.terms.is_empty()
    }

    /// The rank's work in a step on a GPU, by its parts; of pretraining none.
    pub fn parts(&self, gpu: &Gpu) -> Vec<PartTime> {
        roofline::parts(&self.terms, gpu)
    }
}

/// Seconds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepTime {
    /// Of the rank's operations.
    pub work: f64,
    /// Of its collectives.
    pub collectives: f64,
    /// Of these what passes while the target computes.
    pub beside: f64,
}

impl StepTime {
    /// Seconds from one step to the next.
    pub fn total(&self) -> f64 {
        self.work + self.collectives - self.beside
    }
}
