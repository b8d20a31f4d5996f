//! `longdraft runs`: what runs there are, how they compare, and an end to some.

mod compare;
mod delete;
mod found;

use longdraft_models::disk::readable_bytes;
use longdraft_records::decode::date_of;

use crate::cli::{RunsCommand, RunsListArguments};
use crate::failure::{Failure, Result};
use crate::terminal::counted;
pub(super) use found::size_below;
use found::{Found, below};

/// Lists, compares or deletes.
pub(super) fn run(command: &RunsCommand, json: bool) -> Result<()> {
    match command {
        RunsCommand::List(list) => tell(list, json),
        RunsCommand::Compare(compare) => compare::run(compare, json),
        RunsCommand::Delete(delete) => delete::run(delete, json),
    }
}

fn tell(arguments: &RunsListArguments, json: bool) -> Result<()> {
    let folder = &arguments.folder;
    if !folder.is_dir() {
        return Err(Failure::usage(format!("{}: no such folder", folder.display()))
            .hint("give the folder that runs lie in, or one run"));
    }
    let runs = below(folder)?;
    if json {
        let rows: Vec<_> = runs.iter().map(Found::to_json).collect();
        let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
        let folder = folder.to_string_lossy();
        outjson!({ "folder": folder, "bytes": bytes, "runs": rows });
        return Ok(());
    }
    if runs.is_empty() {
        outln!("{}: no runs", folder.display());
        return Ok(());
    }
    let mut rows =
        vec![["run", "state", "steps", "tau", "size", "changed (UTC)"].map(String::from)];
    rows.extend(runs.iter().map(|run| {
        [
            run.folder.display().to_string(),
            run.state.to_string(),
            run.progress(),
            run.tau.map_or_else(String::new, |tau| format!("{tau:.2}")),
            readable_bytes(run.bytes),
            run.changed.map_or_else(String::new, date_of),
        ]
    }));
    print(&rows);
    let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
    outln!("{}, {}", counted(runs.len(), "run"), readable_bytes(bytes));
    Ok(())
}

/// Columns, the first one to the left.
fn print<const N: usize>(rows: &[[String; N]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or_default()).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        outln!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
