//! The one place that prints. Results go to stdout, everything else goes to stderr.
//!
//! A reader that goes away never harms work. A command that only prints ends quietly, as if by
//! SIGPIPE. A command that does work goes on without its reader. A stdout that is full costs such
//! a command its exit code 0, but nothing else. A lost stderr is ignored.

use std::fmt::Arguments;
use std::io::{Error, ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::ColorChoice;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::failure::{Failure, PIPE_CLOSED, Result};

static VERBOSITY: AtomicU8 = AtomicU8::new(Verbosity::Normal as u8);
static COLOUR: AtomicU8 = AtomicU8::new(0);
static OUTLIVES_READERS: AtomicBool = AtomicBool::new(false);
static MACHINE_READABLE: AtomicBool = AtomicBool::new(false);
/// Whether the last line of stdout is not ended.
static IN_LINE: AtomicBool = AtomicBool::new(false);
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

/// Prints an object of JSON as a line of stdout. A path is given as `to_string_lossy` shows it: a value that is no JSON,
/// as one that is not UTF-8, is `null` there, with a warning.
macro_rules! outjson {
    ({ $($key:tt: $value:expr),* $(,)? }) => {{
        #[allow(dead_code, non_upper_case_globals, reason = "as it is written in JSON")]
        const null: serde_json::Value = serde_json::Value::Null;
        let mut map = serde_json::Map::new();
        $($crate::terminal::put(&mut map, String::from($key), &$value);)*
        outln!("{}", serde_json::Value::Object(map));
    }};
}

/// Prints to stderr.
macro_rules! err {
    ($($text:tt)*) => { $crate::terminal::print_aside(format_args!($($text)*)) };
}

/// Prints a line to stderr.
macro_rules! errln {
    () => { $crate::terminal::tell_aside(format_args!("\n")) };
    ($($text:tt)*) => {{
        $crate::terminal::tell_aside(format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// Prints a line to stderr where `--verbose` asks for it; a log has it anyway.
macro_rules! detail {
    ($($text:tt)*) => {
        if $crate::terminal::is_verbose() {
            errln!($($text)*);
        } else if $crate::terminal::log::is_open() {
            $crate::terminal::log::add(&format!("{}\n", format_args!($($text)*)));
        }
    };
}

// After the macros, which they use.
pub(crate) mod cover;
pub(crate) mod failure;
pub(crate) mod log;
pub(crate) mod status;

/// How much is told on stderr.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Verbosity {
    /// Warnings and errors.
    Quiet,
    /// What is done, too.
    Normal,
    /// What runs on what, and how long it took.
    Verbose,
}

/// A key of what `outjson!` prints.
pub(crate) fn put(map: &mut Map<String, Value>, key: String, value: &(impl Serialize + ?Sized)) {
    let value = serde_json::to_value(value).unwrap_or_else(|error| {
        errln!("warning: `{key}` is left out of the JSON: {error}");
        Value::Null
    });
    map.insert(key, value);
}

/// From here on so much is told, and in colours where they are asked for.
pub(crate) fn set_manners(verbosity: Verbosity, colour: ColorChoice) {
    VERBOSITY.store(verbosity as u8, Ordering::Relaxed);
    let asked = match colour {
        ColorChoice::Auto => 0,
        ColorChoice::Always => 1,
        ColorChoice::Never => 2,
    };
    COLOUR.store(asked, Ordering::Relaxed);
}

/// From here on nothing but results, warnings and errors is told.
pub(crate) fn set_quiet() {
    VERBOSITY.store(Verbosity::Quiet as u8, Ordering::Relaxed);
}

/// Whether nothing but results, warnings and errors is told.
pub(crate) fn is_quiet() -> bool {
    VERBOSITY.load(Ordering::Relaxed) == Verbosity::Quiet as u8
}

/// Whether details are told.
pub(crate) fn is_verbose() -> bool {
    VERBOSITY.load(Ordering::Relaxed) == Verbosity::Verbose as u8
}

/// From here on, a reader of stdout that goes away no longer ends the process.
pub(crate) fn outlive_readers() {
    OUTLIVES_READERS.store(true, Ordering::Relaxed);
}

/// From here on, a failure is also told as the last line of stdout, in JSON.
pub(crate) fn set_machine_readable() {
    MACHINE_READABLE.store(true, Ordering::Relaxed);
}

/// Whether the last line of stdout is to be JSON.
pub(crate) fn is_machine_readable() -> bool {
    MACHINE_READABLE.load(Ordering::Relaxed)
}

/// Whether colours go to stdout: it is a terminal, and nobody asked for plain text.
pub(crate) fn colours() -> bool {
    asked_colours().unwrap_or_else(|| std::io::stdout().is_terminal() && wants_colours())
}

/// What `--color` says, if it says something.
fn asked_colours() -> Option<bool> {
    match COLOUR.load(Ordering::Relaxed) {
        0 => None,
        asked => Some(asked == 1),
    }
}

/// The same for stderr.
pub(crate) fn colours_aside() -> bool {
    asked_colours().unwrap_or_else(|| std::io::stderr().is_terminal() && wants_colours())
}

/// `NO_COLOR` with any value, or a terminal that calls itself dumb, ask for plain text.
pub(crate) fn wants_colours() -> bool {
    let is = |name, value: &dyn Fn(&std::ffi::OsStr) -> bool| {
        std::env::var_os(name).is_some_and(|found| value(&found))
    };
    !is("NO_COLOR", &|value| !value.is_empty()) && !is("TERM", &|value| value == "dumb")
}

/// Writes to stdout; see the module for what happens where that fails.
pub(crate) fn print(text: Arguments<'_>) {
    let text = text.to_string();
    if cover::keep(cover::Stream::Out, &text) {
        return;
    }
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    if lost.is_some() {
        return;
    }
    if let Some(last) = text.bytes().last() {
        IN_LINE.store(last != b'\n', Ordering::Relaxed);
    }
    let mut written = Ok(());
    crate::status::aside(|| written = write_whole(std::io::stdout().lock(), text.as_bytes()));
    if let Err(error) = written {
        end_without_reader(&error);
        *lost = Some(error);
    }
}

/// Ends the line of stdout that was begun, if one was, so that what comes stands on its own.
pub(crate) fn end_line() {
    if IN_LINE.load(Ordering::Relaxed) {
        print(format_args!("\n"));
    }
}

/// Tells something on stderr; where only the necessary is told, that are warnings, errors and hints.
pub(crate) fn tell_aside(text: Arguments<'_>) {
    let text = text.to_string();
    if is_quiet() && !is_necessary(&text) {
        log::add(&text);
    } else {
        print_aside(format_args!("{text}"));
    }
}

fn is_necessary(text: &str) -> bool {
    let text = text.trim_start_matches('\n');
    ["error:", "warning:", "hint:"].iter().any(|label| text.starts_with(label))
}

/// Writes to stderr, at once: lines of several ranks are not to mix. Labels are in colour where it
/// takes colours. Nothing can be told where that fails.
pub(crate) fn print_aside(text: Arguments<'_>) {
    let text = text.to_string();
    log::add(&text);
    if cover::keep(cover::Stream::Aside, &text) {
        return;
    }
    crate::status::aside(|| {
        let text = crate::status::coloured(&text);
        let _ = write_whole(std::io::stderr().lock(), text.as_bytes());
    });
}

/// Hands what is buffered to the reader.
pub(crate) fn flush() {
    let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    if lost.is_none()
        && let Err(error) = until_ready(|| std::io::stdout().lock().flush())
    {
        end_without_reader(&error);
        *lost = Some(error);
    }
}

/// Flushes stdout. It fails where some output could not be written, for another reason than a reader that went away.
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
        std::process::exit(i32::from(PIPE_CLOSED));
    }
}

/// Writes all bytes. A stream that does not block, as some terminals and programs hand it on, is no
/// reason to lose any.
fn write_whole(mut stream: impl Write, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match until_ready(|| stream.write(bytes))? {
            0 => return Err(ErrorKind::WriteZero.into()),
            written => bytes = &bytes[written..],
        }
    }
    Ok(())
}

/// Repeats what the system puts off.
fn until_ready<T>(mut call: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    const PAUSE: Duration = Duration::from_millis(1);
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            ended => return ended,
        }
    }
}

