//! What can go wrong with a tracker.

use std::path::PathBuf;

/// Why a tracker was switched off. Training goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// A file cannot be written or read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file went away while the run wrote to it.
    #[error("{}: {what} while the run wrote to it", path.display())]
    Lost {
        /// The file.
        path: PathBuf,
        /// What became of it.
        what: &'static str,
    },
    /// A server does not answer, or refuses.
    #[error("{url}: {problem}")]
    Server {
        /// Address without user and password.
        url: String,
        /// What happened.
        problem: String,
    },
    /// Something that the tracker needs is missing or wrong; the text says the way out.
    #[error("{0}")]
    Setup(String),
}

/// Result of a tracker.
pub type Result<T> = std::result::Result<T, TrackerError>;

impl TrackerError {
    /// For `map_err` on file operations.
    pub(super) fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
