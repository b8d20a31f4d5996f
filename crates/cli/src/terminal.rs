//! The one place that prints. Results go to stdout, everything else goes to stderr.
//!
//! A reader that goes away never harms work. A command that only prints ends quietly, as if by
//! SIGPIPE. A command that does work goes on without its reader. A stdout that is full costs such
//! a command its exit code 0, but nothing else. A lost stderr is ignored.

use std::fmt::Arguments;
use std::io::{Error, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::failure::{Failure, Result};

/// Exit code of a program that SIGPIPE ends.
const PIPE_CLOSED: i32 = 141;

static OUTLIVES_READERS: AtomicBool = AtomicBool::new(false);
static LOST: Mutex<Option<Error>> = Mutex::new(None);

/// Prints to stdout.
macro_rules! out {
    ($($text:tt)*) => { $crate::terminal::print(format_args!($($text)*)) };
}

/// Prints a line to stdout.
macro_rules! outln {
    () => { $crate::terminal::print(format_args!("\n")) };
    ($($text:tt)*) => {{
        $crate::terminal::print(format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// Prints to stderr.
macro_rules! err {
    ($($text:tt)*) => { $crate::terminal::print_aside(format_args!($($text)*)) };
}

/// Prints a line to stderr.
macro_rules! errln {
    () => { $crate::terminal::print_aside(format_args!("\n")) };
    ($($text:tt)*) => {{
        $crate::terminal::print_aside(format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// From here on, a reader of stdout that goes away no longer ends the process.
pub(crate) fn outlive_readers() {
    OUTLIVES_READERS.store(true, Ordering::Relaxed);
}

/// Writes to stdout; see the module for what happens where that fails.
pub(crate) fn print(text: Arguments<'_>) {
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    if lost.is_some() {
        return;
    }
    let mut written = Ok(());
    crate::status::aside(|| written = std::io::stdout().lock().write_fmt(text));
    if let Err(error) = written {
        end_without_reader(&error);
        *lost = Some(error);
    }
}

/// Writes to stderr, labels in colour where it takes colours. Nothing can be told where that fails.
pub(crate) fn print_aside(text: Arguments<'_>) {
    let text = text.to_string();
    crate::status::aside(|| {
        let _ = std::io::stderr().lock().write_all(crate::status::coloured(&text).as_bytes());
    });
}

/// Hands what is buffered to the reader.
pub(crate) fn flush() {
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    if lost.is_none()
        && let Err(error) = std::io::stdout().lock().flush()
    {
        end_without_reader(&error);
        *lost = Some(error);
    }
}

/// Flushes stdout.
///
/// # Errors
/// - some output could not be written, for another reason than a reader that went away
pub(crate) fn finish() -> Result<()> {
    flush();
    match &*LOST.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::work(format!("stdout: {error}")))
        }
        _ => Ok(()),
    }
}

fn end_without_reader(error: &Error) {
    if error.kind() == ErrorKind::BrokenPipe && !OUTLIVES_READERS.load(Ordering::Relaxed) {
        std::process::exit(PIPE_CLOSED);
    }
}
