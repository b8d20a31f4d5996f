//! What is asked: the user's prompts or those that the program carries, and which are set aside.

mod aside;
mod wording;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use longdraft_data::conversation::{Conversation, VARIABLES};
use longdraft_data::source::read_rows;
use longdraft_models::sha256;
use longdraft_models::tokenizer::variables_text;
use longdraft_models::weights::atomic::write_atomically;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::state::STATE_FILE;
use crate::commands::data::regenerate::{Prompts, prompts_of_row};
use crate::failure::{Failure, Result};
use aside::part;
use wording::{normalised, pieces, wording};

/// Written for this program, CC0.
const SHIPPED: &str = include_str!("../../../assets/prompts/prompts.jsonl");
pub(super) const SHIPPED_NAME: &str = "the prompts that the program carries (assets/prompts, CC0)";

/// Of the program's own prompts, those that show beside the user's what a draft of these is worth elsewhere: at
/// most, and one after so many of the user's.
const MOST_GENERAL: usize = 8;
const OWN_OF_GENERAL: usize = 3;
/// What proofs are told apart by.
const OWN: &str = "own prompts";
const GENERAL: &str = "general mix";
/// Prompts below which those that the program carries are asked, too.
const FEW: usize = 200;

/// A prompt: turns without those of the assistant.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    pub(super) turns: Conversation,
    /// Prompts of a group are about the same thing: they are set aside together.
    group: String,
    /// Where there are several kinds.
    category: Option<&'static str>,
}

impl Asked {
    pub(super) fn text(&self) -> String {
        let texts = self.turns.messages.iter().filter_map(|message| message["content"].as_str());
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Its tools and variables as text; empty without any. They are a part of what is asked.
    fn with_it(&self) -> String {
        let tools = self.turns.tools.as_ref().map(Value::to_string).unwrap_or_default();
        tools + &variables_text(&self.turns.variables)
    }

    fn to_json(&self) -> Value {
        let mut row = json!({ "messages": self.turns.messages });
        if let Some(tools) = &self.turns.tools {
            row["tools"] = tools.clone();
        }
        if !self.turns.variables.is_empty() {
            row[VARIABLES] = json!(self.turns.variables);
        }
        if let Some(category) = self.category {
            row["category"] = category.into();
        }
        row
    }
}

/// Prompts in two parts, and what was left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Split {
    /// Where they come from, in words.
    pub(super) source: String,
    pub(super) training: usize,
    /// Of the program's own, where there are few others.
    pub(super) shipped: usize,
    pub(super) held_out: usize,
    /// Of the program's own, set aside beside the user's.
    pub(super) general: usize,
    pub(super) duplicates: usize,
    pub(super) unusable: usize,
    /// Those that are about the same as one that is set aside.
    pub(super) alike: usize,
}

/// Both parts as texts of files.
pub(super) struct Parts {
    pub(super) split: Split,
    /// Hash of all prompts.
    pub(super) digest: String,
    pub(super) training: Vec<Asked>,
    pub(super) held_out: Vec<Asked>,
}

/// Where the parts lie.
pub(super) fn files(folder: &Path) -> (PathBuf, PathBuf) {
    (folder.join("data/prompts.jsonl"), folder.join("data/held-out.jsonl"))
}

/// Reads and parts the prompts. Without a chat template nothing tells the target of tools and variables: prompts have
/// none then.
/// It fails where there is none that can be asked.
pub(super) fn read(
    path: Option<&Path>,
    field: Option<&str>,
    has_chat_template: bool,
) -> Result<Parts> {
    let mut unusable = 0;
    let mut own = match path {
        Some(path) => own_prompts(path, field, &mut unusable)?,
        None => Vec::new(),
    };
    if !has_chat_template {
        for asked in &mut own {
            asked.turns.tools = None;
            asked.turns.variables.clear();
        }
    }
    let source = path.map_or_else(|| SHIPPED_NAME.to_owned(), |path| path.display().to_string());
    let mut seen = HashSet::new();
    let mut fresh = |asked: &Asked| seen.insert((normalised(&asked.text()), asked.with_it()));
    let all = if path.is_some() { own.len() } else { 0 };
    let mut kept: Vec<Asked> = own.into_iter().filter(&mut fresh).collect();
    let duplicates = all - kept.len();
    if let (Some(path), true) = (path, kept.is_empty()) {
        return Err(Failure::usage(format!("{}: there is no prompt in it", path.display())).hint(
            "rows need a conversation, `prompt`, `question` or `text`; `longdraft data inspect` shows \
             how they are read, --field names another field",
        ));
    }
    if path.is_none() {
        kept.extend(shipped().into_iter().filter(&mut fresh));
    }
    let asked = kept.len();
    let (mut held_out, mut training) = part(kept);
    let held = held_out.len();
    let alike = asked - held - training.len();
    let (mut general, mut added) = (Vec::new(), Vec::new());
    if path.is_some() {
        (general, added) = part(shipped().into_iter().filter(&mut fresh).collect());
        general.truncate(MOST_GENERAL.min(held.div_ceil(OWN_OF_GENERAL)));
    }
    // A draft follows its target over all that it says: few prompts teach little of that.
    if training.len() >= FEW {
        added.clear();
    }
    let (shipped, mixed) = (added.len(), general.len());
    training.extend(added);
    held_out = beside(held_out, general);
    let whole = |asked: &Asked| asked.text() + &asked.with_it();
    let texts: Vec<String> = held_out.iter().chain(&training).map(whole).collect();
    let digest = sha256::of_text(&texts.join("\u{0}"));
    let split = Split {
        source,
        training: training.len() - shipped,
        shipped,
        held_out: held,
        general: mixed,
        duplicates,
        unusable,
        alike,
    };
    Ok(Parts { split, digest, training, held_out })
}

