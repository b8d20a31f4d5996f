//! The target that stages share while it may stay open.

use std::sync::Arc;

use longdraft_models::target_model::{Layers, Target};
use longdraft_models::{DeviceChoice, Precision};
use longdraft_parallel::{Reduction, World};
use longdraft_train::config::TrainConfig;

use crate::commands::train;
use crate::failure::Result;

/// What has to be the same for stages to share an open target.
#[derive(PartialEq)]
struct OpenedAs {
    target: String,
    layers: Layers,
    is_spread: bool,
    ranks_a_layer: usize,
    /// Of a target that ranks hold together: how many of them share a row, what they exchange by, and for how long
    /// they wait.
    exchange: Option<(usize, Reduction, u64)>,
    device: DeviceChoice,
    precision: Precision,
}

impl OpenedAs {
    fn of(config: &TrainConfig, world: &World) -> Self {
        let parallel = &config.parallel;
        let exchange = (parallel.sequence, parallel.reduction, parallel.timeout_seconds);
        Self {
            target: config.target.clone(),
            layers: config.needed_layers(),
            is_spread: parallel.spreads_weights(world),
            ranks_a_layer: parallel.tensor,
            exchange: is_held_together(config, world).then_some(exchange),
            device: config.device,
            precision: config.precision,
        }
    }
}

/// Whether a stage's target runs on all ranks or none: it is spread or shared.
pub(super) fn is_held_together(config: &TrainConfig, world: &World) -> bool {
    config.parallel.spreads_weights(world) || config.parallel.tensor > 1
}

/// The target that is open, of one stage after the other.
#[derive(Default)]
pub(super) struct OpenTarget(Option<(OpenedAs, Arc<Target>)>);

impl OpenTarget {
    /// The target of a stage; one that is open otherwise is let go of first, since there may be no room for both.
    pub(super) fn of(&mut self, config: &TrainConfig, world: &World) -> Result<Arc<Target>> {
        let wanted = OpenedAs::of(config, world);
        let same = self.0.take().filter(|(opened_as, _)| *opened_as == wanted);
        let target = match same {
            Some((_, target)) => target,
            None => train::open_target(config, world)?,
        };
        self.0 = Some((wanted, Arc::clone(&target)));
        Ok(target)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn stages_share_a_target_that_is_loaded_the_same() {
        let opened_as = |more: Value| {
            let mut keys = json!({
                "target": "t", "output": "o", "data": { "train": [{ "path": "p" }] },
                "draft": { "method": "glide" },
            });
            for (key, value) in more.as_object().into_iter().flatten() {
                keys[key] = value.clone();
            }
            let config: TrainConfig = serde_json::from_value(keys).expect("a configuration");
            OpenedAs::of(&config, &World::single())
        };
        let slow = |tensor: usize, seconds: u64| {
            opened_as(json!({ "parallel": { "tensor": tensor, "timeout_seconds": seconds } }))
        };
        // How long ranks wait is no matter of a target that they do not exchange.
        assert!(slow(1, 60) == slow(1, 90) && slow(2, 60) != slow(2, 90));
        assert!(opened_as(json!({})) != opened_as(json!({ "precision": "f32" })));
    }
}
