//! From the fields of a row to an example, format by format.

use serde_json::Value;

use super::Template;
use crate::conversation::Conversation;
use crate::error::Result;
use crate::row::{Row, short};

/// What a row says, before any tokenizer sees it.
#[derive(Debug, Clone, PartialEq)]
pub enum Example {
    /// Text whose answer begins at a byte.
    Plain {
        /// The text.
        text: String,
        /// Where the answer begins.
        answer: usize,
    },
    /// Turns.
    Chat(Conversation),
    /// Tokens with their mask.
    Tokens {
        /// Ids, `[T]`.
        ids: Vec<u32>,
        /// Whether each may be learned, `[T]`.
        loss_mask: Vec<bool>,
    },
}

impl Template {
    /// Reads a row's fields; a list of messages is moved out of it. A chat takes the row's variables of the chat
    /// template with it.
    ///
    /// # Errors
    /// - a field is missing or of another type than the template wants
    pub fn example(&self, row: &mut Row) -> Result<Example> {
        Ok(match self.fields_of(row)? {
            Example::Chat(conversation) => {
                let variables = Conversation::variables_of(&row.fields);
                let variables = variables.map_err(|problem| row.problem(problem))?;
                Example::Chat(Conversation { variables, ..conversation })
            }
            other => other,
        })
    }

    fn fields_of(&self, row: &mut Row) -> Result<Example> {
        let chat = |turns: &[(&str, &str)], system: &Option<String>| {
            Example::Chat(Conversation::of(turns).with_system(system.as_deref()))
        };
        Ok(match self {
            Self::Raw { fields, separator } => {
                let texts: Vec<&str> =
                    fields.iter().map(|field| row.text(field)).collect::<Result<_>>()?;
                Example::Plain { text: texts.join(separator), answer: 0 }
            }
            Self::SourceTarget { source, target, with_source, separator } => {
                let prompt = match with_source {
                    true => format!("{}{separator}", row.text(source)?),
                    false => String::new(),
                };
                let answer = prompt.len();
                Example::Plain { text: prompt + row.text(target)?, answer }
            }
            Self::Chat { user, assistant, system } => {
                chat(&[("user", row.text(user)?), ("assistant", row.text(assistant)?)], system)
            }
            Self::Gsm8k { question, answer, system }
            | Self::ProblemAnswer { problem: question, answer, system } => {
                chat(&[("user", row.text(question)?), ("assistant", row.text(answer)?)], system)
            }
            Self::Alpaca { instruction, input, output, system } => {
                let mut prompt = row.text(instruction)?.to_owned();
                if !matches!(row.fields.get(input), None | Some(Value::Null)) {
                    let input = row.text(input)?;
                    if !input.is_empty() {
                        prompt = format!("{prompt}\n\n{input}");
                    }
                }
                chat(&[("user", &prompt), ("assistant", row.text(output)?)], system)
            }
            Self::Sharegpt { conversations, system } => {
                let list = row.value(conversations)?;
                let found = Conversation::from_sharegpt(list).map_err(|problem| {
                    row.problem(format!("field `{conversations}`: {problem}"))
                })?;
                Example::Chat(found.with_system(system.as_deref()))
            }
            Self::Messages { messages, tools, system } => {
                row.value(messages)?;
                let list = row.fields.get_mut(messages).map(Value::take).unwrap_or_default();
                let found = Conversation::from_messages(list, row.fields.get(tools))
                    .map_err(|problem| row.problem(format!("field `{messages}`: {problem}")))?;
                Example::Chat(found.with_system(system.as_deref()))
            }
            Self::Code { prefix, suffix, prompt } => {
                let (given, rest) = (row.text(prefix)?, row.text(suffix)?);
                match prompt {
                    Some(prompt) => {
                        let prompt = prompt.replace("{prefix}", given);
                        chat(&[("user", &prompt), ("assistant", rest)], &None)
                    }
                    None => Example::Plain { text: format!("{given}{rest}"), answer: given.len() },
                }
            }
            Self::Summarise { article, summary, prompt, answer_prefix, system } => {
                let mut conversation = Conversation::default();
                for (text, summary) in pairs(row, article, summary)? {
                    conversation.push("user", &prompt.replace("{article}", text));
                    conversation.push("assistant", &format!("{answer_prefix}{summary}"));
                }
                Example::Chat(conversation.with_system(system.as_deref()))
            }
            Self::PromptCompletion { prompt, completion, tools, system } => {
                let list = prompt_and_completion(row, prompt, completion)?;
                let found = Conversation::from_messages(list, row.fields.get(tools))
                    .map_err(|problem| row.problem(problem))?;
                Example::Chat(found.with_system(system.as_deref()))
            }
            Self::Tokens { ids, loss_mask } => tokens(row, ids, loss_mask)?,
            Self::Auto => {
                let found =
                    Self::detect(&row.fields, None).map_err(|problem| row.problem(problem))?;
                return found.fields_of(row);
            }
        })
    }
}

