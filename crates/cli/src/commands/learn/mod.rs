//! Learning from what a server answers (`serve --learn DIR`), and `longdraft learn` to remove it.
//!
//! ```text
//! server -> answers -> filter -> rows, datastore          keeper.rs, redact.rs, store.rs
//!                                rows -> training          trainer.rs starts a process: training.rs
//!                                candidate -> comparison -> draft, if it is better -> server
//! ```
//!
//! Everything lies in the folder: `rows/`, `drafts/N/`, `training/` while one is under way, and
//! `learning.json`. Each is whole or absent at any moment, and the next start goes on from there.

mod keeper;
mod redact;
mod state;
mod store;
mod trainer;
mod training;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use longdraft_decode::drafter::GrownDatastore;
use longdraft_models::draft::Draft;
use longdraft_models::sha256;
use longdraft_server::{Board, Control, Learning, Lessons, Served};
use longdraft_train::checkpoint::{RunLock, draft_file};
use longdraft_train::method::Method;

use crate::cli::{LearnCommand, LearningArguments, ServeArguments};
use crate::decoding::{Models, open_draft};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use keeper::Keeper;
use state::{STATE_FILE, State, draft_folder};
use store::{Limits, Store, private_folder};
use trainer::Trainer;

/// Tokens of answers that lookup looks in, at most.
const DATASTORE: usize = 1 << 22;
/// What a learner's folder holds beside the rows.
const PARTS: [&str; 4] = [state::TRAINING, state::DRAFTS, STATE_FILE, trainer::LOG_FILE];

/// Runs a command about what was learned.
pub(crate) fn run(command: &LearnCommand) -> Result<()> {
    match command {
        LearnCommand::Purge { folder } => purge(folder),
        LearnCommand::Train { folder } => training::run(folder),
    }
}

/// Removes everything that was kept.
fn purge(folder: &Path) -> Result<()> {
    let is_learner = store::is_there(folder) || folder.join(STATE_FILE).is_file();
    if !is_learner {
        return Err(Failure::usage(format!("{}: nothing was learned there", folder.display()))
            .hint("give the folder of `longdraft serve --learn DIR`"));
    }
    let _lock = lock(folder)?;
    let rows = store::remove(folder)?;
    for part in PARTS {
        let path = folder.join(part);
        let removed = match path.symlink_metadata() {
            Ok(about) if about.is_dir() => std::fs::remove_dir_all(&path),
            Ok(_) => std::fs::remove_file(&path),
            Err(_) => Ok(()),
        };
        removed.map_err(|error| Failure::work(format!("{}: {error}", path.display())))?;
    }
    outln!("removed {rows} answers and what was learned of them");
    Ok(())
}

fn lock(folder: &Path) -> Result<RunLock> {
    RunLock::acquire(folder).map_err(|error| {
        Failure::from(error).hint("a server that learns there is running: end it first")
    })
}

/// What `--learn` asks for, before the server runs.
pub(crate) struct Learner {
    folder: PathBuf,
    arguments: LearningArguments,
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
    /// Takes the folder; nothing if nothing is to be learned.
    ///
    /// # Errors
    /// - there is nothing that could learn, the folder is taken, of another target, or cannot be written
    pub(crate) fn open(arguments: &ServeArguments, models: &Models) -> Result<Option<Self>> {
        let (learning, decoding) = (&arguments.learning, &arguments.decoding);
        let Some(folder) = &learning.learn else { return Ok(None) };
        if !decoding.drafts() && learning.learn_method.is_none() {
            return Err(Failure::usage("--learn has nothing that could learn")
                .hint("give --draft or --learn-method, --lookup, or two of them"));
        }
        let method = learning.learn_method.as_deref();
        if let Some(name) = method.filter(|name| Method::named(name).is_none()) {
            let names: Vec<&str> = Method::all().map(Method::name).collect();
            return Err(Failure::usage(format!("`{name}` is not a method"))
                .hint(format!("methods: {}", names.join(", "))));
        }
        if learning.learn_rows == 0 || learning.learn_size == 0 || learning.learn_minutes <= 0.0 {
            return Err(Failure::usage(
                "--learn-rows, --learn-size and --learn-minutes must be above 0",
            ));
        }
        private_folder(folder)?;
        let lock = lock(folder)?;
        let given = decoding.draft.as_deref().map(DraftSource::find).transpose()?;
        let given = given.map(|source| source.place().to_path_buf());
        let base = given.as_deref().map(|place| hash_of(&draft_file(place))).unwrap_or_default();
        let state = State::open(folder, models.target.fingerprint(), &base)?;
        state.write(folder)?;
        let limits = Limits {
            bytes: learning.learn_size.saturating_mul(1 << 20),
            age: Duration::from_hours(learning.learn_days.saturating_mul(24)),
        };
        let store = Store::open(folder, limits)?;
        let grown = decoding.lookup.is_some().then(|| Arc::new(GrownDatastore::new(DATASTORE)));
        if let Some(grown) = &grown {
            let rows = store::read(folder);
            grown.add(rows.iter().map(store::Row::answer));
        }
        Ok(Some(Self {
            folder: folder.clone(),
            arguments: learning.clone(),
            state,
            store,
            given,
            target: arguments.target.clone(),
            device: decoding.device.to_string(),
            grown,
            lock,
        }))
    }

