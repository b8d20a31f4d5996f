//! What can go wrong while pretraining.

use std::path::PathBuf;

use longdraft_data::DataError;
use longdraft_models::ModelError;
use longdraft_parallel::ParallelError;
use longdraft_tracking::TrackerError;
use longdraft_train::TrainError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, PretrainError>;

/// An error of a pretraining run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PretrainError {
    /// What every training may meet: models, data, ranks, checkpoints, losses that are not finite.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// Nothing says how many bytes the tokens of a stream stand for, or not of all of them.
    #[error("{}: {problem}", path.display())]
    Bytes {
        /// A file of the stream.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// Errors that training wraps already.
macro_rules! of_training {
    ($($error:ty),*) => {$(
        impl From<$error> for PretrainError {
            fn from(error: $error) -> Self {
                Self::Train(error.into())
            }
        }
    )*};
}

of_training!(candle_core::Error, DataError, ModelError, ParallelError, TrackerError);

impl PretrainError {
    pub(crate) fn bytes(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::Bytes { path: path.into(), problem: problem.into() }
    }
}
