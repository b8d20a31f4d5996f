//! Steps of AdamW and the factors that Muon steps along.

use candle_core::{Result, Tensor};

use super::Size::{self, Real, Small, Smoke};
use super::case::{Case, Output, frozen, only, up_to};
use crate::adamw::{
    AdamWState, AdamWStep, adamw, adamw_on_device, square_sum, square_sum_on_device,
    stays_on_device,
};
use crate::orthogonalise::{self, Rule, orthogonalise_on};

/// A step of tests.
pub(crate) const STEP: AdamWStep = AdamWStep {
    learning_rate: 0.05,
    betas: (0.9, 0.95),
    eps: 1e-6,
    weight_decay: 0.1,
    step: 3,
    grad_scale: 0.5,
};

const SIZES: [(Size, [usize; 2]); 6] = [
    (Smoke, [1, 1]),
    (Smoke, [3, 7]),
    (Smoke, [40, 129]),
    (Small, [1, 16_385]),
    (Small, [1000, 1031]),
    (Real, [4096, 14_336]),
];

fn outputs([theta, first, second]: [Tensor; 3]) -> Vec<Output> {
    vec![
        Output::new("values", theta),
        Output::new("first moment", first),
        Output::new("second moment", second),
    ]
}

/// As the optimizer does: where the tensors lie, or on the host's slices.
fn step(t: &[Tensor]) -> Result<Vec<Output>> {
    let (theta, first, second, g) = (&t[0], &t[1], t[2].sqr()?, &t[3]);
    if stays_on_device(theta) {
        let state = AdamWState { theta: theta.clone(), first: first.clone(), second };
        let AdamWState { theta, first, second } = adamw_on_device(&STEP, &state, g)?;
        return Ok(outputs([theta, first, second]));
    }
    let slice = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let (mut values, mut m, mut v) = (slice(theta)?, slice(first)?, slice(&second)?);
    adamw(&STEP, &mut values, &mut m, &mut v, &slice(g)?);
    let tensor = |values| Tensor::from_vec(values, theta.shape(), theta.device());
    Ok(outputs([tensor(values)?, tensor(m)?, tensor(v)?]))
}

fn step_in_f64(t: &[Tensor]) -> Result<Vec<Output>> {
    let ((beta1, beta2), n) = (STEP.betas, STEP.step as i32);
    let g = (&t[3] * STEP.grad_scale)?;
    let first = ((&t[1] * beta1)? + (&g * (1.0 - beta1))?)?;
    let second = ((t[2].sqr()? * beta2)? + (g.sqr()? * (1.0 - beta2))?)?;
    let root = ((&second / (1.0 - beta2.powi(n)))?.sqrt()? + STEP.eps)?;
    let update = ((&first / (1.0 - beta1.powi(n)))? / root)?;
    let shrink = 1.0 - STEP.learning_rate * STEP.weight_decay;
    let theta = ((&t[0] * shrink)? - (update * STEP.learning_rate)?)?;
    Ok(outputs([theta, first, second]))
}

pub(super) fn steps(size: Size) -> Vec<Case> {
    let case = |shape: [usize; 2]| {
        let inputs = ["values", "first moment", "root of the second", "gradient"]
            .map(|name| frozen(name, shape));
        Case::new(format!("{shape:?}"), inputs, step, step_in_f64)
    };
    up_to(size, &SIZES).map(case).collect()
}

pub(super) fn square_sums(size: Size) -> Vec<Case> {
    let case = |shape: [usize; 2]| {
        let op = |t: &[Tensor]| {
            let sum = if stays_on_device(&t[0]) {
                square_sum_on_device(&t[0])?
            } else {
                square_sum(&t[0].flatten_all()?.to_vec1::<f32>()?)
            };
            Ok(vec![Output::numbers("sum", &[sum])?])
        };
        Case::new(format!("{shape:?}"), [frozen("gradient", shape)], op, |t| {
            Ok(vec![Output::new("sum", t[0].sqr()?.sum_all()?.reshape(1)?)])
        })
    };
    up_to(size, &SIZES).map(case).collect()
}

/// Twice as wide as high, or high as wide: small singular values enlarge every error.
const MATRICES: [(Size, [usize; 2]); 7] = [
    (Smoke, [1, 7]),
    (Smoke, [13, 40]),
    (Smoke, [65, 20]),
    (Small, [256, 768]),
    (Small, [1031, 300]),
    (Real, [1024, 4096]),
    (Real, [4096, 1024]),
];

pub(super) fn orthogonal(size: Size) -> Vec<Case> {
    let case = |(shape, rule): ([usize; 2], Rule)| {
        let op = move |t: &[Tensor]| {
            let values = t[0].flatten_all()?.to_vec1::<f32>()?;
            let dims = t[0].dims2()?;
            let factor = orthogonalise_on(t[0].device(), &values, dims, rule, false)?;
            only(Tensor::from_vec(factor, dims, &candle_core::Device::Cpu))
        };
        let label = format!("{shape:?}, {rule:?}");
        let case = Case::new(label, [frozen("matrix", shape)], op, move |t| {
            only(orthogonalise::reference(&t[0], rule))
        });
        case.within(1e-4, 5e-2)
    };
    let rules = [Rule::NewtonSchulz, Rule::PolarExpress];
    up_to(size, &MATRICES).flat_map(|shape| rules.map(|rule| (shape, rule))).map(case).collect()
}
