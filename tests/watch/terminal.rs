//! `fit` on a terminal that is quit, killed, hung up and suspended.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::*;
use crate::support::files::Changes;

/// `fit` on a terminal of its own.
struct OnTerminal {
    script: Child,
    pid: PathBuf,
    seen: PathBuf,
}

impl OnTerminal {
    /// None where the machine has no `script`.
    fn start(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Option<Self> {
        let (pid, seen) = (folder.join("pid"), folder.join("seen"));
        let _ = std::fs::remove_file(&pid);
        let quoted: Vec<String> = arguments.iter().map(|word| format!("'{word}'")).collect();
        let command = format!(
            "stty rows 30 cols 100; echo $$ > '{}'; exec '{}' {} --threads 1",
            pid.display(),
            env!("CARGO_BIN_EXE_longdraft"),
            quoted.join(" ")
        );
        let out = std::fs::File::create(&seen).expect("a file");
        let script = Command::new("script")
            .args(["-qec", &command, "/dev/null"])
            .env_remove("NO_COLOR")
            .envs([("TERM", "xterm-256color"), ("LC_ALL", "C.UTF-8"), ("SHELL", "/bin/sh")])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(Stdio::null())
            .spawn();
        let Ok(script) = script else {
            eprintln!("skipped: there is no `script` on this machine");
            return None;
        };
        Some(Self { script, pid, seen })
    }

    fn seen(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.seen).unwrap_or_default()).into_owned()
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut is: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !is(self) {
            assert!(started.elapsed() < Duration::from_mins(5), "never {what}: {}", self.seen());
            if let Ok(Some(status)) = self.script.try_wait() {
                assert!(is(self), "it ended ({status}) before {what}: {}", self.seen());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn press(&mut self, keys: &str) {
        let input = self.script.stdin.as_mut().expect("piped");
        input.write_all(keys.as_bytes()).expect("pressed");
        input.flush().expect("pressed");
    }

    fn process(&self) -> String {
        std::fs::read_to_string(&self.pid).expect("a process").trim().to_owned()
    }

    /// Has the process and its `script` go on.
    fn resume(&self) {
        let processes = [self.script.id().to_string(), self.process()];
        let status = Command::new("kill").args(["-s", "CONT"]).args(processes).status();
        assert!(status.expect("kill").success());
    }

    fn signal(&self, name: &str) {
        let status =
            Command::new("kill").args(["-s", name, &self.process()]).status().expect("kill");
        assert!(status.success());
    }

    /// Waits for the end; the exit code as a shell has it.
    fn end(&mut self) -> i32 {
        self.script.wait().expect("ended").code().expect("a code")
    }
}

/// What takes the terminal over, and what gives it back.
const ENTER: &str = "\u{1b}[?1049h";
const LEAVE: &str = "\u{1b}[?1049l";

#[test]
fn a_view_that_is_quit_killed_or_hung_up_leaves_a_run_that_goes_on() {
    let folder = tempfile::tempdir().expect("tempdir");
    let output = folder.path().join("fitted");
    let (target, name) = (demonstration(), output.display().to_string());
    let arguments =
        ["fit", &target, "--time", "30s", "--output", &name, "--max-tokens", "48", "--anyway"];
    let start = || OnTerminal::start(folder.path(), &arguments, &[]);

    // `q` stops as Ctrl-C does, with the terminal as it was and a word about going on.
    let Some(mut view) = start() else { return };
    view.until("answers", |view| phase(&output) == "answers" && view.seen().contains("measure"));
    view.press("q");
    let code = view.end();
    let seen = view.seen();
    assert_eq!(code, 130, "{seen}");
    assert!(seen.contains(ENTER) && seen.rfind(LEAVE) > seen.rfind(ENTER), "{seen}");
    let after = &seen[seen.rfind(LEAVE).expect("left")..];
    assert!(after.contains("the same command goes on from there"), "{after}");
    assert!(after.contains("[measure]"), "what was said meanwhile is printed: {after}");

    // After SIGKILL nothing is left but the run.
    let mut view = start().expect("script");
    view.until("a picture", |view| view.seen().contains(ENTER) && !phase(&output).is_empty());
    let mut changes = Changes::of(&output);
    view.until("work", |_| changes.count() > 1);
    view.signal("KILL");
    view.end();

    // A closed terminal stops it too.
    let mut view = start().expect("script");
    view.until("a picture", |view| view.seen().contains(ENTER));
    let mut changes = Changes::of(&output);
    view.until("work", |_| changes.count() > 1);
    view.signal("HUP");
    assert_eq!(view.end(), 129, "{}", view.seen());
    assert!(view.seen().contains(LEAVE));

    let plain = [&arguments[..], &["--json"]].concat();
    let result = last_json(&succeed(&plain));
    assert_eq!((&result["finished"], &result["lossless"]), (&true.into(), &true.into()));
    // Events tell the whole story for whoever watches.
    let events = std::fs::read_to_string(output.join("events.jsonl")).expect("events");
    let lines: Vec<Value> =
        events.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    for (key, value) in [
        ("event", "stopped"),
        ("phase", "proof"),
        ("what", "steps"),
        ("what", "prompts"),
        ("event", "answer"),
    ] {
        assert!(lines.iter().any(|line| line[key] == value), "no {value}: {events}");
    }
    let watch = Watch::start(&[&name]);
    assert!(watch.page("/").contains("faster decoding") || watch.page("/").contains("speed-up"));
}

#[test]
fn a_view_gives_the_terminal_back_when_it_is_suspended_or_not_wanted() {
    let folder = tempfile::tempdir().expect("tempdir");
    let output = folder.path().join("fitted");
    let (target, name) = (demonstration(), output.display().to_string());
    let arguments =
        ["fit", &target, "--time", "25s", "--output", &name, "--max-tokens", "48", "--anyway"];
    let Some(mut view) = OnTerminal::start(folder.path(), &arguments, &[]) else { return };
    view.until("answers", |view| phase(&output) == "answers" && view.seen().contains(ENTER));
    view.press("\u{1a}");
    let state = |view: &OnTerminal| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", view.process()));
        stat.unwrap_or_default().split(") ").nth(1).map(|rest| rest.starts_with('T'))
    };
    view.until("suspended", |view| state(view) == Some(true));
    // `script` suspends itself with what it runs, sooner or later; what it was told before comes then at the latest.
    view.until("back", |view| {
        view.resume();
        view.seen().matches(ENTER).count() == 2
    });
    let seen = view.seen();
    assert!(seen[..seen.rfind(ENTER).expect("back")].contains(LEAVE), "{seen}");
    // `p` goes on with lines.
    view.press("p");
    view.until("gone", |view| view.seen().matches(LEAVE).count() == 2);
    assert_eq!(view.end(), 0, "{}", view.seen());
    let seen = view.seen();
    assert!(seen[seen.rfind(LEAVE).expect("left")..].contains("draft and card"), "{seen}");

    // Plain lines where they are asked for.
    for (more, variables) in
        [(&["--plain"][..], &[][..]), (&[], &[("NO_COLOR", "1")]), (&[], &[("TERM", "dumb")])]
    {
        let arguments = [&arguments[..], more].concat();
        let mut view = OnTerminal::start(folder.path(), &arguments, variables).expect("script");
        assert_eq!(view.end(), 0, "{}", view.seen());
        assert!(!view.seen().contains(ENTER), "{}", view.seen());
    }
}
