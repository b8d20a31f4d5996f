//! An end to runs: with a question, and never to what is no run or is being worked in.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use longdraft_models::disk::readable_bytes;
use longdraft_train::checkpoint::{RunLock, stages};

use super::found::{Found, State};
use crate::cli::RunsDeleteArguments;
use crate::commands::remove_folder;
use crate::failure::{Failure, Result};
use crate::terminal::counted;

/// Folders above a run that may hold it: the stage of a training of a fit has two.
const ABOVE: usize = 2;

/// Deletes after a question; nothing is deleted if one of the folders is refused.
pub(super) fn run(arguments: &RunsDeleteArguments, json: bool) -> Result<()> {
    let runs = arguments.runs.iter().map(|run| require_run(run)).collect::<Result<Vec<_>>>()?;
    let bytes: u64 = runs.iter().map(|run| run.bytes).sum();
    let files: usize = runs.iter().map(|run| run.files).sum();
    for run in &runs {
        let (state, size) = (run.state, readable_bytes(run.bytes));
        errln!("{}: {state}, {} files, {size}", run.folder.display(), run.files);
    }
    if !arguments.yes && !is_confirmed(runs.len(), files, bytes, json)? {
        return Err(Failure::work("nothing was deleted"));
    }
    for run in &runs {
        remove(&run.folder)?;
    }
    if json {
        let folders: Vec<_> = runs.iter().map(|run| run.folder.to_string_lossy()).collect();
        outjson!({ "deleted": folders, "files": files, "bytes": bytes });
    } else {
        outln!("deleted {}, {}", counted(runs.len(), "run"), readable_bytes(bytes));
    }
    Ok(())
}

/// The run at a path, if it may be deleted.
fn require_run(path: &Path) -> Result<Found> {
    let refused = |problem: &str| Failure::usage(format!("{}: {problem}", path.display()));
    let kind = std::fs::symlink_metadata(path);
    let kind =
        kind.map_err(|error| Failure::file(format!("{}: {error}", path.display()), &error))?;
    if kind.is_symlink() {
        return Err(refused("is a link").hint("give the folder that it leads to"));
    }
    let here = std::env::current_dir().and_then(|here| here.canonicalize());
    let inside = |here: PathBuf| path.canonicalize().is_ok_and(|path| here.starts_with(path));
    if here.is_ok_and(inside) {
        return Err(refused("this process works in it").hint("call it from another folder"));
    }
    let Some(run) = Found::at(path) else {
        return Err(refused("is not a run directory")
            .hint("`longdraft runs list FOLDER` lists them; other folders are left alone"));
    };
    if path.join(".git").exists() {
        return Err(refused("holds a repository, which no run writes"));
    }
    if run.state == State::Running {
        return Err(refused("a process works in it").hint("wait for it, or stop it"));
    }
    // A fit and a curriculum hold their own folders, and need the runs in them.
    let place = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut around = place.ancestors().skip(1).take(ABOVE);
    if let Some(held) = around.find(|above| RunLock::is_held(above)) {
        let problem = format!("a process works in {}", held.display());
        return Err(refused(&problem).hint("wait for it, or stop it"));
    }
    Ok(run)
}

/// Asks on a terminal; elsewhere nobody answers.
fn is_confirmed(runs: usize, files: usize, bytes: u64, json: bool) -> Result<bool> {
    if json || !std::io::stdin().is_terminal() {
        return Err(Failure::usage("nobody is there to be asked").hint("add --yes"));
    }
    let (runs, files) = (counted(runs, "run"), counted(files, "file"));
    err!("delete {runs}, {files}, {}? [y/N] ", readable_bytes(bytes));
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Failure::work(format!("stdin: {error}")))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Holds the run, and those of its stages, while it goes.
fn remove(folder: &Path) -> Result<()> {
    let own = stages(folder);
    let held = own
        .iter()
        .filter(|stage| stage.starts_with(folder) && stage.is_dir())
        .map(PathBuf::as_path)
        .chain([folder]);
    let _held = held.map(RunLock::acquire).collect::<std::result::Result<Vec<_>, _>>()?;
    remove_folder(folder)
}
