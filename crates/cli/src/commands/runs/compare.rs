//! Runs side by side.

use longdraft_report::{Run, StageSummary, differences};
use serde_json::json;

use super::print;
use crate::cli::RunsCompareArguments;
use crate::failure::Result;
use crate::terminal::written_out;

/// Prints figures of every stage, and the keys in which the configurations differ.
pub(super) fn run(arguments: &RunsCompareArguments, json: bool) -> Result<()> {
    let runs = Run::open_all(&arguments.runs)?;
    let stages: Vec<StageSummary> = runs.iter().flat_map(StageSummary::of_run).collect();
    let (names, differing) = differences(&runs);
    let decoded = || {
        let cells = runs.iter().filter_map(|run| Some((run, run.decoding.as_ref()?)));
        cells.flat_map(|(run, record)| record.cells.iter().map(move |cell| (run, cell)))
    };
    if json {
        let cells = decoded().map(|(run, cell)| json!({ "run": run.name, "cell": cell }));
        let cells: Vec<_> = cells.collect();
        outjson!({ "stages": stages, "decoding": cells, "names": names, "differences": differing });
        return Ok(());
    }
    if !stages.is_empty() {
        let titles = ["run", "steps", "tokens", "loss", "held-out loss", "length", "tok/s"];
        let mut rows = vec![titles.map(String::from)];
        rows.extend(stages.iter().map(|stage| {
            [
                stage.name.clone(),
                stage.steps.to_string(),
                stage.tokens.to_string(),
                shown(stage.final_loss),
                shown(stage.held_out_loss),
                shown(stage.simulated_acceptance_length),
                stage.median_tokens_per_second.map_or_else(String::new, |s| format!("{s:.0}")),
            ]
        }));
        print(&rows);
    }
    for (run, cell) in decoded() {
        outln!(
            "{}: {}, {}, temperature {}: tau {:.3}, {:.2} times as fast",
            run.name,
            cell.drafter,
            cell.rule,
            cell.temperature,
            cell.figures.tau_incl_bonus,
            cell.figures.speed_up
        );
    }
    if names.len() > 1 {
        outln!("keys that differ ({}):", names.join(", "));
        for difference in &differing {
            let values: Vec<String> =
                difference.values.iter().map(|value| written_out(value, &[])).collect();
            outln!("  {}: {}", difference.key, values.join(" | "));
        }
    }
    Ok(())
}

fn shown(figure: Option<f64>) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.3}"))
}
