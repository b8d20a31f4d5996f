//! `/v1/chat/completions`.

use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::{ChatTemplate, TextTokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Asked, SamplingRequest, fields, refuse_unsupported, require_short};
use crate::Settings;
use crate::error::{ApiError, Result};
use crate::tool_calls::{Calls, Choice, is_function};

/// Most turns of a conversation, and calls of tools in it, which each have an answer among the turns: templates of
/// others run over them.
const MOST_MESSAGES: usize = 1024;
/// Most tools, as OpenAI has it, and bytes of them, 2 KiB each: templates run over them, too.
const MOST_TOOLS: usize = 128;
const LARGEST_TOOLS: usize = MOST_TOOLS << 11;
/// Most bytes of the variables that a request gives its template.
const LARGEST_VARIABLES: usize = 1 << 14;
/// Most tokens whose log-probabilities are told beside the own one.
const MOST_TOP: usize = 20;

/// A conversation to be answered.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ChatRequest {
    messages: Vec<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    /// Not OpenAI's, but of vLLM and SGLang: variables of the template.
    chat_template_kwargs: Option<Map<String, Value>>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
}

impl ChatRequest {
    /// Reads a request's fields and makes them into what is asked for.
    pub(crate) fn asked(
        value: &Value,
        settings: &Settings,
        tokenizer: &TextTokenizer,
    ) -> Result<Asked> {
        let common: SamplingRequest = fields(value)?;
        let chat: Self = fields(value)?;
        refuse_unsupported(value)?;
        let text = chat.text(tokenizer)?;
        require_short(&text, &settings.model, tokenizer)?;
        let prompt = tokens(&text, tokenizer)?;
        let calls = chat.calls(tokenizer)?;
        let room = settings.model.context.saturating_sub(prompt.len());
        let asked = common.asked(settings, (vec![prompt], true), (room, chat.log_probs()?))?;
        Ok(Asked { calls, ..asked })
    }

    /// The calls that answers may make, or have to.
    fn calls(&self, tokenizer: &TextTokenizer) -> Result<Option<Calls>> {
        let choice = Choice::of(self.tool_choice.as_ref())?;
        let tools = self.tools.as_deref().unwrap_or_default();
        Calls::of(tools, &choice, self.parallel_tool_calls.unwrap_or(true), tokenizer)
    }

    fn log_probs(&self) -> Result<Option<usize>> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => Ok(None),
            (true, top) if top.unwrap_or(0) <= MOST_TOP => Ok(Some(top.unwrap_or(0))),
            (true, _) => {
                Err(ApiError::field("top_logprobs", format!("top_logprobs is 0 to {MOST_TOP}")))
            }
            (false, _) => {
                Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true"))
            }
        }
    }

    /// Tokens of the conversation up to where the answer begins.
    pub(crate) fn prompt(&self, tokenizer: &TextTokenizer) -> Result<Vec<TargetTokenId>> {
        tokens(&self.text(tokenizer)?, tokenizer)
    }

    fn text(&self, tokenizer: &TextTokenizer) -> Result<String> {
        let Some(template) = tokenizer.chat_template() else {
            let message = "this model has no chat template: ask /v1/completions";
            return Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, message));
        };
        self.check_sizes()?;
        self.check_tools()?;
        let variables = self.chat_template_kwargs.as_ref();
        let own = variables.map(|given| with_variables(template, given)).transpose()?;
        let template = own.as_ref().unwrap_or(template);
        let messages = self.messages.iter().enumerate();
        let messages = messages.map(|(place, message)| plain(place, message));
        let messages = messages.collect::<Result<Vec<_>>>()?;
        let tools = self.tools().filter(|tools| !tools.is_empty());
        let tools = tools.map(|tools| Value::Array(tools.clone()));
        let render = |messages: &[Map<String, Value>]| {
            template.render_messages(messages, tools.as_ref(), true)
        };
        let with_objects: Vec<_> = messages.iter().map(with_objects).collect();
        Ok(match render(&with_objects) {
            // Some templates put the arguments of calls into the text as they were sent.
            Err(_) if with_objects != messages => render(&messages)?,
            rendered => rendered?,
        })
    }

    /// The tools that the model may call.
    fn tools(&self) -> Option<&Vec<Value>> {
        let may_call = self.tool_choice.as_ref().is_none_or(|choice| choice != "none");
        self.tools.as_ref().filter(|_| may_call)
    }

    /// Refuses tools that are no functions, before a template reads them.
    fn check_tools(&self) -> Result<()> {
        let mut tools = self.tools().into_iter().flatten();
        let Some(place) = tools.position(|tool| !is_function(tool)) else { return Ok(()) };
        let param = format!("tools[{place}].function.name");
        Err(ApiError::field(&param, format!("{param}: a text is needed")))
    }

    /// Refuses what keeps a template at work for long.
    fn check_sizes(&self) -> Result<()> {
        let refused = |field: &str, problem: String| {
            Err(ApiError::field(field, format!("{field}: {problem}")))
        };
        if self.messages.is_empty() || self.messages.len() > MOST_MESSAGES {
            return refused("messages", format!("1 to {MOST_MESSAGES} are needed"));
        }
        let calls = self.messages.iter().filter_map(|message| message.get("tool_calls"));
        let calls: usize = calls.filter_map(Value::as_array).map(Vec::len).sum();
        if calls > MOST_MESSAGES {
            return refused("messages", format!("at most {MOST_MESSAGES} tool_calls are read"));
        }
        let Some(tools) = self.tools() else { return Ok(()) };
        if tools.len() > MOST_TOOLS {
            return refused("tools", format!("at most {MOST_TOOLS} are read"));
        }
        let bytes: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
        if bytes > LARGEST_TOOLS {
            return refused("tools", format!("at most {LARGEST_TOOLS} bytes are read"));
        }
        Ok(())
    }
}

