//! Why an export or a check cannot be done.

use std::path::PathBuf;

use longdraft_models::ModelError;
use longdraft_models::error::Problems;

use crate::Profile;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ServingError>;

/// An error of exporting or checking a draft.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// The draft computes what the profile's engines do not.
    #[error("profile `{}` cannot hold this draft: {problems}", profile.name())]
    NotRepresentable {
        /// Where it was to go.
        profile: Profile,
        /// Every reason.
        problems: Problems,
    },
    /// A draft of a method that no engine's files hold.
    #[error("no format holds drafts of method `{0}`")]
    NoFormat(&'static str),
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A model or weight file is unusable.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl ServingError {
    /// Wraps an I/O error with its path.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

impl From<candle_core::Error> for ServingError {
    fn from(error: candle_core::Error) -> Self {
        Self::Model(error.into())
    }
}
