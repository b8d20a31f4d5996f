//! Starts trainings and checks, lets them rest while answers are written, and has better drafts propose.
//!
//! Both are processes of their own, at the lowest priority: whatever becomes of one, the server goes on. A training
//! makes a candidate. A check compares the learned draft with the one that `--draft` gave, on answers that came since
//! it learned: after a change of what is asked it may be worse than where it began.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use longdraft_server::{Check, Control, SwapError};

use super::process::{LOG_FILE, Process};
use super::rows::LEAST_HELD_OUT;
use super::state::{Job, Origin, Outcome, Resting, State, TRAINING, draft_folder, drafts};
use super::store::now;
use super::{Shared, age_of};
use crate::cli::{DecodingArguments, LearnWhen, LearningArguments};
use crate::decoding::Models;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};

/// Answers after which the learned draft is compared with the given one again.
const CHECK_EVERY: usize = 64;
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
    /// How the server drafts.
    pub(super) decoding: DecodingArguments,
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
                let doing = if running.rests { "paused" } else { running.does };
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
                match self.start() {
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

    /// Whether enough was kept, or something is under way.
    fn is_due(&self) -> bool {
        let enough = self.shared.fresh.load(Ordering::Relaxed) >= self.arguments.learn_rows;
        !self.waits() && (enough || self.is_check_due() || Job::read(&self.folder).is_some())
    }

    /// Whether there are two drafts to compare, and answers enough since that was done.
    fn is_check_due(&self) -> bool {
        let has_both = self.given.is_some() && self.state.current().is_some();
        has_both && self.shared.unchecked.load(Ordering::Relaxed) >= CHECK_EVERY
    }

    /// Says what is to be done, unless that goes on, and starts it. The attempt counts before it is made. A check
    /// comes before a training, which begins with the draft that proposes.
    fn start(&self) -> Result<Process> {
        let job = match Job::read(&self.folder) {
            Some(job) if job.attempts >= ATTEMPTS => {
                let name = job.name();
                return Err(Failure::work(format!("the {name} was ended {ATTEMPTS} times")));
            }
            Some(job) => job,
            None => self.fresh_job()?,
        };
        let does = if job.check.is_some() { "checking" } else { "training" };
        Job { attempts: job.attempts + 1, ..job }.write(&self.folder)?;
        Process::start(&self.folder, does).map_err(Failure::work)
    }

    /// Where a draft lies, if there is one of that origin.
    fn place(&self, origin: Origin) -> Option<PathBuf> {
        match origin {
            Origin::Given => self.given.clone(),
            Origin::Learned => {
                self.state.current().map(|number| draft_folder(&self.folder, number))
            }
        }
    }

    fn fresh_job(&self) -> Result<Job> {
        let proposes = self.state.proposes();
        let absolute = |place: PathBuf| std::path::absolute(place).map_err(Failure::work);
        let draft = self.place(proposes).or_else(|| self.given.clone());
        let draft = draft.map(absolute).transpose()?;
        let resting = self.place(proposes.other()).filter(|_| self.is_check_due());
        let check = resting.map(|draft| {
            let (origin, since) = (proposes.other(), self.state.known_until());
            absolute(draft).map(|draft| Resting { draft, origin, since })
        });
        let check = check.transpose()?;
        self.remove_training();
        // What is kept from now on counts for the next one.
        let counted = if check.is_some() { &self.shared.unchecked } else { &self.shared.fresh };
        counted.store(0, Ordering::Relaxed);
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
            check,
        })
    }

    /// A process ended: its outcome is taken, or it is begun again if a signal ended it.
    fn ended(&mut self, status: ExitStatus) {
        if status.success() && Outcome::read(&self.folder).is_some() {
            self.take_outcome();
            return;
        }
        let by_signal = status.code().is_none_or(|code| code >= 128);
        let job = Job::read(&self.folder);
        let attempts = job.as_ref().map_or(ATTEMPTS, |job| job.attempts);
        if by_signal && attempts < ATTEMPTS {
            self.not_before = Some(Instant::now() + PAUSE * attempts);
            return;
        }
        let (name, log) = (job.map_or("training", |job| job.name()), self.folder.join(LOG_FILE));
        self.give_up(&format!("the {name} failed ({status}); it said why in {}", log.display()));
    }

    /// Lets go of what was begun; the next one begins when as many answers more are kept.
    fn give_up(&mut self, problem: &str) {
        errln!("warning: learning: {problem}");
        self.remove_training();
        self.shared.board.tell(|learning| {
            learning.failed += 1;
            learning.doing = "waiting";
        });
    }

    /// Has the draft propose that an ended training or check found to be better, and remembers what came of it.
    fn take_outcome(&mut self) {
        if let Some(outcome) = Outcome::read(&self.folder) {
            let control = self.control.clone();
            // What is opened on request afterwards is the one that is remembered.
            control.alone(|| self.take(outcome));
        }
    }

    /// The same. In this order, a kill between any two steps has the next start do it again.
    fn take(&mut self, mut outcome: Outcome) {
        let before = self.state.proposes();
        if let Some(place) = self.better(&outcome) {
            match self.swap(&place) {
                Ok(()) => {}
                // The next server takes it.
                Err(SwapError::Ended) => {
                    self.not_before = Some(Instant::now() + PAUSE);
                    return;
                }
                Err(SwapError::Refused(problem)) if outcome.prefers().is_some() => {
                    return self.give_up(&problem);
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
            errln!("warning: learning: {}; it will be tried again", failure.message());
            self.not_before = Some(Instant::now() + PAUSE);
            return;
        }
        self.state = state;
        self.not_before = None;
        if outcome.draft.is_some() {
            // It has seen none of those that were kept while it was trained.
            let fresh = self.shared.fresh.load(Ordering::Relaxed);
            self.shared.unchecked.store(fresh, Ordering::Relaxed);
        }
        self.tell(&outcome, before);
        self.remove_training();
        self.tidy();
    }

    /// The draft that is to propose after this, if another one does.
    fn better(&self, outcome: &Outcome) -> Option<PathBuf> {
        match outcome.prefers() {
            Some(origin) if origin != self.state.proposes() => self.place(origin),
            Some(_) => None,
            None => outcome.draft.map(|number| draft_folder(&self.folder, number)),
        }
    }

    /// Tells what came of a training, or of a check before which a draft of that origin proposed.
    fn tell(&self, outcome: &Outcome, before: Origin) {
        let (proposes, board) = (self.state.proposes(), &self.shared.board);
        board.tell(|learning| learning.rests = proposes == Origin::Given);
        if outcome.prefers().is_none() {
            say(outcome);
            let told = outcome.told();
            board.tell(|learning| {
                learning.trainings += 1;
                learning.replaced += usize::from(told.replaced);
                learning.last = Some(told);
            });
        } else if let Some(check) = outcome.told_as_check() {
            if proposes != before {
                say_change(&check, proposes);
            }
            board.tell(|learning| {
                learning.checks += 1;
                learning.check = Some(check);
            });
        }
    }

    fn swap(&self, place: &Path) -> std::result::Result<(), SwapError> {
        let open = || self.models.open_another(&self.decoding, &DraftSource::find(place)?);
        let refused = |failure: Failure| SwapError::Refused(failure.message().to_owned());
        self.control.swap(open().map_err(refused)?)
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

/// Tells that a check has another draft propose.
fn say_change(check: &Check, proposes: Origin) {
    let Check { answers, given, learned, interval, .. } = check;
    let what = match proposes {
        Origin::Given => "the given draft proposes again",
        Origin::Learned => "the learned draft proposes again",
    };
    errln!(
        "learning: {answers} newest answers: tau {given:.3} with the given draft, {learned:.3} with the learned one \
         [{:+.3}, {:+.3}]; {what}",
        interval.0,
        interval.1
    );
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
