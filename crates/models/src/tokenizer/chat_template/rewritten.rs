//! Templates in which operators and macros mean what they mean to Jinja2.
//!
//! The library's operators cannot be changed. So filters take their place: `a ~ b` becomes `(a)|string ~ (b)|string`,
//! `a % b` becomes `(a)|modulo(b)`, and `(a, b)` becomes `([a, b]|as_tuple)`. A macro that names `varargs` or `kwargs`
//! gets them as parameters, and [`OPENED`] gathers what its calls give beyond the others. Lines keep their numbers.

mod put;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

use super::opened::{GATHERED, OPENED};
use put::{put, put_assignments, put_expressions, put_loop, runs};

/// Nesting of brackets that is followed; the library refuses as much.
const DEEPEST: usize = 150;

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
    /// Macros that have not ended; `None` for one without a list of parameters.
    macros: Vec<Option<Macro<'a>>>,
}

struct Macro<'a> {
    name: &'a str,
    /// Where another parameter goes in what is written, and what stands before it.
    end: usize,
    comma: &'static str,
    /// Which of [`GATHERED`] are parameters of its own.
    has: [bool; 2],
    /// Which of [`GATHERED`] its body names beside these.
    gathers: [bool; 2],
}

impl Macro<'_> {
    fn gather(&mut self, which: usize) {
        self.gathers[which] |= !self.has[which];
    }
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
        let mut assignments = Vec::new();
        match (end, parts.as_slice()) {
            ("%}", [first, rest @ ..]) => {
                put(&mut self.out, first);
                match first.word() {
                    "macro" => assignments = self.begin_macro(rest),
                    "endmacro" => {
                        put_expressions(&mut self.out, rest);
                        assignments.extend(self.end_macro());
                    }
                    "for" => put_loop(&mut self.out, rest),
                    "set" | "with" => put_assignments(&mut self.out, rest),
                    // Names in brackets are no values.
                    "call" if matches!(rest, [Part::Group(..), ..]) => {
                        put(&mut self.out, &rest[0]);
                        put_expressions(&mut self.out, &rest[1..]);
                    }
                    _ => put_expressions(&mut self.out, rest),
                }
            }
            _ => put_expressions(&mut self.out, &parts),
        }
        let closing = &self.rest[..self.rest.find(end)? + end.len()];
        self.copy(closing.len());
        for assignment in &assignments {
            self.out.extend(["{% set ", assignment.as_str(), " ", closing.trim_start()]);
        }
        Some(())
    }

    /// Takes the parts up to what ends them: a bracket, or outside of all brackets the tag's end.
    fn parts(&mut self, end: &str, depth: usize) -> Option<Vec<Part<'a>>> {
        static WORD: LazyLock<Regex> = LazyLock::new(|| {
            let text = r#"'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#;
            let number = r"\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?";
            expression(&format!(r"(?s)^\s*(?:{text}|{number}|[^\W\d]\w*|[=!<>]=|//|\*\*|.)"))
        });
        let mut parts: Vec<Part<'a>> = Vec::new();
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
                name => {
                    // Names of attributes are others.
                    if parts.last().is_none_or(|last| last.word() != ".") {
                        self.gather(name);
                    }
                    Part::Word(word)
                }
            });
        }
    }

    /// Tells the macro whose body holds a name.
    fn gather(&mut self, name: &str) {
        let which = GATHERED.iter().position(|(gathered, _)| *gathered == name);
        if let (Some(which), Some(Some(innermost))) = (which, self.macros.last_mut()) {
            innermost.gather(which);
        }
    }

    fn word(&mut self, expression: &Regex) -> Option<&'a str> {
        let (word, rest) = self.rest.split_at(expression.find(self.rest)?.end());
        self.rest = rest;
        Some(word)
    }

    /// Takes a macro's name and parameters. Returns the assignments with which its body begins.
    fn begin_macro(&mut self, parts: &[Part<'a>]) -> Vec<String> {
        let [Part::Word(name), Part::Group(open, parameters, close)] = parts else {
            self.macros.push(None);
            put_expressions(&mut self.out, parts);
            return Vec::new();
        };
        self.out.extend([*name, *open]);
        let (names, assignments) = put_parameters(&mut self.out, parameters);
        let is_listed = parameters.last().is_none_or(|last| last.word() == ",");
        self.macros.push(Some(Macro {
            name: name.trim_start(),
            end: self.out.len(),
            comma: if is_listed { "" } else { ", " },
            has: GATHERED.map(|(gathered, _)| names.contains(gathered)),
            gathers: [false; 2],
        }));
        self.out.push_str(close);
        assignments
    }

    /// Ends a macro. Returns the assignment that makes it take any arguments, if its body names them.
    fn end_macro(&mut self) -> Option<String> {
        let Macro { name, end, comma, gathers, .. } = self.macros.pop().flatten()?;
        let (mut parameters, mut opened) = (String::new(), format!("{name} = {OPENED}({name}"));
        for which in (0..GATHERED.len()).filter(|which| gathers[*which]) {
            let (gathered, empty) = GATHERED[which];
            let comma = if parameters.is_empty() { comma } else { ", " };
            parameters.extend([comma, gathered, "=", empty]);
            opened.extend([", '", gathered, "'"]);
            // The body of the macro around it holds the name, too.
            if let Some(Some(outer)) = self.macros.last_mut() {
                outer.gather(which);
            }
        }
        self.out.insert_str(end, &parameters);
        (!parameters.is_empty()).then(|| opened + ")")
    }
}

/// Parameters of a macro. Returns their names, and assignments of the defaults that name parameters before theirs: the
/// library sets the last parameter first.
fn put_parameters<'p>(
    out: &mut String,
    parameters: &'p [Part<'_>],
) -> (BTreeSet<&'p str>, Vec<String>) {
    let (mut names, mut assignments) = (BTreeSet::new(), Vec::new());
    for (parameter, comma) in runs(parameters, |at| parameters[at].word() == ",") {
        match parameter {
            [name, equals, default @ ..] if equals.word() == "=" && mentions(default, &names) => {
                put(out, name);
                // An attribute that does not exist: the value is undefined.
                out.push_str("={}.x");
                let name = name.word();
                let mut assignment = format!("{name} = (");
                put_expressions(&mut assignment, default);
                assignment.extend([") if ", name, " is undefined else ", name]);
                assignments.push(assignment);
            }
            _ => put_expressions(out, parameter),
        }
        names.extend(parameter.first().map(Part::word));
        comma.into_iter().for_each(|comma| put(out, comma));
    }
    (names, assignments)
}

/// Whether one of these names stands in an expression.
fn mentions(parts: &[Part<'_>], names: &BTreeSet<&str>) -> bool {
    parts.iter().any(|part| match part {
        Part::Word(_) => names.contains(part.word()),
        Part::Group(_, inner, _) => mentions(inner, names),
    })
}
