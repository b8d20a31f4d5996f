//! Conversations in the form that chat templates read.

use serde_json::{Map, Value};

use crate::row::short;

/// Messages with `role` and `content` and the tools that they may call.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// Every message: `role`, `content` (text), and `reasoning_content`, `tool_calls`, ... if any.
    pub messages: Vec<Map<String, Value>>,
    /// JSON descriptions of tools.
    pub tools: Option<Value>,
    /// Variables of its own for the chat template (`enable_thinking`, ...), which win over those of the reader.
    pub variables: Map<String, Value>,
}

/// Field of a row with the variables of its own, as other trainers and engines name it.
pub const VARIABLES: &str = "chat_template_kwargs";

/// Variables for a chat template without those that are null: such a one is not given, as tables fill columns up with
/// null.
pub fn given_variables(mut variables: Map<String, Value>) -> Map<String, Value> {
    variables.retain(|_, value| !value.is_null());
    variables
}

/// Roles that templates know.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

impl Conversation {
    /// A conversation of `(role, content)` turns.
    pub fn of(turns: &[(&str, &str)]) -> Self {
        let mut conversation = Self::default();
        turns.iter().for_each(|(role, content)| conversation.push(role, content));
        conversation
    }

    /// Adds a turn.
    pub fn push(&mut self, role: &str, content: &str) {
        let mut message = Map::new();
        message.insert("role".into(), role.into());
        message.insert("content".into(), content.into());
        self.messages.push(message);
    }

    /// Role of a message.
    pub fn role(&self, message: usize) -> &str {
        self.messages.get(message).and_then(|m| m.get("role")).and_then(Value::as_str).unwrap_or("")
    }

    /// Whether a message says `weight: 0`, as rows of OpenAI's fine-tuning do of answers that are not learned.
    pub(crate) fn has_no_weight(&self, message: usize) -> bool {
        let weight = self.messages.get(message).and_then(|m| m.get("weight"));
        weight.and_then(Value::as_f64).is_some_and(|weight| weight == 0.0)
    }

    /// Puts a system turn first unless there is one.
    #[must_use]
    pub fn with_system(mut self, system: Option<&str>) -> Self {
        if let Some(text) = system
            && self.role(0) != "system"
        {
            let first = Self::of(&[("system", text)]);
            self.messages.splice(0..0, first.messages);
        }
        self
    }

    /// From a list of `{role, content}` messages as the chat APIs write them: parts of text are
    /// joined, arguments of tool calls that are JSON text become objects, nulls are left out.
    ///
    /// # Errors
    /// - the list is empty or a message has no known role or no text; the message says which
    pub fn from_messages(list: Value, tools: Option<&Value>) -> Result<Self, String> {
        turns(&list)?;
        let list = if let Value::Array(list) = list { list } else { Vec::new() };
        let messages = list
            .into_iter()
            .enumerate()
            .map(|(index, message)| {
                message_of(message).map_err(|problem| format!("message {}: {problem}", index + 1))
            })
            .collect::<Result<_, _>>()?;
        // Tables have no nested types for tools: they hold them as JSON text.
        let tools = match tools {
            Some(Value::String(text)) if text.trim().is_empty() => None,
            Some(Value::String(text)) => {
                Some(serde_json::from_str(text).map_err(|error| format!("tools: {error}"))?)
            }
            other => other.cloned(),
        };
        let has_tools = |tools: &Value| *tools != Value::Null && *tools != Value::Array(Vec::new());
        Ok(Self { messages, tools: tools.filter(has_tools), variables: Map::new() })
    }

    /// The variables that a row brings for the chat template: an object, or one as JSON text, as [`given_variables`].
    ///
    /// # Errors
    /// - the field holds something else
    pub fn variables_of(row: &Map<String, Value>) -> Result<Map<String, Value>, String> {
        let Some(field) = row.get(VARIABLES) else { return Ok(Map::new()) };
        let read = match field {
            Value::String(text) if text.trim().is_empty() => Ok(Value::Null),
            Value::String(text) => serde_json::from_str(text),
            other => Ok(other.clone()),
        };
        match read {
            Ok(Value::Null) => Ok(Map::new()),
            Ok(Value::Object(variables)) => Ok(given_variables(variables)),
            _ => {
                let found = short(field);
                Err(format!("field `{VARIABLES}` is not an object of variables but {found}"))
            }
        }
    }