/// The user's prompts with general ones among them, so that the first ones of all hold both kinds.
fn beside(own: Vec<Asked>, general: Vec<Asked>) -> Vec<Asked> {
    if general.is_empty() {
        return own;
    }
    let named = |category| move |asked: Asked| Asked { category: Some(category), ..asked };
    let (own, mut general) =
        (own.into_iter().map(named(OWN)), general.into_iter().map(named(GENERAL)));
    let mut all = Vec::new();
    for (index, asked) in own.enumerate() {
        all.push(asked);
        if (index + 1).is_multiple_of(OWN_OF_GENERAL) {
            all.extend(general.next());
        }
    }
    all.extend(general);
    all
}

/// The prompts that the program carries.
pub(super) fn shipped() -> Vec<Asked> {
    let row = |line: &str| -> Option<Asked> {
        let row: Value = serde_json::from_str(line).ok()?;
        let group = row["group"].as_str()?.to_owned();
        let turns = Conversation::of(&[("user", row["prompt"].as_str()?)]);
        Some(Asked { turns, group, category: None })
    };
    SHIPPED.lines().filter_map(row).collect()
}

fn own_prompts(path: &Path, field: Option<&str>, unusable: &mut usize) -> Result<Vec<Asked>> {
    let mut found = Vec::new();
    for row in read_rows(path)? {
        let row = row?;
        let asked = row.parse().map_err(|error| error.to_string()).map(|row| {
            let text = row.fields.get("text").and_then(Value::as_str).map(str::to_owned);
            (prompts_of_row(row, field), text)
        });
        match asked {
            Ok((Ok(Prompts::Turns(turns)), _)) if !first_question(&turns).trim().is_empty() => {
                let group = wording(first_question(&turns));
                found.push(Asked { turns, group, category: None });
            }
            // Text that asks nothing is asked to be continued, piece by piece.
            Ok((_, Some(text))) if field.is_none() => {
                let (before, whole) = (found.len(), sha256::of_text(&text));
                let pieces = pieces(&text).into_iter();
                found.extend(pieces.map(|piece| Asked {
                    turns: Conversation::of(&[("user", &piece)]),
                    group: whole.clone(),
                    category: None,
                }));
                *unusable += usize::from(found.len() == before);
            }
            _ => *unusable += 1,
        }
    }
    Ok(found)
}

/// The first text of the user: conversations often share what the system says.
fn first_question(turns: &Conversation) -> &str {
    let mut own = turns.messages.iter().filter(|message| message["role"] == "user");
    own.find_map(|message| message["content"].as_str()).unwrap_or_default()
}

impl Parts {
    /// Refuses files of something else where a fit would begin.
    /// It fails where there are such files, and no earlier call wrote them.
    pub(super) fn require_own(folder: &Path) -> Result<()> {
        let (training, held_out) = files(folder);
        let other = [training, held_out].into_iter().find(|path| path.exists());
        match other.filter(|_| !folder.join(STATE_FILE).exists()) {
            Some(path) => Err(Failure::usage(format!(
                "{}: this fit would write its prompts there, and no earlier fit wrote this file",
                path.display()
            ))
            .hint("give another --output")),
            None => Ok(()),
        }
    }

