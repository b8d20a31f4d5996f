//! Jinja chat templates as models ship them.
//!
//! They are programs of others: each rendering runs within [`LIMITS`], and within a number of
//! instructions (fuel) and bytes of text.

mod arguments;
mod errors;
mod filters;
mod json_filter;
mod marks;
mod methods;
mod opened;
mod operators;
mod python;
mod repr;
mod rewritten;
mod tuples;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use time::OffsetDateTime;

use crate::bounded::{self, Limits, Stopped};
use crate::error::{ModelError, Result};

/// Memory and time of a rendering. Templates take milliseconds of a processor, and some copies of the
/// conversation.
const LIMITS: Limits =
    Limits { bytes: 256 << 20, processor: Duration::from_millis(500), seconds: 10 };

/// Renderings that may be given up: each of their threads keeps its memory, up to that of [`LIMITS`].
const MOST_GIVEN_UP: usize = 4;

/// Instructions of a rendering: published templates take some hundred a message, those that look at
/// all messages for each one some ten a pair.
const FUEL: u64 = 1_000_000;
const FUEL_PER_MESSAGE: u64 = 20_000;

/// Longest text of a conversation.
const LONGEST_TEXT: usize = 32 << 20;

/// The day of texts that are of no day, 1 January 2025, in seconds of Unix.
const DAY: i64 = 1_735_689_600;

/// Longest template; published ones have up to 30 KB.
const LONGEST_TEMPLATE: usize = 1 << 20;

/// Variables of every rendering, beside the special tokens.
const OWN: [&str; 5] =
    ["messages", "tools", "documents", "add_generation_prompt", "mark_generation"];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// A turn.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into() }
    }
}

/// Variables of a template as one text, in whatever order they were given; empty without any.
pub fn variables_text(variables: &Map<String, Value>) -> String {
    if variables.is_empty() {
        return String::new();
    }
    json!(variables.iter().collect::<BTreeMap<_, _>>()).to_string()
}

/// A compiled template with the special tokens that it may print.
#[derive(Clone)]
pub struct ChatTemplate {
    source: String,
    special_tokens: Map<String, Value>,
    /// Variables of others ([`Self::with_variables`]).
    variables: Map<String, Value>,
    /// Special tokens and variables as the template reads them.
    token_values: minijinja::Value,
    environment: Arc<Environment<'static>>,
    /// What takes its place for conversations with tools, where the model has a template of its own for them.
    for_tools: Option<Box<Self>>,
    /// Threads of renderings that were given up, as long as they live.
    given_up: Arc<Mutex<Vec<Weak<()>>>>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// - it does not parse, or is longer than a mebibyte
    pub fn new(source: &str, special_tokens: Map<String, Value>) -> Result<Self> {
        Self::on(None, source, special_tokens)
    }

    /// The same for texts that have to stay as they are: the day is always 1 January 2025.
    ///
    /// # Errors
    /// - as [`Self::new`]
    pub fn undated(&self) -> Result<Self> {
        let of = |template: &Self| -> Result<Self> {
            if !template.source.contains(python::DATE) {
                return Ok(template.clone());
            }
            let day = OffsetDateTime::from_unix_timestamp(DAY).ok();
            let undated = Self::on(day, &template.source, template.special_tokens.clone())?;
            Ok(undated.with_variables(&template.variables))
        };
        let for_tools = self.for_tools.as_deref().map(of).transpose()?.map(Box::new);
        Ok(Self { for_tools, ..of(self)? })
    }

    fn on(
        day: Option<OffsetDateTime>,
        source: &str,
        special_tokens: Map<String, Value>,
    ) -> Result<Self> {
        if source.len() > LONGEST_TEMPLATE {
            let length = source.len();
            return Err(failed(&format!("{length} bytes, at most {LONGEST_TEMPLATE} are read")));
        }
        let owned = source.to_owned();
        let environment = bounded::run(LIMITS, move || compiled(&owned, day))
            .map_err(|stopped| failed(&stopped.to_string()))?
            .map_err(|problem| failed(&problem))?;
        let token_values = minijinja::Value::from_serialize(&special_tokens);
        let (source, environment) = (source.to_owned(), Arc::new(environment));
        let (variables, for_tools, given_up) = (Map::new(), None, Arc::default());
        Ok(Self {
            source,
            special_tokens,
            variables,
            token_values,
            environment,
            for_tools,
            given_up,
        })
    }

