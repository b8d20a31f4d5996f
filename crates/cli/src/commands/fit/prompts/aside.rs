//! Which prompts are set aside.

use std::collections::HashSet;

use longdraft_models::sha256;

use super::Asked;
use super::wording::normalised;

/// Prompts that prove the result: at most, and at most this part of all. Where groups give fewer than so many, every
/// prompt is a group of its own.
pub(super) const MOST_HELD_OUT: usize = 32;
const HELD_OUT_PART: usize = 4;
const FEW_HELD_OUT: usize = 8;

/// The groups whose names have the smallest hashes are set aside, so that the choice depends on nothing
/// else; then the rest in the order of their hashes. What is set aside is at most a part of all prompts: groups that
/// are too large for that are learned from. Where hardly any group is small enough, prompts are parted one by one.
pub(super) fn part(prompts: Vec<Asked>) -> (Vec<Asked>, Vec<Asked>) {
    let most = (prompts.len() / HELD_OUT_PART).max(1);
    let wanted = most.min(MOST_HELD_OUT);
    let hash = |text: &str| sha256::of_text(&normalised(text));
    let mut hashed: Vec<Hashed> = prompts
        .into_iter()
        .map(|asked| {
            let (group, text) = (hash(&asked.group), hash(&asked.text()));
            Hashed { group, text, tools: asked.with_it(), asked }
        })
        .collect();
    let mut aside = groups_aside(&mut hashed, most, wanted);
    if aside.len() < wanted.min(FEW_HELD_OUT) {
        hashed.iter_mut().for_each(|prompt| prompt.group.clone_from(&prompt.text));
        aside = groups_aside(&mut hashed, most, wanted);
    }
    let (mut held_out, mut training) = (Vec::new(), Vec::new());
    let mut last = String::new();
    for prompt in hashed {
        if !aside.contains(&prompt.group) {
            training.push(prompt);
        } else if prompt.group != last {
            // Of a group that is set aside one prompt proves as much as all.
            held_out.push(prompt.asked);
            last = prompt.group;
        }
    }
    training.sort_by(|a, b| (&a.text, &a.tools).cmp(&(&b.text, &b.tools)));
    (held_out, training.into_iter().map(|prompt| prompt.asked).collect())
}

/// A prompt with the hashes of its group's name and of its text. Texts with other tools are about the same thing.
struct Hashed {
    group: String,
    text: String,
    tools: String,
    asked: Asked,
}

/// Sorts prompts by their hashes; returns the first groups that hold at most `most` prompts together, at most
/// `wanted` of them.
fn groups_aside(prompts: &mut [Hashed], most: usize, wanted: usize) -> HashSet<String> {
    prompts.sort_by(|a, b| (&a.group, &a.text, &a.tools).cmp(&(&b.group, &b.text, &b.tools)));
    let (mut aside, mut held) = (HashSet::new(), 0);
    for group in prompts.chunk_by(|a, b| a.group == b.group) {
        if aside.len() < wanted && held + group.len() <= most {
            held += group.len();
            aside.insert(group[0].group.clone());
        }
    }
    aside
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Parts, Split, read};
    use super::*;

    /// What is read of five questions, each without tools and with one of this name.
    fn asked_with(tool: &str, has_chat_template: bool) -> Parts {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("mine.jsonl");
        let row = |question: &str, tools: Value| {
            let messages = json!([{ "role": "user", "content": question }]);
            format!("{}\n", json!({ "messages": messages, "tools": tools }))
        };
        let lines: String = ["tea?", "snow?", "iron?", "rain?", "bread?"]
            .iter()
            .map(|question| row(question, json!([])) + &row(question, json!([{ "name": tool }])))
            .collect();
        std::fs::write(&path, lines).expect("rows");
        read(Some(&path), None, has_chat_template).expect("prompts")
    }

    #[test]
    fn tools_make_another_prompt_about_the_same_thing() {
        let parts = asked_with("f", true);
        let (split, tools) = (&parts.split, json!([{ "name": "f" }]));
        assert_eq!((split.training, split.held_out, split.alike), (8, 1, 1));
        assert_eq!(split.duplicates, 0);
        // They are written with their prompts.
        let rows: Vec<Value> = parts.training.iter().map(Asked::to_json).collect();
        assert_eq!(rows.iter().filter(|row| row["tools"] == tools).count(), 4);
        assert!(rows.iter().all(|row| row.get("tools").is_none_or(|own| *own == tools)));
        assert_eq!(parts.digest, asked_with("f", true).digest);
        assert_ne!(parts.digest, asked_with("g", true).digest);
    }

    #[test]
    fn without_a_chat_template_tools_make_no_other_prompt() {
        let parts = asked_with("f", false);
        let Split { training, held_out, duplicates, .. } = parts.split;
        assert_eq!((training, held_out, duplicates), (4, 1, 5));
        let rows: Vec<Value> = parts.training.iter().map(Asked::to_json).collect();
        assert!(rows.iter().all(|row| row.get("tools").is_none()), "{rows:?}");
        assert_eq!(parts.digest, asked_with("g", false).digest);
    }
}
