//! What requests ask of calls, and what the tests of the parts share.

use std::sync::Arc;

use super::*;
use crate::events::Piece;
use crate::request::tests::tokenizer_with;

/// Templates that write nothing but have the marks of a syntax.
pub(super) const HERMES: &str = "{# <tool_call>{\"name\": , \"arguments\": }</tool_call> #}";
pub(super) const TAGS: &str = "{# <tool_call><function=><parameter=> #}";
pub(super) const NAMED: &str = "{# [TOOL_CALLS] [CALL_ID] [ARGS] #}";
pub(super) const LIST: &str = "{# [TOOL_CALLS] [ #}";
pub(super) const LLAMA: &str = "{# \"parameters\": dictionary of argument name and its value #}";
pub(super) const ALL: [&str; 5] = [HERMES, TAGS, NAMED, LIST, LLAMA];
/// Special tokens of Mistral in place of those that the tokenizer has.
pub(super) const SPECIAL: [(&str, &str); 2] = [("<unk>", "[TOOL_CALLS]"), ("<pad>", "[ARGS]")];

/// Text and calls of an answer.
pub(super) type Told = (String, Vec<(String, String)>);

pub(super) fn tool(name: &str, parameters: Option<Value>) -> Value {
    let mut function = json!({ "name": name });
    if let Some(parameters) = parameters {
        function["parameters"] = parameters;
    }
    json!({ "type": "function", "function": function })
}

pub(super) fn tools() -> Vec<Value> {
    let city = json!({ "type": "string" });
    let properties = json!({ "city": city, "days": { "type": "integer" } });
    let weather = json!({ "type": "object", "properties": properties });
    vec![tool("weather", Some(weather)), tool("now", None), json!(7)]
}

pub(super) fn calls_by(tokenizer: &TextTokenizer) -> Arc<Calls> {
    let calls = Calls::of(&tools(), &Choice::Auto, true, tokenizer).expect("read");
    Arc::new(calls.expect("a syntax"))
}

pub(super) fn calls(template: &str) -> Arc<Calls> {
    calls_by(&tokenizer_with(template))
}

/// What an answer of these pieces says.
pub(super) fn told(calls: &Arc<Calls>, pieces: impl IntoIterator<Item = Piece>) -> Told {
    let mut reader = Reader::new(Arc::clone(calls));
    let (mut text, mut found) = (String::new(), Vec::new());
    let mut add = |said: Said| {
        text += &said.text;
        for Call { index, name, arguments } in said.calls {
            assert_eq!(index, found.len());
            found.push((name, arguments));
        }
    };
    for piece in pieces {
        add(reader.hear(&piece));
    }
    add(reader.finish());
    assert_eq!(reader.has_called(), !found.is_empty());
    (text, found)
}

pub(super) fn pieces<'a>(texts: impl IntoIterator<Item = &'a str>) -> impl Iterator<Item = Piece> {
    let piece = |text: &str| Piece { text: text.to_owned(), ..Piece::default() };
    texts.into_iter().map(piece).collect::<Vec<_>>().into_iter()
}

/// The tokenizer that ships with a template, in which special tokens have other names.
pub(super) fn renamed(template: &str, names: &[(&str, &str)]) -> TextTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    tokenizer_with(template).save(folder.path()).expect("saved");
    let path = folder.path().join("tokenizer.json");
    let mut text = std::fs::read_to_string(&path).expect("read");
    for (old, new) in names {
        text = text.replace(&json!(old).to_string(), &json!(new).to_string());
    }
    std::fs::write(&path, text).expect("written");
    TextTokenizer::from_folder(folder.path()).expect("tokenizer")
}

/// The tokens of a text byte by byte, but special tokens whole.
pub(super) fn bytes_of(tokenizer: &TextTokenizer, text: &str) -> Vec<u32> {
    let tokens = tokenizer.token_bytes();
    let special: Vec<(u32, String)> = tokenizer
        .special_ids()
        .into_iter()
        .filter_map(|id| Some((id, tokenizer.token(id)?)))
        .collect();
    let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
    while let Some(first) = rest.first() {
        let found = special.iter().find(|(_, name)| rest.starts_with(name.as_bytes()));
        let is_byte = |token: &Option<Vec<u8>>| token.as_ref().is_some_and(|own| *own == [*first]);
        let byte = || (tokens.iter().position(is_byte).expect("a byte") as u32, 1);
        let (id, length) = found.map_or_else(byte, |(id, name)| (*id, name.len()));
        ids.push(id);
        rest = &rest[length..];
    }
    ids
}

