//! A row's conversation, of which some prompts are answered.

use std::collections::BTreeMap;

use longdraft_data::conversation::{Conversation, VARIABLES};
use longdraft_data::source::RawRow;
use longdraft_data::template::Verbatim;
use longdraft_decode::EndReason;
use longdraft_models::tokenizer::{ChatTemplate, variables_text};
use serde_json::{Map, Value, json};

use super::ledger::{Entry, Outcome};
use super::prompt;
use crate::decoding::finish;

/// Marks of an answer in channels, as gpt-oss writes them: before a channel's name, before its text, and at its end.
const CHANNEL: &str = "<|channel|>";
const TEXT: &str = "<|message|>";
const ENDS: [&str; 2] = ["<|end|>", "<|start|>"];
/// The channel that users read; others hold thoughts.
const FINAL: &str = "final";

/// Thought and answer of a text in channels; `None` where it has none.
fn parted(text: &str) -> Option<(String, String)> {
    let (mut thoughts, mut answers) = (Vec::new(), Vec::new());
    for channel in text.trim_start().strip_prefix(CHANNEL)?.split(CHANNEL) {
        let (name, text) = channel.split_once(TEXT).unwrap_or((channel, ""));
        let end = ENDS.iter().filter_map(|end| text.find(end)).min().unwrap_or(text.len());
        let is_answer = name.split_whitespace().next() == Some(FINAL);
        let parts = if is_answer { &mut answers } else { &mut thoughts };
        parts.push(&text[..end]);
    }
    Some((thoughts.join("\n"), answers.concat()))
}

/// Field of the messages in a row of text.
pub(super) const DIALOGUE: &str = "dialogue";

/// Messages of a written row.
pub(crate) fn messages_of(line: &Value) -> Option<&Vec<Value>> {
    line["messages"].as_array().or_else(|| line[DIALOGUE].as_array())
}

/// Messages as one text, for a target without a chat template: an answer follows its prompt at once.
pub(crate) fn plain<'a>(messages: impl Iterator<Item = &'a Map<String, Value>>) -> String {
    let mut text = String::new();
    for message in messages {
        let field = |name: &str| message.get(name).and_then(Value::as_str).unwrap_or_default();
        if field("role") != "assistant" && !text.is_empty() {
            text.push('\n');
        }
        text.push_str(field("content"));
    }
    text
}

/// What a row asks, if it asks anything. Only a chat template tells the target of tools, and has variables.
pub(super) fn asked(
    row: &RawRow,
    field: Option<&str>,
    template: Option<&ChatTemplate>,
) -> Option<blake3::Hash> {
    match prompt::of_row(row.parse().ok()?, field).ok()? {
        prompt::Prompts::Turns(Conversation { messages, tools, variables }) => {
            let tools = tools.as_ref().filter(|_| template.is_some());
            let own = template.map(|template| template.with_variables(&variables));
            let variables = own.as_ref().map(ChatTemplate::variables);
            Some(asked_in(messages.iter(), (tools, variables)))
        }
        prompt::Prompts::Unusable(_) => None,
    }
}

/// What messages ask: all of them but answers, whatever the order of their keys, and the tools and variables that stand
/// with them.
pub(super) fn asked_in<'a>(
    messages: impl Iterator<Item = &'a Map<String, Value>>,
    (tools, variables): (Option<&Value>, Option<&Map<String, Value>>),
) -> blake3::Hash {
    let is_asked = |message: &&Map<String, Value>| message.get("role") != Some(&json!("assistant"));
    let asked: Vec<BTreeMap<_, _>> =
        messages.filter(is_asked).map(|message| message.iter().collect()).collect();
    let variables = variables.map(variables_text).unwrap_or_default();
    blake3::hash(format!("{}{variables}", json!([asked, tools])).as_bytes())
}

/// A row's line, as failed until it is answered, and its conversation if there is one.
pub(super) fn opened(
    index: usize,
    (row, attempt): (&RawRow, String),
    field: Option<&str>,
) -> (Entry, Option<Dialogue>) {
    let (id, outcome) = (row.origin(), Outcome::Error);
    let mut entry = Entry { row: index, id, attempt: Some(attempt), outcome, body: Value::Null };
    let prompts =
        row.parse().map_err(|error| error.to_string()).and_then(|row| prompt::of_row(row, field));
    match prompts {
        Ok(prompt::Prompts::Turns(prompts)) => return (entry, Some(Dialogue::new(prompts))),
        Ok(prompt::Prompts::Unusable(problem)) => entry.fail(Outcome::Skipped, &problem),
        Err(problem) => entry.fail(Outcome::Error, &problem),
    }
    (entry, None)
}

/// Prompts of which some are answered; every answer is part of what the next one follows on.
pub(super) struct Dialogue {
    prompts: Conversation,
    pub(super) done: Conversation,
    /// Index of the prompt that is answered now.
    pub(super) turn: usize,
    /// Prompts that are part of `done`.
    taken: usize,
    tokens: usize,
    /// How each answer ended.
    finishes: Vec<&'static str>,
    /// How the last one was written.
    verbatim: Verbatim,
}

