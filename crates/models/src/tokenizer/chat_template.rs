//! Jinja chat templates as models ship them.

use std::io::Write;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, State, context};
use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{ModelError, Result};

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

/// A compiled template with the special tokens that it may print.
#[derive(Clone)]
pub struct ChatTemplate {
    source: String,
    special_tokens: Map<String, Value>,
    /// The same as the template reads them.
    token_values: minijinja::Value,
    environment: Arc<Environment<'static>>,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// - it does not parse
    pub fn new(source: &str, special_tokens: Map<String, Value>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<(), Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("generation", generation);
        environment
            .add_template_owned("chat".to_owned(), with_generation_filters(source))
            .map_err(|error| ModelError::Tokenizer(format!("chat template: {error:#}")))?;
        let token_values = minijinja::Value::from_serialize(&special_tokens);
        let (source, environment) = (source.to_owned(), Arc::new(environment));
        Ok(Self { source, special_tokens, token_values, environment })
    }

    /// From `tokenizer_config.json` and, before it, a file of its own.
    pub(super) fn from_config(config: &Value, file: Option<String>) -> Result<Option<Self>> {
        let default_of = |list: &Vec<Value>| {
            let named = list.iter().find(|t| t["name"] == "default").or_else(|| list.first())?;
            named["template"].as_str().map(str::to_owned)
        };
        let source = file.or_else(|| match config.get("chat_template") {
            Some(Value::String(source)) => Some(source.clone()),
            Some(Value::Array(list)) => default_of(list),
            _ => None,
        });
        let mut special_tokens = Map::new();
        for key in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            let token = match config.get(key) {
                Some(Value::Object(token)) => token.get("content").cloned(),
                other => other.cloned(),
            };
            if let Some(Value::String(token)) = token {
                special_tokens.insert(key.to_owned(), Value::String(token));
            }
        }
        source.map(|source| Self::new(&source, special_tokens)).transpose()
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
        self.render_values(&messages, tools, add_generation_prompt, false)
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
        if generation_tags().find(&self.source).is_none() {
            return Ok(None);
        }
        let messages = minijinja::Value::from_serialize(messages);
        let marked = self.render_values(&messages, tools, false, true)?;
        let unclear = || {
            ModelError::Tokenizer("chat template: its generation blocks cannot be told".to_owned())
        };
        unmarked(&marked).map(Some).ok_or_else(unclear)
    }

    fn render_values(
        &self,
        messages: &minijinja::Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        mark_generation: bool,
    ) -> Result<String> {
        let fail = |error: Error| ModelError::Tokenizer(format!("chat template: {error:#}"));
        let template = self.environment.get_template("chat").map_err(fail)?;
        // Templates test `if tools` as well as `tools is not none`.
        let tools = minijinja::Value::from_serialize(tools);
        let own = context! { messages, tools, add_generation_prompt, mark_generation };
        template.render(context! { ..own, ..self.token_values.clone() }).map_err(fail)
    }

    /// The keys of `tokenizer_config.json` that make this template.
    pub(super) fn to_config(&self) -> Value {
        let mut config = json!({ "chat_template": self.source });
        for (key, token) in &self.special_tokens {
            config[key] = token.clone();
        }
        config
    }
}

/// Around what a template generates while it is asked for.
const GENERATION: [char; 2] = ['\u{10FFFE}', '\u{10FFFF}'];

/// The tags of Hugging Face's `generation` block with their white-space control.
fn generation_tags() -> &'static Regex {
    static TAGS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a valid expression")
    });
    &TAGS
}

/// The same template with filter blocks, which minijinja knows, in place of `generation` blocks.
fn with_generation_filters(source: &str) -> String {
    let tag = |tag: &Captures<'_>| {
        let name = if tag.get(2).is_some() { "endfilter" } else { "filter generation" };
        format!("{{%{} {name} {}%}}", &tag[1], &tag[3])
    };
    generation_tags().replace_all(source, tag).into_owned()
}

/// The body of a `generation` block.
fn generation(state: &State<'_, '_>, body: String) -> String {
    if state.lookup("mark_generation").is_some_and(|mark| mark.is_true()) {
        format!("{}{body}{}", GENERATION[0], GENERATION[1])
    } else {
        body
    }
}

