//! Parts of tags as the library is given them.

use std::iter::repeat_n;

use super::{Part, is_keyword};
use crate::tokenizer::chat_template::operators::{FLOORED, ITEMS, MODULO, POWER, SLICED};
use crate::tokenizer::chat_template::tuples::TUPLE;

/// Parts between borders, each with the border that follows it.
pub(super) fn runs<'p, 'a>(
    parts: &'p [Part<'a>],
    is_border: impl Fn(usize) -> bool,
) -> Vec<(&'p [Part<'a>], Option<&'p Part<'a>>)> {
    let (mut runs, mut start) = (Vec::new(), 0);
    for at in (0..parts.len()).filter(|at| is_border(*at)) {
        runs.push((&parts[start..at], parts.get(at)));
        start = at + 1;
    }
    runs.push((&parts[start..], None));
    runs
}

/// Whether what binds less than `~` stands here.
fn is_border(parts: &[Part<'_>], at: usize) -> bool {
    let before = |back: usize| at.checked_sub(back).map(|at| parts[at].word());
    match parts[at].word() {
        "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">=" => true,
        "+" | "-" => follows_value(parts, at),
        // Names of attributes, filters and tests are none.
        word if is_keyword(word) && word != "is" => match before(1) {
            Some("." | "|") => false,
            Some("is") => before(2) == Some("."),
            Some("not") => before(2) != Some("is"),
            _ => true,
        },
        _ => false,
    }
}

/// Whether a value ends before a place. An attribute may have a keyword's name.
fn follows_value(parts: &[Part<'_>], at: usize) -> bool {
    at > 0 && (parts[at - 1].ends_value() || at > 1 && parts[at - 2].word() == ".")
}

pub(super) fn put_expressions(out: &mut String, parts: &[Part<'_>]) {
    for (run, border) in runs(parts, |at| is_border(parts, at)) {
        match (run, border.map(Part::word)) {
            ([names @ Part::Group(..)], Some("=")) => put_names(out, names),
            _ => put_joined(out, run),
        }
        if let Some(border) = border {
            put(out, border);
        }
    }
}

/// Operands of `~`.
fn put_joined(out: &mut String, parts: &[Part<'_>]) {
    let operands = runs(parts, |at| parts[at].word() == "~");
    let is_one = operands.len() == 1;
    for (operand, tilde) in operands {
        match operand {
            [] => {}
            [text] if text.is_text() => put(out, text),
            _ if is_one => put_product(out, operand),
            _ => {
                out.push('(');
                put_product(out, operand);
                out.push_str(")|string");
            }
        }
        if let Some(tilde) = tilde {
            put(out, tilde);
        }
    }
}

/// The filter that takes the place of a sign.
fn filter_of(sign: &str) -> Option<&'static str> {
    match sign {
        "%" => Some(MODULO),
        "//" => Some(FLOORED),
        _ => None,
    }
}

/// Operands of `*`, `/`, `//` and `%`, which bind as much. A filter takes all that is before its sign.
fn put_product(out: &mut String, parts: &[Part<'_>]) {
    let operands = runs(parts, |at| matches!(parts[at].word(), "*" | "/" | "//" | "%"));
    let is_whole = operands.iter().all(|(operand, _)| !operand.is_empty());
    let filter = |at: usize| {
        let (operand, sign) = operands[at];
        let is_kept = at == 0 && operands.get(1).is_some_and(|(by, _)| is_place(operand, by));
        sign.filter(|_| is_whole && !is_kept).and_then(|sign| filter_of(sign.word()))
    };
    // A filter that follows a filter needs no brackets.
    let begins = |at: usize| filter(at).is_some() && !(at > 0 && filter(at - 1).is_some());
    let brackets = (0..operands.len()).filter(|at| begins(*at)).count();
    out.extend(repeat_n('(', brackets));
    for (at, &(operand, sign)) in operands.iter().enumerate() {
        if at > 0 && filter(at - 1).is_some() {
            put_argument(out, operand);
        } else {
            put_power(out, operand);
        }
        match (sign, filter(at)) {
            (Some(Part::Word(sign)), Some(filter)) => {
                let bracket = if begins(at) { ")" } else { "" };
                out.extend([bracket, sign.trim_end_matches(['%', '/']), "|", filter]);
            }
            (Some(sign), _) => put(out, sign),
            (None, _) => {}
        }
    }
}

/// Whether the library's own sign, which takes less time, does: of a place in a loop, by a number.
fn is_place(operand: &[Part<'_>], by: &[Part<'_>]) -> bool {
    let ([name, dot, place], [by]) = (operand, by) else { return false };
    let words = [name.word(), dot.word(), place.word()];
    let is_index = matches!(words, ["loop", ".", "index" | "index0"]);
    is_index && by.word().starts_with(|c: char| c.is_ascii_digit())
}

/// What a sign's filter is given.
fn put_argument(out: &mut String, operand: &[Part<'_>]) {
    out.push('(');
    put_power(out, operand);
    out.push(')');
}

/// Operands of `**`. The first two are taken first.
fn put_power(out: &mut String, parts: &[Part<'_>]) {
    let operands = runs(parts, |at| parts[at].word() == "**");
    if operands.len() == 1 || operands.iter().any(|(operand, _)| operand.is_empty()) {
        put_value(out, parts);
        return;
    }
    for (operand, sign) in operands {
        out.push('(');
        put_value(out, operand);
        out.push(')');
        if let Some(Part::Word(sign)) = sign {
            out.extend([sign.trim_end_matches('*'), "|", POWER]);
        }
    }
}

/// A value with its signs, parts and filters.
fn put_value(out: &mut String, parts: &[Part<'_>]) {
    let signs = parts.iter().take_while(|part| part.word() == "-").count();
    if signs > 0 {
        put_signed(out, parts, signs);
        return;
    }
    // How many slices there are of the value that begins at each place.
    let (mut slices, mut start) = (vec![0; parts.len()], 0);
    for at in 0..parts.len() {
        start = if is_of_value(parts, at) { start } else { at };
        slices[start] += usize::from(slice_at(parts, at).is_some());
    }
    for (at, slices) in slices.into_iter().enumerate() {
        out.extend(repeat_n("((", slices));
        match slice_at(parts, at) {
            Some(bounds) => put_slice(out, bounds),
            None => put_plain(out, parts, at),
        }
    }
}

/// The filter that takes the place of a slice.
fn put_slice(out: &mut String, bounds: [&[Part<'_>]; 3]) {
    out.extend([")|", SLICED, "("]);
    for (which, bound) in bounds.into_iter().enumerate() {
        out.push_str(if which > 0 { ", " } else { "" });
        if bound.is_empty() {
            out.push_str("none");
        }
        put_expressions(out, bound);
    }
    out.push_str("))");
}

/// A value after so many signs. They are of its part that is taken: the library's are of the whole.
fn put_signed(out: &mut String, parts: &[Part<'_>], signs: usize) {
    let is_end = |at: usize| matches!(parts[at].word(), "|" | "is") && parts[at - 1].word() != ".";
    let end = (signs + 1..parts.len()).find(|at| is_end(*at)).unwrap_or(parts.len());
    parts[..signs].iter().for_each(|part| put(out, part));
    let has_parts = end > signs + 1;
    out.push_str(if has_parts { "(" } else { "" });
    put_value(out, &parts[signs..end]);
    out.push_str(if has_parts { ")" } else { "" });
    (end..parts.len()).for_each(|at| put_plain(out, parts, at));
}

/// The part at a place. A list in round brackets that is no call's is a tuple.
fn put_plain(out: &mut String, parts: &[Part<'_>], at: usize) {
    match &parts[at] {
        Part::Group(open, inner, close) if is_tuple(parts, at) => {
            out.extend([*open, "["]);
            put_expressions(out, inner);
            out.extend(["]|", TUPLE, *close]);
        }
        part => put(out, part),
    }
}

fn is_tuple(parts: &[Part<'_>], at: usize) -> bool {
    let Part::Group(open, inner, _) = &parts[at] else { return false };
    let is_list = inner.is_empty() || inner.iter().any(|part| part.word() == ",");
    open.ends_with('(') && is_list && !follows_value(parts, at)
}

/// The bounds and the step of the slice at a place, if one says its step.
fn slice_at<'p, 'a>(parts: &'p [Part<'a>], at: usize) -> Option<[&'p [Part<'a>]; 3]> {
    let Part::Group(open, inner, _) = &parts[at] else { return None };
    if !open.ends_with('[') || !follows_value(parts, at) {
        return None;
    }
    match runs(inner, |at| inner[at].word() == ":").as_slice() {
        [(start, _), (stop, _), (step, _)] if !step.is_empty() => Some([*start, *stop, *step]),
        _ => None,
    }
}

/// Whether a part belongs to the value before it: as an attribute, or as brackets.
fn is_of_value(parts: &[Part<'_>], at: usize) -> bool {
    let follows_dot = at > 0 && parts[at - 1].word() == ".";
    let is_group = matches!(parts[at], Part::Group(..));
    parts[at].word() == "." || follows_dot || is_group && follows_value(parts, at)
}

/// Names and what they are given. Names in brackets are no tuple.
pub(super) fn put_assignments(out: &mut String, parts: &[Part<'_>]) {
    let end = parts.iter().position(|part| part.word() == "=").unwrap_or(0);
    parts[..end].iter().for_each(|part| put_names(out, part));
    put_expressions(out, &parts[end..]);
}

/// Names that are given values, as they stand.
fn put_names(out: &mut String, part: &Part<'_>) {
    match part {
        Part::Word(word) => out.push_str(word),
        Part::Group(open, inner, close) => {
            out.push_str(open);
            inner.iter().for_each(|part| put_names(out, part));
            out.push_str(close);
        }
    }
}

/// A loop's names, and what it goes over as a list whose length is known.
pub(super) fn put_loop(out: &mut String, parts: &[Part<'_>]) {
    let is_end = |at: usize| {
        let is_name = matches!(parts[at - 1].word(), "." | "|");
        matches!(parts[at].word(), "if" | "recursive") && !is_name
    };
    let start = parts.iter().position(|part| part.word() == "in").map_or(0, |at| at + 1);
    let end = (start.max(1)..parts.len()).find(|at| is_end(*at)).unwrap_or(parts.len());
    if start == 0 || start >= end {
        put_expressions(out, parts);
        return;
    }
    parts[..start].iter().for_each(|part| put_names(out, part));
    out.push_str(" (");
    put_expressions(out, &parts[start..end]);
    out.extend([")|", ITEMS]);
    put_expressions(out, &parts[end..]);
}

pub(super) fn put(out: &mut String, part: &Part<'_>) {
    match part {
        Part::Word(word) => out.push_str(word),
        Part::Group(open, inner, close) => {
            out.push_str(open);
            put_expressions(out, inner);
            out.push_str(close);
        }
    }
}