    /// The same with another template for conversations with tools.
    pub(super) fn with_tools(self, source: Option<&str>) -> Result<Self> {
        let compiled = |source| Self::new(source, self.special_tokens.clone()).map(Box::new);
        let for_tools = source.map(compiled).transpose()?;
        Ok(Self { for_tools, ..self })
    }

    /// Whether renderings set this variable themselves: it is one of theirs, a special token, or a function
    /// (`raise_exception`, `strftime_now`, `namespace`, ...).
    pub fn sets(&self, variable: &str) -> bool {
        OWN.contains(&variable)
            || self.special_tokens.contains_key(variable)
            || self.environment.globals().any(|(name, _)| name == variable)
    }

    /// The same where renderings have more variables (`enable_thinking`, ...). One that it has already takes the new
    /// value. Those that renderings set themselves ([`Self::sets`]) stay as they are.
    #[must_use]
    pub fn with_variables(&self, more: &Map<String, Value>) -> Self {
        if more.is_empty() {
            return self.clone();
        }
        let mut variables = self.variables.clone();
        let others = more.iter().filter(|(name, _)| !self.sets(name));
        variables.extend(others.map(|(name, value)| (name.clone(), value.clone())));
        let tokens = minijinja::Value::from_serialize(&self.special_tokens);
        let of_others = minijinja::Value::from_serialize(&variables);
        let token_values = context! { ..tokens, ..of_others };
        let for_tools = self.for_tools.as_deref().map(|other| other.with_variables(more));
        Self { variables, token_values, for_tools: for_tools.map(Box::new), ..self.clone() }
    }

    /// The variables that [`Self::with_variables`] gave it.
    pub fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// The template of a conversation with these tools.
    fn of(&self, tools: Option<&Value>) -> &Self {
        self.for_tools.as_deref().filter(|_| tools.is_some()).unwrap_or(self)
    }

