//! What tests of several terms measure.

use longdraft_models::published::published_config;
use longdraft_train::config::TrainConfig;
use serde_json::{Value, json};

use crate::target::{ForwardPass, States};
use crate::{Layout, Workload};

/// The training of a draft of Qwen3-8B by a method; `given` holds what sections of the configuration say beside that.
pub(crate) fn workload(method: &str, given: &Value, layout: Layout) -> Workload {
    let mut config = json!({
        "target": "t", "output": "o", "data": { "train": [{ "path": "p" }] },
        "draft": { "method": method },
    });
    for (section, values) in given.as_object().into_iter().flatten() {
        for (key, value) in values.as_object().into_iter().flatten() {
            config[section][key] = value.clone();
        }
    }
    let config: TrainConfig = serde_json::from_value(config).expect("a configuration");
    let target = published_config("Qwen/Qwen3-8B").expect("a published target");
    Workload::new(&config, target, layout).expect("sizes that fit")
}

/// A pass of one token over whole layers.
pub(crate) fn pass(states: States) -> ForwardPass {
    let (parts, tensor, tapped) = (1, 1, 0);
    ForwardPass { tokens: 1, parts, tensor, tapped, finishes: true, states, taps_keys: false }
}