    /// The draft that was learned last, if there is one that can be opened.
    pub(crate) fn draft(&self, models: &Models) -> Option<Arc<dyn Draft>> {
        let place = learned_draft(&self.folder)?;
        match DraftSource::find(&place).and_then(|source| open_draft(&source, &models.target)) {
            Ok(draft) => {
                errln!("draft: {}, which was learned", place.display());
                Some(draft)
            }
            Err(failure) => {
                errln!("warning: {}: --draft proposes", failure.message());
                None
            }
        }
    }

    /// What lookup finds of the answers.
    pub(crate) fn grown(&self) -> Option<Arc<GrownDatastore>> {
        self.grown.clone()
    }

    /// Learns on threads of its own until the server ends.
    ///
    /// # Errors
    /// - the system gives no threads
    pub(crate) fn start(
        self,
        models: &Arc<Models>,
        control: Control,
        (served, board): (Receiver<Served>, Arc<Board>),
    ) -> Result<Lesson> {
        let shared =
            Arc::new(Shared { stop: AtomicBool::new(false), fresh: AtomicUsize::new(0), board });
        let since = self.state.trained_at();
        let fresh = store::read(&self.folder).iter().filter(|row| row.at > since).count();
        shared.fresh.store(fresh, Ordering::Relaxed);
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
        };
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(work).map_err(Failure::work)
        };
        let mut threads = vec![spawn("keeper", Box::new(move || keeper.work(&served)))?];
        if self.given.is_some() || self.arguments.learn_method.is_some() {
            let trainer = Trainer {
                folder: self.folder,
                arguments: self.arguments,
                state: self.state,
                given: self.given,
                target: self.target,
                device: self.device,
                models: Arc::clone(models),
                control,
                shared: Arc::clone(&shared),
                attempts: 0,
                not_before: None,
            };
            threads.push(spawn("trainer", Box::new(move || trainer.work()))?);
        }
        Ok(Lesson { shared, threads, _lock: self.lock })
    }
}

/// Tells drafts apart: the sum of a file, or of the files of a folder.
fn hash_of(place: &Path) -> String {
    let sum = |path: &Path| sha256::of_file(path).unwrap_or_default();
    if !place.is_dir() {
        return sum(place);
    }
    let files = std::fs::read_dir(place).into_iter().flatten().flatten();
    let mut sums: Vec<String> = files
        .map(|file| file.path())
        .filter(|path| path.is_file())
        .map(|path| sum(&path))
        .collect();
    sums.sort();
    sha256::of_text(&sums.join(" "))
}

/// Where the draft lies that was learned last.
pub(crate) fn learned_draft(folder: &Path) -> Option<PathBuf> {
    let number = state::current(folder)?;
    Some(draft_folder(folder, number)).filter(|place| place.is_dir())
}

/// What the threads of a learner share.
struct Shared {
    /// The server ends.
    stop: AtomicBool,
    /// Answers that were kept since the last training.
    fresh: AtomicUsize,
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
    /// Ends it; what is under way goes on with the next server. [`Lessons`] must be gone.
    pub(crate) fn end(self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // A thread that failed has nothing to tell any more.
            let _ = thread.join();
        }
    }
}

/// A way from the server to a learner, if there is one.
pub(crate) fn lessons(learner: Option<&Learner>) -> Option<(Lessons, Receiver<Served>)> {
    learner.map(|_| Lessons::new())
}
