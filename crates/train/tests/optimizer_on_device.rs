//! AdamW where parameters lie, against AdamW on the host. A CPU whose ops are composed stands in for a
//! GPU; the choice holds for the process, so this file has one test.

use candle_core::{Device, Result, Tensor, Var};
use longdraft_kernels::dispatch::{Ops, set_ops};
use longdraft_kernels::graph::Backward;
use longdraft_models::draft::Parameter;
use longdraft_models::weights::TensorRole;
use longdraft_parallel::DataParallel;
use longdraft_parallel::Gradients;
use longdraft_train::optim::{AdamW, AdamWConfig, MomentKind};

fn parameters() -> Result<Vec<Parameter>> {
    let shapes: [&[usize]; 3] = [&[5, 4], &[7], &[2, 3]];
    let parameter = |(i, shape): (usize, &&[usize])| {
        let count: usize = shape.iter().product();
        let values: Vec<f32> =
            (0..count).map(|j| ((i * 5 + j * 7) % 11) as f32 / 8.0 - 0.5).collect();
        let var = Var::from_tensor(&Tensor::from_vec(values, *shape, &Device::Cpu)?)?;
        let (name, role) = (format!("p{i}"), TensorRole::Layer);
        Ok(Parameter { name, var, role, decay: shape.len() == 2, dead: false })
    };
    shapes.iter().enumerate().map(parameter).collect()
}

/// Gradients that are the values themselves; the last parameter gets none.
fn gradients(parameters: &[Parameter]) -> Gradients {
    let half = parameters[..2].iter().map(|p| (p.var.sqr()? * 0.5)?.sum_all());
    let total = half.reduce(|a, b| a? + b?).expect("parameters").expect("sum");
    let mut gradients = Gradients::new(parameters);
    gradients.add(parameters, total.gradients().expect("backward")).expect("gradients");
    // Micro-batches add up.
    gradients.add_of(parameters, &total).expect("gradients");
    gradients
}

fn state(parameters: &[Parameter], optimizer: &AdamW) -> Vec<Vec<f32>> {
    let values = parameters.iter().map(|p| p.var.flatten_all()?.to_vec1());
    let mut all: Vec<Vec<f32>> = values.collect::<Result<_>>().expect("values");
    for kind in MomentKind::ALL {
        for index in 0..parameters.len() {
            all.push(optimizer.moment(kind, index).expect("moment").into_owned());
        }
    }
    all
}

#[test]
fn steps_on_a_device_are_those_on_the_host() -> Result<()> {
    let config = AdamWConfig { clip_norm: 2.0, ..AdamWConfig::default() };
    let (on_host, on_device) = (parameters()?, parameters()?);
    let mut host = AdamW::new(config.clone(), &on_host);
    let mut device = AdamW::new(config.clone(), &on_device);
    for step in 0..4 {
        set_ops(Ops::Fused);
        let norm = host.step(&on_host, &gradients(&on_host), 0.02).expect("step");
        set_ops(Ops::Composed);
        let own = device.step(&on_device, &gradients(&on_device), 0.02).expect("step");
        assert!((own - norm).abs() < 1e-5 * norm, "{own} against {norm}");
        let (got, want) = (state(&on_device, &device), state(&on_host, &host));
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.len(), want.len());
            for (a, b) in got.iter().zip(want) {
                assert!((a - b).abs() < 1e-6, "step {step}: {a} against {b}");
            }
        }
        if step == 1 {
            // What was saved goes on alike.
            let saved = std::mem::replace(&mut device, AdamW::new(config.clone(), &on_device));
            let read = |kind, run: &longdraft_parallel::Run| {
                Ok(saved.moment(kind, run.parameter)?.into_owned())
            };
            let spread = DataParallel::single(&on_device);
            device.restore(saved.steps(), (&spread, &on_device), read).expect("restored");
        }
    }
    Ok(())
}
