//! What can be wrong with data, said with its place.

use std::path::PathBuf;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, DataError>;

/// An error of reading or preparing data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A row is malformed.
    #[error("{}:{line}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong, with what was found.
        problem: String,
    },
    /// Nothing is left to train on.
    #[error("{}: no row gives a token to learn ({rows} rows read)", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Rows that were read.
        rows: usize,
    },
}
