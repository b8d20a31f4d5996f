//! What stderr shows while work goes on: coloured labels, a sign of life, one bar.
//!
//! At most one bar stands there at a time. Whatever is printed meanwhile goes above it.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::{colours_aside, is_quiet};

/// Time between two pictures of a sign of life.
const TICK: Duration = Duration::from_millis(120);
/// Columns from which a bar is wide.
const WIDE_TERMINAL: usize = 90;
/// Cells of a wide bar and of a narrow one.
const CELLS: (usize, usize) = (30, 12);

static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Labels that begin a line, with their colours.
const LABELS: [(&str, &str); 4] = [
    ("error:", "\x1b[1;31m"),
    ("warning:", "\x1b[1;33m"),
    ("hint:", "\x1b[1;36m"),
    ("note:", "\x1b[1;34m"),
];
/// Of the name of a stage in brackets.
const STAGE: &str = "\x1b[1;32m";
const PLAIN: &str = "\x1b[0m";

/// A message with its label in colour, where stderr takes colours.
pub(crate) fn coloured(text: &str) -> Cow<'_, str> {
    if colours_aside() { with_colours(text) } else { Cow::Borrowed(text) }
}

fn with_colours(text: &str) -> Cow<'_, str> {
    let body = text.trim_start_matches('\n');
    let breaks = &text[..text.len() - body.len()];
    let label = LABELS.iter().find(|(label, _)| body.starts_with(label));
    let stage = body.split_once("] ").filter(|(name, _)| name.starts_with('['));
    let (length, colour) = match (label, stage) {
        (Some((label, colour)), _) => (label.len(), *colour),
        (None, Some((name, _))) => (name.len() + 1, STAGE),
        (None, None) => return Cow::Borrowed(text),
    };
    let (label, rest) = body.split_at(length);
    Cow::Owned(format!("{breaks}{colour}{label}{PLAIN}{rest}"))
}

