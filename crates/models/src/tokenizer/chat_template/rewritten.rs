//! Templates in which operators and macros mean what they mean to Jinja2.
//!
//! The library's operators cannot be taught. So filters take their place: `a ~ b` becomes `(a)|string ~ (b)|string`,
//! and `'%s' % a` becomes `'%s'|format(a)`. A macro that names `varargs` or `kwargs` gets them as parameters, and
//! [`opened`] gathers what its calls give beyond the others. Lines keep their numbers.

use std::sync::{Arc, LazyLock};

use minijinja::value::{Kwargs, Object, ObjectRepr, from_args};
use minijinja::{Error, State, Value};
use regex::Regex;

/// Nesting of brackets that is followed; the library refuses as much.
const DEEPEST: usize = 150;

/// Name of the function that is [`opened`].
pub(super) const OPENED: &str = "opened_macro";

/// The same template for the library. One whose tags do not end stays as it is: the library tells what is wrong.
pub(super) fn rewritten(source: &str) -> String {
    let (out, macros) = (String::with_capacity(source.len()), Vec::new());
    let rewriter = Rewriter { rest: source, out, macros };
    rewriter.run().unwrap_or_else(|| source.to_owned())
}

fn expression(text: &str) -> Regex {
    Regex::new(text).expect("a valid expression")
}

/// A part of a tag.
enum Part<'a> {
    /// A word or a sign with the white space before it.
    Word(&'a str),
    /// What stands in brackets.
    Group(&'a str, Vec<Part<'a>>, &'a str),
}

impl Part<'_> {
    /// The word; empty for a group.
    fn word(&self) -> &str {
        match self {
            Part::Word(word) => word.trim_start(),
            Part::Group(..) => "",
        }
    }

    fn is_text(&self) -> bool {
        self.word().starts_with(['\'', '"'])
    }

    /// Whether a value may end here.
    fn ends_value(&self) -> bool {
        let is_name = |c: char| c == '_' || c.is_alphanumeric();
        let is_value = self.is_text() || self.word().starts_with(is_name);
        matches!(self, Part::Group(..)) || is_value && !is_keyword(self.word())
    }
}

fn is_keyword(word: &str) -> bool {
    matches!(word, "and" | "or" | "not" | "if" | "else" | "in" | "is" | "recursive")
}

struct Rewriter<'a> {
    rest: &'a str,
    out: String,
    /// Macros that have not ended: the names of those that take any arguments.
    macros: Vec<Option<&'a str>>,
}

impl<'a> Rewriter<'a> {
    /// `None` where a tag does not end.
    fn run(mut self) -> Option<String> {
        static RAW: LazyLock<Regex> = LazyLock::new(|| {
            expression(r"(?s)^\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}")
        });
        while let Some(start) = self.rest.find('{') {
            self.copy(start);
            match self.rest.as_bytes().get(1) {
                Some(b'#') => {
                    let end = self.rest[2..].find("#}")?;
                    self.copy(end + 4);
                }
                Some(b'{') => self.tag("}}")?,
                Some(b'%') => match RAW.find(self.rest) {
                    Some(raw) => self.copy(raw.end()),
                    None => self.tag("%}")?,
                },
                _ => self.copy(1),
            }
        }
        self.out.push_str(self.rest);
        Some(self.out)
    }

    fn copy(&mut self, bytes: usize) {
        let (before, rest) = self.rest.split_at(bytes);
        self.out.push_str(before);
        self.rest = rest;
    }

    /// Takes a tag with this end.
    fn tag(&mut self, end: &str) -> Option<()> {
        self.copy(2);
        if self.rest.starts_with(['-', '+']) {
            self.copy(1);
        }
        let parts = self.parts(end, 0)?;
        let mut opened = None;
        match (end, parts.as_slice()) {
            ("%}", [first, rest @ ..]) => {
                put(&mut self.out, first);
                match first.word() {
                    "macro" => self.begin_macro(rest),
                    "endmacro" => opened = self.macros.pop().flatten(),
                    _ => put_expressions(&mut self.out, rest),
                }
            }
            _ => put_expressions(&mut self.out, &parts),
        }
        let closing = &self.rest[..self.rest.find(end)? + end.len()];
        self.copy(closing.len());
        if let Some(name) = opened {
            self.out.extend(["{% set ", name, " = ", OPENED, "(", name, ")", closing]);
        }
        Some(())
    }

