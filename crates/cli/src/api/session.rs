//! Decoding: a session answers prompts one after another, on a thread of its own.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use longdraft_decode::{DraftShape, EndReason, Origin, SpeculativeDecoder};
use longdraft_models::tokenizer::Message;
use longdraft_models::{DeviceChoice, TargetTokenId};
use serde_json::Value;

use super::error::{Error, Result};
use super::models::{Draft, Target};
use crate::answer::{Written, to_json};
use crate::cli::{
    DecodingArguments, LookupChoice, OpenOptions, PaceChoice, VerifyChoice, names_of, parse_tree,
};
use crate::decoding::{Models, encode_chat, encode_text, stops};
use crate::failure::Failure;

/// How a session drafts.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Draft with the target's own block for prediction of several tokens, in place of a draft.
    pub mtp: bool,
    /// Tokens of a chain, proposed per round.
    pub draft_len: usize,
    /// A tree in place of the chain; [`layout`] reads one.
    pub tree: Option<DraftShape>,
    /// Also propose what stood earlier in the text.
    pub lookup: Option<LookupChoice>,
    /// Rows in whose answers lookup also looks.
    pub datastore: Vec<PathBuf>,
    /// Propose no further where a draft with a confidence head gives less than this; 0 never stops.
    pub confidence_threshold: f64,
    /// How proposals are tested at a temperature.
    pub verify: VerifyChoice,
    /// A file with the tokens that are proposed, a token id a line.
    pub draft_vocab: Option<PathBuf>,
    /// Of them, so many.
    pub draft_vocab_size: Option<usize>,
    /// Who decides how much is drafted.
    pub pace: PaceChoice,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            mtp: false,
            draft_len: 4,
            tree: None,
            lookup: None,
            datastore: Vec::new(),
            confidence_threshold: 0.0,
            verify: VerifyChoice::Ratio,
            draft_vocab: None,
            draft_vocab_size: None,
            pace: PaceChoice::Measured,
        }
    }
}

impl SessionOptions {
    /// As the commands take them.
    pub(super) fn arguments(&self, draft: Option<&Draft>, open: &OpenOptions) -> DecodingArguments {
        DecodingArguments {
            draft: draft.map(|draft| draft.path.clone()),
            mtp: self.mtp,
            lookup: self.lookup,
            datastore: self.datastore.clone(),
            draft_len: self.draft_len,
            tree: self.tree.clone(),
            confidence_threshold: self.confidence_threshold,
            verify: self.verify,
            draft_vocab: self.draft_vocab.clone(),
            draft_vocab_size: self.draft_vocab_size,
            held: *open,
            pace: Some(self.pace),
            ..DecodingArguments::plain()
        }
    }
}

/// Reads a layout of proposals as `--tree` does: `static:4,8,8`, `dynamic:10,6,60`, `sampled:3,2,1`.
///
/// # Errors
/// - it is none
pub fn layout(text: &str) -> Result<DraftShape> {
    Ok(parse_tree(text).map_err(|problem| Failure::usage(format!("tree `{text}`: {problem}")))?)
}

/// Reads a choice by its name, as the option `what` of a command does.
///
/// # Errors
/// - there is no such choice
pub fn choice<T: clap::ValueEnum>(what: &str, name: &str) -> Result<T> {
    let found = T::from_str(name, false);
    Ok(found.map_err(|_| {
        Failure::usage(format!("`{name}` is no {what}")).hint(format!("give {}", names_of::<T>()))
    })?)
}

/// Reads a device: `auto`, `cpu`, `cuda:0`, `metal:0`.
///
/// # Errors
/// - it is none
pub fn device(name: &str) -> Result<DeviceChoice> {
    let device: std::result::Result<DeviceChoice, String> = name.parse();
    Ok(device.map_err(Failure::usage)?)
}