impl Dialogue {
    fn new(prompts: Conversation) -> Self {
        let (tools, variables) = (prompts.tools.clone(), prompts.variables.clone());
        let done = Conversation { messages: Vec::new(), tools, variables };
        Self {
            prompts,
            done,
            turn: 0,
            taken: 0,
            tokens: 0,
            finishes: Vec::new(),
            verbatim: Verbatim { end: None },
        }
    }

    /// Goes on to the next prompt of the user; whether there is one.
    pub(super) fn next_turn(&mut self) -> bool {
        while let Some(message) = self.prompts.messages.get(self.taken) {
            let message = message.clone();
            self.part_last();
            self.done.messages.push(message);
            self.turn = self.taken;
            self.taken += 1;
            if self.prompts.role(self.turn) == "user" {
                return true;
            }
        }
        false
    }

    /// Parts thought and answer of the last message, which another one follows: a template may refuse channels there.
    fn part_last(&mut self) {
        let Some(last) = self.done.messages.last_mut() else { return };
        if last.get("role").and_then(Value::as_str) == Some("assistant")
            && let Some((thought, answer)) =
                last.get("content").and_then(Value::as_str).and_then(parted)
        {
            last.insert("content".into(), answer.into());
            last.insert("thinking".into(), thought.into());
        }
    }

    /// The prompt's answer of so many tokens, which a stop token may have ended.
    pub(super) fn answer(
        &mut self,
        (tokens, end, stop): (usize, EndReason, Option<String>),
        text: &str,
    ) {
        self.tokens += tokens;
        self.verbatim = Verbatim { end: stop };
        self.finishes.push(finish(end));
        self.done.push("assistant", text);
    }

    /// The row's fields; its `finish` is the last one that is not `stop`. `form` is that of its answers, which the
    /// template wrote with these variables.
    pub(super) fn to_json(&self, form: &str, variables: &Map<String, Value>) -> Value {
        let finish = self.finishes.iter().rfind(|finish| **finish != "stop").unwrap_or(&"stop");
        let mut body =
            json!({ "messages": self.done.messages, "finish": finish, "tokens": self.tokens });
        if self.finishes.len() > 1 {
            body["finishes"] = json!(self.finishes);
        }
        // They stood in the prompt, and stand there again when the answer is learned.
        if let Some(tools) = &self.done.tools {
            body["tools"] = tools.clone();
        }
        if !variables.is_empty() {
            body[VARIABLES] = json!(variables);
        }
        self.verbatim.mark(&mut body, form);
        body
    }

    /// The row's fields where the target has no chat template. A text has one end, that of its last answer.
    pub(super) fn to_text(&self) -> Value {
        let messages = &self.done.messages;
        let finish = self.finishes.last().unwrap_or(&"stop");
        let text = plain(messages.iter());
        let mut body = json!({ "text": text, "finish": finish, "tokens": self.tokens });
        if self.finishes.len() > 1 {
            body["finishes"] = json!(self.finishes);
        }
        body[DIALOGUE] = json!(messages);
        body
    }
}

#[cfg(test)]
mod tests {
    use longdraft_data::source::read_rows;

    use super::super::ledger::Ledger;
    use super::*;

    #[test]
    fn a_row_says_how_each_of_its_answers_ended() {
        let prompts =
            Conversation::of(&[("system", "s"), ("user", "a"), ("user", "b"), ("user", "c")]);
        let mut dialogue = Dialogue::new(prompts);
        let answered = |dialogue: &mut Dialogue, end: EndReason| {
            assert!(dialogue.next_turn());
            let stop = (end == EndReason::StopToken).then(|| "<end>".to_owned());
            dialogue.answer((1, end, stop), "text");
            dialogue.to_json("f", &Map::new())
        };
        let one = answered(&mut dialogue, EndReason::StopToken);
        assert_eq!((&one["finish"], &one["finishes"]), (&json!("stop"), &Value::Null));
        assert_eq!(one["verbatim"], json!({ "form": "f", "end": "<end>" }));
        let cut = answered(&mut dialogue, EndReason::TokenLimit);
        assert_eq!(cut["verbatim"], json!({ "form": "f", "end": null }));
        let all = answered(&mut dialogue, EndReason::StopToken);
        assert_eq!(all["finish"], "length", "one of them was cut");
        assert_eq!(all["finishes"], json!(["stop", "length", "stop"]));
        assert!(!dialogue.next_turn());
    }

    #[test]
    fn a_row_keeps_the_tools_that_stood_in_its_prompt() {
        let tools = json!([{ "name": "f" }]);
        let row = |tools: Option<Value>| {
            let prompts = Conversation { tools, ..Conversation::of(&[("user", "a")]) };
            let mut dialogue = Dialogue::new(prompts);
            assert!(dialogue.next_turn());
            dialogue.answer((1, EndReason::StopToken, None), "b");
            dialogue.to_json("f", &Map::new())
        };
        let written = row(Some(tools.clone()));
        assert_eq!(written["tools"], tools);
        let read = Conversation::from_messages(written["messages"].clone(), written.get("tools"));
        assert_eq!(read.expect("a conversation").tools, Some(tools));
        assert_eq!(row(None).get("tools"), None);
    }

