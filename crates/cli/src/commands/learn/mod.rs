//! Learning from what a server answers (`serve --learn DIR`), and `longdraft learn` to remove it.
//!
//! ```text
//! server -> answers -> filter -> rows, datastore          keeper.rs, redact.rs, store.rs
//!                                rows -> training          trainer.rs starts a process (process.rs): training.rs
//!                                candidate -> comparison -> draft, if it is better -> server
//!                     newest rows -> check: the given draft again, if that is better -> server
//! ```
//!
//! Everything lies in the folder (folder.rs): `rows/`, `drafts/N/`, `training/` while one is under way, and
//! `learning.json`. Each is whole or absent at any moment, and the next start goes on from there.

mod clock;
mod extent;
mod folder;
mod keeper;
mod process;
mod redact;
mod rows;
mod state;
mod store;
mod trainer;
mod training;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use longdraft_decode::drafter::{GrownDatastore, Proposer};
use longdraft_models::sha256;
use longdraft_server::{Board, Control, Learning, Served};
use longdraft_train::checkpoint::{RunLock, draft_file};

use crate::cli::{DecodingArguments, LearnCommand, LearningArguments, ServeArguments};
use crate::commands::{remove_folder, require_text};
use crate::decoding::Models;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::terminal::counted;
use crate::threads::own_threads;
use keeper::Keeper;
use state::{Job, Origin, State, TRAINING, draft_folder};
use store::{Limits, Store};
use trainer::Trainer;

/// Tokens of answers that lookup looks in, at most.
const DATASTORE: usize = 1 << 22;

/// Runs a command about what was learned.
pub(crate) fn run(command: &LearnCommand, json: bool) -> Result<()> {
    match command {
        LearnCommand::Purge { folder } => purge(folder, json),
        LearnCommand::Train { folder } => training::run(folder),
    }
}

/// Removes everything that was kept.
fn purge(place: &Path, json: bool) -> Result<()> {
    let rows = folder::purge(place)?;
    if json {
        outjson!({ "folder": place.to_string_lossy(), "answers": rows });
    } else {
        outln!("removed {} and what was learned of them", counted(rows, "answer"));
    }
    Ok(())
}

/// Refuses what cannot be learned, before anything is opened.
/// It fails where there is nothing that could learn, an argument makes no sense, or the filter cannot be run.
pub(crate) fn check(arguments: &ServeArguments) -> Result<()> {
    let (learning, decoding) = (&arguments.learning, &arguments.decoding);
    let Some(folder) = &learning.learn else { return Ok(()) };
    require_text(folder, "--learn")?;
    if !decoding.drafts() && learning.learn_method.is_none() {
        return Err(Failure::usage("--learn has nothing that could learn")
            .hint("give --draft or --learn-method, --lookup, or two of them"));
    }
    let has_time = learning.learn_minutes > 0.0 && learning.learn_minutes.is_finite();
    let keeps = learning.learn_size > 0 && learning.learn_days > 0;
    if learning.learn_rows == 0 || !keeps || !has_time {
        return Err(Failure::usage(
            "--learn-rows, --learn-size, --learn-days and --learn-minutes must be numbers above 0",
        ));
    }
    learning.learn_redact.as_deref().map_or(Ok(()), redact::check)
}

/// What `--learn` asks for, before the server runs.
pub(crate) struct Learner {
    folder: PathBuf,
    arguments: LearningArguments,
    /// How the server drafts.
    decoding: DecodingArguments,
    state: State,
    store: Store,
    /// The draft that `--draft` leads to, if there is one.
    given: Option<PathBuf>,
    target: String,
    device: String,
    /// What the server finds.
    grown: Option<Arc<GrownDatastore>>,
    /// Held until the server ends.
    lock: RunLock,
}

impl Learner {
    /// Takes the folder, with arguments that [`check`] let pass; nothing if nothing is to be learned.
    /// It fails where the folder is taken, of another target, or cannot be written.
    pub(crate) fn open(arguments: &ServeArguments, models: &Models) -> Result<Option<Self>> {
        let (learning, decoding) = (&arguments.learning, &arguments.decoding);
        let Some(folder) = &learning.learn else { return Ok(None) };
        let given = decoding.draft.as_deref().map(DraftSource::find).transpose()?;
        let given = given.map(|source| source.place().to_path_buf());
        let base = given.as_deref().map(|place| hash_of(&draft_file(place))).transpose()?;
        let lock = folder::take(folder)?;
        let state = State::open(folder, models.target.fingerprint(), &base.unwrap_or_default())?;
        state.write(folder)?;
        let age = age_of(learning);
        let is_useless = |job: Job| job.base != state.base() || job.is_older_than(age);
        if Job::read(folder).is_some_and(is_useless) {
            // What comes of it goes on from another draft, or its texts are too old to be kept.
            remove_folder(&folder.join(TRAINING))?;
        }
        let limits = Limits { bytes: learning.learn_size.saturating_mul(1 << 20), age };
        let store = Store::open(folder, limits)?;
        let grown = decoding.lookup.is_some().then(|| Arc::new(GrownDatastore::new(DATASTORE)));
        if let Some(grown) = &grown {
            grown.refill(store::newest(folder).map(|row| row.answer().to_vec()));
        }
        Ok(Some(Self {
            folder: folder.clone(),
            arguments: learning.clone(),
            decoding: decoding.clone(),
            state,
            store,
            given,
            target: arguments.target.clone(),
            device: decoding.held.device.to_string(),
            grown,
            lock,
        }))
    }