/// Opens target, tokenizer and draft of a session for its commands' work.
pub(super) fn models(
    target: &Target,
    draft: Option<&Draft>,
    arguments: &DecodingArguments,
) -> Result<Models> {
    if arguments.mtp && draft.is_some() {
        return Err(Failure::usage("a draft and the target's own block do not draft together")
            .hint("leave out the draft or `mtp`")
            .into());
    }
    let block = arguments.open_block(target.name())?;
    let weights = draft.map(|draft| draft.weights(&target.weights)).transpose()?;
    let opened = (Arc::clone(&target.weights), Arc::clone(&target.tokenizer));
    Ok(arguments.with(opened, draft.map(|draft| &draft.source), (weights, block))?)
}

/// What is asked for.
#[derive(Debug, Clone)]
pub struct AnswerOptions {
    /// Most tokens.
    pub max_tokens: usize,
    /// 0: the most likely token always.
    pub temperature: f64,
    /// Keep only so many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens until their mass reaches this.
    pub top_p: f64,
    /// Keep tokens at least this likely, relative to the most likely one.
    pub min_p: f64,
    /// Key of all random draws.
    pub seed: u64,
    /// Texts that end the answer, left out of it.
    pub stop: Vec<String>,
    /// Tokens that end it, written out or their ids.
    pub stop_tokens: Vec<String>,
    /// Go on after tokens that end a text.
    pub ignore_eos: bool,
}

impl Default for AnswerOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// Text that a token made certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Never empty.
    pub text: String,
    /// What proposed the token; the target's own if nothing did.
    pub proposed_by: Option<Origin>,
}

/// An answer that is complete.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its text, without what ended it.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens per pass of the target, its own included.
    pub tau: f64,
    /// All figures and the tokens, as `generate --json` gives them.
    pub figures: Value,
}

/// What a session's thread is asked to do.
struct Task {
    prompt: Prompt,
    options: AnswerOptions,
    tell: Sender<Told>,
    cancelled: Arc<AtomicBool>,
}

/// What is answered.
enum Prompt {
    /// A text, which the answer continues.
    Text(Vec<TargetTokenId>),
    /// A user's turn, which becomes a part of its conversation, and how many conversations were before that.
    Turn(String, u64),
}

enum Told {
    Piece(Piece),
    End(Result<Answer>),
}

/// What was said in a conversation.
#[derive(Default)]
struct Said {
    /// In order.
    messages: Vec<Message>,
    /// Conversations before this one: a turn of one of them no longer counts.
    before: u64,
}

type History = Arc<Mutex<Said>>;

/// The conversation, for as long as nobody else needs it.
fn locked(history: &History) -> MutexGuard<'_, Said> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers prompts, one after another; keeps what it measured of drafting, and the cache of a
/// conversation. Several may work at once, each on a thread of its own.
///
/// ```no_run
/// use longdraft::{AnswerOptions, Draft, Session, Target};
///
/// # fn main() -> longdraft::Result<()> {
/// let target = Target::open("model.gguf")?;
/// let draft = Draft::open("runs/mine/draft")?;
/// let session = Session::new(&target, Some(&draft))?;
/// for piece in session.stream("Once upon a time", &AnswerOptions::default())? {
///     print!("{}", piece?.text);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Session {
    target: Target,
    drafter: String,
    history: History,
    tasks: Sender<Task>,
}

impl Session {
    /// Decodes with a draft, or plainly without one.
    ///
    /// # Errors
    /// - the draft does not fit the target
    pub fn new(target: &Target, draft: Option<&Draft>) -> Result<Self> {
        Self::with(target, draft, &SessionOptions::default())
    }