/// Takes the marks out of a text; `None` if they do not come in pairs.
fn unmarked(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let (mut text, mut ranges, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for character in marked.chars() {
        if character == GENERATION[0] {
            if start.replace(text.len()).is_some() {
                return None;
            }
        } else if character == GENERATION[1] {
            ranges.push(start.take()?..text.len());
        } else {
            text.push(character);
        }
    }
    start.is_none().then_some((text, ranges))
}

/// JSON as Python's `json.dumps` writes it: `", "` and `": "`, nothing escaped for HTML. Models were
/// trained on tool descriptions in this form.
#[expect(clippy::needless_pass_by_value, reason = "filters take their options so")]
fn to_json(value: &minijinja::Value, options: Kwargs) -> std::result::Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _ = options.get::<Option<minijinja::Value>>(ignored);
    }
    options.assert_all_used()?;
    let fail = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "tojson").with_source(error)
    };
    let mut bytes = Vec::new();
    match indent {
        Some(width) => {
            let spaces = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    }
    .map_err(fail)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))
}

/// One line with a space behind commas and colons.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message.content.strip() + '<|im_end|>' }}\n{% endfor %}\n{%- if add_generation_prompt %}{{ bos_token }}go{% endif %}";

    #[test]
    fn python_methods_and_special_tokens_work() -> Result<()> {
        let mut tokens = Map::new();
        tokens.insert("bos_token".into(), "<s>".into());
        let template = ChatTemplate::new(CHATML, tokens)?;
        let text = template.render(&[Message::new("user", " hi ")], true)?;
        assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<s>go");
        Ok(())
    }

    #[test]
    fn a_template_can_refuse() -> Result<()> {
        let template = ChatTemplate::new("{{ raise_exception('no tools here') }}", Map::new())?;
        let error = template.render(&[], false).expect_err("refused").to_string();
        assert!(error.contains("no tools here"), "{error}");
        Ok(())
    }

    #[test]
    fn messages_keep_their_fields_and_json_is_written_as_in_python() -> Result<()> {
        let source = "{% for m in messages %}{{ m.tool_calls[0].arguments | tojson }}{% endfor %}\
                      {% if tools %}{{ tools[0] | tojson(indent=2) }}{% endif %}";
        let template = ChatTemplate::new(source, Map::new())?;
        let message = json!({"tool_calls": [{"arguments": {"a": "<b & c>", "d": [1, 2.0]}}]});
        let messages = [message.as_object().expect("object").clone()];
        let text = template.render_messages(&messages, Some(&json!([{"n": "é"}])), false)?;
        assert_eq!(text, "{\"a\": \"<b & c>\", \"d\": [1, 2.0]}{\n  \"n\": \"é\"\n}");
        let text = template.render_messages(&messages, None, false)?;
        assert_eq!(text, "{\"a\": \"<b & c>\", \"d\": [1, 2.0]}");
        Ok(())
    }

    #[test]
    fn generation_blocks_are_plain_text_that_can_be_asked_for() -> Result<()> {
        let source = "{% for m in messages %}\n{%- if m.role == 'assistant' %}\n<a>\n\
                      {%- generation %}{{ m.content }}<end>{% endgeneration -%}\n\
                      {% else %}<u>{{ m.content }}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(source, Map::new())?;
        let turns = [("user", "é?"), ("assistant", "b"), ("user", "c"), ("assistant", "")];
        let turns = turns.map(|(role, text)| Message::new(role, text));
        let text = template.render(&turns, false)?;
        assert_eq!(text, "<u>é?<a>b<end><u>c<a><end>");
        let turn = |m: &Message| json!(m).as_object().cloned().unwrap_or_default();
        let messages: Vec<_> = turns.iter().map(turn).collect();
        let (same, ranges) = template.render_generated(&messages, None)?.expect("blocks");
        let generated: Vec<&str> = ranges.into_iter().map(|range| &text[range]).collect();
        assert_eq!((same.as_str(), generated), (text.as_str(), vec!["b<end>", "<end>"]));
        let marked = [turn(&Message::new("assistant", "a\u{10FFFF}b"))];
        assert!(template.render_generated(&marked, None).is_err());
        assert!(
            ChatTemplate::new(CHATML, Map::new())?.render_generated(&messages, None)?.is_none()
        );
        assert!(ChatTemplate::new("{% generation %}{% endfor %}", Map::new()).is_err());
        Ok(())
    }

    #[test]
    fn broken_templates_are_errors() {
        assert!(ChatTemplate::new("{% for %}", Map::new()).is_err());
    }
}
