//! Finds calls in an answer while its text comes, in time linear in it.
//!
//! Text that may belong to a call is held back until that is decided. What turns out to be none is text as it
//! was, and the search goes on at the byte that decided.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::json::JsonBody;
use super::named::NamedBody;
use super::syntax;
use super::tags::TagsBody;
use super::{Call, Calls};
use crate::events::Piece;

/// What a piece of an answer makes certain.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
}

/// What the text after an opening is.
pub(super) enum Step {
    /// More of it decides.
    More,
    /// None: looking for calls goes on at this byte.
    Not(usize),
    /// Calls up to this byte, names with their arguments.
    Calls(usize, Vec<(String, String)>),
}

/// Reads the text of one answer.
pub(crate) struct Reader {
    calls: Arc<Calls>,
    held: Held,
    place: Place,
    /// Characters of the answer so far.
    length: usize,
    /// Special tokens, each with the characters that the answer has before it: those may come later.
    pending: VecDeque<(usize, &'static str)>,
    /// Calls so far.
    found: usize,
}

/// Where reading stands; bytes are of what is held.
enum Place {
    /// Outside of calls. The first `blank` bytes are white space; with `is_fresh` nothing was said before them
    /// since the answer or the last call.
    Outside { blank: usize, is_fresh: bool },
    /// In what may be a call, after an opening.
    Within { start: usize, body: Body },
    /// After a call, before the marker that ends it; the first `blank` bytes are white space.
    After { blank: usize },
}

/// What reads a call.
enum Body {
    Json(JsonBody),
    Named(NamedBody),
    Tags(TagsBody),
}

impl Body {
    fn new(body: syntax::Body) -> Self {
        match body {
            syntax::Body::Object { .. } => Self::Json(JsonBody::default()),
            syntax::Body::List | syntax::Body::Named => Self::Named(NamedBody::default()),
            syntax::Body::Tags => Self::Tags(TagsBody::default()),
        }
    }

    fn read(&mut self, text: &str, calls: &Calls) -> Step {
        match self {
            Self::Json(body) => body.read(text, calls),
            Self::Named(body) => body.read(text, calls),
            Self::Tags(body) => body.read(text, calls),
        }
    }
}

impl Reader {
    /// For an answer that has no text yet.
    pub(crate) fn new(calls: Arc<Calls>) -> Self {
        let place = Place::Outside { blank: 0, is_fresh: true };
        let (held, pending) = (Held::default(), VecDeque::new());
        Self { calls, held, place, length: 0, pending, found: 0 }
    }

    pub(crate) fn hear(&mut self, piece: &Piece) -> Said {
        if let Some(marker) = piece.token.and_then(|token| self.calls.marker(token)) {
            self.pending.push_back((piece.offset, marker));
        }
        let mut text = piece.text.as_str();
        while let Some(&(offset, marker)) = self.pending.front()
            && let Some(at) = byte_of(text, offset.saturating_sub(self.length))
        {
            let (before, after) = text.split_at(at);
            self.add(before);
            self.held.push_marker(marker);
            self.pending.pop_front();
            text = after;
        }
        self.add(text);
        let mut said = Said::default();
        while self.advance(&mut said, false) {}
        said
    }

    /// What is left when the answer has ended: an unfinished call is text.
    pub(crate) fn finish(&mut self) -> Said {
        let mut said = Said::default();
        while self.advance(&mut said, true) {}
        said
    }

    /// Whether the answer has made calls.
    pub(crate) fn has_called(&self) -> bool {
        self.found > 0
    }

    fn add(&mut self, text: &str) {
        self.length += text.chars().count();
        self.held.text.push_str(text);
    }

    /// Takes a step, and tells whether another one can be taken with what is held.
    fn advance(&mut self, said: &mut Said, ends: bool) -> bool {
        match &mut self.place {
            Place::Outside { blank, is_fresh } => {
                let place = (*blank, *is_fresh);
                self.look(place, said, ends)
            }
            Place::Within { start, body } => {
                let start = *start;
                let step = body.read(&self.held.text[start..], &self.calls);
                self.decide(start, step, said, ends)
            }
            Place::After { blank } => {
                let blank = *blank;
                self.close(blank, ends)
            }
        }
    }

