//! What can go wrong with features.

use longdraft_models::ModelError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, FeatureError>;

/// An error of computing, storing or reading features.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeatureError {
    /// The target cannot run, or a tensor or its file is unusable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Stored features cannot be used or written.
    #[error("{location}: {problem}")]
    Store {
        /// The store, or a file of it.
        location: String,
        /// What is wrong.
        problem: String,
    },
    /// A store of features needs more room than there is.
    #[error(
        "{location}: {bytes_left} bytes are still to be written, {free} are free: make room, name another \
         place in `train.features`, or store less (`capture.dtype: int8`, `teacher.soft_targets: top_k`)"
    )]
    NoRoom {
        /// The store.
        location: String,
        /// Bytes that are still to be written.
        bytes_left: u64,
        /// Bytes that are free.
        free: u64,
    },
}

impl From<candle_core::Error> for FeatureError {
    fn from(error: candle_core::Error) -> Self {
        Self::Model(error.into())
    }
}

impl FeatureError {
    /// A problem with stored features.
    pub fn store(location: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Store { location: location.into(), problem: problem.to_string() }
    }
}