    /// The draft that was learned last with its head, if there is one and it proposes. One that cannot be opened is forgotten:
    /// the next training begins with what proposes instead.
    pub(crate) fn proposer(&mut self, models: &Models) -> Result<Option<Proposer>> {
        let Some(number) = self.state.proposing() else { return Ok(None) };
        let place = draft_folder(&self.folder, number);
        let open = |source: DraftSource| self.decoding.proposer(&source, &models.target);
        match DraftSource::find(&place).and_then(open) {
            Ok(proposer) => {
                errln!("draft: {}, which was learned", place.display());
                Ok(Some(proposer))
            }
            Err(failure) => {
                let instead =
                    if self.given.is_some() { "--draft proposes" } else { "it is forgotten" };
                errln!("warning: {}: {instead}", failure.message());
                self.state.forget();
                self.state.write(&self.folder)?;
                Ok(None)
            }
        }
    }

    /// What lookup finds of the answers.
    pub(crate) fn grown(&self) -> Option<Arc<GrownDatastore>> {
        self.grown.clone()
    }

    /// Learns on threads of its own until the server ends. It fails where the system gives no threads.
    pub(crate) fn start(
        self,
        models: &Arc<Models>,
        control: Control,
        (served, board): (Receiver<Served>, Arc<Board>),
    ) -> Result<Lesson> {
        let job = Job::read(&self.folder);
        let began = |is_check: bool| {
            job.as_ref().filter(|job| job.check.is_some() == is_check).map(|job| job.began)
        };
        let kept_since = |since| {
            AtomicUsize::new(store::newest(&self.folder).take_while(|row| row.at > since).count())
        };
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            fresh: kept_since(began(false).unwrap_or_else(|| self.state.trained_until())),
            unchecked: kept_since(began(true).unwrap_or_else(|| self.state.known_until())),
            board,
        });
        let trainings = &self.state.trainings;
        let replaced = trainings.iter().filter(|outcome| outcome.draft.is_some()).count();
        shared.board.tell(|learning| {
            *learning = Learning {
                doing: "waiting",
                rows: self.store.rows(),
                datastore: self.grown.as_ref().map_or(0, |grown| grown.len()),
                trainings: trainings.len(),
                replaced,
                last: trainings.last().map(state::Outcome::told),
                rests: self.state.proposes() == Origin::Given,
                ..Learning::default()
            };
        });
        let keeper = Keeper {
            store: self.store,
            redact: self.arguments.learn_redact.clone(),
            grown: self.grown,
            models: Arc::clone(models),
            shared: Arc::clone(&shared),
            told_of_trouble: false,
            swept: Instant::now(),
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map_err(Failure::work)
        };
        let own = own_threads(1)?;
        let keep = move || own.install(move || keeper.work(&served));
        let mut threads = vec![spawn("keeper", Box::new(keep))?];
        if self.given.is_some() || self.arguments.learn_method.is_some() {
            let trainer = Trainer {
                folder: self.folder,
                arguments: self.arguments,
                decoding: self.decoding,
                state: self.state,
                given: self.given,
                target: self.target,
                device: self.device,
                models: Arc::clone(models),
                control,
                shared: Arc::clone(&shared),
                not_before: None,
            };
            threads.push(spawn("trainer", Box::new(move || trainer.work()))?);
        }
        Ok(Lesson { shared, threads, _lock: self.lock })
    }
}

/// Seconds of a day.
const DAY: u64 = 24 * 60 * 60;

/// How long texts are kept.
fn age_of(arguments: &LearningArguments) -> Duration {
    Duration::from_secs(arguments.learn_days.saturating_mul(DAY))
}

/// Tells drafts apart: the sum of a file, or of the files of a folder. It fails where one cannot be read.
fn hash_of(place: &Path) -> Result<String> {
    let fail = |path: &Path, error: &std::io::Error| {
        Failure::file(format!("{}: {error}", path.display()), error)
    };
    let sum = |path: &Path| sha256::of_file(path).map_err(|error| fail(path, &error));
    if !place.is_dir() {
        return sum(place);
    }
    let files = std::fs::read_dir(place).map_err(|error| fail(place, &error))?;
    let paths = files.map(|file| file.map(|file| file.path()));
    let paths = paths.collect::<std::io::Result<Vec<_>>>().map_err(|error| fail(place, &error))?;
    let files = paths.iter().filter(|path| path.is_file());
    let mut sums = files.map(|path| sum(path)).collect::<Result<Vec<String>>>()?;
    sums.sort();
    Ok(sha256::of_text(&sums.join(" ")))
}

/// Where the draft lies that was learned last of the one that proposed first, if it proposes.
pub(crate) fn learned_draft(folder: &Path) -> Option<PathBuf> {
    let number = State::read(folder)?.proposing()?;
    Some(draft_folder(folder, number)).filter(|place| place.is_dir())
}

/// What the threads of a learner share.
struct Shared {
    /// The server ends.
    stop: AtomicBool,
    /// Answers that were kept since the last training.
    fresh: AtomicUsize,
    /// Answers that were kept since both drafts were compared; after a start, since the learned draft learned.
    unchecked: AtomicUsize,
    board: Arc<Board>,
}

impl Shared {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A learner that works.
pub(crate) struct Lesson {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    _lock: RunLock,
}

impl Lesson {
    /// Ends it; what is under way goes on with the next server. [`longdraft_server::Lessons`] must be gone.
    pub(crate) fn end(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that failed has nothing to tell any more.
            let _ = thread.join();
        }
    }
}
