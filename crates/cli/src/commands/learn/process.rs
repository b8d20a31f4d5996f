//! The process of a training or a check: at the lowest priority, in a group of its own, with an input that closes
//! when the server ends.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::folder::private_file;

/// What the last one said, in the learner's folder.
pub(super) const LOG_FILE: &str = "training.log";

/// A process that trains or checks; it ends with this.
pub(super) struct Process {
    pub(super) child: Child,
    pub(super) rests: bool,
    /// Which of these.
    pub(super) does: &'static str,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts what a folder's job asks for.
    pub(super) fn start(folder: &Path, does: &'static str) -> std::io::Result<Self> {
        let program = std::env::current_exe()?;
        let log = folder.join(LOG_FILE);
        let _ = std::fs::remove_file(&log);
        let log = private_file(&log)?;
        let nice = Path::new("nice");
        let started = match Self::of(
            nice,
            &["-n".as_ref(), "19".as_ref(), program.as_os_str()],
            folder,
            &log,
        ) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Self::of(&program, &[], folder, &log)
            }
            started => started,
        };
        Ok(Self { child: started?, rests: false, does })
    }

    fn of(
        program: &Path,
        before: &[&std::ffi::OsStr],
        folder: &Path,
        log: &File,
    ) -> std::io::Result<Child> {
        let mut command = Command::new(program);
        command.args(before).args(["learn", "train"]).arg(folder);
        command.args(["--threads", &rayon::current_num_threads().to_string()]);
        // It ends when its input closes, which it does however the server ends.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log.try_clone()?);
        // A group of its own: signals of the terminal are for the server, and a server that is killed
        // leaves no process that rests for ever, because the system wakes groups that lost their parent.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.spawn()
    }

    /// Has it rest or go on.
    #[cfg(unix)]
    pub(super) fn rest(&mut self, rests: bool) {
        use nix::sys::signal::{Signal, kill};
        if rests == self.rests {
            return;
        }
        let signal = if rests { Signal::SIGSTOP } else { Signal::SIGCONT };
        if let Ok(process) = i32::try_from(self.child.id())
            && kill(nix::unistd::Pid::from_raw(process), signal).is_ok()
        {
            self.rests = rests;
        }
    }

    /// Where the system cannot have it rest, its priority has to do.
    #[cfg(not(unix))]
    pub(super) fn rest(&mut self, _: bool) {}
}