/// A template with the variables that a request gives it.
fn with_variables(template: &ChatTemplate, variables: &Map<String, Value>) -> Result<ChatTemplate> {
    let refused = |problem: String| {
        let field = "chat_template_kwargs";
        Err(ApiError::field(field, format!("{field}: {problem}")))
    };
    let bytes = variables.iter().map(|(name, value)| name.len() + value.to_string().len());
    if bytes.sum::<usize>() > LARGEST_VARIABLES {
        return refused(format!("at most {LARGEST_VARIABLES} bytes are read"));
    }
    if let Some(name) = variables.keys().find(|name| template.sets(name)) {
        return refused(format!("`{name}` is not for requests to set here"));
    }
    Ok(template.with_variables(variables))
}

fn tokens(text: &str, tokenizer: &TextTokenizer) -> Result<Vec<TargetTokenId>> {
    Ok(tokenizer.encode(text)?.ids.into_iter().map(TargetTokenId).collect())
}

/// The same with the arguments of calls as the objects that templates write; they are sent as JSON in a string.
fn with_objects(message: &Map<String, Value>) -> Map<String, Value> {
    let mut message = message.clone();
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = call.pointer_mut("/function/arguments");
        let read = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
        if let Some(arguments) = arguments
            && let Some(object) = arguments.as_str().and_then(read)
        {
            *arguments = Value::Object(object);
        }
    }
    message
}