/// Messages of a prompt and of the answer to it; a text is one message. An answer that begins with
/// another role than the assistant's is the whole conversation.
fn prompt_and_completion(row: &Row, prompt: &str, completion: &str) -> Result<Value> {
    let messages = |field: &str, role: &str| match row.value(field)? {
        Value::String(text) => Ok(vec![serde_json::json!({ "role": role, "content": text })]),
        Value::Array(list) => Ok(list.clone()),
        other => {
            let found = short(other);
            Err(row.problem(format!(
                "field `{field}` is neither text nor a list of messages: {found}"
            )))
        }
    };
    let answer = messages(completion, "assistant")?;
    let is_whole = answer
        .first()
        .and_then(|message| message.get("role"))
        .is_some_and(|role| role != "assistant");
    let mut list = if is_whole { Vec::new() } else { messages(prompt, "user")? };
    list.extend(answer);
    Ok(Value::Array(list))
}

/// A text with its summary, or a list of texts with a list of summaries.
fn pairs<'a>(row: &'a Row, texts: &str, summaries: &str) -> Result<Vec<(&'a str, &'a str)>> {
    let list = |field: &str| -> Result<Vec<&'a str>> {
        match row.value(field)? {
            Value::String(text) => Ok(vec![text.as_str()]),
            Value::Array(list) => list
                .iter()
                .map(|value| {
                    value.as_str().ok_or_else(|| {
                        row.problem(format!("field `{field}` holds {}, no text", short(value)))
                    })
                })
                .collect(),
            other => Err(row.problem(format!("field `{field}` is not text but {}", short(other)))),
        }
    };
    let (left, right) = (list(texts)?, list(summaries)?);
    if left.is_empty() || left.len() != right.len() {
        return Err(row.problem(format!(
            "field `{texts}` has {} texts, `{summaries}` {}",
            left.len(),
            right.len()
        )));
    }
    Ok(left.into_iter().zip(right).collect())
}

/// Label of tokens that other trainers do not learn.
const NOT_LEARNED: i64 = -100;

/// Ids without padding, and which of them are learned.
fn tokens(row: &Row, ids: &str, loss_mask: &str) -> Result<Example> {
    let mut ids = list(row, ids)?
        .iter()
        .map(|value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| row.problem(format!("{} is not a token id", short(value))))
        })
        .collect::<Result<Vec<u32>>>()?;
    let mut loss_mask = learned(row, &ids, loss_mask)?;
    if ids.len() != loss_mask.len() {
        let (ids, mask) = (ids.len(), loss_mask.len());
        return Err(row.problem(format!("{ids} ids but {mask} mask values")));
    }
    if let Some(Value::Array(_)) = row.fields.get("attention_mask") {
        let seen = bits(row, "attention_mask")?;
        if seen.len() != ids.len() {
            let (ids, seen) = (ids.len(), seen.len());
            return Err(row.problem(format!("{ids} ids but {seen} values of `attention_mask`")));
        }
        let (mut of_ids, mut of_mask) = (seen.iter(), seen.iter());
        ids.retain(|_| of_ids.next() == Some(&true));
        loss_mask.retain(|_| of_mask.next() == Some(&true));
    }
    Ok(Example::Tokens { ids, loss_mask })
}

/// Which tokens are learned: by the field that is named, else by one in which other trainers say it, else all.
fn learned(row: &Row, ids: &[u32], loss_mask: &str) -> Result<Vec<bool>> {
    let is_there = |name: &&str| row.fields.get(*name).is_some_and(|value| !value.is_null());
    if let Some(name) = [loss_mask, "assistant_masks", "completion_mask"].into_iter().find(is_there)
    {
        return bits(row, name);
    }
    let Some(Value::Array(labels)) = row.fields.get("labels") else {
        return Ok(vec![true; ids.len()]);
    };
    let label = |(place, label): (usize, &Value)| match label.as_i64() {
        Some(NOT_LEARNED) => Ok(false),
        Some(id) if ids.get(place).is_none_or(|own| i64::from(*own) == id) => Ok(true),
        _ => Err(row.problem(format!(
            "field `labels` holds {} at place {}, which is neither the id there nor {NOT_LEARNED}",
            short(label),
            place + 1
        ))),
    };
    labels.iter().enumerate().map(label).collect()
}

fn bits(row: &Row, field: &str) -> Result<Vec<bool>> {
    let bit = |value: &Value| match (value.as_bool(), value.as_u64()) {
        (Some(bit), _) => Ok(bit),
        (_, Some(number @ 0..=1)) => Ok(number == 1),
        _ => Err(row.problem(format!("{} is not a mask value (0 or 1)", short(value)))),
    };
    list(row, field)?.iter().map(bit).collect()
}

fn list<'a>(row: &'a Row, field: &str) -> Result<&'a Vec<Value>> {
    match row.value(field)? {
        Value::Array(list) => Ok(list),
        other => Err(row.problem(format!("field `{field}` is not a list but {}", short(other)))),
    }
}
