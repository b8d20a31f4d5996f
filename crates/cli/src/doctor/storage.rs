//! Disk space, writable folders, open files.

use std::path::{Path, PathBuf};

use longdraft_models::disk::{free_bytes, readable_bytes};

use super::finding::Finding;
use crate::cache::cache_folder;

/// Room for a few checkpoints of a small draft, or the small target.
const LITTLE: u64 = 1 << 30;

/// Files that loaders, logs and the hub may hold open, with room to spare.
const OPEN_FILES: u64 = 256;

struct Folder {
    check: &'static str,
    /// What for.
    purpose: &'static str,
    path: PathBuf,
    /// Bytes for this user, where the system tells.
    free: Option<u64>,
    /// Why nothing can be written.
    unwritable: Option<String>,
    /// How to take another one.
    other: &'static str,
}

pub(super) fn examine() -> Vec<Finding> {
    let mut folders = Vec::new();
    let mut findings = Vec::new();
    match std::env::current_dir() {
        Ok(path) => folders.push(look(
            "current directory",
            "runs go here",
            path,
            "change to another directory, or give `output=FOLDER`",
        )),
        Err(error) => findings.push(Finding::problem(
            "current directory",
            error.to_string(),
            "change to a directory that exists",
        )),
    }
    match cache_folder() {
        Ok(path) => folders.push(look(
            "cache folder",
            "`fetch` puts targets here",
            path,
            "set XDG_CACHE_HOME to another folder",
        )),
        Err(_) => findings.push(Finding::note(
            "cache folder",
            "neither XDG_CACHE_HOME nor HOME is set",
            "set one of them, or give `fetch` a folder",
        )),
    }
    let all_unwritable = folders.iter().all(|folder| folder.unwritable.is_some());
    findings.extend(folders.iter().map(|folder| judge(folder, all_unwritable)));
    findings.extend(open_files());
    findings
}

fn look(check: &'static str, purpose: &'static str, path: PathBuf, other: &'static str) -> Folder {
    // A cache folder is made when it is first needed.
    let existing = path.ancestors().find(|path| path.is_dir()).map(Path::to_path_buf);
    let existing = existing.unwrap_or_else(|| path.clone());
    Folder {
        check,
        purpose,
        free: free_bytes(&existing),
        unwritable: try_to_write(&existing).err().map(|error| error.to_string()),
        path,
        other,
    }
}

fn judge(folder: &Folder, all_unwritable: bool) -> Finding {
    let name = format!("{} ({})", folder.path.display(), folder.purpose);
    if let Some(cause) = &folder.unwritable {
        let fact = format!("{name}: nothing can be written: {cause}");
        let finding = Finding::problem(folder.check, fact, folder.other);
        return if all_unwritable { finding.blocking() } else { finding };
    }
    match folder.free {
        Some(free) if free < LITTLE => Finding::note(
            folder.check,
            format!("{name}: {} free", readable_bytes(free)),
            format!("make room, or {}", folder.other),
        ),
        Some(free) => Finding::ok(folder.check, format!("{name}: {} free", readable_bytes(free))),
        None => Finding::ok(folder.check, format!("{name}: writable")),
    }
}

/// Writes and removes a small file.
fn try_to_write(folder: &Path) -> std::io::Result<()> {
    let path = folder.join(format!(".longdraft-doctor-{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    let written = options
        .write(true)
        .create_new(true)
        .open(&path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, b"longdraft doctor\n"));
    let removed = if path.exists() { std::fs::remove_file(&path) } else { Ok(()) };
    written.and(removed)
}

#[cfg(unix)]
fn open_files() -> Option<Finding> {
    use nix::sys::resource::{Resource, getrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    Some(judge_open_files(soft, hard))
}

#[cfg(not(unix))]
fn open_files() -> Option<Finding> {
    None
}

#[cfg_attr(not(unix), allow(dead_code, reason = "only Unix has this limit"))]
fn judge_open_files(soft: u64, hard: u64) -> Finding {
    let check = "open files";
    let fact = format!("at most {soft} for a process");
    if soft >= OPEN_FILES {
        return Finding::ok(check, fact);
    }
    let remedy = if hard >= OPEN_FILES {
        format!("`ulimit -n {}` before the command", hard.min(4096))
    } else {
        format!("ask an administrator to raise the hard limit of {hard}")
    };
    Finding::note(check, fact, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    fn folder(free: Option<u64>, unwritable: Option<&str>) -> Folder {
        Folder {
            check: "current directory",
            purpose: "runs go here",
            path: "here".into(),
            free,
            unwritable: unwritable.map(str::to_owned),
            other: "give `output=FOLDER`",
        }
    }

    #[test]
    fn only_no_writable_folder_at_all_is_blocking() {
        assert_eq!(judge(&folder(Some(5 << 30), None), false).status, Status::Ok);
        let little = judge(&folder(Some(5 << 20), None), false);
        assert_eq!((little.status, little.blocking), (Status::Note, false));
        let one = judge(&folder(None, Some("read-only")), false);
        assert_eq!((one.status, one.blocking), (Status::Problem, false));
        assert!(judge(&folder(None, Some("read-only")), true).blocking);
    }

    #[test]
    fn writing_leaves_nothing_behind() {
        let dir = tempfile::tempdir().expect("tempdir");
        try_to_write(dir.path()).expect("writable");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 0);
        try_to_write(&dir.path().join("absent")).expect_err("no such folder");
    }

    #[test]
    fn a_folder_that_is_not_yet_there_is_judged_by_its_parent() {
        let dir = tempfile::tempdir().expect("tempdir");
        let found = look("cache folder", "targets", dir.path().join("a/b/c"), "set another");
        assert_eq!(found.unwritable, None);
        assert!(cfg!(not(unix)) || found.free.is_some());
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 0);
    }

    #[test]
    fn a_low_limit_says_how_to_raise_it() {
        assert_eq!(judge_open_files(1024, 4096).status, Status::Ok);
        let raise = judge_open_files(64, 100_000).remedy.expect("a remedy");
        assert!(raise.contains("ulimit -n 4096"), "{raise}");
        assert!(judge_open_files(64, 64).remedy.expect("a remedy").contains("administrator"));
    }
}
