//! How fast a draft trains here: a few steps of its own training.

use longdraft_parallel::World;
use longdraft_records::median;
use longdraft_train::stage::{Ending, Event};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::training::{heard, prepared};
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Steps that are timed, the first of which also makes room.
const STEPS: usize = 3;

/// What a training takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainingSpeed {
    /// Seconds of a token of training, and of the features of one.
    pub(crate) step: f64,
    pub(crate) capture: f64,
    /// Bytes of a token's features, and of the process in memory.
    pub(crate) features_of_token: f64,
    pub(crate) memory: u64,
}

/// Runs the first steps of a training of one row a step: `config` with fewer steps, its features in memory and
/// nothing held out. Its output holds a checkpoint afterwards.
pub(crate) fn timed(config: &Value, interrupts: &Interrupts) -> Result<TrainingSpeed> {
    let mut config = config.clone();
    let row_tokens = config["data"]["row_tokens"].as_u64().unwrap_or(0) as usize;
    if let Some(data) = config["data"].as_object_mut() {
        data.remove("held_out");
        data.insert("held_out_rows".into(), json!(0));
    }
    config["data"]["train"][0]["limit_tokens"] = json!(row_tokens * STEPS);
    config["train"] = json!({
        "rows_per_step": 1, "steps": STEPS, "features": "memory", "save_minutes": 0,
    });
    config["tracking"] = json!({ "report_to": [] });
    // Seconds of rows, a new one in every step, and of a token in the rest of a step.
    let (mut captured, mut steps) = (Vec::<f64>::new(), Vec::<f64>::new());
    let mut watch = heard(interrupts, |event| {
        if let Event::Step(report) = event {
            captured.push(report.capture_seconds);
            let own = report.seconds - report.capture_seconds;
            steps.push(own / report.tokens.max(1) as f64);
        }
    });
    let mut stage = prepared(&config, &mut watch)?;
    if stage.run(&mut watch)? == Ending::Stopped {
        return Err(interrupts.failure());
    }
    let (rows, tokens, _) = stage.data_sizes();
    let footprint = crate::commands::plan::features_of_row(&stage, &World::single()).unwrap_or(0);
    Ok(TrainingSpeed {
        // Without the first, which makes room.
        step: median(steps.get(1..).filter(|rest| !rest.is_empty()).unwrap_or(&steps)),
        // Rows are not full.
        capture: median(&captured) * rows as f64 / tokens.max(1) as f64,
        features_of_token: footprint as f64 / row_tokens.max(1) as f64,
        memory: longdraft_train::memory::resident_bytes().unwrap_or(0),
    })
}