    /// Takes the parts up to what ends them: a bracket, or outside of all brackets the tag's end.
    fn parts(&mut self, end: &str, depth: usize) -> Option<Vec<Part<'a>>> {
        static WORD: LazyLock<Regex> = LazyLock::new(|| {
            let text = r#"'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#;
            let number = r"\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?";
            expression(&format!(r"(?s)^\s*(?:{text}|{number}|[A-Za-z_]\w*|[=!<>]=|//|\*\*|.)"))
        });
        let mut parts = Vec::new();
        loop {
            let next = self.rest.trim_start();
            let unmarked = next.strip_prefix(['-', '+']).unwrap_or(next);
            if depth == 0 && (next.starts_with(end) || unmarked.starts_with(end)) {
                return Some(parts);
            }
            if depth > 0 && next.starts_with([')', ']', '}']) {
                return Some(parts);
            }
            let word = self.word(&WORD)?;
            parts.push(match word.trim_start() {
                "'" | "\"" | ")" | "]" | "}" => return None,
                "(" | "[" | "{" if depth == DEEPEST => return None,
                "(" | "[" | "{" => {
                    let inner = self.parts(end, depth + 1)?;
                    Part::Group(word, inner, self.word(&WORD)?)
                }
                _ => Part::Word(word),
            });
        }
    }

    fn word(&mut self, expression: &Regex) -> Option<&'a str> {
        let (word, rest) = self.rest.split_at(expression.find(self.rest)?.end());
        self.rest = rest;
        Some(word)
    }

    /// Takes a macro's name and parameters.
    fn begin_macro(&mut self, parts: &[Part<'a>]) {
        static GATHERED: LazyLock<Regex> = LazyLock::new(|| expression(r"\b(?:varargs|kwargs)\b"));
        let body = self.rest.split("endmacro").next().unwrap_or_default();
        let is_own = |part: &Part<'_>| matches!(part.word(), "varargs" | "kwargs");
        match parts {
            [Part::Word(name), Part::Group(open, parameters, close)]
                if GATHERED.is_match(body) && !parameters.iter().any(is_own) =>
            {
                self.macros.push(Some(name.trim_start()));
                self.out.push_str(name);
                self.out.push_str(open);
                put_expressions(&mut self.out, parameters);
                let is_listed = parameters.last().is_none_or(|last| last.word() == ",");
                self.out.push_str(if is_listed { "" } else { ", " });
                self.out.push_str("varargs=[], kwargs={}");
                self.out.push_str(close);
            }
            _ => {
                self.macros.push(None);
                put_expressions(&mut self.out, parts);
            }
        }
    }
}

/// Parts between borders, each with the border behind it.
fn runs<'p, 'a>(
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
        // An attribute may have a keyword's name.
        "+" | "-" => at > 0 && (parts[at - 1].ends_value() || before(2) == Some(".")),
        // Names of attributes, filters and tests are none.
        word if is_keyword(word) && word != "is" => match before(1) {
            Some("." | "|" | "is") => false,
            Some("not") => before(2) != Some("is"),
            _ => true,
        },
        _ => false,
    }
}

fn put_expressions(out: &mut String, parts: &[Part<'_>]) {
    for (run, border) in runs(parts, |at| is_border(parts, at)) {
        put_joined(out, run);
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

/// Operands of `%` and of what binds as much: behind a text `%` formats it.
fn put_product(out: &mut String, parts: &[Part<'_>]) {
    let operands = runs(parts, |at| matches!(parts[at].word(), "*" | "/" | "//" | "%"));
    let mut is_text = matches!(operands[0].0, [only] if only.is_text());
    let mut before: Option<&Part<'_>> = None;
    for (operand, operator) in operands {
        match before {
            Some(sign) if is_text && sign.word() == "%" => {
                out.push_str("|format");
                put_arguments(out, operand);
            }
            sign => {
                is_text &= sign.is_none();
                sign.into_iter().chain(operand).for_each(|part| put(out, part));
            }
        }
        before = operator;
    }
}

/// What a text is formatted with: a tuple, or one value.
fn put_arguments(out: &mut String, operand: &[Part<'_>]) {
    let is_tuple =
        |inner: &[Part<'_>]| inner.is_empty() || inner.iter().any(|part| part.word() == ",");
    match operand {
        [Part::Group(open, inner, _)] if open.ends_with('(') && is_tuple(inner) => {
            put(out, &operand[0]);
        }
        _ => {
            out.push('(');
            operand.iter().for_each(|part| put(out, part));
            out.push(')');
        }
    }
}

fn put(out: &mut String, part: &Part<'_>) {
    match part {
        Part::Word(word) => out.push_str(word),
        Part::Group(open, inner, close) => {
            out.push_str(open);
            put_expressions(out, inner);
            out.push_str(close);
        }
    }
}

/// A macro whose last two parameters are `varargs` and `kwargs`, as one that takes any arguments.
pub(super) fn opened(own: Value) -> Value {
    Value::from_object(Opened(own))
}

#[derive(Debug)]
struct Opened(Value);

impl Object for Opened {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        let (given, named): (&[Value], Kwargs) = from_args(arguments)?;
        let parameters: Vec<Value> = self.0.get_attr("arguments")?.try_iter()?.collect();
        let own = &parameters[..parameters.len().saturating_sub(2)];
        let (taken, more) = given.split_at(own.len().min(given.len()));
        let (mut known, mut other) = (Vec::new(), Vec::new());
        for name in named.args() {
            let is_known = name == "caller" || own.iter().any(|one| one.as_str() == Some(name));
            let list = if is_known { &mut known } else { &mut other };
            list.push((name, named.get::<Value>(name)?));
        }
        known.push(("varargs", Value::from(more.to_vec())));
        known.push(("kwargs", other.into_iter().collect::<Value>()));
        let mut all = taken.to_vec();
        all.push(known.into_iter().collect::<Kwargs>().into());
        self.0.call(state, &all)
    }
}