    /// Looks for the beginning of a call.
    fn look(&mut self, (blank, is_fresh): (usize, bool), said: &mut Said, ends: bool) -> bool {
        let syntax = self.calls.syntax;
        let text = self.held.text.as_str();
        let rest = text[blank..].trim_start();
        if is_fresh && syntax.bare.is_some_and(|bare| rest.starts_with(bare)) {
            let (start, body) = (text.len() - rest.len(), Body::new(syntax.body));
            self.place = Place::Within { start, body };
            return true;
        }
        if let Some((at, start)) = syntax.find(text, blank) {
            // White space before a call is none of the text, if it becomes one.
            let before = text[..at].trim_end().len();
            said.text += &self.held.take(before);
            self.place = Place::Within { start: start - before, body: Body::new(syntax.body) };
            return true;
        }
        if ends {
            let (is_blank, bytes) = (rest.is_empty(), text.len());
            let rest = self.held.take(bytes);
            // White space after the last call is none of the text either.
            if !(is_blank && is_fresh && self.found > 0) {
                said.text += &rest;
            }
            self.place = Place::Outside { blank: 0, is_fresh: false };
            return false;
        }
        let keep = syntax.beginning(text, blank);
        let told = text[blank..keep].trim_end().len();
        self.place = if told == 0 {
            Place::Outside { blank: keep, is_fresh }
        } else {
            said.text += &self.held.take(blank + told);
            Place::Outside { blank: keep - blank - told, is_fresh: false }
        };
        false
    }

    /// Goes on by what the text from `start` on turned out to be.
    fn decide(&mut self, start: usize, step: Step, said: &mut Said, ends: bool) -> bool {
        match step {
            Step::More if !ends => return false,
            Step::More => {
                said.text += &self.held.take(self.held.text.len());
                self.place = Place::Outside { blank: 0, is_fresh: false };
            }
            Step::Not(end) => {
                said.text += &self.held.take(start + end);
                self.place = Place::Outside { blank: 0, is_fresh: false };
            }
            Step::Calls(end, spoken) => {
                self.held.take(start + end);
                let most = if self.calls.is_single { 1 } else { usize::MAX };
                for (name, arguments) in spoken.into_iter().take(most - self.found.min(most)) {
                    said.calls.push(Call { index: self.found, name, arguments });
                    self.found += 1;
                }
                self.place = Place::After { blank: 0 };
            }
        }
        true
    }

    /// Leaves out the marker that ends a call, and the beginning of one that an answer's end cut off.
    fn close(&mut self, blank: usize, ends: bool) -> bool {
        let rest = self.held.text[blank..].trim_start();
        let blank = self.held.text.len() - rest.len();
        let closing = self.calls.syntax.closing.unwrap_or_default();
        if rest.starts_with(closing) {
            // Without a marker the white space stays.
            let end = if closing.is_empty() { 0 } else { blank + closing.len() };
            self.held.take(end);
        } else if closing.starts_with(rest) {
            if !ends {
                self.place = Place::After { blank };
                return false;
            }
            self.held.take(self.held.text.len());
        }
        self.place = Place::Outside { blank: 0, is_fresh: true };
        true
    }
}

/// The byte at which a text has so many characters, if it has.
fn byte_of(text: &str, characters: usize) -> Option<usize> {
    text.char_indices().map(|(at, _)| at).chain([text.len()]).nth(characters)
}

/// Text that is not told yet.
#[derive(Default)]
struct Held {
    text: String,
    /// Where in it special tokens stand.
    markers: Vec<Range<usize>>,
}

impl Held {
    fn push_marker(&mut self, marker: &str) {
        let start = self.text.len();
        self.text.push_str(marker);
        self.markers.push(start..self.text.len());
    }

    /// Takes the first bytes out. Special tokens are no text.
    fn take(&mut self, bytes: usize) -> String {
        let (mut text, mut from) = (String::new(), 0);
        for marker in &self.markers {
            text.push_str(&self.text[from..marker.start.min(bytes)]);
            from = marker.end.min(bytes);
        }
        text.push_str(&self.text[from..bytes]);
        self.text.drain(..bytes);
        self.markers.retain(|marker| marker.end > bytes);
        for marker in &mut self.markers {
            *marker = marker.start.saturating_sub(bytes)..marker.end - bytes;
        }
        text
    }
}

#[cfg(test)]
mod tests;
