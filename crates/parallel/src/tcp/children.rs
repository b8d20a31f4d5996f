//! Processes that the first rank starts on its own machine.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{ParallelError, Result};
use crate::launcher::{CHILD, JOB, Place};
use crate::watch::leave;

/// How long a process may take to end after its work.
const LEAVES_WITHIN: Duration = Duration::from_secs(30);
/// How long the end of a process whose connection closed may take to show.
const SHOWS_WITHIN: Duration = Duration::from_millis(500);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Further ranks, from 1 on, that this process started; none where a launcher did.
#[derive(Default)]
pub(super) struct Children(Mutex<Vec<Child>>);

/// Starts the ranks from 1 on, by a command. They meet at the listener. It fails where they cannot be started.
pub(super) fn start(
    size: usize,
    command: &dyn Fn() -> std::io::Result<Command>,
) -> Result<(Place, TcpListener, Children)> {
    let failed = |what: &str, error: &std::io::Error| ParallelError::Meeting {
        problem: format!("cannot {what}: {error}"),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listener = listener.map_err(|error| failed("listen for further ranks", &error))?;
    let port = listener.local_addr().map_err(|error| failed("listen", &error))?.port();
    let address = Ipv4Addr::LOCALHOST.to_string();
    let (job, is_local) = (new_job(), true);
    let place = Place { rank: 0, size, address, port, job, is_local, is_child: false };
    let children = Children::default();
    for rank in 1..size {
        let mut command = command().map_err(|error| failed("find this program", &error))?;
        let started = command
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", size.to_string())])
            .envs([("MASTER_ADDR", place.address.clone()), ("MASTER_PORT", port.to_string())])
            .envs([("LOCAL_WORLD_SIZE", size.to_string()), (JOB, place.job.clone())])
            .env(CHILD, "1")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(Stdio::null())
            .spawn();
        let child = started.map_err(|error| failed(&format!("start rank {rank}"), &error))?;
        children.lock().push(child);
    }
    Ok((place, listener, children))
}

/// A name that nobody guesses.
fn new_job() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

impl Children {
    fn lock(&self) -> MutexGuard<'_, Vec<Child>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether none ended before it came.
    pub(super) fn are_all_there(&self) -> Result<()> {
        let ended = |(at, child): (usize, &mut Child)| Some((at + 1, child.try_wait().ok()??));
        let found = self.lock().iter_mut().enumerate().find_map(ended);
        let Some((rank, status)) = found else { return Ok(()) };
        Err(ParallelError::Meeting {
            problem: format!("rank {rank} ended before all ranks had come: {}", described(status)),
        })
    }

    /// How a rank's process ended, if this one started it.
    pub(super) fn end_of(&self, rank: usize) -> Option<String> {
        let started = Instant::now();
        loop {
            let status = self.lock().get_mut(rank.checked_sub(1)?)?.try_wait().ok()?;
            match status {
                Some(status) => return Some(described(status)),
                None if started.elapsed() > SHOWS_WITHIN => return None,
                None => std::thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Waits until all have ended; ends those that do not.
    pub(super) fn wait(&self) {
        let started = Instant::now();
        let is_running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        while started.elapsed() < LEAVES_WITHIN && self.lock().iter_mut().any(is_running) {
            std::thread::sleep(LOOK_EVERY);
        }
        self.kill();
    }

    /// Ends this process, and the others at any rate.
    pub(super) fn exit(&self, code: u8) -> ! {
        self.kill();
        leave(code)
    }

    /// All are told before one is waited for: a driver may hold one back.
    fn kill(&self) {
        let mut children = self.lock();
        // They may have ended.
        for child in children.iter_mut() {
            let _ = child.kill();
        }
        for child in children.iter_mut() {
            let _ = child.wait();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An end in words; the system ends who takes too much memory.
fn described(status: ExitStatus) -> String {
    let memory = if is_kill(status) { ", as it does where memory ends" } else { "" };
    format!("its process ended ({status}{memory})")
}

#[cfg(unix)]
fn is_kill(status: ExitStatus) -> bool {
    const KILL: i32 = 9;
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(KILL)
}

#[cfg(not(unix))]
fn is_kill(_: ExitStatus) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(program: &str, argument: &str) -> Children {
        let child = Command::new(program).arg(argument).spawn().expect("starts");
        Children(Mutex::new(vec![child]))
    }

    #[test]
    #[cfg(unix)]
    fn ends_of_processes_are_told() {
        let children = of("sleep", "600");
        assert!(children.are_all_there().is_ok());
        assert_eq!(
            (children.end_of(1), children.end_of(0), children.end_of(2)),
            (None, None, None)
        );
        children.kill();
        let end = children.end_of(1).expect("ended");
        assert!(end.contains("signal: 9") && end.contains("memory"), "{end}");
        let children = of("false", "");
        let end = children.end_of(1).expect("ended");
        assert!(end.contains("exit status: 1") && !end.contains("memory"), "{end}");
        let error = children.are_all_there().expect_err("gone");
        assert!(error.to_string().starts_with("rank 1 ended before"), "{error}");
        children.wait();
    }

    #[test]
    fn jobs_have_names_of_their_own() {
        assert!(new_job().len() == 32 && new_job() != new_job());
    }
}
