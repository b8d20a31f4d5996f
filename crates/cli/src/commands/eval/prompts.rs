//! Prompt sets: the published ones by name, or any JSONL file.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;

use longdraft_data::Result as DataResult;
use longdraft_data::conversation::{Conversation, VARIABLES};
use longdraft_data::source::{Row, read_jsonl};
use longdraft_decode::evaluate::Prompt;
use longdraft_decode::{DecodeOptions, SpeculativeDecoder};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::{Message, TextTokenizer};
use serde_json::{Map, Value};

use crate::cli::EvalDecodeArguments;
use crate::decoding::{encode_chat_with, encode_text, stop_tokens};
use crate::failure::{Failure, Result};
use crate::progress::Lines;

/// Directory of named sets, as in configurations.
const DATA_ROOT: &str = "LONGDRAFT_DATA";

pub(crate) struct PromptSet<'a> {
    /// Name or file.
    pub(crate) name: &'a str,
    /// Of a file's rows.
    pub(crate) field: &'a str,
    /// Whether a file's prompts are a user's turn.
    pub(crate) chat: bool,
    /// Prompts at most (of each category, where there are categories).
    pub(crate) limit: Option<usize>,
    /// Lengths to cut documents to.
    pub(crate) contexts: &'a [usize],
    /// Room that the answer needs.
    pub(crate) max_tokens: usize,
}

impl<'a> PromptSet<'a> {
    /// What `eval decode` was asked for.
    pub(super) fn of(arguments: &'a EvalDecodeArguments) -> Self {
        Self {
            name: &arguments.prompts,
            field: &arguments.field,
            chat: arguments.chat,
            limit: arguments.limit,
            contexts: &arguments.contexts,
            max_tokens: arguments.max_tokens,
        }
    }
}

/// What a named set's rows look like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `category` and `turns`.
    Turns,
    /// One field.
    Field(&'static str),
    /// `document` and `question`.
    Document,
}

const NAMED: [(&str, &str, Layout); 5] = [
    ("spec-bench", "spec-bench.jsonl", Layout::Turns),
    ("mt-bench", "mt-bench.jsonl", Layout::Turns),
    ("gsm8k", "gsm8k-test.jsonl", Layout::Field("question")),
    ("humaneval", "humaneval.jsonl", Layout::Field("prompt")),
    ("longdoc", "longdoc-eval.jsonl", Layout::Document),
];

/// The categories of MT-bench, which Spec-Bench gives as one.
const MT_BENCH: [&str; 8] =
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"];

/// Whether a set is a published one, whose prompts are turns where turns are known.
pub(super) fn is_named(set: &str) -> bool {
    NAMED.iter().any(|(name, ..)| *name == set)
}

/// Whom a set is read for, and what becomes of its texts there.
pub(crate) trait Reader {
    type Prompt;

    /// A prompt of a text that is continued as it is.
    fn text(&self, category: &str, text: &str) -> Result<Self::Prompt>;

    /// A prompt of a conversation, the user's turn the last one, with variables of its own for the chat template.
    fn turns(
        &self,
        category: &str,
        messages: &[Message],
        own: &Map<String, Value>,
    ) -> Result<Self::Prompt>;

    fn knows_turns(&self) -> bool;

    /// Tokens of a prompt, if they can be counted here.
    fn length(&self, prompt: &Self::Prompt) -> Result<Option<usize>>;

    /// What counts tokens, and how many the context has.
    fn ruler(&self) -> Option<(&TextTokenizer, usize)>;

    /// The greedy answer to a first turn, which the second one follows; none where the prompt is refused.
    fn answer(&self, prompt: &Self::Prompt, max_tokens: usize) -> Result<Option<String>>;
}

/// Reads and encodes a set. Second turns follow on the target's own greedy answers.
pub(crate) fn read(
    set: &PromptSet<'_>,
    target: &Target,
    tokenizer: &TextTokenizer,
) -> Result<Vec<Prompt>> {
    read_for(set, &Local { target, tokenizer })
}

/// The same for any reader.
pub(crate) fn read_for<R: Reader>(set: &PromptSet<'_>, reader: &R) -> Result<Vec<R::Prompt>> {
    let encoder = Encoder::new(set, reader);
    let named = NAMED.iter().find(|(name, ..)| *name == set.name);
    let prompts = match named {
        Some((name, file, layout)) => encoder.named(name, file, *layout)?,
        None => encoder.file()?,
    };
    some(prompts, set)
}

/// Encodes rows that a program hands over, as a file's.
pub(super) fn of_rows(
    set: &PromptSet<'_>,
    rows: Vec<Row>,
    target: &Target,
    tokenizer: &TextTokenizer,
) -> Result<Vec<Prompt>> {
    let reader = Local { target, tokenizer };
    some(Encoder::new(set, &reader).rows(rows.into_iter().map(Ok))?, set)
}

/// Refuses none.
fn some<P>(prompts: Vec<P>, set: &PromptSet<'_>) -> Result<Vec<P>> {
    if prompts.is_empty() {
        return Err(Failure::usage(format!("{}: there are no prompts", set.name)));
    }
    Ok(prompts)
}

