//! How a row becomes text, and which part of the text is learned.
//!
//! A [`Template`] says which fields make an [`Example`]: plain text, a conversation, or tokens. A
//! conversation is rendered by the model's chat template; [`chat`] finds its turns in the result.

pub mod chat;
mod cut;
mod detect;
mod formats;
mod verbatim;

pub use detect::PROMPT_FIELDS;

use std::ops::Range;

use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::conversation::Conversation;
use crate::encoder::TextEncoder;
use chat::ChatLayout;
use cut::{without, without_weight};

pub(crate) use cut::Cut;
pub use formats::Example;
pub use verbatim::{Verbatim, form};

/// Version of how rows become text and masks: raised by every change that gives other tokens or another mask for
/// the same row, so that shards of older rules are not taken for new ones.
pub const RULES: u32 = 5;

/// Which tokens are learned as labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Learn {
    /// Every token.
    All,
    /// All but the system turn.
    NoSystem,
    /// Every assistant turn with its end-of-turn token, without its header.
    Assistant,
    /// The last assistant turn.
    Last,
    /// What follows the prompt: the last assistant turn of a chat, or the answer of a text that
    /// has one. Thinking that the chat template shows belongs to it.
    Answer,
}

/// A row's way to text. Field names have the defaults of the published data sets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub enum Template {
    /// The fields' texts one after another, then the end-of-text token.
    Raw {
        /// Names of text fields.
        #[serde(default = "field::texts")]
        fields: Vec<String>,
        /// Between two fields.
        #[serde(default = "field::newline")]
        separator: String,
    },
    /// The target text and the end-of-text token; the source field before it if asked for.
    SourceTarget {
        /// Field of what comes before.
        #[serde(default = "field::source")]
        source: String,
        /// Field of the text (the answer, when the source is used).
        #[serde(default = "field::target")]
        target: String,
        /// Whether the source is a prompt; published data only names its origin there.
        #[serde(default)]
        with_source: bool,
        /// Between source and target.
        #[serde(default = "field::newline")]
        separator: String,
    },
    /// One question and its answer through the model's chat template.
    Chat {
        /// Field of the user's turn.
        user: String,
        /// Field of the assistant's turn.
        assistant: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
    /// Instruction, optional input, output: one question and its answer.
    Alpaca {
        /// Field of the instruction.
        #[serde(default = "field::instruction")]
        instruction: String,
        /// Field of the input, which may be empty or missing.
        #[serde(default = "field::input")]
        input: String,
        /// Field of the answer.
        #[serde(default = "field::output")]
        output: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
    /// A list of `{from, value}` turns.
    Sharegpt {
        /// Field of the list.
        #[serde(default = "field::conversations")]
        conversations: String,
        /// Text of a system turn for conversations without one.
        #[serde(default)]
        system: Option<String>,
    },
    /// A list of `{role, content}` messages, with `tool_calls` and `reasoning_content` if any.
    Messages {
        /// Field of the list.
        #[serde(default = "field::messages")]
        messages: String,
        /// Field of the tool descriptions, which may be missing.
        #[serde(default = "field::tools")]
        tools: String,
        /// Text of a system turn for conversations without one.
        #[serde(default)]
        system: Option<String>,
    },
    /// A question and its worked answer.
    Gsm8k {
        /// Field of the question.
        #[serde(default = "field::question")]
        question: String,
        /// Field of the answer.
        #[serde(default = "field::answer")]
        answer: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
    /// Code and how it goes on: plain text, or a chat when there is a prompt.
    Code {
        /// Field of the given code.
        #[serde(default = "field::prefix")]
        prefix: String,
        /// Field of the code that follows.
        #[serde(default = "field::suffix")]
        suffix: String,
        /// The user's turn; `{prefix}` stands for the given code.
        #[serde(default)]
        prompt: Option<String>,
    },
    /// Texts and their summaries: strings, or lists of equal length for several turns.
    Summarise {
        /// Field of the text or texts.
        #[serde(default = "field::article")]
        article: String,
        /// Field of the summary or summaries.
        #[serde(rename = "abstract", default = "field::abstract_")]
        summary: String,
        /// The user's turn; `{article}` stands for the text.
        #[serde(default = "field::summarise_prompt")]
        prompt: String,
        /// What every answer starts with.
        #[serde(default)]
        answer_prefix: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
    /// A problem and its answer, usually a long chain of thought.
    ProblemAnswer {
        /// Field of the problem.
        #[serde(default = "field::problem")]
        problem: String,
        /// Field of the answer.
        #[serde(default = "field::answer")]
        answer: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
    /// A prompt and what follows it, each a text or a list of messages. A list of messages that
    /// begins before the answer holds its prompt, as rows of preferences have it.
    PromptCompletion {
        /// Field of the prompt, which may be missing where the other field holds it.
        #[serde(default = "field::prompt")]
        prompt: String,
        /// Field of the answer (of preferences: `chosen`).
        #[serde(default = "field::completion")]
        completion: String,
        /// Field of the tool descriptions, which may be missing.
        #[serde(default = "field::tools")]
        tools: String,
        /// Text of a system turn for conversations without one.
        #[serde(default)]
        system: Option<String>,
    },
    /// Token ids, made elsewhere with this tokenizer. Those with `attention_mask` 0 are padding and left out.
    Tokens {
        /// Field of the ids.
        #[serde(default = "field::input_ids")]
        ids: String,
        /// Field of the mask (0/1 or booleans, one per id). Where it is missing, `assistant_masks`, `completion_mask`
        /// or `labels` (-100: not learned) say it, else all are learned.
        #[serde(default = "field::loss_mask")]
        loss_mask: String,
    },
    /// One of the above, by the fields of the first rows.
    #[default]
    Auto,
}

/// Default field names.
mod field {
    macro_rules! names {
        ($($function:ident = $text:expr),* $(,)?) => {
            $(pub(super) fn $function() -> String { $text.to_owned() })*
        };
    }
    names!(
        newline = "\n",
        source = "source",
        target = "target",
        instruction = "instruction",
        input = "input",
        output = "output",
        conversations = "conversations",
        messages = "messages",
        tools = "tools",
        question = "question",
        answer = "answer",
        prefix = "prefix",
        suffix = "suffix",
        article = "article",
        abstract_ = "abstract",
        problem = "problem",
        prompt = "prompt",
        completion = "completion",
        input_ids = "input_ids",
        loss_mask = "loss_mask",
        summarise_prompt = "Please summarize the following article: {article}",
    );

    pub(super) fn texts() -> Vec<String> {
        vec!["text".to_owned()]
    }
}

impl Template {
    /// Whether rows go through the model's chat template.
    pub fn is_chat(&self) -> bool {
        match self {
            Self::Raw { .. } | Self::SourceTarget { .. } | Self::Tokens { .. } | Self::Auto => {
                false
            }
            Self::Code { prompt, .. } => prompt.is_some(),
            _ => true,
        }
    }

    /// What is learned where a source does not say: the assistant's turns of conversations, the answer
    /// to a prompt, all of a text.
    pub fn usual_learn(&self) -> Learn {
        match self {
            Self::Messages { .. } | Self::Sharegpt { .. } | Self::Summarise { .. } => {
                Learn::Assistant
            }
            Self::Chat { .. }
            | Self::Alpaca { .. }
            | Self::Gsm8k { .. }
            | Self::ProblemAnswer { .. }
            | Self::PromptCompletion { .. }
            | Self::Code { .. }
            | Self::SourceTarget { with_source: true, .. } => Learn::Answer,
            Self::Raw { .. } | Self::SourceTarget { .. } | Self::Tokens { .. } | Self::Auto => {
                Learn::All
            }
        }
    }

    /// What makes no sense, alone or with `learn`; where the template is recognised, the user gave `learn` alone.
    pub(crate) fn problems(&self, learn: Option<Learn>, is_recognised: bool) -> Vec<Problem> {
        let mut rules = Rules::default();
        let names_no_field = matches!(self, Self::Raw { fields, .. } if fields.is_empty());
        rules.require(!names_no_field, "template.fields", "must name at least one field");
        let lost =
            matches!(self, Self::Code { prompt: Some(prompt), .. } if !prompt.contains("{prefix}"));
        rules.require(!lost, "template.prompt", "must contain `{prefix}`");
        let lost = matches!(self, Self::Summarise { prompt, .. } if !prompt.contains("{article}"));
        rules.require(!lost, "template.prompt", "must contain `{article}`");
        let has_answer = self.is_chat()
            || matches!(
                self,
                Self::SourceTarget { with_source: true, .. } | Self::Code { .. } | Self::Auto
            );
        if let Some(learn) = learn.filter(|learn| !has_answer && *learn != Learn::All) {
            let learn = serde_json::to_value(learn).unwrap_or_default();
            let way_out = match self {
                _ if is_recognised => {
                    "leave `learn` (--learn of a command) out, or set it to `all`"
                }
                Self::SourceTarget { .. } => {
                    "set `with_source: true` in the template, which makes `source` the prompt"
                }
                Self::Tokens { .. } => "tokens bring their own mask: leave `learn` out",
                _ => "leave `template` out, so that the format is recognised, or set `learn: all`",
            };
            let learn = learn.as_str().unwrap_or_default();
            let text =
                format!("is `{learn}`, which needs rows of a prompt and an answer: {way_out}");
            rules.require_with(false, "learn", &["template"], text);
        }
        rules.into_problems()
    }
}

/// Text and the bytes of it that are learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// What the tokenizer reads.
    pub text: String,
    /// Learned bytes: ascending ranges that do not overlap.
    pub learned: Vec<Range<usize>>,
    /// Whether the start-of-text token precedes, not learned, where the model's tokenizer adds one.
    pub add_start: bool,
    /// Whether the end-of-text token follows, learned.
    pub append_end: bool,
}

/// Renders a plain text whose answer begins at byte `answer`.
pub(crate) fn render_plain(text: String, answer: usize, learn: Learn) -> Rendered {
    let start = if learn == Learn::All || learn == Learn::NoSystem { 0 } else { answer };
    Rendered {
        learned: std::iter::once(start..text.len()).collect(),
        text,
        add_start: true,
        append_end: true,
    }
}

/// Renders a conversation; `layout` is needed unless everything is learned. The end-of-turn marks of answers
/// that were cut off are not learned: the model did not write them. An answer that stands verbatim is learned as it was
/// written.
///
/// # Errors
/// - the model has no chat template, it refuses the messages, or its turns cannot be found
pub(crate) fn render_conversation(
    conversation: &Conversation,
    learn: Learn,
    layout: Option<&ChatLayout>,
    (cut, verbatim): (&Cut, Option<&Verbatim>),
    encoder: &dyn TextEncoder,
) -> std::result::Result<Rendered, String> {
    if let (Some(verbatim), Some(layout)) = (verbatim, layout)
        && let Some(rendered) =
            verbatim::render(conversation, learn, (layout, cut), verbatim, encoder)
    {
        return Ok(rendered);
    }
    let rendered =
        |text, learned: Vec<_>| Rendered { text, learned, add_start: false, append_end: false };
    let is_cut = *cut != Cut::Nowhere;
    if learn == Learn::All {
        let text = encoder.render_chat(conversation, false)?;
        let mut learned: Vec<_> = std::iter::once(0..text.len()).collect();
        // Where no turns can be found, all stays learned.
        if let (true, Some(layout)) = (is_cut, layout)
            && let Ok(turns) = layout.locate(conversation, encoder)
        {
            learned = without(&learned, &cut.ends_of(layout, &turns));
        }
        return Ok(rendered(text, learned));
    }
    if learn != Learn::NoSystem
        && !(0..conversation.messages.len()).any(|index| conversation.has_no_weight(index))
        && let Some((text, mut turns)) = encoder.render_generated(conversation)?
    {
        if learn != Learn::Assistant {
            let answered = conversation.messages.len().checked_sub(1);
            let answered = answered.is_some_and(|last| conversation.role(last) == "assistant");
            turns = turns.pop().filter(|_| answered).into_iter().collect();
        }
        if let (true, Some(layout)) = (is_cut, layout) {
            let ends = match layout.locate(conversation, encoder) {
                Ok(found) if found.text == text => cut.ends_of(layout, &found),
                _ => layout.ends(&text, &turns),
            };
            turns = without(&turns, &ends);
        }
        return Ok(rendered(text, turns));
    }
    let layout = layout.ok_or("the chat template's turns are not known")?;
    let turns = layout.locate(conversation, encoder)?;
    let ends = cut.ends_of(layout, &turns);
    let left_out = match learn {
        Learn::NoSystem => Vec::new(),
        _ => without_weight(conversation, &turns),
    };
    let learned: Vec<Range<usize>> = match learn {
        Learn::NoSystem => turns.without_system(),
        Learn::Assistant => turns.assistant,
        Learn::All | Learn::Last | Learn::Answer => turns.last_assistant.into_iter().collect(),
    };
    Ok(rendered(turns.text, without(&without(&learned, &ends), &left_out)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::tests::{Bytes, Other};
    use crate::encoder::GeneratedText;

    /// Marks what the assistant says, without the end of its turn.
    fn marked(of: &Conversation) -> std::result::Result<Option<GeneratedText>, String> {
        let text = Bytes.render_chat(of, false)?;
        let starts = text.match_indices("<assistant>").map(|(at, header)| at + header.len());
        let turns = starts.map(|at| at..at + text[at..].find('|').unwrap_or(0)).collect();
        Ok(Some((text, turns)))
    }

    fn learned(turns: &[(&str, &str)], learn: Learn) -> Vec<String> {
        let encoder = Other { generated: marked, ..Other::default() };
        let layout = ChatLayout::probe(&encoder).expect("layout");
        let conversation = Conversation::of(turns);
        let cut = (&Cut::Nowhere, None);
        let rendered = render_conversation(&conversation, learn, Some(&layout), cut, &encoder);
        let rendered = rendered.expect("rendered");
        rendered.learned.into_iter().map(|range| rendered.text[range].to_owned()).collect()
    }

    #[test]
    fn a_template_s_own_marks_decide_what_is_learned() {
        let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
        assert_eq!(learned(&turns, Learn::Assistant), ["b", "d"]);
        assert_eq!(learned(&turns, Learn::Last), ["d"]);
        assert_eq!(learned(&turns, Learn::Answer), ["d"]);
        assert_eq!(learned(&turns[..3], Learn::Last), Vec::<String>::new());
        assert_eq!(learned(&turns[..2], Learn::All), ["<user>a|<assistant>b|"]);
    }
}
