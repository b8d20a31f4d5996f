//! Processes that work while a test looks on, and how they are ended.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::files::Changes;

/// Longest time in which what is waited for must come, on a loaded machine too: only a hang takes longer.
const PATIENCE: Duration = Duration::from_mins(10);

/// Waits until it holds.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "{what}: not yet");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Starts a command whose output nobody reads.
#[track_caller]
pub(crate) fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
}

/// Starts a command whose output is kept.
#[track_caller]
pub(crate) fn start_kept(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// Ends a process at once.
#[track_caller]
pub(crate) fn kill(mut child: Child) {
    child.kill().expect("kill");
    child.wait().expect("reap");
}

/// Runs a command, and kills it as soon as a part of its work begins.
#[track_caller]
pub(crate) fn killed_when(command: &mut Command, part: &str, mut begins: impl FnMut() -> bool) {
    let mut child = start(command);
    wait_until(part, || {
        let begun = begins();
        assert!(begun || child.try_wait().expect("wait").is_none(), "it ended before {part}");
        begun
    });
    kill(child);
}

/// Runs a command, and kills it as soon as the files under a folder have changed so often. Tells whether it
/// was killed: a command that ends before that must succeed.
#[track_caller]
pub(crate) fn killed_after(changes: usize, folder: &Path, command: &mut Command) -> bool {
    let mut seen = Changes::of(folder);
    let mut child = start(command);
    let mut status = None;
    wait_until("an end", || {
        status = child.try_wait().expect("wait");
        status.is_some() || seen.count() >= changes
    });
    let Some(status) = status else {
        kill(child);
        return true;
    };
    assert!(status.success(), "a run failed that went on");
    false
}

/// Sends a process a signal, such as `-INT`.
#[track_caller]
pub(crate) fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(sent.expect("kill").success());
}