    /// Writes both parts, unless an earlier call did.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let (training, held_out) = files(folder);
        for (path, prompts) in [(held_out, &self.held_out), (training, &self.training)] {
            if path.is_file() {
                continue;
            }
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(Failure::at(folder))?;
            }
            let lines: String =
                prompts.iter().map(|asked| format!("{}\n", asked.to_json())).collect();
            write_atomically(&path, lines.as_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::aside::MOST_HELD_OUT;
    use super::*;

    fn asked(text: &str) -> Asked {
        let turns = Conversation::of(&[("user", text)]);
        Asked { turns, group: text.to_owned(), category: None }
    }

    #[test]
    fn what_is_set_aside_depends_on_the_prompts_alone() {
        let prompts: Vec<Asked> = (0..40).map(|i| asked(&format!("prompt {i}"))).collect();
        let (held_out, training) = part(prompts.clone());
        assert_eq!((held_out.len(), training.len()), (10, 30));
        let (again, _) = part(prompts.into_iter().rev().collect());
        assert_eq!(again, held_out);
        assert!(held_out.iter().all(|held| !training.contains(held)));
    }

    fn chat(system: &str, question: &str) -> Value {
        json!({ "messages": [
            { "role": "system", "content": system }, { "role": "user", "content": question },
            { "role": "assistant", "content": "An answer." },
        ]})
    }

    /// What is read of some rows.
    fn split_of(rows: &[Value]) -> Split {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("mine.jsonl");
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(&path, lines).expect("rows");
        read(Some(&path), None, true).expect("prompts").split
    }

    #[test]
    fn conversations_with_one_system_prompt_are_not_one_subject() {
        let subjects = ["tea", "snow", "iron", "rain", "bread"];
        let question = |i: usize| format!("{} and {}", subjects[i % 5], "x".repeat(i / 5 + 1));
        let rows: Vec<Value> = (0..400).map(|i| chat("You help.", &question(i))).collect();
        let split = split_of(&rows);
        assert_eq!((split.held_out, split.training, split.alike), (MOST_HELD_OUT, 368, 0));
        // Numbers alone make no other subject, and a subject with most of the prompts is not set aside.
        let rows: Vec<Value> = (0..400)
            .map(|i| {
                let question = if i < 360 { format!("Where is order {i}?") } else { question(i) };
                chat("You help.", &question)
            })
            .collect();
        let split = split_of(&rows);
        assert_eq!((split.held_out, split.training), (MOST_HELD_OUT, 368));
        // Where all is one subject, prompts are parted all the same.
        let rows: Vec<Value> =
            (0..400).map(|i| chat("You help.", &format!("Where is order {i}?"))).collect();
        assert_eq!((split_of(&rows).held_out, split_of(&rows).training), (MOST_HELD_OUT, 368));
        let rows = [chat("You help.", "Why?"), chat("You help.", " ")];
        let split = split_of(&rows);
        assert_eq!((split.held_out, split.training, split.unusable), (1, 0, 1));
    }

    #[test]
    fn the_rest_of_a_subject_that_is_set_aside_is_counted() {
        let rows: Vec<Value> = (0..400)
            .map(|i| {
                let subject = "x".repeat(i / 4 + 1);
                chat("You help.", &format!("Where is order {i} of {subject}?"))
            })
            .collect();
        let Split { held_out, training, alike, .. } = split_of(&rows);
        // A quarter of all prompts makes 25 subjects of four.
        assert_eq!((held_out, training, alike), (25, 300, 75));
    }

    #[test]
    fn the_shipped_prompts_share_no_subject_with_those_set_aside() {
        let parts = read(None, None, true).expect("shipped");
        assert!(parts.training.len() > 2000 && parts.held_out.len() == MOST_HELD_OUT);
        let aside: HashSet<&String> = parts.held_out.iter().map(|asked| &asked.group).collect();
        assert!(parts.training.iter().all(|asked| !aside.contains(&asked.group)));
        assert!(SHIPPED.len() < 1 << 20);
    }

    #[test]
    fn general_prompts_stand_among_the_first() {
        let list = |name: &str, count: usize| -> Vec<Asked> {
            (0..count).map(|i| asked(&format!("{name} {i}"))).collect()
        };
        let kinds = |own, general| -> String {
            let all = beside(list("own", own), list("general", general));
            all.iter().map(|asked| if asked.category == Some(OWN) { 'o' } else { 'g' }).collect()
        };
        assert_eq!(kinds(7, 3), "ooogooogog");
        assert_eq!((kinds(2, 1).as_str(), kinds(3, 1).as_str()), ("oog", "ooog"));
        assert!(beside(list("own", 2), Vec::new()).iter().all(|asked| asked.category.is_none()));
    }

    #[test]
    fn duplicates_and_rows_without_a_prompt_are_counted() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("mine.jsonl");
        let rows = "{\"prompt\": \"¿Qué hora es?\"}\n{\"prompt\": \"¿qué  hora es?\"}\n{\"prompt\": \"\"}\n\
                    {\"x\": 1}\n{\"question\": \"Wie spät ist es?\"}\n";
        std::fs::write(&path, rows).expect("rows");
        let parts = read(Some(&path), None, true).expect("prompts");
        let Split { training, held_out, general, duplicates, unusable, .. } = parts.split;
        assert_eq!((training, held_out, duplicates, unusable), (1, 1, 1, 2));
        let categories: Vec<_> = parts.held_out.iter().map(|asked| asked.category).collect();
        assert_eq!((general, categories), (1, vec![Some(OWN), Some(GENERAL)]));
        let general = &parts.held_out[1].group;
        assert!(parts.training.len() > 2000);
        assert!(parts.training.iter().all(|asked| asked.group != *general));
        std::fs::write(&path, "{\"prompt\": \" \"}\n").expect("rows");
        assert!(read(Some(&path), None, true).is_err());
    }
}