#[test]
fn a_request_for_single_calls_gets_the_first_alone() {
    let tokenizer = tokenizer_with(HERMES);
    let calls = Calls::of(&tools(), &Choice::Auto, false, &tokenizer).expect("read");
    let calls = Arc::new(calls.expect("a syntax"));
    let answer = "<tool_call>{\"name\": \"now\"}</tool_call>\n<tool_call>{\"name\": \"weather\"}</tool_call>";
    let found = told(&calls, pieces([answer]));
    assert_eq!(found, (String::new(), vec![("now".to_owned(), "{}".to_owned())]));
}

#[test]
fn ids_are_unique_and_of_the_length_that_templates_want() {
    let call = |index| Call { index, name: "now".to_owned(), arguments: "{}".to_owned() };
    for (template, length) in [(HERMES, None), (LIST, Some(9))] {
        let calls = calls(template);
        let mut ids = Vec::new();
        for answer in ["1-0", "1-1", "11-0"] {
            for choice in 0..3 {
                for index in 0..3 {
                    let told = calls.to_json((answer, choice), &call(index));
                    assert_eq!(told, calls.to_json((answer, choice), &call(index)));
                    ids.push(told["id"].as_str().expect("an id").to_owned());
                }
            }
        }
        let is_own = |id: &String| match length {
            Some(length) => id.len() == length && id.chars().all(|c| c.is_ascii_alphanumeric()),
            None => id.starts_with("call_"),
        };
        assert!(ids.iter().all(is_own), "{ids:?}");
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}

#[test]
fn choices_are_read_or_refused() {
    let function = json!({ "type": "function", "function": { "name": "now" } });
    for (asked, wanted) in [
        (Value::Null, Choice::Auto),
        (json!("auto"), Choice::Auto),
        (json!("none"), Choice::Never),
        (json!("required"), Choice::Required),
        (function, Choice::Named("now".to_owned())),
    ] {
        assert_eq!(Choice::of(Some(&asked)), Ok(wanted));
    }
    for wrong in [json!("any"), json!(7), json!({ "function": { "name": "now" } }), json!({})] {
        let error = Choice::of(Some(&wrong)).expect_err("refused").to_json();
        assert_eq!(error["error"]["param"], "tool_choice");
    }
}

#[test]
fn calls_that_cannot_be_forced_are_refused() {
    let object = || tool("now", None);
    let large = json!({ "type": "object", "description": "a".repeat(1 << 16) });
    for (template, tools, choice, param) in [
        ("{{ messages }}", vec![object()], Choice::Required, "tool_choice"),
        (TAGS, vec![tool("a>b", None)], Choice::Required, "tools"),
        (HERMES, vec![], Choice::Required, "tool_choice"),
        (HERMES, vec![json!("now")], Choice::Required, "tool_choice"),
        (HERMES, vec![object()], Choice::Named("other".to_owned()), "tool_choice"),
        (HERMES, vec![tool("now", Some(json!("text")))], Choice::Required, "tools"),
        (HERMES, vec![tool("now", Some(json!({ "type": "array" })))], Choice::Required, "tools"),
        (HERMES, vec![tool("now", Some(large))], Choice::Required, "tools"),
    ] {
        let tokenizer = tokenizer_with(template);
        let error = Calls::of(&tools, &choice, true, &tokenizer).expect_err("refused").to_json();
        assert_eq!(error["error"]["param"], param, "{error}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
    // Nothing is looked for where nothing may be called or the syntax is unknown.
    for (template, tools, choice) in [
        ("{{ messages }}", vec![object()], Choice::Auto),
        (HERMES, vec![], Choice::Auto),
        (HERMES, vec![object()], Choice::Never),
    ] {
        let calls = Calls::of(&tools, &choice, true, &tokenizer_with(template));
        assert!(calls.expect("read").is_none());
    }
}
