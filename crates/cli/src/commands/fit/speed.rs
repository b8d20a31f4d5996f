//! How fast a draft trains here: a few steps of its own training.

use std::cell::Cell;
use std::time::Instant;

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
    // Seconds of rows, and of a token in steps.
    let (mut captured, mut steps) = (Vec::<f64>::new(), Vec::<f64>::new());
    let last: Cell<Option<Instant>> = Cell::new(None);
    let mut watch = heard(interrupts, |event| match event {
        Event::Captured(..) => {
            let before = last.replace(Some(Instant::now()));
            captured.extend(before.map(|before| before.elapsed().as_secs_f64()));
        }
        Event::Step(report) => steps.push(report.seconds / report.tokens.max(1) as f64),
        _ => {}
    });
    let mut stage = prepared(&config, &mut watch)?;
    last.set(Some(Instant::now()));
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
