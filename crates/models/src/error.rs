//! What can be wrong with a model on disk, said with its place.

use std::fmt;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ModelError>;

/// An error of reading, checking or running a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or folder could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A file's content is unusable; every problem found is listed.
    #[error("{}: {problems}", path.display())]
    Invalid {
        /// The file or folder.
        path: PathBuf,
        /// At least one.
        problems: Problems,
    },
    /// Nothing of a known kind is at a path, or nothing at all.
    #[error("{}: {problem}", path.display())]
    Unrecognised {
        /// As it was named.
        path: PathBuf,
        /// What is missing, and what would have been possible.
        problem: String,
    },
    /// The hub could not deliver a model or a data set.
    #[error("hub {kind} `{repo}`: {reason}")]
    Hub {
        /// `model` or `data set`
        kind: &'static str,
        /// `org/name`
        repo: String,
        /// What the client said.
        reason: String,
        /// The way out.
        remedy: String,
    },
    /// A repository of the hub holds other files than those asked for.
    #[error("hub {kind} `{repo}`: {problem}")]
    HubFiles {
        /// `model` or `data set`
        kind: &'static str,
        /// `org/name`
        repo: String,
        /// What is there in their place.
        problem: String,
        /// How to say what is wanted.
        remedy: String,
    },
    /// Text could not be encoded, decoded or rendered.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template took too long here, or too many did: on another machine, or later, it may not.
    #[error("tokenizer: chat template: {0}")]
    Rendering(String),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(candle_core::Error),
    /// A device that was asked for cannot be used.
    #[error("device `{device}`: {problem}")]
    Device {
        /// As it was named.
        device: String,
        /// What is wrong.
        problem: String,
        /// The way out.
        remedy: String,
    },
    /// The device has no memory left.
    #[error("the device has no memory left: {source}")]
    DeviceMemory {
        /// The driver's error.
        #[source]
        source: candle_core::Error,
    },
}

impl From<candle_core::Error> for ModelError {
    fn from(error: candle_core::Error) -> Self {
        let error = without_backtrace(error);
        if is_out_of_memory(&error) {
            Self::DeviceMemory { source: error }
        } else {
            Self::Tensor(error)
        }
    }
}

/// Whether a tensor operation failed because the device has no memory left. candle keeps the
/// driver's error as text.
fn is_out_of_memory(error: &candle_core::Error) -> bool {
    let text = error.to_string();
    ["OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "FailedToCreateResource"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// The error without the frames that candle puts into its text where `RUST_BACKTRACE` is set.
pub fn without_backtrace(error: candle_core::Error) -> candle_core::Error {
    use candle_core::Error;
    let plain = |inner: Box<Error>| Box::new(without_backtrace(*inner));
    match error {
        Error::WithBacktrace { inner, .. } => without_backtrace(*inner),
        Error::Context { inner, context } => Error::Context { inner: plain(inner), context },
        Error::WithPath { inner, path } => Error::WithPath { inner: plain(inner), path },
        other => other,
    }
}

impl ModelError {
    /// Wraps an I/O error with its path.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    /// Says in which file problems are.
    pub(crate) fn all_in(path: impl Into<PathBuf>) -> impl FnOnce(Problems) -> Self {
        let path = path.into();
        move |problems| Self::Invalid { path, problems }
    }

    /// Nothing of a known kind is there.
    pub fn unrecognised(path: impl Into<PathBuf>, problem: impl fmt::Display) -> Self {
        Self::Unrecognised { path: path.into(), problem: problem.to_string() }
    }

    /// One problem with a file.
    pub fn invalid(path: impl Into<PathBuf>, problem: impl fmt::Display) -> Self {
        Self::Invalid { path: path.into(), problems: Problems(vec![problem.to_string()]) }
    }
}

/// The error of a call that cannot be done with these tensors, or in this state.
pub(crate) fn refused(problem: impl Into<String>) -> ModelError {
    ModelError::Tensor(candle_core::Error::Msg(problem.into()))
}

/// Everything that is wrong with one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl Problems {
    /// Adds one.
    pub fn push(&mut self, problem: impl fmt::Display) {
        self.0.push(problem.to_string());
    }

    /// Adds the sizes of a draft that are not its target's: name, the draft's, the target's.
    pub(crate) fn push_unlike_target(&mut self, sizes: &[(&str, usize, usize)]) {
        for (name, draft, target) in sizes.iter().filter(|(_, draft, target)| draft != target) {
            self.push(format!("`{name}` = {draft}, the target's is {target}"));
        }
    }

    /// An error naming all of them, or nothing if there are none.
    ///
    /// # Errors
    /// - there is at least one problem
    pub fn into_result(self, path: &Path) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(ModelError::Invalid { path: path.to_path_buf(), problems: self })
        }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 40;
        if let [only] = self.0.as_slice() {
            return f.write_str(&shown(only));
        }
        write!(f, "{} problems", self.0.len())?;
        for problem in self.0.iter().take(SHOWN) {
            write!(f, "\n  - {}", shown(problem))?;
        }
        if self.0.len() > SHOWN {
            write!(f, "\n  - and {} more", self.0.len() - SHOWN)?;
        }
        Ok(())
    }
}

/// A problem without what steers terminals, cut short: it may quote names and values of any file.
fn shown(problem: &str) -> String {
    const LONGEST: usize = 4000;
    let plain = problem.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t'));
    let mut text: String = plain.take(LONGEST).collect();
    if problem.len() > LONGEST && text.chars().count() == LONGEST {
        text.push_str(" ...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_are_quoted_with_steers_no_terminal_and_is_cut_short() {
        let mut problems = Problems(vec![format!("no tensor `\u{1b}[31m{}`", "x".repeat(9000))]);
        for _ in 0..2 {
            let text = problems.to_string();
            assert!(text.contains("no tensor `[31mxxx") && text.ends_with(" ..."), "{text}");
            assert!(text.len() < 5000, "{}", text.len());
            problems.0.insert(0, "another".into());
        }
    }

    #[test]
    fn tensor_errors_are_told_without_frames() {
        let framed = || candle_core::Error::WithBacktrace {
            inner: Box::new(candle_core::Error::Msg("no such shape".into())),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        for error in [framed(), framed().context("matmul"), framed().with_path("file").context("x")]
        {
            assert!(error.to_string().lines().count() > 4, "{error}");
            let message = ModelError::from(error).to_string();
            assert!(message.contains("no such shape"), "{message}");
            assert!(message.lines().count() < 4, "{message}");
        }
    }
}
