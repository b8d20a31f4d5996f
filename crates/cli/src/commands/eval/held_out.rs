//! `longdraft eval held-out`: trained drafts on held-out rows, teacher-forced, side by side.

use std::path::PathBuf;

use longdraft_configuration::read_stage;
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_train::config::TrainConfig;
use longdraft_train::metrics::DelayCounts;
use longdraft_train::stage::{RowMetrics, measure_drafts};
use serde_json::{Value, json};

use crate::cli::{EvalHeldOutArguments, with_device};
use crate::commands::train::open_target;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;
use crate::terminal::counted;

/// Measures every draft on the same rows; differences are paired by row.
pub(crate) fn run(arguments: &EvalHeldOutArguments, json: bool) -> Result<()> {
    let changes = with_device(&arguments.overrides, arguments.device);
    let mut config = read_stage(&arguments.config, &changes)?;
    arguments.drafts.iter().try_for_each(|path| DraftSource::find(path).map(drop))?;
    // Drafts bring their weights: no layer of the target is wanted for initial ones.
    config.draft.from = arguments.drafts.first().cloned();
    let target = open_target(&config, &World::single())?;
    let tokenizer = Target::open_tokenizer(&config.target)?;
    let mut progress = TrainingProgress::new(Interrupts::default(), Voice::alone());
    let measured = measure_drafts(&config, &arguments.drafts, (&target, &tokenizer), &mut progress);
    let measured = measured.map_err(|error| {
        of_another_method(&config, &arguments.drafts).unwrap_or_else(|| error.into())
    })?;
    let rows = measured.first().map_or(0, RowMetrics::rows);
    if rows == 0 {
        return Err(Failure::usage("the configuration has no held-out rows")
            .hint("set data.held_out, or data.held_out_rows above 0"));
    }
    let names: Vec<String> =
        arguments.drafts.iter().map(|path| path.display().to_string()).collect();
    print(&names, &measured, config.data.row_tokens);
    if json {
        let drafts: Vec<Value> = names
            .iter()
            .zip(&measured)
            .map(|(name, rows)| record(name, rows, &measured[0]))
            .collect();
        outjson!({ "rows": rows, "row_tokens": config.data.row_tokens, "drafts": drafts });
    }
    Ok(())
}

/// What is said where a draft is of another method than the configuration.
fn of_another_method(config: &TrainConfig, drafts: &[PathBuf]) -> Option<Failure> {
    let own = config.draft.method.name();
    drafts.iter().find_map(|path| {
        let method = DraftSource::find(path).ok()?.method().ok()?;
        let path = path.display();
        let problem = format!("{path} is a draft of method {method}, the configuration's is {own}");
        let hint = "give drafts of one method, and the configuration of their run";
        (method != own).then(|| Failure::usage(problem).hint(hint))
    })
}

fn print(names: &[String], measured: &[RowMetrics], row_tokens: usize) {
    let first = &measured[0];
    outln!(
        "simulated acceptance length (greedy) over {} of up to {row_tokens} tokens, with 95 % \
         intervals (bootstrap over rows; differences row by row):",
        counted(first.rows(), "row")
    );
    for (index, (name, rows)) in names.iter().zip(measured).enumerate() {
        let (low, high) = rows.interval();
        outln!("  {name}: {:.3} [{low:.3}, {high:.3}]", rows.simulated_length());
        let rates = agreement(rows).map(|rate| format!("{:.1}", 100.0 * rate));
        outln!("    agreement by position: {} %", rates.collect::<Vec<_>>().join(" "));
        if index > 0 {
            let (gain, (low, high)) = rows.gain_over(first);
            outln!("    against the first: {gain:+.3} [{low:+.3}, {high:+.3}]");
        }
    }
}

fn agreement(rows: &RowMetrics) -> impl Iterator<Item = f64> {
    rows.total().by_delay.into_iter().map(|counts: DelayCounts| counts.top1_agreement())
}

fn record(name: &str, rows: &RowMetrics, first: &RowMetrics) -> Value {
    let (gain, interval) = rows.gain_over(first);
    let mut record = rows.total().to_json(rows.gamma());
    record.extend([
        ("draft".to_owned(), json!(name)),
        ("interval".to_owned(), json!(rows.interval())),
        ("lengths".to_owned(), json!(rows.simulated_lengths().collect::<Vec<_>>())),
        ("gain_over_first".to_owned(), json!({ "gain": gain, "interval": interval })),
    ]);
    Value::Object(record)
}
