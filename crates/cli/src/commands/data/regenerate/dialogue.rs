//! A row's conversation, of which some prompts are answered.

use longdraft_data::conversation::Conversation;
use longdraft_data::source::RawRow;
use longdraft_decode::{EndReason, Generation};
use serde_json::{Value, json};

use super::ledger::{Entry, Outcome};
use super::prompt;
use crate::decoding::finish;

/// The texts one after another, for a target without a chat template.
pub(super) fn plain(conversation: &Conversation) -> String {
    let texts = conversation.messages.iter().filter_map(|message| message["content"].as_str());
    texts.collect::<Vec<_>>().join("\n")
}

/// A row's line, as failed until it is answered, and its conversation if there is one.
pub(super) fn opened(index: usize, row: &RawRow, field: Option<&str>) -> (Entry, Option<Dialogue>) {
    let mut entry =
        Entry { row: index, id: row.origin(), outcome: Outcome::Error, body: Value::Null };
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
    finish: &'static str,
}

impl Dialogue {
    fn new(prompts: Conversation) -> Self {
        let done = Conversation { messages: Vec::new(), tools: prompts.tools.clone() };
        Self { prompts, done, turn: 0, taken: 0, tokens: 0, finish: "stop" }
    }

    /// Goes on to the next prompt of the user; whether there is one.
    pub(super) fn next_turn(&mut self) -> bool {
        while let Some(message) = self.prompts.messages.get(self.taken) {
            self.done.messages.push(message.clone());
            self.turn = self.taken;
            self.taken += 1;
            if self.prompts.role(self.turn) == "user" {
                return true;
            }
        }
        false
    }

    pub(super) fn answer(&mut self, generation: &Generation, text: &str) {
        self.tokens += generation.tokens.len();
        if generation.end != EndReason::StopToken {
            self.finish = finish(generation.end);
        }
        self.done.push("assistant", text);
    }

    pub(super) fn to_json(&self) -> Value {
        json!({ "messages": self.done.messages, "finish": self.finish, "tokens": self.tokens })
    }
}
