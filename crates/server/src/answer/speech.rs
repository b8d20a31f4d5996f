//! What one answer says: its text, and its calls where a request has tools.

use std::sync::Arc;

use longdraft_decode::EndReason;
use serde_json::{Value, json};

use super::Head;
use crate::events::Piece;
use crate::tool_calls::{Call, Reader, Said};

/// Follows an answer.
pub(super) struct Speech {
    /// Looks for calls, if there may be some.
    reader: Option<Reader>,
}

impl Speech {
    /// Of an answer that has no text yet.
    pub(super) fn new(head: &Head) -> Self {
        Self { reader: head.calls.as_ref().map(|calls| Reader::new(Arc::clone(calls))) }
    }

    /// What a piece makes certain.
    pub(super) fn hear(&mut self, piece: Piece) -> Said {
        match &mut self.reader {
            Some(reader) => reader.hear(&piece),
            None => Said { text: piece.text, calls: Vec::new() },
        }
    }

    /// What was held back when the answer ended.
    pub(super) fn finish(&mut self) -> Said {
        self.reader.as_mut().map(Reader::finish).unwrap_or_default()
    }

    /// Why an answer ended, in OpenAI's words. An answer that the server's end cut short has not its full
    /// length; after one that was cut there might have been more calls.
    pub(super) fn finish_reason(&self, reason: EndReason) -> &'static str {
        let has_called = self.reader.as_ref().is_some_and(Reader::has_called);
        match reason {
            EndReason::StopToken | EndReason::StopString if has_called => "tool_calls",
            EndReason::StopToken | EndReason::StopString => "stop",
            EndReason::TokenLimit | EndReason::ContextLimit | EndReason::Interrupted => "length",
        }
    }
}

impl Head {
    /// The message of a chat's answer.
    pub(super) fn message(&self, choice: usize, Said { text, calls }: &Said) -> Value {
        let mut message = json!({ "role": "assistant", "content": text, "refusal": null });
        if !calls.is_empty() {
            if text.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = calls.iter().map(|call| self.call(choice, call)).collect();
        }
        message
    }

    /// What calls add to a message that streams. Each comes whole: that text is a call is certain when it ends.
    pub(super) fn calls_delta(&self, choice: usize, calls: &[Call]) -> Value {
        let delta = |call: &Call| {
            let mut delta = self.call(choice, call);
            delta["index"] = Value::from(call.index);
            delta
        };
        json!({ "tool_calls": calls.iter().map(delta).collect::<Value>() })
    }

    fn call(&self, choice: usize, call: &Call) -> Value {
        let answer = self.id.split_once('-').map_or("", |(_, answer)| answer);
        self.calls.as_ref().map_or(Value::Null, |calls| calls.to_json((answer, choice), call))
    }
}
