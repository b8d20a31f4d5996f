//! Parts of answers that are not learned although `learn` names them.
//!
//! The model did not end answers that were cut off, so their end-of-turn marks are not learned.
//!
//! Rows of the target's own answers say so: `finish` is `length` where an answer of the row was cut, and
//! `finishes` says it of each answer, in their order. Where `finishes` is missing, every answer may be the cut one.

use std::ops::Range;

use serde_json::{Map, Value};

use super::chat::{ChatLayout, Turns};
use crate::conversation::Conversation;

/// Which answers of a row were cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    /// None.
    Nowhere,
    /// Some of them, it is not known which.
    Somewhere,
    /// Whether each one was, in their order.
    Each(Vec<bool>),
}

impl Cut {
    /// What a row says.
    pub(crate) fn of(fields: &Map<String, Value>) -> Self {
        let is_cut = |finish: &Value| finish == "length";
        if !fields.get("finish").is_some_and(is_cut) {
            return Self::Nowhere;
        }
        match fields.get("finishes").and_then(Value::as_array) {
            Some(each) if each.iter().any(is_cut) => Self::Each(each.iter().map(is_cut).collect()),
            _ => Self::Somewhere,
        }
    }

    /// The end-of-turn marks that are not learned, in bytes of the turns' text.
    pub(super) fn ends_of(&self, layout: &ChatLayout, turns: &Turns) -> Vec<Range<usize>> {
        match self {
            Self::Nowhere => Vec::new(),
            Self::Somewhere => layout.ends(&turns.text, &turns.assistant),
            Self::Each(cut) => {
                let is_cut = |answer: usize| cut.get(answer).copied().unwrap_or(true);
                let each = turns.assistant.iter().zip(&turns.answers);
                let cut: Vec<_> = each
                    .filter(|(_, answer)| is_cut(**answer))
                    .map(|(turn, _)| turn.clone())
                    .collect();
                layout.ends(&turns.text, &cut)
            }
        }
    }
}

/// Turns of the assistant that the row says not to learn.
pub(super) fn without_weight(conversation: &Conversation, turns: &Turns) -> Vec<Range<usize>> {
    let answers: Vec<usize> = (0..conversation.messages.len())
        .filter(|index| conversation.role(*index) == "assistant")
        .collect();
    let is_out = |answer: &usize| {
        answers.get(*answer).is_some_and(|index| conversation.has_no_weight(*index))
    };
    let each = turns.assistant.iter().zip(&turns.answers);
    each.filter(|(_, answer)| is_out(answer)).map(|(turn, _)| turn.clone()).collect()
}

/// Ranges without the holes in them; both lists ascend.
pub(super) fn without(ranges: &[Range<usize>], holes: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut kept = Vec::new();
    for range in ranges {
        let mut start = range.start;
        for hole in holes.iter().filter(|hole| hole.start < range.end && hole.end > range.start) {
            if start < hole.start {
                kept.push(start..hole.start);
            }
            start = hole.end;
        }
        if start < range.end {
            kept.push(start..range.end);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn holes_are_taken_out_of_ranges() {
        assert_eq!(without(&[0..4, 6..9], &[2..3, 8..9]), [0..2, 3..4, 6..8]);
        assert_eq!(without(&[0..9, 12..20], &[2..3, 5..6, 12..20]), [0..2, 3..5, 6..9]);
        assert_eq!(without(&[0..4, 6..9], &[4..6, 9..10]), [0..4, 6..9]);
    }

    #[test]
    fn a_row_says_which_answers_were_cut() {
        let of = |row: Value| Cut::of(row.as_object().expect("a row"));
        assert_eq!(of(json!({})), Cut::Nowhere);
        assert_eq!(of(json!({"finish": "stop", "finishes": ["length"]})), Cut::Nowhere);
        assert_eq!(of(json!({"finish": "length"})), Cut::Somewhere);
        for other in [json!(3), json!([]), json!(["stop"])] {
            assert_eq!(of(json!({"finish": "length", "finishes": other})), Cut::Somewhere);
        }
        let each = json!({"finish": "length", "finishes": ["stop", "length"]});
        assert_eq!(of(each), Cut::Each(vec![false, true]));
    }
}
