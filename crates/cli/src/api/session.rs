//! Decoding: a session answers prompts one after another, on a thread of its own.

mod options;
mod stream;
mod thread;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};

use longdraft_models::tokenizer::{Message, TextTokenizer};

use super::error::Result;
use super::models::{Draft, Target};
use crate::cli::{DecodingArguments, TemplateArguments};
use crate::decoding::{Models, encode_text};
use crate::failure::Failure;
use stream::ended;
use thread::{History, Prompt, Said, Task, answer_all, locked};

pub use options::{AnswerOptions, SessionOptions, choice, device, layout, template_variables};
pub use stream::{Answer, Next, Piece, Stream};

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
    let template = &arguments.template;
    let tokenizer = if template.variables().is_empty() {
        Arc::clone(&target.tokenizer)
    } else {
        Arc::new(template.apply(TextTokenizer::clone(&target.tokenizer))?)
    };
    let opened = (Arc::clone(&target.weights), tokenizer);
    Ok(arguments.with(opened, draft.map(|draft| &draft.source), (weights, block))?)
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
    /// - `options` has variables of a chat template: a text goes through none
    pub fn generate(&self, prompt: &str, options: &AnswerOptions) -> Result<Answer> {
        self.stream(prompt, options)?.answer()
    }

    /// The same, piece by piece. Where the stream is dropped the answer ends.
    ///
    /// # Errors
    /// - as [`Self::generate`]
    pub fn stream(&self, prompt: &str, options: &AnswerOptions) -> Result<Stream> {
        let template = TemplateArguments::of(options.chat_template_kwargs.clone());
        template.require_chat(false, "ask for a turn with `chat`, or leave them out")?;
        let prompt = encode_text(prompt, &self.target.tokenizer, &self.target.weights)?;
        self.ask(Prompt::Text(prompt), options)
    }

    /// Answers a user's turn through the target's chat template; both become part of the conversation.
    ///
    /// # Errors
    /// - the prompt is longer than the context, the options make no sense, a model cannot run
    /// - the target has no chat template, or it sets one of the variables itself
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
        Ok(Stream::new(told, cancelled))
    }
}
