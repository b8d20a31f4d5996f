//! A view that covers the terminal: what is printed meanwhile waits until it goes.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Lines of stderr that wait at most; those of stdout wait all.
const WAITING: usize = 200;

static COVER: Mutex<Option<Cover>> = Mutex::new(None);

/// Where a text goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Aside,
}

struct Cover {
    /// Gives the terminal back as it was.
    restore: fn(),
    waiting: VecDeque<(Stream, String)>,
}

fn cover_mut() -> std::sync::MutexGuard<'static, Option<Cover>> {
    COVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From here on lines wait. `restore` is called when the view goes, whatever the reason.
pub(crate) fn cover(restore: fn()) {
    *cover_mut() = Some(Cover { restore, waiting: VecDeque::new() });
}

/// Whether a view covers the terminal.
pub(crate) fn is_covered() -> bool {
    cover_mut().is_some()
}

/// Keeps a text for later; `false` if nothing covers the terminal.
pub(super) fn keep(stream: Stream, text: &str) -> bool {
    let mut cover = cover_mut();
    let Some(cover) = cover.as_mut() else { return false };
    cover.waiting.push_back((stream, text.to_owned()));
    let is_aside = |(stream, _): &(Stream, String)| *stream == Stream::Aside;
    if cover.waiting.iter().filter(|kept| is_aside(kept)).count() > WAITING
        && let Some(oldest) = cover.waiting.iter().position(is_aside)
    {
        cover.waiting.remove(oldest);
    }
    true
}

/// The last lines that wait, oldest first.
pub(crate) fn last_lines(count: usize) -> Vec<String> {
    let cover = cover_mut();
    let waiting = cover.iter().flat_map(|cover| cover.waiting.iter().rev());
    let lines = waiting.flat_map(|(_, text)| text.lines().rev().map(str::to_owned));
    let mut lines: Vec<String> = lines.filter(|line| !line.trim().is_empty()).take(count).collect();
    lines.reverse();
    lines
}

/// Gives the terminal back, and prints what waited. Does nothing where no view is.
pub(crate) fn uncover() {
    let Some(Cover { restore, waiting }) = cover_mut().take() else { return };
    restore();
    for (stream, text) in waiting {
        match stream {
            Stream::Out => super::print(format_args!("{text}")),
            Stream::Aside => super::print_aside(format_args!("{text}")),
        }
    }
}
