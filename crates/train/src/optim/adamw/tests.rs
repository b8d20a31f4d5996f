use candle_core::Var;
use longdraft_kernels::dispatch::with_rounded_products;
use longdraft_kernels::graph::Backward;
use longdraft_kernels::orthogonalise::orthogonalise;

use super::*;

fn parameter(role: TensorRole, shape: &[usize]) -> Parameter {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| ((i * 7 % 11) as f32 - 4.0) / 8.0).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("tensor");
    let var = Var::from_tensor(&tensor).expect("variable");
    let name = format!("{role:?}.weight");
    Parameter { name, var, role, decay: shape.len() == 2, dead: false }
}

fn values(parameter: &Parameter) -> Vec<f32> {
    parameter.var.flatten_all().and_then(|t| t.to_vec1()).expect("values")
}

/// Values after one step with gradients that are the values themselves.
fn stepped(matrices: MatrixUpdate) -> Vec<Vec<f32>> {
    let parameters = [
        parameter(TensorRole::Layer, &[3, 2]),
        parameter(TensorRole::Embedding, &[3, 2]),
        parameter(TensorRole::Head, &[3, 2]),
        parameter(TensorRole::Layer, &[2]),
    ];
    let half = parameters.iter().map(|p| (p.var.sqr()? * 0.5)?.sum_all());
    let total = half.reduce(|a, b| a? + b?).expect("parameters").expect("sum");
    let mut gradients = Gradients::new(&parameters);
    gradients.add(&parameters, total.gradients().expect("backward")).expect("gradients");
    let config = AdamWConfig { matrices, clip_norm: 1e9, ..AdamWConfig::default() };
    AdamW::new(config, &parameters).step(&parameters, &gradients, 0.01).expect("a step");
    parameters.iter().map(values).collect()
}

#[test]
fn muon_moves_matrices_of_layers_by_the_formula_and_nothing_else() {
    let (plain, muon) = (stepped(MatrixUpdate::Adamw), stepped(MatrixUpdate::Muon));
    assert_eq!(plain[1..], muon[1..]);
    let start = values(&parameter(TensorRole::Layer, &[3, 2]));
    let direction: Vec<f32> = start.iter().map(|g| g * 1.95).collect();
    let x = orthogonalise(&direction, 3, 2, Rule::NewtonSchulz);
    for ((got, start), x) in muon[0].iter().zip(&start).zip(x) {
        let want = start * (1.0 - 0.01 * 0.1) - 0.01 * 0.2 * 3.0_f32.sqrt() * x;
        assert!((got - want).abs() < 1e-6, "{got} {want}");
    }
}

#[test]
fn muon_rounds_factors_where_the_calling_thread_asks_for_it() {
    let side = 256;
    let noise = (0..side * side).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 16) as f32);
    let start: Vec<f32> = noise.map(|value| value / 65_536.0 - 0.5).collect();
    let side = side as usize;
    let direction: Vec<f32> = start.iter().map(|g| g + 0.95 * g).collect();
    for rounded in [false, true] {
        let parameter = parameter(TensorRole::Layer, &[side, side]);
        let gradient = Tensor::from_slice(&start, (side, side), &Device::Cpu).expect("tensor");
        let before = values(&parameter);
        let total = (parameter.var.as_tensor() * gradient).and_then(|all| all.sum_all());
        let graph = total.expect("sum").gradients().expect("backward");
        let parameters = [parameter];
        let mut gradients = Gradients::new(&parameters);
        gradients.add(&parameters, graph).expect("gradients");
        let config =
            AdamWConfig { matrices: MatrixUpdate::Muon, clip_norm: 1e9, ..AdamWConfig::default() };
        let mut optimizer = AdamW::new(config, &parameters);
        with_rounded_products(rounded, || optimizer.step(&parameters, &gradients, 0.01))
            .expect("a step");
        let rule = Rule::NewtonSchulz;
        let x = orthogonalise_on(&Device::Cpu, &direction, (side, side), rule, rounded);
        let of_both = values(&parameters[0]).into_iter().zip(before).zip(x.expect("factor"));
        let apart = of_both.map(|((got, before), x)| {
            let want = before * (1.0 - 0.01 * 0.1) - 0.01 * 0.2 * (side as f32).sqrt() * x;
            (got - want).abs()
        });
        let apart = apart.fold(0.0, f32::max);
        assert!(apart < 1e-6, "rounded {rounded}: {apart}");
    }
}

/// First moments that [`AdamW::restore`] keeps where all were 2, with these second moments.
fn restored(matrices: MatrixUpdate, second: f32) -> Vec<f32> {
    let parameters = [TensorRole::Layer, TensorRole::Embedding, TensorRole::Head]
        .map(|role| parameter(role, &[3, 2]));
    let parallel = DataParallel::single(&parameters);
    let config = AdamWConfig { matrices, ..AdamWConfig::default() };
    let mut optimizer = AdamW::over(config, &parallel);
    let read = |kind, run: &Run| match kind {
        MomentKind::First => Ok(vec![2.0; run.len]),
        MomentKind::Second => Ok(vec![second; run.len]),
    };
    optimizer.restore(7, (&parallel, &parameters), read).expect("restored");
    let moment = |index| optimizer.moment(MomentKind::First, index).expect("a moment")[0];
    (0..3).map(moment).collect()
}

#[test]
fn what_muon_once_updated_begins_anew_under_adamw() {
    assert_eq!(restored(MatrixUpdate::Muon, 0.0), [2.0, 0.0, 0.0]);
    assert_eq!(restored(MatrixUpdate::Muon, 0.5), [2.0; 3]);
    assert_eq!(restored(MatrixUpdate::Adamw, 0.0), [0.0; 3]);
    assert_eq!(restored(MatrixUpdate::Adamw, 0.5), [2.0; 3]);
}
