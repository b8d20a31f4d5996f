//! `longdraft parity`: reference cases recomputed on this build.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::cli::ParityArguments;
use crate::failure::{Failure, Result};
use crate::parity::{CaseReport, run_case};

/// Runs every case; fails if one does not hold.
pub(crate) fn run(arguments: &ParityArguments, json: bool) -> Result<()> {
    let mut folders = Vec::new();
    for path in &arguments.cases {
        collect_cases(path, &mut folders)?;
    }
    let device = arguments.device.open(0)?;
    let mut reports = Vec::new();
    for folder in &folders {
        let report = run_case(folder, arguments.target.as_deref(), &device)?;
        print_report(&report, json);
        reports.push(report);
    }
    let passed = reports.iter().filter(|report| report.pass()).count();
    let all = passed == reports.len();
    if json {
        outln!("{}", json!({"cases": reports.len(), "passed": passed, "pass": all}));
    } else {
        outln!("{passed} of {} cases passed", reports.len());
    }
    if all {
        Ok(())
    } else {
        Err(Failure::work(format!("{} cases failed", reports.len() - passed)).in_result())
    }
}

/// A folder with a `meta.json`, or all such folders below it.
fn collect_cases(path: &Path, cases: &mut Vec<PathBuf>) -> Result<()> {
    if path.join("meta.json").is_file() {
        cases.push(path.to_path_buf());
        return Ok(());
    }
    let entries = std::fs::read_dir(path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let mut folders: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    let before = cases.len();
    for folder in folders {
        if folder.join("meta.json").is_file() {
            cases.push(folder);
        }
    }
    if cases.len() == before {
        return Err(Failure::usage(format!("{}: no meta.json is there", path.display()))
            .hint("a case is a folder with meta.json and its tensors"));
    }
    Ok(())
}

fn print_report(report: &CaseReport, json: bool) {
    if json {
        outln!("{}", report.to_json());
        return;
    }
    let verdict = if report.pass() { "pass" } else { "FAIL" };
    outln!("{verdict} {} ({})", report.case, report.kind);
    for check in &report.checks {
        let mark = if check.pass() { " " } else { "x" };
        outln!(
            "  {mark} {:<44} error {:.2e}  tolerance {:.0e}",
            check.name,
            check.error,
            check.tolerance
        );
    }
}
