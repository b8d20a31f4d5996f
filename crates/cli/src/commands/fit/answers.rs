//! The target's own answers: written within a time, and cleaned of what teaches nothing.

use std::cell::RefCell;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use longdraft_data::conversation::VARIABLES;
use longdraft_data::template::Verbatim;
use longdraft_models::DeviceChoice;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_records::events::Events;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::hearing::Hearing;
use super::parting::LEAST_ANSWERS;
use super::prompts;
use super::state::Settings;
use crate::cli::{DataRegenerateArguments, WeightDtype};
use crate::commands::data::regenerate::{
    Answered, Reached, Writer, failures_file, messages_of, plain,
};
use crate::decoding::{Models, stop_tokens};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Answers that a prompt gets at most: from the second one on they are sampled, at this temperature at least.
pub(super) const MOST_OF_A_PROMPT: usize = 4;
const FURTHER_TEMPERATURE: f64 = 0.8;
/// Share of the planned tokens that is enough, and the least that is believed: short answers may become longer.
const NEARLY_ALL: f64 = 0.9;
const LEAST_SHARE: f64 = 0.25;
/// Letters of the end of an answer that are looked at, and how much of them a repetition must fill.
const LOOKED_AT: usize = 1200;
const REPEATED: usize = 80;
/// Letters from which two equal answers are one too many.
const LONG: usize = 40;

/// What became of the answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cleaned {
    /// Those that are learned from, and their tokens.
    pub(super) kept: usize,
    pub(super) tokens: usize,
    pub(super) empty: usize,
    pub(super) duplicates: usize,
    /// Those that repeat themselves to the end.
    pub(super) endless: usize,
    /// Whether these are learned from all the same, because there is hardly anything else.
    pub(super) keeps_endless: bool,
    /// Those that reached the most tokens before their end.
    pub(super) cut: usize,
}

/// What the answers are learned from.
pub(super) fn training_file(folder: &Path) -> PathBuf {
    folder.join("data/training.jsonl")
}

/// The answers of every prompt, the first ones or later ones, from 0.
fn answers_file(folder: &Path, turn: usize) -> PathBuf {
    match turn {
        0 => folder.join("data/answers.jsonl"),
        _ => folder.join(format!("data/answers-{}.jsonl", turn + 1)),
    }
}

/// How a prompt is answered for the first time or later: as it will be served, then sampled, for a text that
/// stands there already teaches nothing.
fn asking(
    folder: &Path,
    settings: &Settings,
    (lookup, batch): (bool, usize),
    turn: usize,
) -> DataRegenerateArguments {
    let least = if turn == 0 { 0.0 } else { FURTHER_TEMPERATURE };
    DataRegenerateArguments {
        prompts: prompts::files(folder).0,
        target: settings.target.clone(),
        draft: None,
        lookup,
        output: answers_file(folder, turn),
        field: None,
        max_tokens: settings.max_tokens,
        temperature: settings.temperature.max(least),
        seed: settings.seed.wrapping_add(turn as u64),
        draft_len: 4,
        batch,
        limit: None,
        dtype: WeightDtype::Stored,
        device: DeviceChoice::Auto,
        template: settings.template(),
    }
}

