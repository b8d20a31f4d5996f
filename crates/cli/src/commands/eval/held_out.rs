//! `longdraft eval held-out`: trained drafts on held-out rows, teacher-forced, side by side.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;

use longdraft_configuration::read_stage;
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_train::config::TrainConfig;
use longdraft_train::metrics::DelayCounts;
use longdraft_train::stage::{RowMetrics, measure_at_places};
use serde_json::{Value, json};

use crate::cli::{EvalHeldOutArguments, with_device};
use crate::commands::train::open_target;
use crate::draft_source::{DraftSource, configuration};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;
use crate::terminal::counted;

/// Measures every draft on the same rows; differences are paired by row.
pub(crate) fn run(arguments: &EvalHeldOutArguments, json: bool) -> Result<()> {
    let changes = with_device(&arguments.overrides, arguments.device);
    let mut config = read_stage(&arguments.config, &changes)?;
    for path in &arguments.drafts {
        let draft = DraftSource::find(path)?;
        if let Some(told) = draft.run().and_then(|run| trained_on(&config, &configuration(run))) {
            errln!("warning: {}: {told}", path.display());
        }
    }
    let contexts = ranges(&arguments.contexts, config.data.row_tokens)?;
    // Drafts bring their weights: no layer of the target is wanted for initial ones.
    config.draft.from = arguments.drafts.first().cloned();
    let target = open_target(&config, &World::single())?;
    let tokenizer = Target::open_tokenizer(&config.target)?;
    let mut progress = TrainingProgress::new(Interrupts::default(), Voice::alone());
    let places: Vec<_> = std::iter::once(None).chain(contexts.iter().cloned().map(Some)).collect();
    let of_target = (&target, &tokenizer);
    let measured = measure_at_places(&config, &arguments.drafts, &places, of_target, &mut progress);
    let mut measured = measured.map_err(|error| {
        of_another_method(&config, &arguments.drafts).unwrap_or_else(|| error.into())
    })?;
    let by_context = measured.split_off(1);
    let measured = measured.pop().unwrap_or_default();
    let rows = measured.first().map_or(0, RowMetrics::rows);
    if rows == 0 {
        return Err(Failure::usage("the configuration has no held-out rows")
            .hint("set data.held_out, or data.held_out_rows above 0"));
    }
    let names: Vec<String> =
        arguments.drafts.iter().map(|path| path.display().to_string()).collect();
    print(&names, &measured, config.data.row_tokens);
    let by_context: Vec<_> = contexts.iter().zip(&by_context).collect();
    print_contexts(&names, &by_context);
    if json {
        let records = |measured: &[RowMetrics]| -> Vec<Value> {
            let drafts = names.iter().zip(measured);
            drafts.map(|(name, rows)| record(name, rows, &measured[0])).collect()
        };
        let of_context = |(tokens, measured): &(&Range<usize>, &Vec<RowMetrics>)| {
            let rows = measured[0].rows();
            json!({ "from": tokens.start, "to": tokens.end, "rows": rows, "drafts": records(measured) })
        };
        let contexts: Vec<Value> = by_context.iter().map(of_context).collect();
        outjson!({
            "rows": rows, "row_tokens": config.data.row_tokens, "drafts": records(&measured),
            "by_context": contexts,
        });
    }
    Ok(())
}

/// What `--contexts` asks for: from 0 to the first number, from there to the second, and so on.
fn ranges(bounds: &[NonZeroUsize], row_tokens: usize) -> Result<Vec<Range<usize>>> {
    let starts = std::iter::once(0).chain(bounds.iter().map(|bound| bound.get()));
    let ranges: Vec<_> = starts.zip(bounds).map(|(start, end)| start..end.get()).collect();
    if ranges.iter().any(Range::is_empty) {
        return Err(Failure::usage("the numbers of --contexts do not rise")
            .hint("give the smallest first: --contexts 512,2048,8192"));
    }
    match ranges.last() {
        Some(last) if last.start >= row_tokens => {
            let problem = format!("no row reaches {} tokens, rows have {row_tokens}", last.start);
            Err(Failure::usage(problem).hint("set data.row_tokens, or leave that context out"))
        }
        _ => Ok(ranges),
    }
}

/// What is said where rows are held out now that the run kept for its training.
fn trained_on(config: &TrainConfig, run: &Value) -> Option<String> {
    let (now, then) = (&config.data, &run["data"]);
    let source = now.train.first()?.path.to_str()?;
    if !now.held_out.is_empty() || then["train"][0]["path"].as_str() != Some(source) {
        return None;
    }
    let number = |name: &str| then[name].as_u64().unwrap_or(0);
    let is_split = then["held_out"].as_array().is_none_or(Vec::is_empty);
    let rows = if is_split { number("held_out_rows") } else { 0 };
    let kept = rows.saturating_mul(number("row_tokens")).max(number("reserved_tokens"));
    (now.held_out_rows.saturating_mul(now.row_tokens) as u64 > kept).then(|| {
        format!(
            "may have been trained on some of these held-out rows: its run kept {kept} tokens of that text aside; give \
             the run's data.held_out, data.held_out_rows and data.row_tokens, or other text in data.held_out"
        )
    })
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

fn print_contexts(names: &[String], by_context: &[(&Range<usize>, &Vec<RowMetrics>)]) {
    if by_context.is_empty() {
        return;
    }
    outln!("the same by the tokens of text before a token:");
    for (tokens, measured) in by_context {
        let rows = counted(measured[0].rows(), "row");
        outln!("  {} to {} ({rows}):", tokens.start, tokens.end);
        for (name, rows) in names.iter().zip(*measured) {
            if rows.rows() == 0 {
                outln!("    {name}: no text is that long");
                continue;
            }
            let (low, high) = rows.interval();
            outln!("    {name}: {:.3} [{low:.3}, {high:.3}]", rows.simulated_length());
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