/// A number of things: "1 row", "2 rows".
pub(crate) fn counted(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Text that cannot steer the terminal: control characters, but those to keep, are written out.
pub(crate) fn written_out(text: &str, kept: &[char]) -> String {
    let escape = |c: char| match c {
        c if c.is_control() && !kept.contains(&c) => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        assert_eq!(written_out("a\n\tb é", &[]), "a\\n\\tb é");
        assert_eq!(written_out("a\n\u{1b}[31mé", &['\n', '\t']), "a\n\\u{1b}[31mé");
    }

    /// Takes three bytes at a time, and none at every other call.
    #[derive(Default)]
    struct Slow {
        taken: Vec<u8>,
        calls: usize,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.calls += 1;
            match self.calls % 3 {
                1 => Err(ErrorKind::WouldBlock.into()),
                2 => Err(ErrorKind::Interrupted.into()),
                _ => self.taken.write(&bytes[..bytes.len().min(3)]),
            }
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_path_that_is_no_text_is_null_in_json() {
        use std::os::unix::ffi::OsStrExt;
        let mut map = Map::new();
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(b"runs/\xff"));
        put(&mut map, "output".to_owned(), path);
        put(&mut map, "steps".to_owned(), &3);
        assert_eq!(Value::Object(map), serde_json::json!({ "output": null, "steps": 3 }));
    }

    #[test]
    fn a_stream_that_does_not_block_gets_every_byte() {
        let mut slow = Slow::default();
        write_whole(&mut slow, b"every byte").expect("written");
        assert_eq!(slow.taken, b"every byte");
        let mut full: &mut [u8] = &mut [0; 4];
        let error = write_whole(&mut full, b"every byte").expect_err("full");
        assert_eq!(error.kind(), ErrorKind::WriteZero);
    }
}
