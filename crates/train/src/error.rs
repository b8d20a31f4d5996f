//! What can go wrong while training.

use std::path::{Path, PathBuf};

use longdraft_features::FeatureError;
use longdraft_models::ModelError;
use longdraft_parallel::ParallelError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, TrainError>;

/// An error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A model is unusable.
    #[error(transparent)]
    Model(#[from] longdraft_models::ModelError),
    /// Data is unusable.
    #[error(transparent)]
    Data(#[from] longdraft_data::DataError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(candle_core::Error),
    /// A file that metrics go to cannot be used.
    #[error(transparent)]
    Tracking(#[from] longdraft_tracking::TrackerError),
    /// The loss or a gradient is not finite. Nothing was saved or overwritten.
    #[error(
        "step {step}: {what} is not finite (in {}); the last checkpoint is untouched",
        origins.join(", ")
    )]
    NotFinite {
        /// Optimizer step, from 1.
        step: u64,
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// Where the step's rows came from.
        origins: Vec<String>,
    },
    /// No training row has a token to learn.
    #[error("no token of the training text is learned")]
    NothingToLearn,
    /// A checkpoint cannot be used or written.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The checkpoint's folder or file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A run cannot go on from what it saved.
    #[error("{}: {problem}", path.display())]
    CannotGoOn {
        /// The folder of checkpoints, or one of them.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Features cannot be used or written.
    #[error(transparent)]
    Features(FeatureError),
    /// Another process works in the run directory.
    #[error("{}: another process works in this folder{}", path.display(), named(process.as_deref()))]
    Locked {
        /// The run directory.
        path: PathBuf,
        /// The process's number and host, where these are known.
        process: Option<String>,
    },
    /// A folder or a file cannot be made or written.
    #[error("{}: nothing can be written there: {source}", path.display())]
    Unwritable {
        /// The folder or the file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Several processes cannot work together.
    #[error(transparent)]
    Parallel(ParallelError),
    /// The configuration asks for what is not there yet.
    #[error("{problem}")]
    Unsupported {
        /// What is asked for.
        problem: String,
    },
    /// A run directory belongs to a run of another length.
    #[error("{}: cannot resume: {}", path.display(), differences.join("; "))]
    OtherLength {
        /// The run directory.
        path: PathBuf,
        /// Old and new values.
        differences: Vec<String>,
        /// Whether the run would only become longer.
        longer: bool,
    },
    /// A run directory belongs to another run.
    #[error("{}: cannot resume: {}", path.display(), differences.join("; "))]
    OtherRun {
        /// The run directory.
        path: PathBuf,
        /// Old and new values.
        differences: Vec<String>,
    },
}

/// A process, as a message adds it.
fn named(process: Option<&str>) -> String {
    process.map(|process| format!(" (process {process})")).unwrap_or_default()
}

impl From<candle_core::Error> for TrainError {
    fn from(error: candle_core::Error) -> Self {
        match ModelError::from(error) {
            ModelError::Tensor(error) => Self::Tensor(error),
            other => Self::Model(other),
        }
    }
}

impl From<FeatureError> for TrainError {
    fn from(error: FeatureError) -> Self {
        match error {
            FeatureError::Model(ModelError::Tensor(error)) => Self::Tensor(error),
            FeatureError::Model(error) => Self::Model(error),
            other => Self::Features(other),
        }
    }
}

impl From<ParallelError> for TrainError {
    fn from(error: ParallelError) -> Self {
        match error {
            ParallelError::Model(ModelError::Tensor(error)) => Self::Tensor(error),
            ParallelError::Model(error) => Self::Model(error),
            other => Self::Parallel(other),
        }
    }
}

impl TrainError {
    /// Ranks that do not fit together.
    pub(crate) fn ranks(problem: impl Into<String>) -> Self {
        Self::Parallel(ParallelError::Ranks { problem: problem.into() })
    }

    /// A place that cannot be written; for `map_err`.
    pub fn unwritable(path: &Path) -> impl Fn(std::io::Error) -> Self + Copy {
        move |source| Self::Unwritable { path: path.to_path_buf(), source }
    }

    /// A checkpoint problem.
    pub fn checkpoint(path: impl Into<PathBuf>, problem: impl std::fmt::Display) -> Self {
        Self::Checkpoint { path: path.into(), problem: problem.to_string() }
    }
}