    /// The same, drafting as asked.
    ///
    /// # Errors
    /// - as [`Self::new`], or the options do not fit each other or the draft
    pub fn with(target: &Target, draft: Option<&Draft>, options: &SessionOptions) -> Result<Self> {
        let arguments = options.arguments(draft, target.options());
        // What does not fit is told here, not by the first answer.
        arguments.options(0.0, options.pace)?;
        let models = models(target, draft, &arguments)?;
        arguments.drafter(&models)?;
        let drafter = arguments.drafter_parts(&models).to_string();
        let history = History::default();
        let (tasks, work) = channel();
        let said = Arc::clone(&history);
        std::thread::Builder::new()
            .name("session".to_owned())
            .spawn(move || answer_all(&models, &arguments, &said, &work))
            .map_err(|error| Failure::work(format!("cannot start a thread: {error}")))?;
        Ok(Self { target: target.clone(), drafter, history, tasks })
    }

    /// What it decodes.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// What drafts: a method, `lookup`, both, or `none`.
    pub fn drafter(&self) -> &str {
        &self.drafter
    }

    /// Continues a text.
    ///
    /// # Errors
    /// - the prompt is empty or longer than the context, the options make no sense, a model cannot run
    pub fn generate(&self, prompt: &str, options: &AnswerOptions) -> Result<Answer> {
        self.stream(prompt, options)?.answer()
    }

    /// The same, piece by piece. Where the stream is dropped the answer ends.
    ///
    /// # Errors
    /// - as [`Self::generate`]
    pub fn stream(&self, prompt: &str, options: &AnswerOptions) -> Result<Stream> {
        let prompt = encode_text(prompt, &self.target.tokenizer, &self.target.weights)?;
        self.ask(Prompt::Text(prompt), options)
    }

    /// Answers a user's turn through the target's chat template; both become part of the conversation.
    ///
    /// # Errors
    /// - as [`Self::generate`], or the target has no chat template
    pub fn chat(&self, text: &str, options: &AnswerOptions) -> Result<Answer> {
        self.chat_stream(text, options)?.answer()
    }

    /// The same, piece by piece. It follows the turns that were asked for before it, also where their streams were
    /// dropped; so the stream tells what is wrong with the conversation.
    ///
    /// # Errors
    /// - `max_tokens` is 0, or the session's thread has ended
    pub fn chat_stream(&self, text: &str, options: &AnswerOptions) -> Result<Stream> {
        let conversation = locked(&self.history).before;
        self.ask(Prompt::Turn(text.to_owned(), conversation), options)
    }

    /// What was said, in order.
    pub fn messages(&self) -> Vec<Message> {
        locked(&self.history).messages.clone()
    }

    /// Forgets the conversation, with a turn that is under way; it begins anew with these messages.
    pub fn restart(&self, messages: Vec<Message>) {
        let mut said = locked(&self.history);
        *said = Said { messages, before: said.before + 1 };
    }

    fn ask(&self, prompt: Prompt, options: &AnswerOptions) -> Result<Stream> {
        if options.max_tokens == 0 {
            return Err(Failure::usage("max_tokens must be at least 1").into());
        }
        let (tell, told) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let (options, stop) = (options.clone(), Arc::clone(&cancelled));
        let task = Task { prompt, options, tell, cancelled: stop };
        self.tasks.send(task).map_err(|_| ended())?;
        Ok(Stream { told, cancelled, is_over: false, answer: None })
    }
}

fn ended() -> Error {
    Error::fault("the session's thread has ended")
}

/// Works until the session is dropped.
fn answer_all(
    models: &Models,
    arguments: &DecodingArguments,
    history: &History,
    work: &Receiver<Task>,
) {
    // It was made once already.
    let Ok(drafter) = arguments.drafter(models) else { return };
    let mut decoder = SpeculativeDecoder::new(&models.target, drafter);
    for task in work {
        let answer = if task.cancelled.load(Ordering::Relaxed) {
            Err(Failure::interrupted(0).into())
        } else {
            answer(&mut decoder, models, arguments, history, &task)
        };
        // Who no longer listens does not need the end.
        let _ = task.tell.send(Told::End(answer));
    }
}

