//! Other programs, asked with a deadline: a driver that hangs must not hang the doctor.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(5);

/// What a program said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// There is no such program on the PATH.
    Absent,
    /// It ended well; its standard output.
    Said(String),
    /// It did not, for this reason.
    Failed(String),
}

/// Runs a program without input and waits for a few seconds at most.
pub(super) fn ask(program: &str, arguments: &[&str]) -> Answer {
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Answer::Absent,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    let (sender, receiver) = mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.read_to_end(&mut bytes);
            let _ = sender.send(bytes);
        });
    }
    let Ok(bytes) = receiver.recv_timeout(PATIENCE) else {
        let _ = child.kill();
        // One that waits for a broken driver does not end even then.
        std::thread::spawn(move || child.wait());
        return Answer::Failed(format!("no answer within {} s", PATIENCE.as_secs()));
    };
    let said = String::from_utf8_lossy(&bytes).into_owned();
    match child.wait() {
        Ok(status) if status.success() => Answer::Said(said),
        Ok(status) => {
            let line = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
            Answer::Failed(if line.is_empty() { status.to_string() } else { line.trim().into() })
        }
        Err(error) => Answer::Failed(error.to_string()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn answers_failures_and_absence_are_told_apart() {
        assert_eq!(ask("sh", &["-c", "echo 4.1"]), Answer::Said("4.1\n".into()));
        assert_eq!(
            ask("sh", &["-c", "echo; echo no driver; exit 9"]),
            Answer::Failed("no driver".into())
        );
        assert!(matches!(ask("sh", &["-c", "exit 9"]), Answer::Failed(text) if text.contains('9')));
        assert_eq!(ask("longdraft-no-such-program", &[]), Answer::Absent);
    }
}
