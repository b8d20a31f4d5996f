//! A program of the user's that takes out of a text what must not be kept.
//!
//! It reads and writes the texts as they are, prompt and answer, with a line between them that holds a NUL and
//! nothing else. So tools that work line by line see every line, the last one of the prompt and the first one
//! of the answer, too.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result};

/// Time that it has for a text.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that it may answer with beyond twice those that it got.
const MARGIN: u64 = 1 << 16;
/// How often it is looked whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What the border between prompt and answer is made of.
const NUL: char = '\0';

/// What is asked and answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) prompt: String,
    pub(super) answer: String,
}

impl Text {
    /// As the program reads it; `None` where the border could stand in a text.
    fn framed(&self) -> Option<String> {
        let Self { prompt, answer } = self;
        let is_clear = !prompt.contains(NUL) && !answer.contains(NUL);
        is_clear.then(|| format!("{prompt}\n{NUL}\n{answer}\n"))
    }

    /// As the program writes it: one border, and an answer. All lines of the prompt may be gone, and programs
    /// that write no end of the last line are as good.
    fn of_frame(frame: &str) -> Option<Self> {
        let (prompt, answer) = frame.split_once(NUL)?;
        let prompt = if prompt.is_empty() { prompt } else { prompt.strip_suffix('\n')? };
        let answer = answer.strip_prefix('\n')?;
        let answer = answer.strip_suffix('\n').unwrap_or(answer);
        let is_whole = !answer.contains(NUL) && !answer.is_empty();
        is_whole.then(|| Self { prompt: prompt.to_owned(), answer: answer.to_owned() })
    }
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

/// The program as it is started; its complaints could hold the text.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stderr(Stdio::null());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command
}

/// Refuses a program that the system does not start: this starts it without a text, and ends it.
/// It fails where the file is not there, or is no program.
pub(super) fn check(program: &Path) -> Result<()> {
    match command(program).stdin(Stdio::null()).stdout(Stdio::null()).spawn() {
        Ok(child) => {
            drop(Running(child));
            Ok(())
        }
        Err(error) => Err(Failure::usage(format!("{}: cannot be run: {error}", program.display()))
            .hint("give --learn-redact a program that is there, and may be executed")),
    }
}

/// What the program makes of a text; `None` if it fails, says nothing of use, or takes too long.
pub(super) fn redact(program: &Path, text: &Text) -> Option<Text> {
    redact_within(program, text, PATIENCE)
}

fn redact_within(program: &Path, text: &Text, patience: Duration) -> Option<Text> {
    let asked = text.framed()?;
    let deadline = Instant::now() + patience;
    let mut command = command(program);
    let mut running = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?);
    let (mut stdin, stdout) = (running.0.stdin.take()?, running.0.stdout.take()?);
    let most = 2 * asked.len() as u64 + MARGIN;
    // It may not read, and it may never stop writing: neither is waited for here.
    std::thread::spawn(move || stdin.write_all(asked.as_bytes()));
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
    Text::of_frame(std::str::from_utf8(&answer).ok()?)
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
        let text = Text {
            prompt: "my code is:\n1234\n\tsecret\n".into(),
            answer: "1234 \"it\\n\" is\n\n".into(),
        };
        let through = |script: &str| redact(&program(folder.path(), script), &text);
        assert_eq!(through("cat"), Some(text.clone()));
        // At the start of a line, of the answer, and past a tab.
        let found = through("sed -e s/^1234/####/ -e 's/secret/******/'").expect("filtered");
        assert_eq!(&*found.prompt, "my code is:\n####\n\t******\n");
        assert_eq!(&*found.answer, "#### \"it\\n\" is\n\n");
        // Whole lines go, also all of the prompt.
        let found = through("sed -e '/^my/d' -e '/1234$/d' -e '/secret/d' -e '4{/^$/d;}'");
        assert_eq!(found.expect("filtered").prompt, "");
        for failing in [
            "exit 3",
            "cat; exit 1",
            "cat; kill -9 $$",
            "true",
            "echo no border",
            "cat; printf '\\000'",
            "tr -d '\\000'",
            "tr -d '\\n'",
            r"printf 'a\n\000\n'",
            r"printf 'a\n\000\n\n'",
            r"printf 'a\000\nb\n'",
            r"printf 'a\n\000b\n'",
            r"printf 'a\n\000\n\377\n'",
        ] {
            assert_eq!(through(failing), None, "{failing}");
        }
        let found = through(r"printf 'a\n\000\nb'").expect("without the end of the last line");
        assert_eq!((&*found.prompt, &*found.answer), ("a", "b"));
        let border = Text { answer: "a\n\0\nb".into(), ..text.clone() };
        assert_eq!(redact(&program(folder.path(), "cat"), &border), None);
        assert_eq!(redact(&folder.path().join("none"), &text), None);
        let path = program(folder.path(), "cat");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("mode");
        assert_eq!(redact(&path, &text), None, "it cannot be run");
    }

    #[test]
    fn what_is_no_program_is_refused_before_there_is_a_text() {
        let folder = tempfile::tempdir().expect("folder");
        let refused = |path: &Path| check(path).expect_err("no program").message().to_owned();
        let none = folder.path().join("none");
        assert!(refused(&none).contains("none: cannot be run: "), "{}", refused(&none));
        let path = program(folder.path(), "cat");
        assert!(check(&path).is_ok() && check(Path::new("cat")).is_ok());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("mode");
        assert!(refused(&path).contains("filter: cannot be run: "), "{}", refused(&path));
        assert!(refused(folder.path()).contains("cannot be run"));
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
