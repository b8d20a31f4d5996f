//! Starts trainings, lets them rest while answers are written, and has better drafts propose.
//!
//! A training is a process of its own, at the lowest priority: whatever becomes of it, the server goes on.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use longdraft_server::Control;

use super::Shared;
use super::state::{Job, Outcome, State, TRAINING, draft_folder, drafts};
use super::store::private_file;
use crate::cli::{LearnWhen, LearningArguments};
use crate::decoding::{Models, open_draft};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};

/// What the last training said, in the learner's folder.
pub(super) const LOG_FILE: &str = "training.log";
/// How long nothing must be answered before training begins or goes on.
const QUIET: Duration = Duration::from_secs(2);
/// How often it is looked whether it may, and whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Trainings that end by a signal are begun again, so often, after so long.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(10);

/// Has drafts trained.
pub(super) struct Trainer {
    pub(super) folder: PathBuf,
    pub(super) arguments: LearningArguments,
    pub(super) state: State,
    /// The draft that `--draft` leads to, if there is one.
    pub(super) given: Option<PathBuf>,
    pub(super) target: String,
    pub(super) device: String,
    pub(super) models: Arc<Models>,
    pub(super) control: Control,
    pub(super) shared: Arc<Shared>,
    /// Processes of the training under way that a signal ended.
    pub(super) attempts: u32,
    /// When the next one may begin.
    pub(super) not_before: Option<Instant>,
}

/// A process that trains; it ends with this.
struct Process {
    child: Child,
    rests: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts a training in a folder.
    fn start(folder: &Path) -> std::io::Result<Self> {
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
        Ok(Self { child: started?, rests: false })
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
    fn rest(&mut self, rests: bool) {
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
    fn rest(&mut self, _: bool) {}
}

impl Trainer {
    /// Until the server ends.
    pub(super) fn work(mut self) {
        // Of a training that ended when the server did.
        self.take_outcome();
        self.tidy();
        let mut process: Option<Process> = None;
        while !self.shared.stops() {
            self.shared.board.wait(LOOK_EVERY);
            let may = self.may_train();
            if let Some(running) = &mut process {
                running.rest(!may);
                let doing = if running.rests { "paused" } else { "training" };
                self.shared.board.tell(|learning| learning.doing = doing);
                match running.child.try_wait() {
                    Ok(None) => {}
                    Ok(Some(status)) => {
                        process = None;
                        self.ended(status);
                        self.shared.board.tell(|learning| learning.doing = "waiting");
                    }
                    Err(error) => {
                        process = None;
                        self.give_up(&error.to_string());
                    }
                }
            } else if may && self.is_due() {
                match self
                    .begin()
                    .and_then(|()| Process::start(&self.folder).map_err(Failure::work))
                {
                    Ok(started) => process = Some(started),
                    Err(failure) => self.give_up(failure.message()),
                }
            }
        }
    }

    /// Whether training disturbs nobody.
    fn may_train(&self) -> bool {
        let is_quiet = || self.shared.board.idle().is_some_and(|idle| idle >= QUIET);
        self.arguments.learn_when == LearnWhen::Always || is_quiet()
    }

    /// Whether enough was kept, or a training is under way.
    fn is_due(&self) -> bool {
        let waits = self.not_before.is_some_and(|time| Instant::now() < time);
        let enough = self.shared.fresh.load(Ordering::Relaxed) >= self.arguments.learn_rows;
        !waits && (enough || Job::read(&self.folder).is_some())
    }

    /// Says what is to be trained, unless that goes on.
    fn begin(&mut self) -> Result<()> {
        if Job::read(&self.folder).is_some() {
            return Ok(());
        }
        let draft = super::learned_draft(&self.folder).or_else(|| self.given.clone());
        let draft = draft.map(std::path::absolute).transpose().map_err(Failure::work)?;
        let number = drafts(&self.folder).into_iter().max().unwrap_or(0) + 1;
        self.attempts = 0;
        self.remove_training();
        let (target, device) = (self.target.clone(), self.device.clone());
        let (method, minutes) = (self.arguments.learn_method.clone(), self.arguments.learn_minutes);
        Job { target, device, draft, method, minutes, number }.write(&self.folder)
    }

    /// A process ended: its outcome is taken, or it is begun again if a signal ended it.
    fn ended(&mut self, status: ExitStatus) {
        if status.success() && Outcome::read(&self.folder).is_some() {
            self.take_outcome();
            return;
        }
        let by_signal = status.code().is_none_or(|code| code >= 128);
        self.attempts += 1;
        if by_signal && self.attempts < ATTEMPTS {
            self.not_before = Some(Instant::now() + PAUSE * self.attempts);
            return;
        }
        let log = self.folder.join(LOG_FILE);
        self.give_up(&format!("the training failed ({status}); it said why in {}", log.display()));
    }

    /// Lets go of a training; the next one begins when as many answers more are kept.
    fn give_up(&mut self, problem: &str) {
        errln!("warning: learning: {problem}");
        self.remove_training();
        self.shared.fresh.store(0, Ordering::Relaxed);
        self.shared.board.tell(|learning| {
            learning.failed += 1;
            learning.doing = "waiting";
        });
    }

    /// Has the candidate of an ended training propose if it is better, and remembers what came of it. In
    /// this order, a kill between any two steps has the next start do it again.
    fn take_outcome(&mut self) {
        let Some(mut outcome) = Outcome::read(&self.folder) else { return };
        if let Some(number) = outcome.draft
            && let Err(problem) = self.swap(&draft_folder(&self.folder, number))
        {
            if self.shared.stops() {
                return;
            }
            errln!("warning: learning: {problem}; the draft before it goes on");
            outcome.draft = None;
        }
        let (told, rows) = (outcome.told(), outcome.rows);
        self.state.add(outcome);
        if let Err(failure) = self.state.write(&self.folder) {
            errln!("warning: learning: {}", failure.message());
            return;
        }
        self.shared.fresh.store(0, Ordering::Relaxed);
        let what = if told.replaced { "a better draft proposes now" } else { "the draft stays" };
        errln!(
            "learning: {rows} rows learned, {} held out: tau {:.3} before, {:.3} after [{:+.3}, {:+.3}]; {what}",
            told.held_out,
            told.before,
            told.after,
            told.interval.0,
            told.interval.1
        );
        self.shared.board.tell(|learning| {
            learning.trainings += 1;
            learning.replaced += usize::from(told.replaced);
            learning.last = Some(told);
        });
        self.remove_training();
        self.tidy();
    }

    fn swap(&self, place: &Path) -> std::result::Result<(), String> {
        let open = || open_draft(&DraftSource::find(place)?, &self.models.target);
        let draft = open().map_err(|failure| failure.message().to_owned())?;
        self.control.swap(draft)
    }

    fn remove_training(&self) {
        // What stays is removed before the next one begins, or by `learn purge`.
        let _ = std::fs::remove_dir_all(self.folder.join(TRAINING));
    }

    /// Removes drafts but the one that proposes and the one before it.
    fn tidy(&self) {
        let taken = self.state.trainings.iter().rev().filter_map(|outcome| outcome.draft);
        let kept: Vec<u32> = taken.take(2).collect();
        let under_way = Job::read(&self.folder).map(|job| job.number);
        for number in drafts(&self.folder) {
            if !kept.contains(&number) && under_way != Some(number) {
                let _ = std::fs::remove_dir_all(draft_folder(&self.folder, number));
            }
        }
    }
}