/// Columns of the terminal at stderr; none where it is not a terminal, or a view covers it.
pub(crate) fn columns() -> Option<usize> {
    if crate::terminal::cover::is_covered() {
        return None;
    }
    let terminal = console::Term::stderr();
    let size = terminal.is_term().then(|| terminal.size_checked()).flatten();
    size.map(|(_, columns)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Whether the locale writes more than ASCII. Systems without locales do.
pub(crate) fn writes_unicode() -> bool {
    let value = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(value);
    !cfg!(unix) || locale.is_some_and(|locale| names_utf8(&locale))
}

fn names_utf8(locale: &str) -> bool {
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Writes above the bar that stands there, if there is one.
pub(crate) fn aside(write: impl FnOnce()) {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match shown {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

fn set_shown(bar: Option<ProgressBar>) {
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = bar;
}

/// A sign of life while something is opened or read; nothing where stderr is not a terminal.
pub(crate) struct Waiting(Option<ProgressBar>);

impl Waiting {
    /// `what` names the work: "opening the target".
    pub(crate) fn start(what: &str) -> Self {
        let taken = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if taken || is_quiet() || columns().is_none() {
            return Self(None);
        }
        let bar = ProgressBar::new_spinner().with_message(what.to_owned());
        let style = ProgressStyle::with_template("{spinner} {wide_msg}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        bar.set_style(style.tick_chars("|/-\\ "));
        bar.enable_steady_tick(TICK);
        set_shown(Some(bar.clone()));
        Self(Some(bar))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            set_shown(None);
            bar.finish_and_clear();
        }
    }
}

/// A bar with a message, never wider than the terminal.
pub(crate) struct Bar {
    shown: ProgressBar,
    columns: usize,
    /// Columns of the line that stands there.
    drawn: usize,
}

impl Bar {
    /// None where stderr is not a terminal, or little is to be told.
    pub(crate) fn new() -> Option<Self> {
        let columns = columns().filter(|_| !is_quiet())?;
        let bar = ProgressBar::new(0);
        bar.set_style(style(columns));
        set_shown(Some(bar.clone()));
        Some(Self { shown: bar, columns, drawn: 0 })
    }

    /// Moves the bar and says something after it.
    pub(crate) fn show(&mut self, position: u64, length: u64, message: &str) {
        let columns = columns().unwrap_or(self.columns);
        if columns != self.columns {
            let rows = self.drawn.div_ceil(columns);
            if columns < self.columns && rows > 1 {
                // The terminal broke the line that stands there.
                self.shown.suspend(|| {
                    let _ = console::Term::stderr().clear_last_lines(rows - 1);
                });
            }
            self.columns = columns;
            self.shown.set_style(style(columns));
        }
        let before = cells(columns) + format!(" {position}/{length} ").len();
        let message = cut(message, columns.saturating_sub(before + 1));
        self.drawn = before + message.chars().count();
        self.shown.set_length(length);
        self.shown.set_message(message);
        self.shown.set_position(position);
    }

    /// Takes the line away; one that is dropped leaves it as it stands.
    pub(crate) fn clear(self) {
        set_shown(None);
        self.shown.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        set_shown(None);
        if !self.shown.is_finished() {
            self.shown.abandon();
        }
    }
}

fn cells(columns: usize) -> usize {
    if columns >= WIDE_TERMINAL { CELLS.0 } else { CELLS.1.min(columns / 3) }
}

fn style(columns: usize) -> ProgressStyle {
    let template = format!("{{bar:{}}} {{pos}}/{{len}} {{msg}}", cells(columns));
    let style = ProgressStyle::with_template(&template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    if writes_unicode() { style } else { style.progress_chars("#-.") }
}

/// The first so many letters.
fn cut(text: &str, letters: usize) -> String {
    text.chars().take(letters).collect()
}

/// Fields of a line, on several lines where the terminal is too narrow; two spaces stand between.
pub(crate) fn lines(fields: &[String]) -> String {
    lines_within(fields, columns())
}

fn lines_within(fields: &[String], columns: Option<usize>) -> String {
    let mut text = String::new();
    let mut used = 0;
    for field in fields {
        let long = field.chars().count();
        if text.is_empty() {
            used = long;
        } else if columns.is_some_and(|columns| used + 2 + long > columns) {
            text.push_str("\n  ");
            used = 2 + long;
        } else {
            text.push_str("  ");
            used += 2 + long;
        }
        text.push_str(field);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_alone_are_coloured() {
        let cases = [
            ("error: it broke\n", "\x1b[1;31merror:\x1b[0m it broke\n"),
            ("\n[train 1/3] short text\n", "\n\x1b[1;32m[train 1/3]\x1b[0m short text\n"),
            ("an error: no label\n", "an error: no label\n"),
            ("[1] \n", "\x1b[1;32m[1]\x1b[0m \n"),
            ("plain\n", "plain\n"),
        ];
        for (text, want) in cases {
            assert_eq!(with_colours(text), want);
        }
    }

    #[test]
    fn fields_break_where_the_terminal_ends() {
        let fields = ["held-out after step 5:", "loss 1.000", "agreement 40 30 %"];
        let fields = fields.map(str::to_owned);
        let one = "held-out after step 5:  loss 1.000  agreement 40 30 %";
        assert_eq!(lines_within(&fields, None), one);
        assert_eq!(lines_within(&fields, Some(one.len())), one);
        let narrow = lines_within(&fields, Some(36));
        assert_eq!(narrow, "held-out after step 5:  loss 1.000\n  agreement 40 30 %");
        assert!(narrow.lines().all(|line| line.chars().count() <= 36));
    }

    #[test]
    fn bars_leave_room_on_any_terminal() {
        for columns in [1, 5, 20, 50, 89, 90, 200] {
            assert!(cells(columns) <= columns);
        }
        assert!(names_utf8("de_DE.UTF-8") && names_utf8("C.utf8"));
        assert!(!names_utf8("POSIX") && !names_utf8("C"));
    }
}
