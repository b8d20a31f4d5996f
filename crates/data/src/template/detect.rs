//! Which template fits a row, by its fields.

use serde_json::{Map, Value};

use super::{Learn, Template};
use crate::row::short;

/// Fields that hold a long answer to `problem`, most specific first.
const ANSWERS: [&str; 6] =
    ["qwq", "generated_solution", "generation", "solution", "answer", "response"];

/// Fields that hold a text in a known format.
const TEXTS: [&str; 14] = [
    "text",
    "content",
    "target",
    "instruction",
    "output",
    "question",
    "answer",
    "prompt",
    "completion",
    "response",
    "chosen",
    "problem",
    "prefix",
    "suffix",
];

/// Fields of prompts and evaluation sets that hold what is asked.
pub const PROMPT_FIELDS: [&str; 3] = ["prompt", "question", "problem"];

/// Fields that hold the turns of a conversation in a known format.
const TURNS: [&str; 4] = ["messages", "conversations", "conversation", "chat"];

impl Template {
    /// The template for rows with these fields. Where `learn` asks for an answer, the source of a
    /// `{source, target}` row is its prompt.
    ///
    /// # Errors
    /// - no known format has such fields; the message names them, or the one of another type than its
    ///   format has
    pub fn detect(fields: &Map<String, Value>, learn: Option<Learn>) -> Result<Self, String> {
        let has = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        let is_text = |name: &str| fields.get(name).is_some_and(Value::is_string);
        if let Some(Value::Array(ids)) = fields.get("input_ids")
            && ids.iter().all(Value::is_u64)
        {
            return Ok(of("tokens", &[]));
        }
        for name in TURNS {
            let Some(first) = fields.get(name).and_then(|list| list.get(0)) else { continue };
            if first.get("role").is_some() {
                return Ok(of("messages", &[("messages", name)]));
            }
            if first.get("from").is_some() {
                return Ok(of("sharegpt", &[("conversations", name)]));
            }
        }
        if is_text("instruction") && is_text("output") {
            return Ok(of("alpaca", &[]));
        }
        if is_text("question") && is_text("answer") {
            return Ok(of("gsm8k", &[]));
        }
        if has("article") && has("abstract") {
            return Ok(of("summarise", &[]));
        }
        for (text, summary) in
            [("report", "summary"), ("document", "summary"), ("transcript", "summary")]
        {
            if has(text) && has(summary) {
                return Ok(of("summarise", &[("article", text), ("abstract", summary)]));
            }
        }
        if is_text("prefix") && is_text("suffix") {
            return Ok(of("code", &[]));
        }
        if is_text("problem")
            && let Some(answer) = ANSWERS.iter().find(|name| is_text(name))
        {
            return Ok(of("problem_answer", &[("answer", answer)]));
        }
        if is_text("prompt")
            && let Some(answer) = ["completion", "response", "answer"].iter().find(|n| is_text(n))
        {
            return Ok(of("chat", &[("user", "prompt"), ("assistant", answer)]));
        }
        if let Some(answer) = ["completion", "chosen"].iter().find(|name| is_answer(fields, name)) {
            return Ok(of("prompt_completion", &[("completion", answer)]));
        }
        if is_text("target") {
            let answers = matches!(learn, Some(Learn::Answer | Learn::Last | Learn::Assistant));
            let mut template = of("source_target", &[]);
            if let Self::SourceTarget { with_source, .. } = &mut template {
                *with_source = answers && is_text("source");
            }
            return Ok(template);
        }
        for name in ["text", "content"] {
            if is_text(name) {
                return Ok(Self::Raw { fields: vec![name.to_owned()], separator: "\n".to_owned() });
            }
        }
        Err(unrecognised(fields))
    }
}

/// Whether a field answers a prompt: messages, or a text beside a prompt.
fn is_answer(fields: &Map<String, Value>, name: &str) -> bool {
    let is_turns = |value: &Value| value.get(0).is_some_and(|first| first.get("role").is_some());
    let prompt = fields.get("prompt");
    let has_prompt = prompt.is_some_and(|value| value.is_string() || is_turns(value));
    match fields.get(name) {
        Some(Value::String(_)) => has_prompt,
        Some(list) if is_turns(list) => has_prompt || list[0]["role"] != "assistant",
        _ => false,
    }
}

