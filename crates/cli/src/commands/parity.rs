//! `longdraft parity`: reference cases recomputed on this build.

use std::path::{Path, PathBuf};

use longdraft_parity::{CaseReport, ParityError, Place, run_case};

use super::kernel_check::summarise;
use crate::cli::ParityArguments;
use crate::failure::{Failure, Result};

/// Runs every case; fails if one does not hold. A case that cannot be computed counts as one that does
/// not; where it is the only one, its error is the command's.
pub(crate) fn run(arguments: &ParityArguments, json: bool) -> Result<()> {
    let mut folders = Vec::new();
    for path in &arguments.cases {
        collect_cases(path, &mut folders)?;
    }
    let place = Place::new(arguments.device.open(0)?, arguments.precision);
    let mut passed = 0;
    for folder in &folders {
        match run_case(folder, arguments.target.as_deref(), &place).map_err(Failure::from) {
            Ok(report) => {
                print_report(&report, json);
                passed += usize::from(report.pass());
            }
            Err(failure) if folders.len() == 1 => return Err(failure),
            Err(failure) => print_failure(folder, &failure, json),
        }
    }
    summarise((folders.len(), passed), "cases", json)
}

impl From<ParityError> for Failure {
    fn from(error: ParityError) -> Self {
        let hint = error.hint();
        let failure: Self = match error {
            ParityError::Model(error) => error.into(),
            ParityError::Data(error) => error.into(),
            ParityError::Train(error) => error.into(),
            ParityError::OtherWeights { .. } => Self::work(error),
            _ => Self::usage(error),
        };
        failure.hinted(hint)
    }
}

/// A folder with a `meta.json`, or all such folders below it.
fn collect_cases(path: &Path, cases: &mut Vec<PathBuf>) -> Result<()> {
    let is_case = |folder: &PathBuf| folder.join("meta.json").is_file();
    let itself = path.to_path_buf();
    let mut found = if is_case(&itself) {
        vec![itself]
    } else {
        let entries = std::fs::read_dir(path)
            .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
        entries.flatten().map(|entry| entry.path()).filter(is_case).collect()
    };
    if found.is_empty() {
        return Err(Failure::usage(format!("{}: no meta.json is there", path.display()))
            .hint("a case is a folder with meta.json and its tensors"));
    }
    found.sort();
    cases.append(&mut found);
    Ok(())
}

/// A case that could not be computed.
fn print_failure(folder: &Path, failure: &Failure, json: bool) {
    let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy();
    if json {
        let error = failure.to_json()["error"].take();
        outjson!({"case": name, "kind": null, "pass": false, "error": error});
        return;
    }
    outln!("FAIL {name}: it could not be computed");
    failure.print();
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
