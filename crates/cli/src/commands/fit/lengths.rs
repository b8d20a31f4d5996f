//! How long prompts are: as they are asked first, and as whole conversations, which are learned.
//!
//! Every turn of the user is answered. So a row holds all turns with as many answers, and the template around them.

use std::path::Path;

use longdraft_data::conversation::Conversation;
use longdraft_data::source::read_jsonl;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{prompts, proof};
use crate::failure::Result;

/// Tokens and answers of prompts; 0 where there are none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Lengths {
    /// Tokens of a row without its answers: the mean, and of the row that nine of ten are not longer than.
    pub(super) prompt: f64,
    pub(super) long_prompt: usize,
    /// Answers that go with both: one a turn of the user.
    pub(super) turns: f64,
    pub(super) long_turns: usize,
    /// Mean tokens of what stands before the first answer.
    pub(super) first_prompt: f64,
}

/// A row: tokens before its first answer, tokens of all turns, and their number.
#[derive(Debug, Clone, Copy)]
struct Row {
    first: usize,
    prompt: usize,
    turns: usize,
}

/// Of the prompts that were set aside, where an answer has some tokens.
pub(super) fn of(
    folder: &Path,
    models: (&Target, &TextTokenizer),
    of_answer: f64,
) -> Result<Lengths> {
    let context = models.0.config().max_position_embeddings;
    let mut rows = Vec::new();
    for row in read_jsonl(&prompts::files(folder).1)? {
        let row = row?;
        let messages = row.value("messages")?;
        // A template may refuse what stands there: such a prompt is not asked.
        let first = proof::first_turn(messages, &row.fields);
        let Ok(asked) = proof::encode(&first, models) else { continue };
        let first = asked.len();
        if !proof::leaves_room(first, context) {
            continue;
        }
        let whole = conversation(messages, &row.fields);
        let turns = (0..whole.messages.len()).filter(|at| whole.role(*at) == "user").count();
        // Where it refuses later turns, the answers to them fail, too.
        let prompt = proof::encode(&whole, models).map(|tokens| tokens.len());
        rows.push(match prompt {
            Ok(prompt) => Row { first, prompt, turns },
            Err(_) => Row { first, prompt: first, turns: 1 },
        });
    }
    Ok(lengths(rows, of_answer))
}

/// All turns, with an empty answer after each but the last, and what stands with them in their row.
fn conversation(messages: &Value, row: &Map<String, Value>) -> Conversation {
    let mut turns = proof::beside(row);
    for message in messages.as_array().into_iter().flatten() {
        let last = turns.messages.len().checked_sub(1);
        if last.is_some_and(|last| turns.role(last) == "user") {
            turns.push("assistant", "");
        }
        let role = message["role"].as_str().unwrap_or("user");
        turns.push(role, message["content"].as_str().unwrap_or_default());
    }
    turns
}

fn lengths(mut rows: Vec<Row>, of_answer: f64) -> Lengths {
    let count = rows.len().max(1) as f64;
    let mean = |of: fn(&Row) -> usize| rows.iter().map(of).sum::<usize>() as f64 / count;
    let means = [mean(|row| row.first), mean(|row| row.prompt), mean(|row| row.turns)];
    let [first_prompt, prompt, turns] = means;
    let length = |row: &Row| row.prompt as f64 + row.turns as f64 * of_answer;
    rows.sort_by(|a, b| length(a).total_cmp(&length(b)));
    let long = rows.get(rows.len() * 9 / 10);
    let (long_prompt, long_turns) = long.map_or((0, 0), |row| (row.prompt, row.turns));
    Lengths { prompt, long_prompt, turns, long_turns, first_prompt }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_turn_of_a_conversation_counts() {
        let messages = json!([
            { "role": "system", "content": "s" }, { "role": "user", "content": "a" },
            { "role": "user", "content": "b" }, { "role": "user", "content": "c" },
        ]);
        let whole = conversation(&messages, &Map::new());
        let roles: Vec<&str> = (0..whole.messages.len()).map(|at| whole.role(at)).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user", "assistant", "user"]);
        let row = json!({ "tools": [{ "name": "f" }], "chat_template_kwargs": { "a": 1 } });
        let row = row.as_object().expect("a row");
        let first = proof::first_turn(&messages, row);
        assert_eq!((first.messages.len(), first.tools.as_ref()), (2, row.get("tools")));
        assert_eq!(first.variables["a"], 1);
    }

    #[test]
    fn the_long_row_is_long_with_its_answers() {
        // Nine rows of one question each, and one of ten short ones.
        let mut rows = vec![Row { first: 300, prompt: 300, turns: 1 }; 9];
        rows.push(Row { first: 20, prompt: 200, turns: 10 });
        let found = lengths(rows.clone(), 150.0);
        assert_eq!((found.long_prompt, found.long_turns), (200, 10));
        assert!((found.prompt - 290.0).abs() < 1e-9 && (found.turns - 1.9).abs() < 1e-9);
        assert!((found.first_prompt - 272.0).abs() < 1e-9);
        // Without answers the other ones are longer.
        let found = lengths(rows, 1.0);
        assert_eq!((found.long_prompt, found.long_turns), (300, 1));
        assert_eq!(lengths(Vec::new(), 1.0), Lengths::default());
    }
}
