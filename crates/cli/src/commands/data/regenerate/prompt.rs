//! What of a row is asked: everything but the assistant's turns.

use longdraft_data::conversation::Conversation;
use longdraft_data::source::Row;
use longdraft_data::template::{Example, PROMPT_FIELDS, Template};
use serde_json::Value;

use super::dialogue::DIALOGUE;

/// What a row asks.
pub(crate) enum Prompts {
    /// Turns without those of the assistant.
    Turns(Conversation),
    /// Nothing that the target can answer turn by turn; why.
    Unusable(String),
}

fn text<'a>(row: &'a Row, field: &str) -> Result<&'a str, String> {
    row.text(field).map_err(|error| error.to_string())
}

/// Prompts of a row: the named field, a conversation, a list `turns`, or a known field; with the variables of the chat
/// template that the row has itself.
pub(crate) fn of_row(row: Row, field: Option<&str>) -> Result<Prompts, String> {
    let variables = Conversation::variables_of(&row.fields)?;
    Ok(match without_variables(row, field)? {
        Prompts::Turns(turns) => Prompts::Turns(Conversation { variables, ..turns }),
        unusable @ Prompts::Unusable(_) => unusable,
    })
}

fn without_variables(mut row: Row, field: Option<&str>) -> Result<Prompts, String> {
    if let Some(field) = field {
        return Ok(single(text(&row, field)?));
    }
    if let Some(Value::Array(turns)) = row.fields.get("turns") {
        let texts: Option<Vec<&str>> = turns.iter().map(Value::as_str).collect();
        let texts =
            texts.filter(|texts| !texts.is_empty()).ok_or("`turns` is not a list of texts")?;
        let turns: Vec<(&str, &str)> = texts.into_iter().map(|text| ("user", text)).collect();
        return Ok(Prompts::Turns(Conversation::of(&turns)));
    }
    // Of rows of text that were written before.
    if let Some(list) = row.fields.get(DIALOGUE)
        && ["text", "finish"].iter().all(|field| row.fields.contains_key(*field))
        && !row.fields.contains_key("messages")
        && list.get(0).is_some_and(|first| first.get("role").is_some())
    {
        return Ok(without_answers(Conversation::from_messages(list.clone(), None)?));
    }
    let template = Template::detect(&row.fields, None);
    if let Ok(template) = template
        && template.is_chat()
    {
        let example = template.example(&mut row).map_err(|error| error.to_string())?;
        if let Example::Chat(conversation) = example {
            return Ok(without_answers(conversation));
        }
    }
    match PROMPT_FIELDS.iter().find(|field| row.fields.contains_key(**field)) {
        Some(field) => Ok(single(text(&row, field)?)),
        None => Ok(Prompts::Unusable(
            "no prompt: neither a conversation, `turns`, `prompt`, `question` nor `problem`".into(),
        )),
    }
}

fn single(text: &str) -> Prompts {
    if text.trim().is_empty() {
        return Prompts::Unusable("the prompt is empty".into());
    }
    Prompts::Turns(Conversation::of(&[("user", text)]))
}

/// Answers to tool results would need the tools.
fn without_answers(mut conversation: Conversation) -> Prompts {
    let tools = |message: &serde_json::Map<String, Value>| {
        message.contains_key("tool_calls") || message["role"] == "tool"
    };
    if conversation.messages.iter().any(tools) {
        return Prompts::Unusable("the conversation calls tools".into());
    }
    conversation.messages.retain(|message| message["role"] != "assistant");
    if !conversation.messages.iter().any(|message| message["role"] == "user") {
        return Prompts::Unusable("the conversation has no user turn".into());
    }
    Prompts::Turns(conversation)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(json: &str, field: Option<&str>) -> Result<Vec<String>, String> {
        let fields = serde_json::from_str(json).expect("object");
        let row = Row { path: "p.jsonl".into(), line: 1, fields };
        match of_row(row, field)? {
            Prompts::Turns(turns) => Ok(turns
                .messages
                .iter()
                .map(|m| format!("{}:{}", m["role"], m["content"]).replace('"', ""))
                .collect()),
            Prompts::Unusable(problem) => Ok(vec![problem]),
        }
    }

    #[test]
    fn a_row_keeps_its_variables_however_it_asks() {
        let own = r#""chat_template_kwargs": {"enable_thinking": false}"#;
        for asks in [
            r#""prompt": "p""#,
            r#""turns": ["a", "b"]"#,
            r#""messages": [{"role": "user", "content": "a"}]"#,
        ] {
            let fields = serde_json::from_str(&format!("{{{asks}, {own}}}")).expect("object");
            let row = Row { path: "p.jsonl".into(), line: 1, fields };
            let Ok(Prompts::Turns(turns)) = of_row(row, None) else { panic!("{asks}") };
            assert_eq!(turns.variables["enable_thinking"], false, "{asks}");
        }
        let problem = asked(r#"{"prompt": "p", "chat_template_kwargs": 3}"#, None);
        assert!(problem.expect_err("no object").contains("not an object"));
    }

    #[test]
    fn everything_but_the_answers_is_asked() {
        let one = |json: &str| asked(json, None).expect("usable").join("|");
        assert_eq!(one(r#"{"question": "q", "answer": "a"}"#), "user:q");
        assert_eq!(one(r#"{"turns": ["a", "b"], "category": "x"}"#), "user:a|user:b");
        assert_eq!(one(r#"{"prompt": "p", "task_id": 1}"#), "user:p");
        let chat = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}"#;
        assert_eq!(one(chat), "system:s|user:a|user:c");
        let text = r#"{"text": "ab", "finish": "stop", "dialogue": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"}]}"#;
        assert_eq!(one(text), "user:a");
        let other = r#"{"prompt": "p", "dialogue": [{"role": "user", "content": "a"}]}"#;
        assert_eq!(one(other), "user:p");
        assert!(one(r#"{"dialogue": "someone else's"}"#).contains("no prompt"));
        assert!(one(r#"{"text": "t"}"#).contains("no prompt"));
        assert!(one(r#"{"messages": [{"role": "tool", "content": "t"}]}"#).contains("tools"));
        assert_eq!(asked(r#"{"text": "t"}"#, Some("text")).expect("usable"), ["user:t"]);
        assert!(
            asked(r#"{"text": 3}"#, Some("text")).expect_err("number").contains("is not a string")
        );
    }
}
