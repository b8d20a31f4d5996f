//! A program of the user's that takes out of a text what must not be kept.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Time that it has for a text.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that it may answer with beyond twice those that it got.
const MARGIN: u64 = 1 << 16;
/// How often it is looked whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What is asked and answered: one JSON object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Text {
    pub(super) prompt: String,
    pub(super) answer: String,
}

/// A program that ran, whatever comes: it and what it started are gone when this is.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Ok(group) = i32::try_from(self.0.id()) {
            use nix::sys::signal::{Signal, killpg};
            let _ = killpg(nix::unistd::Pid::from_raw(group), Signal::SIGKILL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the program makes of a text; `None` if it fails, says nothing of use, or takes too long.
pub(super) fn redact(program: &Path, text: &Text) -> Option<Text> {
    redact_within(program, text, PATIENCE)
}

fn redact_within(program: &Path, text: &Text, patience: Duration) -> Option<Text> {
    let deadline = Instant::now() + patience;
    let mut command = Command::new(program);
    // Its complaints could hold the text.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut running = Running(command.spawn().ok()?);
    let (mut stdin, stdout) = (running.0.stdin.take()?, running.0.stdout.take()?);
    let asked = serde_json::to_vec(text).ok()?;
    let most = 2 * asked.len() as u64 + MARGIN;
    // It may not read, and it may never stop writing: neither is waited for here.
    std::thread::spawn(move || stdin.write_all(&asked).and_then(|()| stdin.write_all(b"\n")));
    let (sender, told) = channel();
    std::thread::spawn(move || {
        let mut answer = Vec::new();
        let read = stdout.take(most + 1).read_to_end(&mut answer);
        let _ = sender.send(read.map(|_| answer));
    });
    let left = || deadline.saturating_duration_since(Instant::now());
    let answer = match told.recv_timeout(left()) {
        Ok(answer) => answer.ok()?,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
    };
    loop {
        match running.0.try_wait().ok()? {
            Some(status) if !status.success() => return None,
            Some(_) => break,
            None if left().is_zero() => return None,
            None => std::thread::sleep(LOOK_EVERY),
        }
    }
    if answer.len() as u64 > most {
        return None;
    }
    serde_json::from_slice::<Text>(&answer).ok().filter(|text| !text.answer.is_empty())
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    fn program(folder: &Path, script: &str) -> PathBuf {
        let path = folder.join("filter");
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("script");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).expect("mode");
        path
    }

    #[test]
    fn a_filter_changes_texts_and_one_that_fails_lets_none_through() {
        let folder = tempfile::tempdir().expect("folder");
        let text = Text { prompt: "my code is 1234".into(), answer: "1234 it is\n".into() };
        let through = |script: &str| redact(&program(folder.path(), script), &text);
        assert_eq!(through("cat"), Some(text.clone()));
        let found = through("sed s/1234/####/g").expect("filtered");
        assert_eq!((&*found.prompt, &*found.answer), ("my code is ####", "#### it is\n"));
        for failing in [
            "exit 3",
            "cat; exit 1",
            "cat; kill -9 $$",
            "true",
            "echo no JSON",
            "cat; cat; echo more",
            r#"echo '{"prompt": "a"}'"#,
            r#"echo '{"prompt": "a", "answer": ""}'"#,
            r#"echo '{"prompt": "a", "answer": 7}'"#,
            r#"echo '{"prompt": "a", "answer": "b", "more": 1}'"#,
            r#"printf '{"prompt": "a", "answer": "\377"}'"#,
        ] {
            assert_eq!(through(failing), None, "{failing}");
        }
        assert_eq!(redact(&folder.path().join("none"), &text), None);
        let path = program(folder.path(), "cat");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("mode");
        assert_eq!(redact(&path, &text), None, "it cannot be run");
    }

    #[test]
    fn one_that_never_ends_is_ended() {
        let folder = tempfile::tempdir().expect("folder");
        let answer = "long ".repeat(50_000);
        let text = Text { prompt: String::new(), answer };
        let patience = Duration::from_millis(400);
        for script in [
            "sleep 100",
            "cat > /dev/null; exec sleep 100",
            "cat; sleep 100",
            "yes",
            // What it starts holds its output open.
            "sleep 100 &",
            "trap '' TERM; while true; do sleep 1; done",
        ] {
            let path = program(folder.path(), script);
            assert_eq!(redact_within(&path, &text, patience), None, "{script}");
        }
    }
}
