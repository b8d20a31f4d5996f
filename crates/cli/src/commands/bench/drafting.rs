//! Steps of a draft: from drawn features, or with the target online.

use candle_core::Tensor;
use longdraft_features::{BatchFeatures, run_target};
use longdraft_kernels::graph::Backward;
use longdraft_models::TargetConfig;
use longdraft_models::draft::Parameter;
use longdraft_models::target_model::Target;
use longdraft_parallel::Gradients;
use longdraft_train::objective::Objective;
use longdraft_train::optim::{AdamW, AdamWConfig};

use super::clock::{Timed, time};
use super::{Place, shape};
use crate::cli::BenchArguments;
use crate::failure::{Failure, Result};

/// Times steps on rows of `tokens` tokens at a learning rate. Without a target, `draw` gives features as a
/// store would.
pub(super) fn steps(
    (place, arguments): (&Place, &BenchArguments),
    objective: &dyn Objective,
    (optimizer, rate): (AdamWConfig, f64),
    (config, target, tokens): (&TargetConfig, Option<&Target>, usize),
    draw: impl Fn() -> Result<BatchFeatures>,
) -> Result<Timed> {
    let parameters = objective.draft().parameters();
    let mut optimizer = AdamW::new(optimizer, parameters);
    let prepare = |step| -> Result<(_, Option<BatchFeatures>)> {
        let given = target.is_none().then(&draw).transpose()?;
        Ok((shape::batch(tokens, step, config.vocab_size), given))
    };
    time(place, arguments, prepare, |(batch, given)| {
        let features = match (given, target) {
            (None, Some(target)) => run_target(target, &batch, None, &objective.needs())?,
            (given, _) => given.ok_or_else(|| Failure::work("no features were drawn"))?,
        };
        let prepared = objective.prepare(&batch, &features)?;
        let denominators = &prepared.denominators;
        let loss = || {
            let share = objective.share(&batch, &features, &prepared, denominators, true)?;
            share.loss.ok_or_else(|| Failure::work("no row is learned"))
        };
        update(parameters, &mut optimizer, rate, loss).map(Some)
    })
}

/// An update of parameters by a loss, which it returns.
pub(super) fn update(
    parameters: &[Parameter],
    optimizer: &mut AdamW,
    rate: f64,
    loss: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let (loss, gradients) = optimizer.written().with(|| -> Result<_> {
        let loss = loss()?;
        let mut gradients = Gradients::new(parameters);
        gradients.add(parameters, loss.gradients()?)?;
        Ok((loss.detach(), gradients))
    })?;
    optimizer.step(parameters, &gradients, rate)?;
    Ok(loss)
}