    /// Tells templates apart: a hash of their texts, and of their variables where they have some.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for template in [Some(self), self.for_tools.as_deref()].into_iter().flatten() {
            hasher.update(&(template.source.len() as u64).to_le_bytes());
            hasher.update(template.source.as_bytes());
        }
        hasher.update(variables_text(&self.variables).as_bytes());
        hasher.finalize().to_hex()[..16].to_owned()
    }

    /// The text of the template that conversations with tools have.
    pub fn source_with_tools(&self) -> &str {
        &self.for_tools.as_deref().unwrap_or(self).source
    }

    /// From what `tokenizer_config.json` says, and what its `chat_template` or a file of its own holds: a text, or
    /// several by name.
    pub(super) fn from_config(config: &Value, templates: &Value) -> Result<Option<Self>> {
        let named = |name: &str| {
            let list = templates.as_array()?;
            list.iter().find(|one| one["name"] == name)?["template"].as_str()
        };
        let first = || templates.get(0)?["template"].as_str();
        let source = templates.as_str().or_else(|| named("default")).or_else(first);
        let mut special_tokens = Map::new();
        for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            if let Some(token) = written_token(config, key) {
                special_tokens.insert(key.to_owned(), token.into());
            }
        }
        let Some(source) = source else { return Ok(None) };
        Self::new(source, special_tokens)?.with_tools(named("tool_use")).map(Some)
    }

    /// Text of a conversation; with `add_generation_prompt` it ends where the assistant's answer
    /// begins.
    ///
    /// # Errors
    /// - the template refuses the messages
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let messages = minijinja::Value::from_serialize(messages);
        self.render_values(&messages, None, add_generation_prompt, false)
    }

    /// As [`Self::render`] for messages with any fields (`tool_calls`, `reasoning_content`, ...)
    /// and the tools that they may call.
    ///
    /// # Errors
    /// - the template refuses the messages
    pub fn render_messages(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let messages = minijinja::Value::from_serialize(messages);
        self.of(tools).render_values(&messages, tools, add_generation_prompt, false)
    }

    /// A finished conversation and, in bytes of its text, what the template says that the model
    /// generates: its `{% generation %}` blocks. `None` if it has none.
    ///
    /// # Errors
    /// - the template refuses the messages, or a message holds the last characters of Unicode
    pub fn render_generated(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
    ) -> Result<Option<(String, Vec<Range<usize>>)>> {
        let template = self.of(tools);
        if marks::generation_tags().find(&template.source).is_none() {
            return Ok(None);
        }
        let messages = minijinja::Value::from_serialize(messages);
        let marked = template.render_values(&messages, tools, false, true)?;
        let unclear = || {
            ModelError::Tokenizer("chat template: its generation blocks cannot be told".to_owned())
        };
        marks::unmarked(&marked).map(Some).ok_or_else(unclear)
    }

    fn render_values(
        &self,
        messages: &minijinja::Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        mark_generation: bool,
    ) -> Result<String> {
        self.require_threads()?;
        // Templates test `if tools` as well as `tools is not none`.
        let tools = minijinja::Value::from_serialize(tools);
        let fuel = FUEL + FUEL_PER_MESSAGE * messages.len().unwrap_or(0) as u64;
        let own = context! {
            messages, tools, documents => (), add_generation_prompt, mark_generation
        };
        let context = context! { ..own, ..self.token_values.clone() };
        let environment = Arc::clone(&self.environment);
        let alive = Arc::new(());
        let thread = Arc::downgrade(&alive);
        let rendered = bounded::run(LIMITS, move || {
            let text = rendered(&environment, fuel, context);
            drop(alive);
            text
        });
        rendered
            .map_err(|stopped| {
                let Stopped::Limit(problem) = stopped else { return failed(&stopped.to_string()) };
                self.given_up.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
                ModelError::Rendering(problem)
            })?
            .map_err(|problem| failed(&problem))
    }

    /// Refuses to begin another rendering beside too many that were given up.
    fn require_threads(&self) -> Result<()> {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        given_up.retain(|thread| thread.strong_count() > 0);
        if given_up.len() >= MOST_GIVEN_UP {
            let problem = "renderings were given up and hold their memory: no other one is begun";
            return Err(ModelError::Rendering(format!("{MOST_GIVEN_UP} {problem}")));
        }
        Ok(())
    }

    /// The keys of `tokenizer_config.json` that make this template.
    pub(super) fn to_config(&self) -> Value {
        let mut config = json!({ "chat_template": self.source });
        if let Some(other) = &self.for_tools {
            let named = |name, own: &Self| json!({ "name": name, "template": own.source });
            config["chat_template"] = json!([named("default", self), named("tool_use", other)]);
        }
        for (key, token) in &self.special_tokens {
            config[key] = token.clone();
        }
        config
    }
}

/// A special token of `tokenizer_config.json`: its text, or an object that holds it.
pub(super) fn written_token<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn failed(problem: &str) -> ModelError {
    ModelError::Tokenizer(format!("chat template: {problem}"))
}

fn compiled(
    source: &str,
    day: Option<OffsetDateTime>,
) -> std::result::Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    python::teach(&mut environment, day);
    environment.add_filter("tojson", json_filter::to_json);
    environment.add_filter("string", repr::string);
    environment.add_filter("format", repr::format);
    environment.add_function(opened::OPENED, opened::opened);
    environment.set_formatter(repr::print);
    environment.add_function(
        "raise_exception",
        |message: String| -> std::result::Result<(), Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment.add_filter("generation", marks::generation);
    let plain = marks::with_generation_filters(source);
    let added = environment.add_template_owned("chat", rewritten::rewritten(&plain));
    added.map_err(|error| errors::refusal(error, &mut environment, plain, source))?;
    Ok(environment)
}

fn rendered(
    environment: &Environment<'static>,
    fuel: u64,
    context: minijinja::Value,
) -> std::result::Result<String, String> {
    let mut environment = environment.clone();
    environment.set_fuel(Some(fuel));
    let template = environment.get_template("chat").map_err(|error| errors::described(&error))?;
    let mut text = BoundedText(Vec::new());
    template.render_captured_to(context, &mut text).map_err(|error| match error.kind() {
        ErrorKind::OutOfFuel => format!("it has not ended after {fuel} instructions"),
        ErrorKind::WriteFailure => format!("its text is longer than {LONGEST_TEXT} bytes"),
        _ => errors::described(&error),
    })?;
    String::from_utf8(text.0).map_err(|error| error.to_string())
}

/// Text up to [`LONGEST_TEXT`].
struct BoundedText(Vec<u8>);

impl Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST_TEXT {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
