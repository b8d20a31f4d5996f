//! Starts trainings, lets them rest while answers are written, and has better drafts propose.
//!
//! A training is a process of its own, at the lowest priority: whatever becomes of it, the server goes on.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use longdraft_server::{Control, SwapError};

use super::folder::private_file;
use super::rows::LEAST_HELD_OUT;
use super::state::{Job, Outcome, State, TRAINING, draft_folder, drafts};
use super::store::now;
use super::{Shared, age_of};
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
/// Processes that may be started for a training: one that ends by a signal, or together with the server, is
/// begun again after so long.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(10);
/// How often it is looked whether the texts of a training are still to be kept.
const LOOK_FOR_AGE: Duration = Duration::from_mins(10);

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
    /// When the next process may begin, or an outcome be written again.
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
        let mut looked = Instant::now();
        while !self.shared.stops() {
            self.shared.board.wait(LOOK_EVERY);
            if looked.elapsed() >= LOOK_FOR_AGE {
                looked = Instant::now();
                self.drop_old(&mut process);
            }
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
            } else if Outcome::read(&self.folder).is_some() {
                // One that could not be remembered.
                self.retry();
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
        if process.is_some() {
            self.is_no_fault();
        }
    }

    /// Lets go of a training whose texts are too old to be kept, however long it rested.
    fn drop_old(&self, process: &mut Option<Process>) {
        let age = age_of(&self.arguments);
        if Job::read(&self.folder).is_some_and(|job| job.is_older_than(age)) {
            *process = None;
            self.remove_training();
            self.shared.board.tell(|learning| learning.doing = "waiting");
        }
    }

    /// The server ends, and the training with it: that is no sign against the training.
    fn is_no_fault(&self) {
        let job = Job::read(&self.folder);
        let job = job.map(|job| Job { attempts: job.attempts.saturating_sub(1), ..job });
        // Else it has an attempt less.
        let _ = job.map(|job| job.write(&self.folder));
    }

    fn retry(&mut self) {
        if !self.waits() {
            self.take_outcome();
        }
    }

    fn waits(&self) -> bool {
        self.not_before.is_some_and(|time| Instant::now() < time)
    }

    /// Whether training disturbs nobody.
    fn may_train(&self) -> bool {
        let is_quiet = || self.shared.board.idle().is_some_and(|idle| idle >= QUIET);
        self.arguments.learn_when == LearnWhen::Always || is_quiet()
    }

    /// Whether enough was kept, or a training is under way.
    fn is_due(&self) -> bool {
        let enough = self.shared.fresh.load(Ordering::Relaxed) >= self.arguments.learn_rows;
        !self.waits() && (enough || Job::read(&self.folder).is_some())
    }

    /// Says what is to be trained, unless that goes on, and counts the attempt before it is made.
    fn begin(&mut self) -> Result<()> {
        let job = match Job::read(&self.folder) {
            Some(job) if job.attempts >= ATTEMPTS => {
                return Err(Failure::work(format!("the training was ended {ATTEMPTS} times")));
            }
            Some(job) => job,
            None => self.fresh_job()?,
        };
        Job { attempts: job.attempts + 1, ..job }.write(&self.folder)
    }

    fn fresh_job(&mut self) -> Result<Job> {
        let draft = self.state.current().map(|number| draft_folder(&self.folder, number));
        let draft = draft.or_else(|| self.given.clone());
        let draft = draft.map(std::path::absolute).transpose().map_err(Failure::work)?;
        self.remove_training();
        // What is kept from now on counts for the next one.
        self.shared.fresh.store(0, Ordering::Relaxed);
        Ok(Job {
            target: self.target.clone(),
            device: self.device.clone(),
            base: self.state.base().to_owned(),
            draft,
            method: self.arguments.learn_method.clone(),
            minutes: self.arguments.learn_minutes,
            number: self.state.next_number(&self.folder),
            began: now(),
            attempts: 0,
        })
    }

    /// A process ended: its outcome is taken, or it is begun again if a signal ended it.
    fn ended(&mut self, status: ExitStatus) {
        if status.success() && Outcome::read(&self.folder).is_some() {
            self.take_outcome();
            return;
        }
        let by_signal = status.code().is_none_or(|code| code >= 128);
        let attempts = Job::read(&self.folder).map_or(ATTEMPTS, |job| job.attempts);
        if by_signal && attempts < ATTEMPTS {
            self.not_before = Some(Instant::now() + PAUSE * attempts);
            return;
        }
        let log = self.folder.join(LOG_FILE);
        self.give_up(&format!("the training failed ({status}); it said why in {}", log.display()));
    }

    /// Lets go of a training; the next one begins when as many answers more are kept.
    fn give_up(&mut self, problem: &str) {
        errln!("warning: learning: {problem}");
        self.remove_training();
        self.shared.board.tell(|learning| {
            learning.failed += 1;
            learning.doing = "waiting";
        });
    }

    /// Has the candidate of an ended training propose if it is better, and remembers what came of it.
    fn take_outcome(&mut self) {
        if let Some(outcome) = Outcome::read(&self.folder) {
            let control = self.control.clone();
            // What is opened on request afterwards is the one that is remembered.
            control.alone(|| self.take(outcome));
        }
    }

    /// The same. In this order, a kill between any two steps has the next start do it again.
    fn take(&mut self, mut outcome: Outcome) {
        if let Some(number) = outcome.draft {
            match self.swap(&draft_folder(&self.folder, number)) {
                Ok(()) => {}
                // The next server takes it.
                Err(SwapError::Ended) => {
                    self.not_before = Some(Instant::now() + PAUSE);
                    return;
                }
                Err(SwapError::Refused(problem)) => {
                    errln!("warning: learning: {problem}; the draft before it goes on");
                    outcome.draft = None;
                }
            }
        }
        let mut state = self.state.clone();
        state.add(outcome.clone());
        if let Err(failure) = state.write(&self.folder) {
            errln!("warning: learning: {}; it is tried again", failure.message());
            self.not_before = Some(Instant::now() + PAUSE);
            return;
        }
        self.state = state;
        self.not_before = None;
        say(&outcome);
        let told = outcome.told();
        self.shared.board.tell(|learning| {
            learning.trainings += 1;
            learning.replaced += usize::from(told.replaced);
            learning.last = Some(told);
        });
        self.remove_training();
        self.tidy();
    }

    fn swap(&self, place: &Path) -> std::result::Result<(), SwapError> {
        let open = || open_draft(&DraftSource::find(place)?, &self.models.target);
        let draft = open().map_err(|failure| SwapError::Refused(failure.message().to_owned()))?;
        self.control.swap(draft)
    }

    fn remove_training(&self) {
        // What stays is removed before the next one begins, or by `learn purge`.
        let _ = std::fs::remove_dir_all(self.folder.join(TRAINING));
    }

    /// Removes drafts that cannot propose again.
    fn tidy(&self) {
        let under_way = Job::read(&self.folder).map(|job| job.number);
        for number in drafts(&self.folder) {
            if !self.state.keeps(number) && under_way != Some(number) {
                let _ = std::fs::remove_dir_all(draft_folder(&self.folder, number));
            }
        }
    }
}

/// Tells what a training came to.
fn say(outcome: &Outcome) {
    let Outcome { rows, held_out, before, after, interval, .. } = outcome;
    if outcome.has_too_few() {
        return errln!(
            "learning: answers to {held_out} prompts were set aside, too few to compare drafts on \
             ({LEAST_HELD_OUT} are needed): nothing was trained"
        );
    }
    let replaced = outcome.draft.is_some();
    let what = if replaced { "a better draft proposes now" } else { "the draft stays" };
    errln!(
        "learning: {rows} texts learned, {held_out} held out: tau {before:.3} before, {after:.3} after \
         [{:+.3}, {:+.3}]; {what}",
        interval.0,
        interval.1
    );
}