fn answer(
    decoder: &mut SpeculativeDecoder<'_>,
    models: &Models,
    arguments: &DecodingArguments,
    history: &History,
    task: &Task,
) -> Result<Answer> {
    let asked = &task.options;
    let AnswerOptions { temperature, top_k, top_p, min_p, seed, .. } = *asked;
    let arguments = DecodingArguments { top_k, top_p, min_p, seed, ..arguments.clone() };
    let mut options = arguments.options(temperature, PaceChoice::Measured)?;
    options.max_new_tokens = asked.max_tokens;
    options.stop_tokens =
        stops(asked.ignore_eos, &asked.stop_tokens, &models.tokenizer, &models.target)?;
    let (prompt, goes_on) = match &task.prompt {
        Prompt::Text(tokens) => (Cow::Borrowed(&tokens[..]), Some(&tokens[..])),
        Prompt::Turn(turn, _) => {
            // Here the turns before it are over, and a part of the conversation.
            let mut messages = locked(history).messages.clone();
            options.reuse_prefix = true;
            messages.push(Message::new("user", turn));
            (Cow::Owned(encode_chat(&messages, &models.tokenizer)?), None)
        }
    };
    let mut written = Written::new(&models.tokenizer, goes_on, &options.stop_tokens, &asked.stop)?;
    let tell = |text: &str, proposed_by| {
        let piece = Piece { text: text.to_owned(), proposed_by };
        let _ = task.tell.send(Told::Piece(piece));
    };
    let is_wanted = || !task.cancelled.load(Ordering::Relaxed);
    let generation = decoder.generate_while(&is_wanted, &prompt, &options, &mut |committed| {
        if !is_wanted() {
            return ControlFlow::Break(EndReason::Interrupted);
        }
        written.hear(committed, &mut |text| tell(text, committed.proposed_by))
    });
    let text = written.finish(&mut |rest| tell(rest, None));
    let generation = generation?;
    let text = text?;
    if let Prompt::Turn(turn, before) = &task.prompt {
        let mut said = locked(history);
        if said.before == *before {
            said.messages.extend([Message::new("user", turn), Message::new("assistant", &text)]);
        }
    }
    Ok(Answer {
        prompt_tokens: prompt.len(),
        tau: generation.metrics.acceptance_length(),
        figures: to_json(&generation, &text),
        text,
    })
}

/// Longest wait between two looks at an answer.
const LONG: Duration = Duration::from_hours(1);

/// An answer while it is written.
pub struct Stream {
    told: Receiver<Told>,
    cancelled: Arc<AtomicBool>,
    is_over: bool,
    answer: Option<Result<Answer>>,
}

/// What came of waiting for a piece.
#[derive(Debug)]
pub enum Next {
    /// It came.
    Piece(Piece),
    /// Nothing came yet.
    Nothing,
    /// The answer is over.
    End,
}

impl Stream {
    /// Waits for the next piece, so long at most.
    pub fn next_within(&mut self, time: Duration) -> Next {
        if self.is_over {
            return Next::End;
        }
        let answer = match self.told.recv_timeout(time) {
            Ok(Told::Piece(piece)) => return Next::Piece(piece),
            Err(RecvTimeoutError::Timeout) => return Next::Nothing,
            Ok(Told::End(answer)) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
        };
        (self.is_over, self.answer) = (true, Some(answer));
        Next::End
    }

    /// Ends the answer after the round that is under way, also while its prompt is read; what is written stays.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits for the rest; the whole answer.
    ///
    /// # Errors
    /// - the answer could not be written
    pub fn answer(mut self) -> Result<Answer> {
        while !matches!(self.next_within(LONG), Next::End) {}
        self.answer.take().unwrap_or_else(|| Err(ended()))
    }
}

impl Iterator for Stream {
    type Item = Result<Piece>;

    /// The next piece. After an error there is none.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(LONG) {
                Next::Piece(piece) => return Some(Ok(piece)),
                Next::Nothing => {}
                Next::End => {
                    let failed = self.answer.take_if(|answer| answer.is_err());
                    return failed.and_then(Result::err).map(Err);
                }
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.cancel();
    }
}
