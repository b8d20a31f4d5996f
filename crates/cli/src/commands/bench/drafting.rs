//! Steps of a draft: from drawn features, or with the target online.

use candle_core::Tensor;
use longdraft_features::{BatchFeatures, run_target};
use longdraft_models::TargetConfig;
use longdraft_models::draft::Parameter;
use longdraft_models::target_model::Target;
use longdraft_parallel::Gradients;
use longdraft_train::objective::Objective;
use longdraft_train::optim::{AdamW, AdamWConfig};

use super::clock::{Timed, time};
use super::{Place, shape};
use crate::cli::benchmarking::RowsArguments;
use crate::failure::{Failure, Result};

/// Where a draft of some sizes learns, and from what.
pub(super) struct Setting<'a, S> {
    rows: &'a RowsArguments,
    pub(super) place: Place,
    pub(super) config: TargetConfig,
    pub(super) sizes: S,
    /// Runs in every step, where it does.
    target: Option<Target>,
    pub(super) tables: shape::Tables,
}

impl<'a, S> Setting<'a, S> {
    /// For a draft of these `sizes` for the target.
    pub(super) fn open(
        rows: &'a RowsArguments,
        online: bool,
        sizes: impl FnOnce(&TargetConfig) -> Result<S>,
    ) -> Result<Self> {
        let place = Place::open(&rows.bench)?;
        let config = shape::config(&rows.shape.shape, rows.shape.layers)?;
        let sizes = sizes(&config)?;
        let target = online.then(|| shape::target(&rows.shape, &place)).transpose()?;
        let tables = shape::Tables::of(&config, target.as_ref(), &place)?;
        Ok(Self { rows, place, config, sizes, target, tables })
    }

    /// Times steps on rows of `tokens` tokens at a learning rate. Without a target, `draw` gives features as a
    /// store would.
    pub(super) fn steps(
        &self,
        objective: &dyn Objective,
        (optimizer, rate): (AdamWConfig, f64),
        tokens: usize,
        draw: impl Fn() -> Result<BatchFeatures>,
    ) -> Result<Timed> {
        let parameters = objective.draft().parameters();
        let mut optimizer = AdamW::new(optimizer, parameters);
        let prepare = |step| -> Result<(_, Option<BatchFeatures>)> {
            let given = self.target.is_none().then(&draw).transpose()?;
            Ok((shape::batch(tokens, step, self.config.vocab_size), given))
        };
        time(&self.place, &self.rows.bench, prepare, |(batch, given)| {
            let features = match (given, &self.target) {
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
        gradients.add_of(parameters, &loss)?;
        Ok((loss.detach(), gradients))
    })?;
    optimizer.step(parameters, &gradients, rate)?;
    Ok(loss)
}