/// A target that is open here.
struct Local<'a> {
    target: &'a Target,
    tokenizer: &'a TextTokenizer,
}

impl Reader for Local<'_> {
    type Prompt = Prompt;

    fn text(&self, category: &str, text: &str) -> Result<Prompt> {
        let tokens = encode_text(text, self.tokenizer, self.target)?;
        Ok(Prompt { category: category.to_owned(), tokens })
    }

    fn turns(
        &self,
        category: &str,
        messages: &[Message],
        own: &Map<String, Value>,
    ) -> Result<Prompt> {
        let tokens = encode_chat_with(messages, own, self.tokenizer)?;
        Ok(Prompt { category: category.to_owned(), tokens })
    }

    fn knows_turns(&self) -> bool {
        self.tokenizer.chat_template().is_some()
    }

    fn length(&self, prompt: &Prompt) -> Result<Option<usize>> {
        Ok(Some(prompt.tokens.len()))
    }

    fn ruler(&self) -> Option<(&TextTokenizer, usize)> {
        Some((self.tokenizer, self.target.config().max_position_embeddings))
    }

    fn answer(&self, prompt: &Prompt, max_tokens: usize) -> Result<Option<String>> {
        let options = DecodeOptions {
            max_new_tokens: max_tokens,
            stop_tokens: stop_tokens(self.target),
            ..DecodeOptions::default()
        };
        let all = &mut |_| ControlFlow::Continue(());
        let mut decoder = SpeculativeDecoder::new(self.target, None);
        let tokens = decoder.generate(&prompt.tokens, &options, all)?.tokens;
        let ids = tokens.iter().filter(|token| !options.stop_tokens.contains(token));
        let ids: Vec<u32> = ids.map(|token| token.0).collect();
        Ok(Some(self.tokenizer.decode(&ids, true)?))
    }
}

struct Encoder<'a, R> {
    set: &'a PromptSet<'a>,
    reader: &'a R,
    /// First turns that were answered, and when that is told.
    answered: Cell<(usize, Lines)>,
}

impl<'a, R: Reader> Encoder<'a, R> {
    fn new(set: &'a PromptSet<'a>, reader: &'a R) -> Self {
        Self { set, reader, answered: Cell::new((0, Lines::later())) }
    }

    fn named(&self, name: &str, file: &str, layout: Layout) -> Result<Vec<R::Prompt>> {
        let root = std::env::var_os(DATA_ROOT).map_or_else(|| PathBuf::from("data"), PathBuf::from);
        let path = root.join(file);
        if !path.is_file() {
            return Err(Failure::usage(format!("{name}: {} is not there", path.display())).hint(
                format!(
                    "put the published file there, set {DATA_ROOT} to where it is, or give a file"
                ),
            ));
        }
        if !self.set.contexts.is_empty() && layout != Layout::Document {
            return Err(Failure::usage(format!("--contexts cuts documents, {name} has none"))
                .hint("use --prompts longdoc"));
        }
        let mut prompts = Vec::new();
        let mut used: BTreeMap<String, usize> = BTreeMap::new();
        for row in read_jsonl(&path)? {
            let row = row?;
            let category = category(name, &row, layout)?;
            let count = used.entry(category.clone()).or_insert(0);
            if self.set.limit.is_some_and(|limit| *count >= limit) {
                continue;
            }
            *count += 1;
            match layout {
                Layout::Turns => prompts.extend(self.turns(name, &row, &category)?),
                Layout::Field(field) => prompts.push(self.turn(&category, row.text(field)?)?),
                Layout::Document => prompts.extend(self.document(&row, &category)?),
            }
        }
        Ok(prompts)
    }

    fn file(&self) -> Result<Vec<R::Prompt>> {
        let path = PathBuf::from(self.set.name);
        if !path.exists() {
            let names = NAMED.map(|(name, ..)| name).join(", ");
            return Err(Failure::usage(format!("{}: no such file", self.set.name))
                .hint(format!("give a JSONL file, or one of {names}")));
        }
        if !self.set.contexts.is_empty() {
            let name = self.set.name;
            return Err(Failure::usage(format!("--contexts cuts documents, {name} has prompts"))
                .hint("leave --contexts out, or use --prompts longdoc"));
        }
        self.rows(read_jsonl(&path)?)
    }

    fn rows(&self, rows: impl Iterator<Item = DataResult<Row>>) -> Result<Vec<R::Prompt>> {
        rows.take(self.set.limit.unwrap_or(usize::MAX)).map(|row| self.row(&row?)).collect()
    }