/// A message as templates read it: its text as one string, `developer` as `system`, and without fields that say
/// nothing, because templates ask whether they are there.
fn plain(place: usize, message: &Map<String, Value>) -> Result<Map<String, Value>> {
    let wrong = |field: &str, problem: &str| {
        let param = format!("messages[{place}].{field}");
        ApiError::field(&param, format!("{param}: {problem}"))
    };
    let mut plain = message.clone();
    let role = match message.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool" | "function")) => role,
        _ => return Err(wrong("role", "system, developer, user, assistant or tool is needed")),
    };
    let content = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                let is_text = part["type"] == "text";
                part["text"].as_str().filter(|_| is_text).map(str::to_owned)
            };
            let texts: Option<Vec<String>> = parts.iter().map(text).collect();
            texts.ok_or_else(|| wrong("content", "only parts of text are read"))?.concat()
        }
        // An assistant that called tools has said nothing.
        None | Some(Value::Null) if role == "assistant" => String::new(),
        _ => return Err(wrong("content", "a text is needed")),
    };
    plain.retain(|_, value| !value.is_null());
    if plain.get("tool_calls") == Some(&Value::Array(Vec::new())) {
        plain.remove("tool_calls");
    }
    plain.insert("role".to_owned(), Value::from(role));
    plain.insert("content".to_owned(), Value::from(content));
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::tokenizer_with;
    use super::*;

    fn read(message: Value) -> std::result::Result<Value, Value> {
        let Value::Object(message) = message else { panic!("an object") };
        plain(3, &message).map(Value::Object).map_err(|error| error.to_json()["error"].take())
    }

    #[test]
    fn messages_become_what_templates_read() {
        let parts = json!([{ "type": "text", "text": "a " }, { "type": "text", "text": "b" }]);
        let found = read(json!({ "role": "developer", "content": parts, "name": "x" }));
        assert_eq!(found, Ok(json!({ "role": "system", "content": "a b", "name": "x" })));
        let called = json!({ "role": "assistant", "content": null, "tool_calls": [1] });
        let found = read(called).expect("read");
        assert_eq!((&found["content"], &found["tool_calls"]), (&json!(""), &json!([1])));
        for (wrong, param) in [
            (json!({ "role": "robot", "content": "a" }), "messages[3].role"),
            (json!({ "content": "a" }), "messages[3].role"),
            (json!({ "role": "user" }), "messages[3].content"),
            (json!({ "role": "user", "content": 7 }), "messages[3].content"),
            (
                json!({ "role": "user", "content": [{ "type": "image_url" }] }),
                "messages[3].content",
            ),
        ] {
            assert_eq!(read(wrong).expect_err("refused")["param"], param);
        }
        let empty =
            json!({ "role": "assistant", "content": null, "tool_calls": null, "audio": null });
        let nothing = json!({ "role": "assistant", "content": "" });
        assert_eq!(read(empty), Ok(nothing.clone()));
        let none = json!({ "role": "assistant", "content": "", "tool_calls": [] });
        assert_eq!(read(none), Ok(nothing));
    }

    /// The text of a request's conversation.
    fn text(template: &str, request: &Value) -> Result<String> {
        fields::<ChatRequest>(request)?.text(&tokenizer_with(template))
    }

    fn call(arguments: &str) -> Value {
        json!({ "type": "function", "function": { "name": "f", "arguments": arguments } })
    }

    fn tool() -> Value {
        json!({ "type": "function", "function": { "name": "f" } })
    }

    #[test]
    fn arguments_of_calls_are_the_objects_that_their_texts_tell() {
        let calls = |shown: &str| {
            let each = format!("{{% for call in m.tool_calls %}}{{{{ {shown} }}}}{{% endfor %}}");
            format!("{{% for m in messages %}}{each}{{% endfor %}}")
        };
        let calls_of = [call(r#"{"city": "Kiel", "days": [1, 2.0]}"#), call("no JSON"), call("7")];
        let request = json!({ "messages": [{ "role": "assistant", "tool_calls": calls_of }] });
        let written = text(&calls("call.function.arguments | tojson"), &request);
        let wanted = r#"{"city": "Kiel", "days": [1, 2.0]}"no JSON""7""#;
        assert_eq!(written, Ok(wanted.to_owned()));
        // A template that wants them as they were sent.
        let written = text(&calls("'<' + call.function.arguments + '>'"), &request);
        let wanted = r#"<{"city": "Kiel", "days": [1, 2.0]}><no JSON><7>"#;
        assert_eq!(written, Ok(wanted.to_owned()));
        let refused = text("{{ raise_exception('never') }}", &request).expect_err("refused");
        assert!(refused.to_json()["error"]["message"].to_string().contains("never"));
    }

    #[test]
    fn tools_that_must_not_be_called_are_not_told() {
        let template = "{% if tools %}{{ tools | length }}{% else %}none{% endif %}";
        for (choice, wanted) in [("auto", "2"), ("none", "none")] {
            let messages = json!([{ "role": "user", "content": "a" }]);
            let tools = [tool(), tool()];
            let request = json!({ "messages": messages, "tools": tools, "tool_choice": choice });
            assert_eq!(text(template, &request), Ok(wanted.to_owned()));
        }
    }

    #[test]
    fn what_keeps_a_template_at_work_is_refused() {
        let request = |tools: Value, calls: usize| {
            let calls = vec![call("{}"); calls];
            let messages = json!([{ "role": "assistant", "tool_calls": calls }]);
            text("{{ tools | length }}", &json!({ "messages": messages, "tools": tools }))
        };
        let large = json!([{ "parameters": vec![1; LARGEST_TOOLS / 2] }]);
        for (tools, calls, param) in [
            (json!(vec![1; MOST_TOOLS + 1]), 1, "tools"),
            (large, 1, "tools"),
            (json!([tool()]), MOST_MESSAGES + 1, "messages"),
        ] {
            let refused = request(tools, calls).expect_err("refused");
            assert_eq!(refused.to_json()["error"]["param"], param);
        }
        assert_eq!(request(json!(vec![tool(); MOST_TOOLS]), MOST_MESSAGES), Ok("128".to_owned()));
    }
}
