//! Why something could not be done, and how to end what is under way.

use std::fmt;

use crate::failure::Failure;
use crate::interrupts::Interrupts;

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something could not be done, in the words of the command line.
#[derive(Debug)]
pub struct Error(Failure);

impl Error {
    /// What is wrong.
    pub fn message(&self) -> &str {
        self.0.message()
    }

    /// The way out, where one is known. It may name an option of a command.
    pub fn help(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// Every problem of a configuration, each with its file and line.
    pub fn problems(&self) -> &[String] {
        &self.0.problems
    }

    /// The exit code that a command would have: 1 for work that failed, 2 for wrong use.
    pub fn code(&self) -> u8 {
        self.0.code()
    }

    /// Whether nothing is wrong, but the caller asked to stop.
    pub fn is_interruption(&self) -> bool {
        self.0.is_interruption()
    }

    /// A fault of this program.
    pub(super) fn fault(what: &str) -> Self {
        Self(Failure::work(what).hint("this is a fault of the program: please report it"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl std::error::Error for Error {}

impl<T: Into<Failure>> From<T> for Error {
    fn from(error: T) -> Self {
        Self(error.into())
    }
}

/// Asks long work to end where it can go on later. Copies ask for the same; any thread may.
#[derive(Debug, Clone, Default)]
pub struct Stop(pub(super) Interrupts);

impl Stop {
    /// Nothing is asked yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks.
    pub fn ask(&self) {
        self.0.ask_calmly();
    }

    /// Whether it was asked.
    pub fn asked(&self) -> bool {
        self.0.asked()
    }
}
