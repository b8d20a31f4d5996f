//! Which template fits a row, by its fields.

use serde_json::{Map, Value};

use super::Template;

/// Fields that hold a long answer to `problem`, most specific first.
const ANSWERS: [&str; 6] =
    ["qwq", "generated_solution", "generation", "solution", "answer", "response"];

impl Template {
    /// The template for rows with these fields.
    ///
    /// # Errors
    /// - no known format has such fields; the message names them
    pub fn detect(fields: &Map<String, Value>) -> Result<Self, String> {
        let has = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        let is_text = |name: &str| fields.get(name).is_some_and(Value::is_string);
        if let Some(Value::Array(ids)) = fields.get("input_ids")
            && ids.iter().all(Value::is_u64)
        {
            return Ok(of("tokens", &[]));
        }
        for name in ["messages", "conversations", "conversation", "chat"] {
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
        if is_text("target") {
            return Ok(of("source_target", &[]));
        }
        for name in ["text", "content"] {
            if is_text(name) {
                return Ok(Self::Raw { fields: vec![name.to_owned()], separator: "\n".to_owned() });
            }
        }
        let names: Vec<&str> = fields.keys().map(String::as_str).collect();
        Err(format!("no known format has the fields `{}`: give a `template`", names.join("`, `")))
    }
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
            let template = Template::detect(&fields).expect("known");
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
            (r#"{"input_ids": [1, 2], "loss_mask": [0, 1]}"#, "tokens"),
        ];
        for (json, expected) in cases {
            assert_eq!(kind(json), expected, "{json}");
        }
        let fields = serde_json::from_str(r#"{"colour": "red"}"#).expect("object");
        let problem = Template::detect(&fields).expect_err("unknown");
        assert!(problem.contains("`colour`"), "{problem}");
    }
}
