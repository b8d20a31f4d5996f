//! Calls of tools: read out of answers, and forced, in the syntax of the target's own template.

mod forced;
mod json;
mod named;
mod reader;
mod syntax;
mod tags;

use std::hash::{DefaultHasher, Hash, Hasher};

use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::{ChatTemplate, TextTokenizer};
use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::grammar::Form;
use forced::Writing;
use syntax::Syntax;

pub(crate) use reader::{Reader, Said};

/// What short ids are made of.
const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Which calls a request wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Those that the model makes.
    Auto,
    /// None.
    Never,
    /// At least one, of any function.
    Required,
    /// One of this function.
    Named(String),
}

impl Choice {
    /// What `tool_choice` says.
    pub(crate) fn of(asked: Option<&Value>) -> Result<Self> {
        let Some(asked) = asked.filter(|asked| !asked.is_null()) else { return Ok(Self::Auto) };
        let is_function = asked.get("type").is_some_and(|kind| kind == "function");
        let name = asked.pointer("/function/name").and_then(Value::as_str);
        match (asked.as_str(), name.filter(|_| is_function)) {
            (Some("auto"), _) => Ok(Self::Auto),
            (Some("none"), _) => Ok(Self::Never),
            (Some("required"), _) => Ok(Self::Required),
            (None, Some(name)) => Ok(Self::Named(name.to_owned())),
            _ => {
                let wanted = "auto, none, required, or a function's name";
                Err(ApiError::field("tool_choice", format!("tool_choice: {wanted} is needed")))
            }
        }
    }
}

/// A function that may be called.
#[derive(Debug, Clone)]
struct Function {
    name: String,
    /// The schema of its arguments, if it has one.
    parameters: Option<Value>,
}

impl Function {
    /// Of a tool; none of what is no function.
    fn of(tool: &Value) -> Option<Self> {
        let function = tool.get("function")?;
        let name = function.get("name")?.as_str().filter(|name| !name.is_empty())?;
        let parameters = function.get("parameters").filter(|schema| !schema.is_null());
        Some(Self { name: name.to_owned(), parameters: parameters.cloned() })
    }
}

/// Whether a tool is a function with a name, which answers may call.
pub(crate) fn is_function(tool: &Value) -> bool {
    Function::of(tool).is_some()
}

/// A call that an answer makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// Which call of its answer.
    pub(crate) index: usize,
    name: String,
    /// JSON of an object.
    arguments: String,
}

/// The calls that answers to a request may make.
#[derive(Debug)]
pub(crate) struct Calls {
    syntax: &'static Syntax,
    functions: Vec<Function>,
    /// The markers that are special tokens: those have no text of their own.
    markers: Vec<(TargetTokenId, &'static str)>,
    /// Whether an answer makes at most one.
    is_single: bool,
    /// The form of answers that must be calls.
    pub(crate) forced: Option<Form>,
}

impl Calls {
    /// Of a request's tools; none where answers make no calls, or in no syntax that is known.
    ///
    /// # Errors
    /// - a call is wanted that cannot be forced
    pub(crate) fn of(
        tools: &[Value],
        choice: &Choice,
        is_parallel: bool,
        tokenizer: &TextTokenizer,
    ) -> Result<Option<Self>> {
        let functions: Vec<Function> = tools.iter().filter_map(Function::of).collect();
        let wanted: Option<Vec<&Function>> = match choice {
            Choice::Never => return Ok(None),
            Choice::Auto if functions.is_empty() => return Ok(None),
            Choice::Auto => None,
            Choice::Required => Some(functions.iter().collect()),
            Choice::Named(name) => Some(functions.iter().filter(|f| f.name == *name).collect()),
        };
        let refused = |problem: &str| ApiError::field("tool_choice", problem.to_owned());
        if wanted.as_ref().is_some_and(Vec::is_empty) {
            return Err(refused(match choice {
                Choice::Named(_) => "tool_choice: `tools` has no function of this name",
                _ => "tool_choice: required needs a function in `tools`",
            }));
        }
        let template = tokenizer.chat_template().map_or("", ChatTemplate::source_with_tools);
        let Some(syntax) = Syntax::of(template) else {
            let problem = "tool_choice: this model's template has no calls in a syntax that is \
                           known: none can be forced";
            return wanted.map_or(Ok(None), |_| Err(refused(problem)));
        };
        let is_single = !is_parallel || matches!(choice, Choice::Named(_));
        let writing = Writing { syntax, template, tokenizer };
        let forced = wanted.map(|functions| writing.form(&functions, is_single)).transpose()?;
        let special = |marker: &&str| tokenizer.id(marker).filter(|id| tokenizer.is_special(*id));
        let markers = syntax
            .markers()
            .filter_map(|marker| special(&marker).map(|id| (TargetTokenId(id), marker)));
        let markers = markers.collect();
        Ok(Some(Self { syntax, functions, markers, is_single, forced }))
    }

    /// The function of a name, if it may be called.
    fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// The marker that a token is, if it is a special one.
    fn marker(&self, token: TargetTokenId) -> Option<&'static str> {
        self.markers.iter().find(|(id, _)| *id == token).map(|(_, marker)| *marker)
    }

    /// A call in OpenAI's shape; `answer` and `choice` say whose it is.
    pub(crate) fn to_json(&self, (answer, choice): (&str, usize), call: &Call) -> Value {
        let Call { index, name, arguments } = call;
        let id = self.id(&format!("call_{}_{choice:x}_{index:x}", answer.replace('-', "_")));
        let function = json!({ "name": name, "arguments": arguments });
        json!({ "id": id, "type": "function", "function": function })
    }

    /// The id itself, or one of the length that the template wants ids to have.
    fn id(&self, long: &str) -> String {
        let Some(length) = self.syntax.id_length else { return long.to_owned() };
        let mut hasher = DefaultHasher::new();
        long.hash(&mut hasher);
        let mut rest = hasher.finish();
        let digit = |_| {
            let digit = DIGITS[(rest % DIGITS.len() as u64) as usize];
            rest /= DIGITS.len() as u64;
            char::from(digit)
        };
        (0..length).map(digit).collect()
    }
}

#[cfg(test)]
mod tests;
