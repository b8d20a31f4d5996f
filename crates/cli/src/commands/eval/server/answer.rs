//! An answer as it streams back.

use serde_json::Value;

/// An answer with its times, in seconds from the request on.
#[derive(Debug, Clone, Default)]
pub(super) struct Answer {
    pub(super) text: String,
    /// Tokens, if the server tells them.
    pub(super) tokens: Option<usize>,
    pub(super) prompt_tokens: usize,
    /// Events that brought text, and the times between them.
    pub(super) events: usize,
    pub(super) gaps: Vec<f64>,
    pub(super) first: f64,
    pub(super) end: f64,
    /// `usage` and `timings` of the last events that had them.
    pub(super) usage: Value,
    pub(super) timings: Value,
}

impl Answer {
    /// Takes an event in; whether the answer is over.
    pub(super) fn take(&mut self, event: &Value, now: f64) -> bool {
        for (name, place) in [("usage", &mut self.usage), ("timings", &mut self.timings)] {
            if event[name].is_object() {
                place.clone_from(&event[name]);
            }
        }
        let choice = &event["choices"][0];
        // Models that think tell their thoughts in a field of their own.
        let parts = [
            &choice["text"],
            &choice["delta"]["reasoning_content"],
            &choice["delta"]["reasoning"],
            &choice["delta"]["content"],
        ];
        let text: String = parts.iter().filter_map(|part| part.as_str()).collect();
        if !text.is_empty() {
            if self.events == 0 {
                self.first = now;
            } else {
                self.gaps.push(now - self.end);
            }
            self.events += 1;
            self.end = now;
            self.text.push_str(&text);
        }
        let is_over = choice["finish_reason"].is_string();
        if is_over {
            self.end = now;
        }
        is_over
    }

    /// The answer, now that nothing more comes.
    pub(super) fn finished(mut self, now: f64) -> Self {
        if self.events == 0 {
            (self.first, self.end) = (now, now);
        }
        let count = |value: &Value| value.as_u64().map(|count| count as usize);
        self.tokens =
            count(&self.usage["completion_tokens"]).or_else(|| count(&self.timings["predicted_n"]));
        self.prompt_tokens = count(&self.usage["prompt_tokens"]).unwrap_or(0);
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_become_an_answer_with_times() {
        let mut answer = Answer::default();
        let events = [
            (0.1, json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] })),
            (0.5, json!({ "choices": [{ "delta": { "content": "ab" } }] })),
            (
                0.7,
                json!({ "choices": [{ "delta": { "reasoning_content": "c" }, "finish_reason": null }] }),
            ),
            (0.8, json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] })),
            (
                0.9,
                json!({ "choices": [], "usage": { "completion_tokens": 5, "prompt_tokens": 3 } }),
            ),
        ];
        let over: Vec<bool> = events.iter().map(|(at, event)| answer.take(event, *at)).collect();
        assert_eq!(over, [false, false, false, true, false]);
        let answer = answer.finished(1.0);
        assert_eq!((answer.text.as_str(), answer.events, answer.tokens), ("abc", 2, Some(5)));
        assert_eq!((answer.first, answer.end, answer.prompt_tokens), (0.5, 0.8, 3));
        assert!((answer.gaps[0] - 0.2).abs() < 1e-9 && answer.gaps.len() == 1);
        let empty = Answer::default().finished(0.3);
        assert_eq!((empty.first, empty.end, empty.tokens), (0.3, 0.3, None));
    }
}