    /// From a list of `{from, value}` turns, which may have a `weight`.
    ///
    /// # Errors
    /// - the list is empty, a speaker unknown, or a value no text
    pub fn from_sharegpt(list: &Value) -> Result<Self, String> {
        let mut conversation = Self::default();
        for (index, turn) in turns(list)?.iter().enumerate() {
            let text = |key: &str| match turn.get(key) {
                Some(Value::String(text)) => Ok(text.as_str()),
                Some(other) => Err(format!("turn {}: `{key}` is {}", index + 1, short(other))),
                None => Err(format!("turn {}: `{key}` is missing", index + 1)),
            };
            let role = match text("from")? {
                "human" | "user" => "user",
                "gpt" | "assistant" | "chatgpt" | "bing" | "bard" | "model" | "function_call" => {
                    "assistant"
                }
                "system" => "system",
                "tool" | "function" | "observation" | "function_response" => "tool",
                other => {
                    return Err(format!(
                        "turn {}: unknown speaker `{other}` (known: human, gpt, system, tool)",
                        index + 1
                    ));
                }
            };
            conversation.push(role, text("value")?);
            if let (Some(weight), Some(message)) = (
                turn.get("weight").filter(|weight| !weight.is_null()),
                conversation.messages.last_mut(),
            ) {
                message.insert("weight".into(), weight.clone());
            }
        }
        Ok(conversation)
    }

    /// Changes every text that belongs to a message: content, reasoning, names and texts of tool calls.
    pub(crate) fn edit_texts(&mut self, edit: &mut dyn FnMut(usize, &mut String)) {
        for (index, message) in self.messages.iter_mut().enumerate() {
            for key in ["reasoning_content", "reasoning", "thinking", "content"] {
                if let Some(Value::String(text)) = message.get_mut(key) {
                    edit(index, text);
                }
            }
            let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { continue };
            for call in calls {
                let call = function_of(call);
                for key in ["name", "arguments"] {
                    if let Some(value) = call.get_mut(key) {
                        edit_leaves(value, &mut |text| edit(index, text));
                    }
                }
            }
        }
    }
}

fn edit_leaves(value: &mut Value, edit: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(text) => edit(text),
        Value::Array(list) => list.iter_mut().for_each(|value| edit_leaves(value, edit)),
        Value::Object(fields) => fields.values_mut().for_each(|value| edit_leaves(value, edit)),
        _ => {}
    }
}

fn turns(list: &Value) -> Result<&Vec<Value>, String> {
    match list {
        Value::Array(turns) if turns.is_empty() => Err("the conversation is empty".to_owned()),
        Value::Array(turns) => Ok(turns),
        other => Err(format!("a list of turns was expected, not {}", short(other))),
    }
}

fn message_of(value: Value) -> Result<Map<String, Value>, String> {
    let Value::Object(mut message) = value else {
        return Err(format!("an object was expected, not {}", short(&value)));
    };
    message.retain(|_, value| !value.is_null());
    match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => {}
        Some(role) => {
            return Err(format!("unknown role {} (known: {})", short(role), ROLES.join(", ")));
        }
        None => return Err("`role` is missing".to_owned()),
    }
    let calls = matches!(message.get("tool_calls"), Some(Value::Array(calls)) if !calls.is_empty());
    if !calls {
        message.shift_remove("tool_calls");
    }
    let content = match message.get_mut("content").map(Value::take) {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> =
                parts.iter().map(|part| part.get("text").and_then(Value::as_str)).collect();
            texts.ok_or("`content` has a part that is not text")?.concat()
        }
        Some(other) => return Err(format!("`content` is not text but {}", short(&other))),
        None if calls || message.contains_key("reasoning_content") => String::new(),
        None => return Err("`content` is missing".to_owned()),
    };
    message.insert("content".into(), content.into());
    if let Some(reasoning) = message.get("reasoning_content")
        && !reasoning.is_string()
    {
        return Err(format!("`reasoning_content` is not text but {}", short(reasoning)));
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for call in calls {
            check_call(call)?;
        }
    }
    Ok(message)
}

/// What a tool call calls: most lists of messages have it in a table of its own.
fn function_of(call: &mut Value) -> &mut Value {
    if call.get("function").is_some() { &mut call["function"] } else { call }
}

