use candle_core::{Device, Tensor, Var};
use longdraft_kernels::dispatch::with_rounded_products;
use longdraft_kernels::graph::Backward;
use longdraft_models::weights::TensorRole;

use super::*;

fn parameter(name: &str, values: &[f32], shape: &[usize]) -> Parameter {
    let tensor = Tensor::from_slice(values, shape, &Device::Cpu).expect("tensor");
    let var = Var::from_tensor(&tensor).expect("variable");
    let (name, role) = (name.to_owned(), TensorRole::Layer);
    Parameter { name, var, role, decay: false, dead: false }
}

fn gradients(parameters: &[Parameter], factor: f64) -> Gradients {
    let terms = parameters.iter().map(|p| (p.var.sqr()? * factor)?.sum_all());
    let total = terms.reduce(|a, b| a? + b?).expect("parameters").expect("sum");
    let mut gradients = Gradients::new(parameters);
    gradients.add(parameters, total.gradients().expect("backward")).expect("gradients");
    gradients
}

fn parameters() -> Vec<Parameter> {
    vec![
        parameter("blocks.0.mlp.fc.weight", &[1.0, 0.5, -0.5, 2.0, 0.25, -1.0], &[3, 2]),
        parameter("tok_emb.weight", &[1.0, -2.0], &[1, 2]),
    ]
}

fn values(parameter: &Parameter) -> Vec<f32> {
    parameter.var.flatten_all().and_then(|t| t.to_vec1()).expect("values")
}

#[test]
fn one_step_is_the_formula() -> Result<()> {
    let config = MuonConfig { clip_norm: 0.5, ..MuonConfig::default() };
    let parameters = parameters();
    let start = values(&parameters[0]);
    let mut muon = Muon::new(config.clone(), &parameters);
    let outcome = muon.step(&parameters, &gradients(&parameters, 0.5), 0.5)?;
    // The gradient is the value itself.
    let all: f32 = start.iter().chain(&[1.0, -2.0]).map(|v| v * v).sum();
    assert!((outcome.grad_norm - f64::from(all).sqrt()).abs() < 1e-6);
    let c = 0.5 / (outcome.grad_norm + 1e-6);
    assert!((outcome.clip_factor - c).abs() < 1e-12 && (outcome.momentum - 0.85).abs() < 1e-12);
    let u: Vec<f32> = start.iter().map(|g| g * c as f32 * 1.85).collect();
    let x = longdraft_kernels::orthogonalise::orthogonalise(&u, 3, 2, Rule::NewtonSchulz);
    let rate = (0.5 * 0.04 * 1.5_f64.sqrt()) as f32;
    for ((got, start), x) in values(&parameters[0]).iter().zip(&start).zip(x) {
        assert!((got - (start - rate * x)).abs() < 1e-6, "{got}");
    }
    // Adam's first step is the rate along the sign.
    for (got, want) in values(&parameters[1]).iter().zip([1.0 - 0.025, -2.0 + 0.025]) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
    let saved = muon.state().clone();
    assert_eq!(saved.step, 1);
    let parallel = DataParallel::single(&parameters);
    Muon::with_state(config.clone(), &parallel, &parameters, saved.clone())?;
    let swapped = MuonState { tensors: saved.tensors.into_iter().rev().collect(), step: 1 };
    assert!(Muon::with_state(config, &parallel, &parameters, swapped).is_err());
    Ok(())
}

#[test]
fn factors_are_rounded_where_the_calling_thread_asks_for_it() -> Result<()> {
    let side = 256;
    let noise = (0..side * side).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 16) as f32);
    let start: Vec<f32> = noise.map(|value| value / 65_536.0 - 0.5).collect();
    let side = side as usize;
    let config = MuonConfig { momentum_warmup_steps: 0, ..MuonConfig::default() };
    let direction: Vec<f32> = start.iter().map(|g| g + 0.95 * g).collect();
    for rounded in [false, true] {
        let parameters = [parameter("blocks.0.mlp.fc.weight", &start, &[side, side])];
        let gradients = gradients(&parameters, 0.5);
        let mut muon = Muon::new(config.clone(), &parameters);
        with_rounded_products(rounded, || muon.step(&parameters, &gradients, 1.0))?;
        let rule = Rule::NewtonSchulz;
        let x = orthogonalise_on(&Device::Cpu, &direction, (side, side), rule, rounded)?;
        let of_both = values(&parameters[0]).into_iter().zip(&start).zip(x);
        let apart = of_both.map(|((got, start), x)| (got - (start - 0.04 * x)).abs());
        let apart = apart.fold(0.0, f32::max);
        assert!(apart < 1e-7, "rounded {rounded}: {apart}");
    }
    Ok(())
}

#[test]
fn decay_is_cautious_and_rows_can_be_normalised() -> Result<()> {
    let plain = MuonConfig { momentum_warmup_steps: 0, ..MuonConfig::default() };
    let run = |config: MuonConfig| -> Result<Vec<f32>> {
        let parameters = parameters();
        Muon::new(config, &parameters).step(&parameters, &gradients(&parameters, 0.5), 1.0)?;
        Ok(values(&parameters[0]))
    };
    let without = run(plain.clone())?;
    let with = run(MuonConfig { weight_decay: 1.0, ..plain.clone() })?;
    let start = values(&parameters()[0]);
    let mut decayed = 0;
    for ((with, without), start) in with.iter().zip(&without).zip(&start) {
        let outward = (start - without) * start > 0.0;
        let want = if outward { without - 0.04 * start } else { *without };
        assert!((with - want).abs() < 1e-6);
        decayed += usize::from(outward);
    }
    assert!(decayed > 0);
    let rows = run(MuonConfig { normalise_rows: true, ..plain })?;
    assert!(rows.iter().zip(&without).any(|(a, b)| (a - b).abs() > 1e-4));
    Ok(())
}

#[test]
fn zero_gradients_move_nothing_but_the_count() -> Result<()> {
    let parameters = parameters();
    let before: Vec<_> = parameters.iter().map(values).collect();
    let mut muon = Muon::new(MuonConfig::default(), &parameters);
    muon.step(&parameters, &Gradients::new(&parameters), 1.0)?;
    assert_eq!(muon.state().step, 1);
    assert_eq!(parameters.iter().map(values).collect::<Vec<_>>(), before);
    Ok(())
}