/// Why no format fits: a known field of another type, or no known field.
fn unrecognised(fields: &Map<String, Value>) -> String {
    for name in TURNS {
        match fields.get(name) {
            None | Some(Value::Null) => {}
            Some(Value::Array(list)) if list.is_empty() => {
                return format!("field `{name}` is an empty list");
            }
            Some(Value::Array(list)) => {
                let first = short(&list[0]);
                return format!(
                    "field `{name}` holds turns with neither `role` nor `from`: {first}"
                );
            }
            Some(other) => return format!("field `{name}` is not a list but {}", short(other)),
        }
    }
    for name in TEXTS {
        match fields.get(name) {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(other) => return format!("field `{name}` is not a string but {}", short(other)),
        }
    }
    let prompt = PROMPT_FIELDS.iter().find(|name| fields.contains_key(**name));
    let answered = prompt.map(|name| {
        format!("; `longdraft data regenerate` has the target answer rows with a `{name}` alone")
    });
    let names: Vec<&str> = fields.keys().map(String::as_str).collect();
    format!(
        "no known format has the fields `{}`: name those of the text in a `template`, or rename them by \
         `aligners`{}",
        names.join("`, `"),
        answered.unwrap_or_default()
    )
}

/// A template with its defaults, some field names replaced.
fn of(kind: &str, names: &[(&str, &str)]) -> Template {
    let mut value = serde_json::json!({ "kind": kind });
    for (key, name) in names {
        value[*key] = Value::String((*name).to_owned());
    }
    serde_json::from_value(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_formats_are_recognised() {
        let kind = |json: &str| {
            let fields: Map<String, Value> = serde_json::from_str(json).expect("object");
            let template = Template::detect(&fields, None).expect("known");
            let value = serde_json::to_value(template).expect("a template");
            value["kind"].as_str().expect("kind").to_owned()
        };
        let cases = [
            (r#"{"text": "a", "source": {}}"#, "raw"),
            (r#"{"source": "x", "target": "a"}"#, "source_target"),
            (r#"{"instruction": "a", "input": "", "output": "b", "text": "c"}"#, "alpaca"),
            (r#"{"id": "1", "conversations": [{"from": "human", "value": "a"}]}"#, "sharegpt"),
            (r#"{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}"#, "messages"),
            (
                r#"{"source": "tulu-v2", "conversation": [{"role": "user", "content": "a"}]}"#,
                "messages",
            ),
            (r#"{"question": "a", "answer": "b"}"#, "gsm8k"),
            (r#"{"source": "arxiv", "article": ["a"], "abstract": ["b"]}"#, "summarise"),
            (r#"{"report": "a", "summary": "b"}"#, "summarise"),
            (r#"{"prefix": "a", "suffix": "b"}"#, "code"),
            (r#"{"problem": "a", "qwq": "b"}"#, "problem_answer"),
            (r#"{"prompt": "a", "completion": "b"}"#, "chat"),
            (
                r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
                "prompt_completion",
            ),
            (r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#, "prompt_completion"),
            (
                r#"{"chosen": [{"role": "user", "content": "a"}], "rejected": []}"#,
                "prompt_completion",
            ),
            (r#"{"input_ids": [1, 2], "loss_mask": [0, 1]}"#, "tokens"),
        ];
        for (json, expected) in cases {
            assert_eq!(kind(json), expected, "{json}");
        }
    }

    #[test]
    fn what_is_not_recognised_is_told_by_its_cause() {
        let problem = |json: &str| {
            let fields = serde_json::from_str(json).expect("object");
            Template::detect(&fields, None).expect_err("unknown")
        };
        assert!(problem(r#"{"colour": "red"}"#).contains("the fields `colour`"));
        assert_eq!(problem(r#"{"text": 3}"#), "field `text` is not a string but 3");
        assert_eq!(problem(r#"{"messages": "a"}"#), "field `messages` is not a list but \"a\"");
        assert_eq!(problem(r#"{"messages": []}"#), "field `messages` is an empty list");
        assert!(problem(r#"{"conversations": [{"x": 1}]}"#).contains("neither `role` nor `from`"));
        // An answer without anything before it.
        assert!(problem(r#"{"chosen": "a"}"#).contains("the fields `chosen`"));
    }

    #[test]
    fn a_source_is_the_prompt_where_an_answer_is_learned() {
        let fields = serde_json::from_str(r#"{"source": "a", "target": "b"}"#).expect("object");
        let with_source = |learn| match Template::detect(&fields, learn) {
            Ok(Template::SourceTarget { with_source, .. }) => with_source,
            other => panic!("{other:?}"),
        };
        assert!(with_source(Some(Learn::Answer)) && with_source(Some(Learn::Assistant)));
        assert!(!with_source(None) && !with_source(Some(Learn::All)));
    }
}