    #[test]
    fn variables_are_a_part_of_what_is_asked() {
        let template = ChatTemplate::new("{{ a }}", Map::new()).expect("a template");
        let given = json!({ "a": 1, "b": 2 });
        let given = given.as_object().expect("variables");
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("p.jsonl");
        let row = |variables: &str| {
            std::fs::write(&path, format!(r#"{{"prompt": "p"{variables}}}"#)).expect("written");
            read_rows(&path).expect("rows").next().expect("one").expect("a row")
        };
        let of = |row: &RawRow, template| asked(row, None, template).expect("a prompt");
        let (plain, own) = (row(""), row(r#", "chat_template_kwargs": {"b": 2, "a": 1}"#));
        let with = template.with_variables(given);
        assert_eq!(of(&plain, Some(&with)), of(&own, Some(&template)));
        assert_ne!(of(&plain, Some(&with)), of(&plain, Some(&template)));
        // Without variables it is what older files hold.
        let before = json!([[{ "content": "p", "role": "user" }], null]);
        let before = blake3::hash(before.to_string().as_bytes());
        assert_eq!([None, Some(&template)].map(|template| of(&plain, template)), [before; 2]);
    }

    #[test]
    fn an_answer_to_a_prompt_with_other_tools_is_not_taken() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("answers.jsonl");
        let user = json!({ "role": "user", "content": "a" });
        let answer = json!({ "role": "assistant", "content": "b" });
        let tools = json!([{ "name": "f" }]);
        let mut ledger = Ledger::open(&path, ("r", "f")).expect("new");
        for (row, tools) in [Some(&tools), None].into_iter().enumerate() {
            let (id, attempt) = (format!("p.jsonl:{}", row + 1), None);
            let mut body = json!({ "messages": [user, answer] });
            if let Some(tools) = tools {
                body["tools"] = tools.clone();
            }
            let entry = Entry { row, id, attempt, outcome: Outcome::Success, body };
            ledger.write(&entry).expect("write");
        }
        drop(ledger);
        let ledger = Ledger::open(&path, ("r", "f")).expect("again");
        let is_done = |row: usize, tools: Option<&Value>| {
            let asks = || Some(asked_in(user.as_object().into_iter(), (tools, None)));
            ledger.is_done(row, &format!("p.jsonl:{}", row + 1), asks)
        };
        assert!(is_done(0, Some(&tools)).expect("the same") && is_done(1, None).expect("the same"));
        let others = json!([{ "name": "g" }]);
        for (row, tools) in [(0, None), (0, Some(&others)), (1, Some(&tools))] {
            let refused = is_done(row, tools).expect_err("another prompt");
            assert!(refused.message().contains("answers another prompt"), "{refused:?}");
        }
    }

    #[test]
    fn a_text_ends_as_its_last_answer_did() {
        let mut dialogue = Dialogue::new(Conversation::of(&[("user", "a"), ("user", "b")]));
        for (end, answer) in [(EndReason::TokenLimit, "1"), (EndReason::StopToken, "2")] {
            assert!(dialogue.next_turn());
            dialogue.answer((1, end, None), answer);
        }
        let row = dialogue.to_text();
        assert_eq!((&row["text"], &row["finish"]), (&json!("a1\nb2"), &json!("stop")));
        assert_eq!(row["finishes"], json!(["length", "stop"]));
        assert_eq!(messages_of(&row).map(Vec::len), Some(4));
    }

    #[test]
    fn an_earlier_answer_in_channels_is_parted_and_the_last_one_stands_as_it_was_written() {
        let mut dialogue = Dialogue::new(Conversation::of(&[("user", "a"), ("user", "b")]));
        let written = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
        for _ in 0..2 {
            assert!(dialogue.next_turn());
            dialogue.answer((9, EndReason::StopToken, Some("<|return|>".to_owned())), written);
        }
        assert!(!dialogue.next_turn());
        let messages = &dialogue.to_json("f", &Map::new())["messages"];
        let parted = json!({ "role": "assistant", "content": "Yes.", "thinking": "So." });
        assert_eq!(messages[1], parted);
        assert_eq!(messages[3], json!({ "role": "assistant", "content": written }));
    }

    #[test]
    fn only_channels_are_parted() {
        let of = |text: &str| parted(text).map(|(thought, answer)| format!("{thought}|{answer}"));
        assert_eq!(of("Yes."), None);
        assert_eq!(of("<think>\nSo.</think>Yes."), None);
        let cut = of("<|channel|>analysis<|message|>So, ");
        assert_eq!(cut.as_deref(), Some("So, |"));
        let call = of("<|channel|>commentary to=f <|constrain|>json<|message|>{}");
        assert_eq!(call.as_deref(), Some("{}|"));
        assert_eq!(of("<|channel|>fin").as_deref(), Some("|"));
    }
}