/// A call needs a name; arguments that are JSON text become an object, which templates expect.
fn check_call(call: &mut Value) -> Result<(), String> {
    let function = function_of(call);
    if !function.get("name").is_some_and(Value::is_string) {
        return Err("a tool call has no `name`".to_owned());
    }
    if let Some(Value::String(text)) = function.get("arguments")
        && let Ok(arguments @ Value::Object(_)) = serde_json::from_str(text)
    {
        function["arguments"] = arguments;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn api_messages_are_brought_into_one_form() {
        let list = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": null},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "{\"x\": [\"y\"]}"}}]},
            {"role": "tool", "content": "z"},
            {"role": "assistant", "content": "done", "reasoning_content": "so", "tool_calls": []}
        ]);
        let mut conversation = Conversation::from_messages(list, Some(&json!([]))).expect("valid");
        assert_eq!(conversation.messages[0]["content"], "ab");
        assert!(!conversation.messages[0].contains_key("name"));
        let call = &conversation.messages[1]["tool_calls"][0]["function"];
        assert_eq!(call["arguments"], json!({"x": ["y"]}));
        assert_eq!(conversation.tools, None);
        assert!(!conversation.messages[3].contains_key("tool_calls"));
        let mut seen = Vec::new();
        conversation.edit_texts(&mut |index, text| seen.push(format!("{index}{text}")));
        assert_eq!(seen, ["0ab", "1", "1f", "1y", "2z", "3so", "3done"]);
    }

    #[test]
    fn no_tools_are_none_however_they_are_written() {
        let tools = |tools: Value| {
            let list = json!([{"role": "user", "content": "a"}]);
            Conversation::from_messages(list, Some(&tools)).expect("valid").tools
        };
        for none in [json!(null), json!([]), json!(""), json!(" [] "), json!("null")] {
            assert_eq!(tools(none.clone()), None, "{none}");
        }
        let one = json!([{"name": "f"}]);
        assert_eq!(tools(json!(one.to_string())), Some(one.clone()));
        assert_eq!(tools(one.clone()), Some(one));
    }

    #[test]
    fn a_row_s_variables_are_an_object_however_it_is_written() {
        let of = |field: Value| {
            let row = json!({ "chat_template_kwargs": field });
            Conversation::variables_of(row.as_object().expect("a row"))
        };
        let given = json!({ "enable_thinking": false, "effort": null });
        let known = json!({ "enable_thinking": false });
        for field in [given.clone(), json!(given.to_string())] {
            assert_eq!(of(field).map(Value::Object), Ok(known.clone()));
        }
        for none in [json!(null), json!({}), json!(" "), json!("null")] {
            assert_eq!(of(none.clone()), Ok(Map::new()), "{none}");
        }
        assert_eq!(Conversation::variables_of(&Map::new()), Ok(Map::new()));
        for wrong in [json!(false), json!([1]), json!("no thinking"), json!("[]")] {
            let problem = of(wrong.clone()).expect_err("refused");
            assert!(problem.contains("`chat_template_kwargs` is not an object"), "{problem}");
        }
    }

    #[test]
    fn malformed_turns_are_named() {
        let fails = |list: Value, part: &str| {
            let problem = Conversation::from_messages(list, None).expect_err("malformed");
            assert!(problem.contains(part), "{problem}");
        };
        fails(json!([]), "empty");
        fails(json!("hi"), "list of turns");
        fails(json!([{"role": "user", "content": "a"}, {"content": "b"}]), "message 2: `role`");
        fails(json!([{"role": "oracle", "content": "b"}]), "unknown role \"oracle\"");
        fails(json!([{"role": "user"}]), "`content` is missing");
        fails(json!([{"role": "user", "content": [{"type": "image"}]}]), "not text");
        fails(json!([{"role": "assistant", "tool_calls": [{}]}]), "no `name`");
        let problem = Conversation::from_sharegpt(&json!([{"from": "moon", "value": "x"}]));
        assert!(problem.expect_err("unknown").contains("unknown speaker `moon`"));
        let problem = Conversation::from_sharegpt(&json!([{"from": "gpt", "value": 3}]));
        assert!(problem.expect_err("number").contains("turn 1: `value` is 3"));
    }
}
