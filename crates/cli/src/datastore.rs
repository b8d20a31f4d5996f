//! Texts that lookup looks in, from files of rows.

use std::path::PathBuf;

use longdraft_data::conversation::Conversation;
use longdraft_data::source::{Row, read_rows};
use longdraft_data::template::{Example, Template};
use longdraft_decode::drafter::Datastore;
use longdraft_models::tokenizer::TextTokenizer;
use rayon::prelude::*;
use serde_json::Value;

use crate::failure::{Failure, Result};

/// Orders the answers of all rows: the assistant's turns of conversations, texts as they are. Tokens are
/// below `vocabulary`.
pub(crate) fn open(
    paths: &[PathBuf],
    tokenizer: &TextTokenizer,
    vocabulary: usize,
) -> Result<Datastore> {
    let mut texts = Vec::new();
    for path in paths {
        let before = texts.len();
        for row in read_rows(path)? {
            texts.extend(answers(row?.parse()?, vocabulary)?);
        }
        if texts.len() == before {
            return Err(Failure::usage(format!("{}: no row has an answer", path.display()))
                .hint("`longdraft data regenerate` has the target write some"));
        }
    }
    let encode = |text: Text| -> Result<Vec<Vec<u32>>> {
        let ids = match text {
            Text::Words(text) => tokenizer.encode(&text)?.ids,
            Text::Tokens(ids) => return Ok(vec![ids]),
        };
        // A tokenizer may have tokens that the target has not.
        Ok(ids.split(|id| *id as usize >= vocabulary).map(<[u32]>::to_vec).collect())
    };
    let pieces = texts.into_par_iter().map(encode).collect::<Result<Vec<_>>>()?;
    let texts: Vec<Vec<u32>> = pieces.into_iter().flatten().collect();
    // Every text takes a place more, for its end.
    let tokens: usize = texts.iter().map(|text| text.len() + 1).sum();
    if u32::try_from(tokens).is_err() {
        return Err(Failure::usage(format!("--datastore: {tokens} tokens"))
            .hint("give fewer rows: at most 4.2 billion tokens"));
    }
    Ok(Datastore::new(texts.iter().map(Vec::as_slice)))
}

/// What a file may hold.
const FORMATS: &str =
    "give rows of a format that is recognised: `longdraft data inspect FILE` names it";

enum Text {
    Words(String),
    Tokens(Vec<u32>),
}

fn answers(mut row: Row, vocabulary: usize) -> Result<Vec<Text>> {
    let template = Template::detect(&row.fields, None)
        .map_err(|problem| Failure::usage(row.problem(problem)).hint(FORMATS))?;
    Ok(match template.example(&mut row)? {
        Example::Plain { mut text, answer } => vec![Text::Words(text.split_off(answer))],
        Example::Tokens { ids, .. } => match ids.iter().find(|id| **id as usize >= vocabulary) {
            None => vec![Text::Tokens(ids)],
            Some(id) => {
                let problem = format!("token {id} is not one of the target's {vocabulary}");
                return Err(row.problem(problem).into());
            }
        },
        Example::Chat(conversation) => turns(&conversation),
    })
}

fn turns(conversation: &Conversation) -> Vec<Text> {
    let of_assistant = |message: &usize| conversation.role(*message) == "assistant";
    let turns = (0..conversation.messages.len()).filter(of_assistant);
    let text = |message: usize| match conversation.messages[message].get("content") {
        Some(Value::String(text)) if !text.is_empty() => Some(Text::Words(text.clone())),
        _ => None,
    };
    turns.filter_map(text).collect()
}

/// How a report names it.
pub(crate) fn describe(datastore: &Datastore) -> String {
    format!("{} tokens of other texts", datastore.len())
}
