//! Random tensors, comparisons and finite differences for the ops' tests.

use crate::graph::Backward;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

/// A deterministic stream of numbers in `[-1, 1)`.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (f64::midpoint(self.next(), 1.0) * n as f64) as usize % n.max(1)
    }

    pub(crate) fn tensor(&mut self, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|_| self.next() as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).expect("shape matches the value count")
    }

    pub(crate) fn var(&mut self, shape: &[usize]) -> Var {
        Var::from_tensor(&self.tensor(shape)).expect("a CPU tensor makes a variable")
    }
}

/// `max |a - b| / max(max |b|, 0.01)`: relative, but absolute where everything cancels.
pub(crate) fn relative_error(a: &Tensor, b: &Tensor) -> f64 {
    let flat = |t: &Tensor| -> Vec<f64> {
        t.flatten_all()
            .and_then(|t| t.to_dtype(DType::F64)?.to_vec1())
            .expect("CPU tensor of numbers")
    };
    assert_eq!(a.dims(), b.dims(), "shapes differ");
    let (a, b) = (flat(a), flat(b));
    let scale = b.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    let mut worst = 0.0_f64;
    for (x, y) in a.iter().zip(&b) {
        assert!(x.is_finite() && y.is_finite(), "not finite: {x} against {y}");
        worst = worst.max((x - y).abs());
    }
    worst / scale.max(0.01)
}

/// The bits of f32 values.
#[track_caller]
pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).expect("f32 values");
    values.into_iter().map(f32::to_bits).collect()
}

#[track_caller]
pub(crate) fn assert_close(name: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    let error = relative_error(a, b);
    assert!(error <= tolerance, "{name}: error {error:.3e} above {tolerance:.1e}");
}

/// Holds the gradients of variables together.
#[track_caller]
pub(crate) fn assert_gradients(
    variables: &[(&str, &Var)],
    own: &GradStore,
    want: &GradStore,
    tolerance: f64,
) {
    for (name, variable) in variables {
        let (own, want) = (own.get(variable).expect("own"), want.get(variable).expect("wanted"));
        assert_close(name, own, want, tolerance);
    }
}

/// Holds results together, and the gradients of variables along a direction: `tolerances` are of these two.
#[track_caller]
pub(crate) fn assert_alike(
    variables: &[(&str, &Var)],
    direction: &Tensor,
    [own, want]: [&Tensor; 2],
    tolerances: (f64, f64),
) {
    assert_close("forward", own, want, tolerances.0);
    let along = |result: &Tensor| (result * direction)?.sum_all()?.gradients();
    let (own, want) = (along(own).expect("own"), along(want).expect("wanted"));
    assert_gradients(variables, &own, &want, tolerances.1);
}

/// Compares `f`'s gradients in f64 with central differences, for every input element.
#[track_caller]
pub(crate) fn gradcheck(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let inputs: Vec<Var> = inputs
        .iter()
        .map(|t| Var::from_tensor(&t.to_dtype(DType::F64).expect("to f64")).expect("variable"))
        .collect();
    let run = |vars: &[Var]| -> Tensor {
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        // A fixed random direction turns the output into a scalar that sees every element.
        let out = f(&tensors).expect("forward");
        let mut noise = Noise::new(99);
        let direction = noise.tensor(out.dims()).to_dtype(DType::F64).expect("to f64");
        (out * direction).and_then(|t| t.sum_all()).expect("scalar")
    };
    let grads = run(&inputs).gradients().expect("backward");
    for (index, var) in inputs.iter().enumerate() {
        let grad = grads.get(var.as_tensor()).expect("a gradient for every input");
        let grad: Vec<f64> = grad.flatten_all().and_then(|g| g.to_vec1()).expect("values");
        let base: Vec<f64> = var.flatten_all().and_then(|v| v.to_vec1()).expect("values");
        for i in 0..base.len() {
            let shifted = |delta: f64| -> f64 {
                let mut values = base.clone();
                values[i] += delta;
                let moved = Tensor::from_vec(values, var.dims(), &Device::Cpu).expect("tensor");
                let mut all: Vec<Var> = inputs.clone();
                all[index] = Var::from_tensor(&moved).expect("variable");
                run(&all).to_scalar().expect("scalar")
            };
            let h = 1e-5;
            let numeric = (shifted(h) - shifted(-h)) / (2.0 * h);
            let error = (numeric - grad[i]).abs();
            assert!(
                error <= 1e-6 * (1.0 + numeric.abs()),
                "input {index} element {i}: gradient {} against difference {numeric}",
                grad[i]
            );
        }
    }
}
