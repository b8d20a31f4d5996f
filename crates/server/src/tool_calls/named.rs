//! Mistral's calls: a list of JSON, or since version 11 a name and its arguments.

use std::ops::ControlFlow;

use super::Calls;
use super::json::{JsonBody, JsonValue, arguments};
use super::reader::Step;
use super::syntax::{ARGUMENTS, CALL_ID};

/// Bytes that stand at most between a name and its arguments, and before it.
const MOST_BETWEEN: usize = 128;

/// Reads either as its text comes.
#[derive(Default)]
pub(super) enum NamedBody {
    /// Neither is known.
    #[default]
    Unknown,
    Json(JsonBody),
    /// Arguments of a function, which begin at a byte.
    Arguments(String, usize, JsonValue),
}

impl NamedBody {
    pub(super) fn read(&mut self, text: &str, calls: &Calls) -> Step {
        if matches!(self, Self::Unknown) {
            match Self::begun(text, calls) {
                ControlFlow::Continue(body) => *self = body,
                ControlFlow::Break(step) => return step,
            }
        }
        match self {
            Self::Unknown => Step::More,
            Self::Json(body) => body.read(text, calls),
            Self::Arguments(name, start, value) => match value.read(&text[*start..]) {
                ControlFlow::Continue(()) => Step::More,
                ControlFlow::Break(Err(end)) => Step::Not(*start + end),
                ControlFlow::Break(Ok((from, end))) => {
                    let (from, end) = (*start + from, *start + end);
                    match arguments(&text[from..end]) {
                        Some(arguments) => {
                            Step::Calls(end, vec![(std::mem::take(name), arguments)])
                        }
                        None => Step::Not(end),
                    }
                }
            },
        }
    }

    /// What the beginning of a text tells. Where it is no call, all of it is looked at again.
    fn begun(text: &str, calls: &Calls) -> ControlFlow<Step, Self> {
        let longest = calls.functions.iter().map(|function| function.name.len()).max();
        let most = longest.unwrap_or(0) + MOST_BETWEEN;
        let rest = text.trim_start();
        let is_json = rest.starts_with(['[', '{']);
        let length = if is_json { Some(0) } else { rest.find('{') };
        let start = length.map(|length| text.len() - rest.len() + length);
        if start.unwrap_or(text.len()) > most {
            return ControlFlow::Break(Step::Not(0));
        }
        let Some(start) = start else { return ControlFlow::Break(Step::More) };
        if is_json {
            return ControlFlow::Continue(Self::Json(JsonBody::default()));
        }
        match name(text[..start].trim_start()).filter(|name| calls.function(name).is_some()) {
            Some(name) => {
                let body = Self::Arguments(name.to_owned(), start, JsonValue::default());
                ControlFlow::Continue(body)
            }
            None => ControlFlow::Break(Step::Not(0)),
        }
    }
}

/// The name in what stands before the arguments. Some tokenizers have no marker for these.
fn name(head: &str) -> Option<&str> {
    let (name, between) = head.split_at(head.find('[').unwrap_or(head.len()));
    let between = between.trim_end();
    let is_between = between.is_empty()
        || between == ARGUMENTS
        || (between.starts_with(CALL_ID) && between.ends_with(ARGUMENTS));
    is_between.then(|| name.trim_end())
}
