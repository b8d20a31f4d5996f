//! `longdraft report`: training runs as one HTML page.

use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically;
use longdraft_report::{REPORT_FILE, ReportError, Run, StageSummary, render};

use crate::cli::ReportArguments;
use crate::failure::{Failure, Result};

/// Skipped lines that are told on the terminal.
const TOLD_PROBLEMS: usize = 20;

/// Writes the page.
pub(crate) fn run(arguments: &ReportArguments, json: bool) -> Result<()> {
    let runs = Run::open_all(&arguments.runs)?;
    let output = match &arguments.output {
        Some(output) => output.clone(),
        None => runs[0].folder.join(REPORT_FILE),
    };
    tell_problems(&runs);
    let page = render(&runs)?;
    write(&output, &page)?;
    if json {
        let rows: Vec<StageSummary> = runs.iter().flat_map(StageSummary::of_run).collect();
        let problems: usize = runs.iter().map(|run| run.problems.len()).sum();
        let output = output.to_string_lossy();
        outjson!({"output": output, "stages": rows, "skipped": problems});
    } else {
        outln!("wrote {}", output.display());
    }
    Ok(())
}

/// Writes the page of one run, fit or curriculum into its folder; returns where it stands.
pub(crate) fn write_page(folder: &Path) -> Result<PathBuf> {
    let runs = Run::open_all(&[folder.to_path_buf()])?;
    let output = folder.join(REPORT_FILE);
    write(&output, &render(&runs)?)?;
    Ok(output)
}

impl From<ReportError> for Failure {
    fn from(error: ReportError) -> Self {
        let hint = error.hint();
        let failure = match error {
            ReportError::NoRuns(_) => Self::usage(error),
            _ => Self::work(error),
        };
        failure.hinted(hint)
    }
}

fn tell_problems(runs: &[Run]) {
    let problems: Vec<&String> = runs.iter().flat_map(|run| &run.problems).collect();
    for problem in problems.iter().take(TOLD_PROBLEMS) {
        errln!("warning: skipped {problem}");
    }
    if problems.len() > TOLD_PROBLEMS {
        errln!("warning: skipped {} more", problems.len() - TOLD_PROBLEMS);
    }
}

fn write(output: &Path, page: &str) -> Result<()> {
    let written = if output.file_name().is_none() {
        Err(Failure::at(output)("no file name"))
    } else if output.is_dir() {
        Err(Failure::at(output)("is a directory"))
    } else {
        write_atomically(output, page.as_bytes()).map_err(Failure::work)
    };
    written.map_err(|failure| failure.hint("name another file with --output FILE"))
}
