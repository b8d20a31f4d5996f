//! The stages of a curriculum: run in order, finished ones skipped, drafts handed on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_models::target::{Layers, Target};
use longdraft_train::curriculum::{CurriculumFile, StageEntry, StartFrom};
use longdraft_train::stage::{Ending, Evaluator, ResumePolicy};
use serde_json::{Value, json};

use crate::commands::{report, train};
use crate::configuration::LocatedStage;
use crate::failure::Result;
use crate::progress::{TrainingProgress, stop_on_interrupt};

/// A target's name and which of its layers are loaded.
type OpenedAs = (String, Layers);

/// Held-out figures of every stage's draft (rows) on every stage's text (columns).
const TABLE_FILE: &str = "held_out.json";

/// Runs every stage; a second call goes on where the first one stopped.
pub(crate) fn run(
    output: &Path,
    stages: Vec<LocatedStage>,
    policy: ResumePolicy,
    json: bool,
) -> Result<()> {
    describe(output, &stages).write(output)?;
    let stop = stop_on_interrupt();
    let mut target: Option<(OpenedAs, Arc<Target>)> = None;
    let mut evaluators: Vec<(String, Evaluator)> = Vec::new();
    let mut before: Option<PathBuf> = None;
    let count = stages.len();
    for (index, stage) in stages.into_iter().enumerate() {
        let LocatedStage { name, start_from, located } = stage;
        let mut config = located.config;
        if let Some(before) = &before
            && let Some(checkpoint) = start_from.checkpoint(before)?
        {
            config.draft.from = Some(checkpoint);
        }
        let opened_as = (config.target.clone(), train::layers(&config));
        let opened = match target.take() {
            Some((other, opened)) if other == opened_as => opened,
            _ => train::open_target(&config)?,
        };
        let from = match (&before, start_from) {
            (Some(_), StartFrom::Last) => "from the last draft of the stage before",
            (Some(_), StartFrom::Best) => "from the best draft of the stage before",
            _ => "from its own start",
        };
        eprintln!("stage {}/{count} {name}, {from}", index + 1);
        let mut progress = TrainingProgress::new(Arc::clone(&stop));
        let run = config.output.clone();
        let (ending, trained) = train::train(config, &opened, policy, &mut progress)?;
        if ending == Ending::Stopped {
            println!("stopped in stage {name}: the same command goes on from there");
            return Ok(());
        }
        evaluators.push((name, trained.into_evaluator()));
        target = Some((opened_as, opened));
        before = Some(run);
    }
    let table = table(&evaluators)?;
    print_table(&evaluators, &table);
    let record = record(&evaluators, &table);
    let path = output.join(TABLE_FILE);
    std::fs::write(&path, format!("{record:#}\n"))
        .map_err(|error| crate::failure::Failure::work(format!("{}: {error}", path.display())))?;
    let page = report::write_page(output)?;
    if json {
        println!(
            "{}",
            json!({ "output": output, "finished": true, "report": page, "held_out": record })
        );
    } else {
        println!(
            "done, plots: {}; write the draft with `longdraft extract {}`",
            page.display(),
            before.unwrap_or_default().display()
        );
    }
    Ok(())
}

/// Names and folders of the stages, relative where they lie inside.
fn describe(output: &Path, stages: &[LocatedStage]) -> CurriculumFile {
    let entry = |stage: &LocatedStage| {
        let folder = &stage.located.config.output;
        let inside = folder.strip_prefix(output).unwrap_or(folder);
        StageEntry { name: stage.name.clone(), output: inside.to_path_buf() }
    };
    CurriculumFile { stages: stages.iter().map(entry).collect() }
}

/// Greedy simulated acceptance length with its 95 % bootstrap interval.
#[derive(Clone, Copy)]
struct Cell {
    length: f64,
    low: f64,
    high: f64,
}

/// Every draft on every stage's held-out rows.
fn table(evaluators: &[(String, Evaluator)]) -> Result<Vec<Vec<Cell>>> {
    let mut rows = Vec::new();
    for (_, draft) in evaluators {
        let mut row = Vec::new();
        for (_, text) in evaluators {
            let metrics = draft.on_rows_of(text)?;
            let (low, high) = metrics.interval();
            row.push(Cell { length: metrics.simulated_length(), low, high });
        }
        rows.push(row);
    }
    Ok(rows)
}

fn print_table(evaluators: &[(String, Evaluator)], table: &[Vec<Cell>]) {
    println!("simulated acceptance length (greedy, 95 % interval) of each stage's draft on each");
    println!("stage's held-out rows:");
    print!("{:>16}", "draft \\ text");
    evaluators.iter().for_each(|(name, _)| print!("  {name:>22}"));
    println!();
    for ((name, _), row) in evaluators.iter().zip(table) {
        print!("{name:>16}");
        for Cell { length, low, high } in row {
            let cell = format!("{length:.3} [{low:.3}, {high:.3}]");
            print!("  {cell:>22}");
        }
        println!();
    }
}

fn record(evaluators: &[(String, Evaluator)], table: &[Vec<Cell>]) -> Value {
    let names: Vec<&str> = evaluators.iter().map(|(name, _)| name.as_str()).collect();
    let cells: Vec<Vec<Value>> = table
        .iter()
        .map(|row| {
            let cell = |cell: &Cell| {
                json!({ "simulated_length": cell.length, "interval": [cell.low, cell.high] })
            };
            row.iter().map(cell).collect()
        })
        .collect();
    json!({ "stages": names, "by_draft": cells })
}
