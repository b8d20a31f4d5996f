//! What can go wrong among ranks.

use longdraft_models::ModelError;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ParallelError>;

/// An error of ranks that work together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// Several processes cannot work together.
    #[error("{problem}")]
    Ranks {
        /// What is wrong.
        problem: String,
    },
    /// The ranks did not find each other.
    #[error("{problem}")]
    Meeting {
        /// What is wrong.
        problem: String,
    },
    /// A configuration asks for what this number of ranks cannot do.
    #[error("{problem}")]
    Unsupported {
        /// What is asked for.
        problem: String,
    },
    /// A tensor operation failed, or a device has no memory left.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl From<candle_core::Error> for ParallelError {
    fn from(error: candle_core::Error) -> Self {
        Self::Model(error.into())
    }
}
