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
    /// More rows are malformed than the configuration tolerates.
    #[error(
        "{}: {bad} of {rows} rows are malformed, more than data.max_bad_rows ({share}) allows:\n  {}{}",
        path.display(), first.join("\n  "),
        quarantine.as_ref().map(|path| format!("\n  all of them are in {}", path.display()))
            .unwrap_or_default()
    )]
    TooManyBadRows {
        /// The source.
        path: PathBuf,
        /// Malformed rows.
        bad: usize,
        /// Rows that were read.
        rows: usize,
        /// Tolerated share.
        share: f64,
        /// The first problems, `file:line: problem`.
        first: Vec<String>,
        /// Where every malformed row was written.
        quarantine: Option<PathBuf>,
    },
    /// Nothing is left to train on.
    #[error(
        "{}: no row gives a token to learn ({rows} {} read){}", path.display(),
        if *rows == 1 { "row" } else { "rows" },
        first_problem.as_ref().map(|problem| format!("; {problem}")).unwrap_or_default()
    )]
    Empty {
        /// The file.
        path: PathBuf,
        /// Rows that were read.
        rows: usize,
        /// The first malformed row, if there was one.
        first_problem: Option<String>,
    },
    /// A source is of no known kind, or holds nothing to read.
    #[error("{}: {problem}", path.display())]
    Source {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Prepared shards cannot be used.
    #[error("{}: {problem}", path.display())]
    Shards {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

impl DataError {
    /// Wraps a system error with its file.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// An unusable source.
    pub(crate) fn source(path: impl Into<PathBuf>, problem: impl std::fmt::Display) -> Self {
        Self::Source { path: path.into(), problem: problem.to_string() }
    }

    /// Unusable shards.
    pub(crate) fn shards(path: impl Into<PathBuf>, problem: impl std::fmt::Display) -> Self {
        Self::Shards { path: path.into(), problem: problem.to_string() }
    }
}
