//! Grammars of answers that are calls, in Lark's notation.

mod tagged;

use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value, json};

use super::Function;
use super::syntax::{ARGUMENTS, Body, CALL_ID, Syntax};
use crate::error::{ApiError, Result};
use crate::grammar::{Form, LARGEST, on_one_line};

/// How calls are written in a target's text.
pub(super) struct Writing<'a> {
    pub(super) syntax: &'a Syntax,
    pub(super) template: &'a str,
    pub(super) tokenizer: &'a TextTokenizer,
}

impl Writing<'_> {
    /// The form of an answer that calls one of these functions, or several unless `is_single`.
    ///
    /// # Errors
    /// - a schema is none of an object or cannot be written in the syntax, or all are too large
    pub(super) fn form(&self, functions: &[&Function], is_single: bool) -> Result<Form> {
        let any: Vec<String> = (0..functions.len()).map(|place| format!("f{place}")).collect();
        let mut rules = vec![self.start(is_single), format!("any: {}\n", any.join(" | "))];
        if self.syntax.body == Body::Tags {
            rules.push(tagged::text());
        }
        for (place, function) in functions.iter().enumerate() {
            rules.push(match self.syntax.body {
                Body::Tags => tagged::call(function, place)?,
                _ => self.json_call(function, place)?,
            });
        }
        let grammar = rules.concat();
        if grammar.len() > LARGEST {
            let problem = format!("tools: at most {LARGEST} bytes are read where calls are forced");
            return Err(ApiError::field("tools", problem));
        }
        Ok(Form::Lark(grammar))
    }

    /// A marker: its token, if it is a special one, or its text.
    fn marker(&self, marker: &str) -> String {
        let is_special = |id: &u32| self.tokenizer.is_special(*id);
        let id = self.tokenizer.id(marker).filter(is_special);
        id.map_or_else(|| literal(marker), |id| format!("<[{id}]>"))
    }

    /// The rules of a call of a function, of this number, whose arguments are JSON.
    fn json_call(&self, function: &Function, place: usize) -> Result<String> {
        let arguments = format!("a{place}");
        let call = self.call(&function.name, &arguments);
        let schema = on_one_line(&schema(function)?);
        Ok(format!("f{place}: {call}\n{arguments}: %json {schema}\n"))
    }

    /// The rules of an answer, down to `any` call.
    fn start(&self, is_single: bool) -> String {
        let opening = self.syntax.forced_opening();
        let begin = opening.map(|opening| self.marker(opening)).unwrap_or_default();
        match self.syntax.body {
            Body::Object { between, .. } => self.marked(between, is_single),
            Body::Tags => self.marked(Some("\n"), is_single),
            Body::List => {
                // Some templates have a space before the list.
                let spaced = format!("{} [", opening.unwrap_or_default());
                let list = literal(if self.template.contains(&spaced) { " [" } else { "[" });
                let more = if is_single { "" } else { "(\", \" any)*" };
                format!("start: {begin} {list} any {more} {}\n", literal("]"))
            }
            Body::Named => {
                let more = if is_single { "" } else { "+" };
                format!("start: call{more}\ncall: {begin} any\n")
            }
        }
    }

    /// The same of calls between markers that have lines of their own, and with what divides several.
    fn marked(&self, between: Option<&str>, is_single: bool) -> String {
        let (opening, line) = (self.syntax.forced_opening(), literal("\n"));
        let begin = opening.map(|opening| format!("{} {line}", self.marker(opening)));
        let end = self.syntax.closing.filter(|_| opening.is_some());
        let end = end.map(|end| format!("{line} {}", self.marker(end)));
        let more = between.filter(|_| !is_single).map(literal);
        let more = more.map(|between| format!("({between} call)*")).unwrap_or_default();
        let (begin, end) = (begin.unwrap_or_default(), end.unwrap_or_default());
        format!("start: call {more}\ncall: {begin} any {end}\n")
    }

    /// A call of a function, with the rule of its arguments.
    fn call(&self, name: &str, arguments: &str) -> String {
        let key = match self.syntax.body {
            Body::Named => {
                let id = self.template.contains(CALL_ID).then(|| self.marker(CALL_ID));
                let id = id.map(|id| format!("{id} /[a-zA-Z0-9]{{9}}/")).unwrap_or_default();
                return format!("{} {id} {} {arguments}", literal(name), self.marker(ARGUMENTS));
            }
            Body::Object { arguments, .. } => arguments,
            Body::List | Body::Tags => "arguments",
        };
        let begin = format!("{{\"name\": {}, \"{key}\": ", literal(name));
        format!("{} {arguments} {}", literal(&begin), literal("}"))
    }
}

/// A text in Lark's notation, which is that of JSON.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// The schema of a function's arguments; without one it has none.
fn schema(function: &Function) -> Result<Value> {
    let wrong = || {
        let problem =
            format!("tools: the parameters of `{}` are not an object's schema", function.name);
        ApiError::field("tools", problem)
    };
    let mut schema: Map<String, Value> = match &function.parameters {
        None => {
            let none = json!({ "type": "object", "properties": {}, "additionalProperties": false });
            return Ok(none);
        }
        Some(Value::Object(schema)) => schema.clone(),
        Some(_) => return Err(wrong()),
    };
    if schema.entry("type").or_insert_with(|| Value::from("object")) != "object" {
        return Err(wrong());
    }
    Ok(Value::Object(schema))
}

#[cfg(test)]
mod tests;