/// Has the target answer the first prompts, within the time but for a few; all of them again where more answers
/// than prompts are wanted.
pub(super) fn write(
    folder: &Path,
    (settings, how, prompts): (&Settings, (bool, usize), usize),
    models: &Models,
    (wanted, seconds): (usize, f64),
    (interrupts, events): (&Interrupts, &Events),
    tell: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<Reached> {
    let until = Instant::now() + Duration::from_secs_f64(seconds.clamp(0.0, 1e8));
    let words = (models.tokenizer.as_ref(), stop_tokens(&models.target));
    let hearing = RefCell::new(Hearing::new(events.clone(), words, (wanted, until)));
    let mut failed = Ok(());
    let mut reached = Reached::TheEnd;
    // The first ones are needed at any rate.
    let mut parts = vec![(0, LEAST_ANSWERS.min(wanted), None)];
    let turns = wanted.div_ceil(prompts.max(1)).clamp(1, MOST_OF_A_PROMPT);
    parts.extend((0..turns).map(|turn| (turn, wanted - turn * prompts, Some(until))));
    for (turn, limit, until) in parts {
        let mut arguments = asking(folder, settings, how, turn);
        let done = tried(&arguments.output)?;
        if limit <= done && until.is_none() {
            continue;
        }
        arguments.limit = Some(limit.max(done));
        let earlier = turn * prompts;
        let writer = Writer {
            arguments: &arguments,
            target: &models.target,
            tokenizer: &models.tokenizer,
            draft: None,
            hears: Some(&hearing),
        };
        let answered = writer.answer(until, interrupts, &mut |answered: &Answered| {
            let done = earlier + answered.counts.sum();
            hearing.borrow_mut().done(done);
            if failed.is_ok() {
                failed = tell(done, wanted);
            }
        })?;
        reached = answered.reached;
        if reached != Reached::TheEnd {
            break;
        }
    }
    failed.map(|()| reached)
}

/// Rows of prompts up to the last one that was answered, or tried in vain.
fn tried(answers: &Path) -> Result<usize> {
    let rows = [lines(answers)?, lines(&failures_file(answers))?].into_iter().flatten();
    Ok(rows.filter_map(|line| line["row"].as_u64()).max().map_or(0, |row| row as usize + 1))
}

/// Answers that are asked for where `wanted` ones came to fewer tokens than were planned; `None` where they came to
/// nearly as many, or every prompt was asked as often as it may be.
pub(super) fn further(
    wanted: usize,
    (cleaned, planned): (&Cleaned, f64),
    prompts: usize,
) -> Option<usize> {
    let share = (cleaned.tokens as f64 / planned.max(1.0)).max(LEAST_SHARE);
    let more = ((wanted as f64 / share).ceil() as usize).min(MOST_OF_A_PROMPT * prompts);
    (share < NEARLY_ALL && more > wanted).then_some(more)
}

fn lines(path: &Path) -> Result<Vec<Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::work(format!("{}: {error}", path.display()))),
    };
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Writes what is learned from, and counts what is not.
pub(super) fn clean(folder: &Path, has_chat_template: bool) -> Result<Cleaned> {
    let mut cleaned = Cleaned::default();
    let (mut kept, mut endless, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    let mut all = Vec::new();
    for turn in 0..MOST_OF_A_PROMPT {
        all.extend(lines(&answers_file(folder, turn))?);
    }
    for line in all {
        let answer = answer(&line).trim().to_owned();
        if answer.is_empty() {
            cleaned.empty += 1;
        } else if answer.len() >= LONG && !seen.insert(answer.clone()) {
            cleaned.duplicates += 1;
        } else {
            let cut = line["finish"] == "length";
            cleaned.cut += usize::from(cut);
            if cut && is_endless(&answer) { endless.push(line) } else { kept.push(line) }
        }
    }
    cleaned.endless = endless.len();
    if kept.len() < LEAST_ANSWERS {
        cleaned.keeps_endless = !endless.is_empty();
        kept.append(&mut endless);
    }
    if kept.is_empty() {
        return Err(Failure::work(
            "the target's answers are all empty: there is nothing to learn from",
        )
        .hint("look at its answers with `longdraft generate`; its chat template may be wrong"));
    }
    cleaned.kept = kept.len();
    cleaned.tokens = kept.iter().map(|line| line["tokens"].as_u64().unwrap_or(0) as usize).sum();
    let row = |line: &Value| {
        // The end of an answer that was cut off is not learned.
        let finish = &line["finish"];
        let finishes = line["finishes"].as_array();
        match finishes {
            each if has_chat_template => {
                let mut row = json!({ "messages": line["messages"], "finish": finish });
                if let Some(each) = each {
                    row["finishes"] = json!(each);
                }
                if let Some(tools) = line.get("tools") {
                    row["tools"] = tools.clone();
                }
                if let Some(variables) = line.get(VARIABLES) {
                    row[VARIABLES] = variables.clone();
                }
                Verbatim::copy(line, &mut row);
                row
            }
            // A text has one end, that of its last answer.
            each => {
                let last = each.and_then(|each| each.last()).unwrap_or(finish);
                let text = plain(messages(line).filter_map(Value::as_object));
                json!({ "text": text, "finish": last })
            }
        }
    };
    let text: String = kept.iter().map(|line| format!("{}\n", row(line))).collect();
    write_atomically(&training_file(folder), text.as_bytes())?;
    Ok(cleaned)
}

fn messages(line: &Value) -> impl Iterator<Item = &Value> {
    messages_of(line).into_iter().flatten()
}

/// All answers of a row.
fn answer(line: &Value) -> String {
    let own = messages(line).filter(|message| message["role"] == "assistant");
    own.filter_map(|message| message["content"].as_str()).collect::<Vec<_>>().join("\n")
}

/// Whether a text ends with the same letters over and over: three times, and over [`REPEATED`] letters.
fn is_endless(text: &str) -> bool {
    let mut end: Vec<char> = text.chars().rev().take(LOOKED_AT).collect();
    end.reverse();
    let count = end.len();
    (1..=count / 3).any(|period| {
        let same = (period..count).rev().take_while(|i| end[*i] == end[i - period]).count();
        same + period >= REPEATED.max(3 * period)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_repetition_to_the_end_is_endless() {
        assert!(is_endless(&"the cat sat. ".repeat(20)));
        assert!(is_endless(&format!("A true beginning. {}", "no ".repeat(60))));
        assert!(is_endless(&"是".repeat(100)));
        let text = "First the flour, then the eggs, and at last the milk. Stir until it is smooth, wait for an \
                    hour, and bake the pancakes one by one in a hot pan with a little butter.";
        assert!(!is_endless(text) && !is_endless("ha ha ha ha") && !is_endless(""));
        assert!(!is_endless(&format!(
            "{} But then it ended well, as stories do.",
            "no ".repeat(60)
        )));
    }

    #[test]
    fn rows_that_failed_were_tried() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("answers.jsonl");
        assert_eq!(tried(&path).expect("nothing"), 0);
        std::fs::write(&path, "{\"row\":0}\n{\"row\":4}\n{\"ro").expect("answers");
        assert_eq!(tried(&path).expect("answers"), 5);
        std::fs::write(failures_file(&path), "{\"row\":3}\n{\"row\":7}\n").expect("failures");
        assert_eq!(tried(&path).expect("both"), 8);
    }

    #[test]
    fn short_answers_are_followed_by_more() {
        let of = |tokens, wanted| {
            let cleaned = Cleaned { tokens, ..Cleaned::default() };
            further(wanted, (&cleaned, 1000.0), 100)
        };
        assert_eq!((of(500, 50), of(950, 50), of(1500, 50)), (Some(100), None, None));
        // Four of each prompt at most, and four times as many at once.
        assert_eq!((of(1, 50), of(1, 200), of(1, 400)), (Some(200), Some(400), None));
    }

    #[test]
    fn what_teaches_nothing_is_counted_and_left_out() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::create_dir(folder.path().join("data")).expect("data");
        let line = |answer: &str, finish: &str| {
            let messages = json!([
                { "role": "user", "content": "q" }, { "role": "assistant", "content": answer },
            ]);
            format!(
                "{}\n",
                json!({ "row": 1, "messages": messages, "finish": finish, "tokens": 5 })
            )
        };
        let answer = |i: usize| format!("answer number {i} is long enough to be counted as one");
        let mut text: String = (0..LEAST_ANSWERS).map(|i| line(&answer(i), "stop")).collect();
        text +=
            &(line(&answer(0), "stop") + &line(" ", "stop") + &line(&"x".repeat(200), "length"));
        std::fs::write(answers_file(folder.path(), 0), text).expect("answers");
        let cleaned = clean(folder.path(), false).expect("cleaned");
        let Cleaned { kept, tokens, empty, duplicates, endless, keeps_endless, cut } = cleaned;
        assert_eq!((kept, tokens, empty, duplicates), (LEAST_ANSWERS, 5 * LEAST_ANSWERS, 1, 1));
        assert_eq!((endless, keeps_endless, cut), (1, false, 1));
        let written = std::fs::read_to_string(training_file(folder.path())).expect("rows");
        assert!(written.starts_with("{\"text\":\"qanswer number 0"), "{written}");
        // A cut answer may stand among whole ones.
        let messages = json!([
            { "role": "user", "content": "q" }, { "role": "assistant", "content": answer(98) },
            { "role": "user", "content": "r" }, { "role": "assistant", "content": "whole" },
        ]);
        let each = json!({
            "row": 2, "messages": messages, "finish": "length", "finishes": ["length", "stop"],
        });
        for (has_template, end) in [
            (true, ",\"finish\":\"length\",\"finishes\":[\"length\",\"stop\"]}\n"),
            (false, "\nrwhole\",\"finish\":\"stop\"}\n"),
        ] {
            std::fs::write(answers_file(folder.path(), 1), format!("{each}\n")).expect("again");
            assert_eq!(clean(folder.path(), has_template).expect("cleaned").cut, 2);
            let written = std::fs::read_to_string(training_file(folder.path())).expect("rows");
            assert!(written.ends_with(&end.replace("\nr", "\\nr")), "{written}");
        }
        // Tools stand in the prompt where the answer is learned, as they stood there when it was written.
        let mut called = each.clone();
        called["tools"] = json!([{ "name": "f" }]);
        std::fs::write(answers_file(folder.path(), 1), format!("{called}\n")).expect("again");
        for has_template in [true, false] {
            clean(folder.path(), has_template).expect("cleaned");
            let written = std::fs::read_to_string(training_file(folder.path())).expect("rows");
            let tools = written.matches("\"tools\":[{\"name\":\"f\"}]").count();
            assert_eq!(tools, usize::from(has_template), "{written}");
        }
        // So do variables: the template may show a turn by them.
        called["chat_template_kwargs"] = json!({ "enable_thinking": false });
        std::fs::write(answers_file(folder.path(), 1), format!("{called}\n")).expect("again");
        clean(folder.path(), true).expect("cleaned");
        let written = std::fs::read_to_string(training_file(folder.path())).expect("rows");
        assert!(
            written.contains("\"chat_template_kwargs\":{\"enable_thinking\":false}"),
            "{written}"
        );
        // Further answers are learned, too.
        std::fs::write(answers_file(folder.path(), 1), line(&answer(99), "stop")).expect("again");
        assert_eq!(clean(folder.path(), false).expect("cleaned").kept, LEAST_ANSWERS + 1);
        std::fs::remove_file(answers_file(folder.path(), 1)).expect("removed");
        std::fs::write(answers_file(folder.path(), 0), line(&"x".repeat(200), "length"))
            .expect("one");
        assert!(clean(folder.path(), true).expect("kept").keeps_endless);
        let written = std::fs::read_to_string(training_file(folder.path())).expect("rows");
        assert!(written.ends_with("\"finish\":\"length\"}\n"), "{written}");
        std::fs::write(answers_file(folder.path(), 0), line("", "stop")).expect("none");
        assert!(clean(folder.path(), true).is_err());
    }
}