    /// A row's text as it is, or as a user's turn with the row's own variables.
    fn row(&self, row: &Row) -> Result<R::Prompt> {
        let text = row.text(self.set.field);
        let text = text.map_err(|error| {
            Failure::from(error).or_hint("--field names the field of the prompt")
        })?;
        let category = row.fields.get("category").and_then(Value::as_str).unwrap_or("all");
        let own = Conversation::variables_of(&row.fields);
        let own = own.map_err(|problem| row.problem(problem))?;
        let prompt = if self.set.chat {
            self.reader.turns(category, &[Message::new("user", text)], &own)?
        } else if own.is_empty() {
            self.reader.text(category, text)?
        } else {
            let problem = format!("`{VARIABLES}`: the text goes through no chat template");
            return Err(Failure::usage(row.problem(problem)).hint("add --chat"));
        };
        self.check(row, &prompt)?;
        Ok(prompt)
    }

    /// A user's turn where turns are known.
    fn turn(&self, category: &str, text: &str) -> Result<R::Prompt> {
        self.turns_or_text(category, &[Message::new("user", text)])
    }

    fn turns_or_text(&self, category: &str, messages: &[Message]) -> Result<R::Prompt> {
        if self.reader.knows_turns() {
            return self.reader.turns(category, messages, &Map::new());
        }
        let texts: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        self.reader.text(category, &texts.join("\n\n"))
    }

    fn turns(&self, name: &str, row: &Row, category: &str) -> Result<Vec<R::Prompt>> {
        let turns = row.value("turns")?.as_array().filter(|turns| !turns.is_empty());
        let turns = turns.ok_or_else(|| row.problem("`turns` is not a list of texts"))?;
        let mut messages = Vec::new();
        let mut prompts = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            let turn = turn.as_str();
            let turn = turn.ok_or_else(|| row.problem("`turns` holds something else than text"))?;
            messages.push(Message::new("user", turn));
            let prompt = self.turns_or_text(category, &messages)?;
            let length = self.reader.length(&prompt)?.unwrap_or(0);
            let fits = self.context().is_none_or(|most| length + self.set.max_tokens <= most);
            let answer = if fits && index + 1 < turns.len() {
                self.reader.answer(&prompt, self.set.max_tokens)?
            } else {
                fits.then(String::new)
            };
            let Some(answer) = answer else {
                errln!("{name}: {} left out, it does not fit the context", row.origin());
                break;
            };
            if index + 1 < turns.len() {
                messages.push(Message::new("assistant", answer));
                self.tell();
            }
            prompts.push(prompt);
        }
        Ok(prompts)
    }

    /// Answers take minutes on a slow machine.
    fn tell(&self) {
        let (answered, mut lines) = self.answered.get();
        if lines.are_due(false) {
            errln!("    {:>3} first turns answered, for the second ones", answered + 1);
        }
        self.answered.set((answered + 1, lines));
    }

    fn context(&self) -> Option<usize> {
        self.reader.ruler().map(|(_, context)| context)
    }

    /// A document cut at its end so that question and answer still fit, to each length asked for; whole
    /// where nothing here counts its tokens.
    fn document(&self, row: &Row, category: &str) -> Result<Vec<R::Prompt>> {
        let (document, question) = (row.text("document")?, row.text("question")?);
        let question = format!("\n\n{question}");
        let around = self.reader.length(&self.turn(category, &question)?)?;
        let (Some((tokenizer, context)), Some(around)) = (self.reader.ruler(), around) else {
            return Ok(vec![self.turn(category, &format!("{document}{question}"))?]);
        };
        let encoded = tokenizer.encode(document)?;
        let most = context.saturating_sub(self.set.max_tokens);
        let whole = [most];
        let lengths = if self.set.contexts.is_empty() { &whole[..] } else { self.set.contexts };
        let mut prompts = Vec::new();
        for &length in lengths {
            // Cutting may split a word in two tokens: a little room is left.
            let room = length.min(most).saturating_sub(around + 4);
            let asked = !self.set.contexts.is_empty();
            if room == 0 || (asked && (encoded.ids.len() < room || length > most)) {
                errln!("{} left out at {length} tokens", row.origin());
                continue;
            }
            let end = encoded.offsets.get(room).map_or(document.len(), |range| range.start);
            let end = (0..=end).rev().find(|at| document.is_char_boundary(*at)).unwrap_or(0);
            let prompt = self.turn(category, &format!("{}{question}", &document[..end]))?;
            self.check(row, &prompt)?;
            prompts.push(prompt);
        }
        Ok(prompts)
    }

    fn check(&self, row: &Row, prompt: &R::Prompt) -> Result<()> {
        let (tokens, context) = (self.reader.length(prompt)?, self.context());
        if let (Some(tokens), Some(context)) = (tokens, context)
            && tokens >= context
        {
            let problem = format!("{tokens} tokens leave no room in the context of {context}");
            return Err(Failure::usage(row.problem(problem)).hint("shorten it or leave it out"));
        }
        Ok(())
    }
}

/// The group that a row is reported in.
fn category(name: &str, row: &Row, layout: Layout) -> Result<String> {
    Ok(match layout {
        Layout::Field(_) => name.to_owned(),
        Layout::Document => row.text("kind")?.to_owned(),
        Layout::Turns => {
            let category = row.text("category")?;
            let grouped = name == "spec-bench" && MT_BENCH.contains(&category);
            if grouped { "mt_bench".to_owned() } else { category.to_owned() }
        }
    })
}
