//! `longdraft generate`: text from the target, with a draft or without; one answer, or a chat.

mod chat;
mod figures;
mod speaker;

use std::io::{IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use longdraft_decode::{DecodeError, DecodeOptions, EndReason, Generation, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::Message;

use crate::answer::{self, Written};
use crate::cli::{GenerateArguments, PaceChoice};
use crate::decoding::{Models, encode_chat, encode_text, holdings, stops};
use crate::failure::{Failure, Result};
use crate::interrupts::INTERRUPT;
use chat::{Line, Turns};
use speaker::{Show, Speaker};

/// Streams text to stdout and figures to stderr.
pub(crate) fn run(arguments: &GenerateArguments, json: bool) -> Result<()> {
    let decoding = &arguments.decoding;
    if arguments.max_tokens == 0 {
        return Err(Failure::usage("--max-tokens must be at least 1"));
    }
    decoding.template.require_chat(arguments.chat, "add --chat")?;
    let mut options = decoding.options(arguments.temperature, PaceChoice::Measured)?;
    options.max_new_tokens = arguments.max_tokens;
    let text = prompt_text(arguments)?;
    if text.is_none() && !arguments.chat {
        return Err(Failure::usage("there is no prompt")
            .hint("give --prompt TEXT, --prompt-file FILE, text on stdin, or --chat to converse"));
    }
    if !arguments.no_draft {
        decoding.warn_of_unused_layout();
    }
    let asked =
        if arguments.no_draft { decoding.clone().without_drafts() } else { decoding.clone() };
    let models = asked.open(&arguments.target)?;
    errln!("{}", holdings(&models.target, models.draft.as_deref()));
    options.stop_tokens =
        stops(arguments.ignore_eos, &arguments.stop_token, &models.tokenizer, &models.target)?;
    let drafter = asked.drafter(&models)?;
    let decoder = SpeculativeDecoder::new(&models.target, drafter);
    let interrupt = Interrupt::install();
    let mut writer = Writer { arguments, models: &models, decoder, options, interrupt };
    let is_conversation = text.is_none();
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(Message::new("system", system));
    }
    let last = match text {
        Some(text) if arguments.chat => Some(writer.turn(&mut messages, text)?),
        Some(text) => {
            let prompt = encode_text(&text, &models.tokenizer, &models.target)?;
            Some(writer.answer(&prompt)?)
        }
        None => writer.conversation(&mut messages)?,
    };
    let Some((generation, text)) = last else { return Ok(()) };
    if json {
        outln!("{}", answer::to_json(&generation, &text));
    }
    // A conversation goes on after that.
    let is_cut = generation.end == EndReason::Interrupted && !is_conversation;
    if is_cut { Err(Failure::interrupted(INTERRUPT)) } else { Ok(()) }
}

/// The prompt that the arguments name, or that is piped in.
fn prompt_text(arguments: &GenerateArguments) -> Result<Option<String>> {
    if arguments.prompt.is_some() {
        return Ok(arguments.prompt.clone());
    }
    if let Some(path) = &arguments.prompt_file {
        return read_text(path).map(Some);
    }
    if arguments.chat || std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let mut text = read_text(Path::new("-"))?;
    // `echo` ends a line with a break, which is not part of the prompt.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// A file's text, or that of stdin (`-`).
fn read_text(path: &Path) -> Result<String> {
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    let bytes = bytes.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::usage(format!("{}: no UTF-8 at byte {at}", path.display()))
            .hint("convert the file to UTF-8")
    })
}

/// Ctrl-C: ends the answer that is being written; the program, when none is or at the second time.
struct Interrupt {
    writing: Arc<AtomicBool>,
    wanted: Arc<AtomicBool>,
}

impl Interrupt {
    fn install() -> Self {
        let interrupt = Self { writing: Arc::default(), wanted: Arc::default() };
        let (writing, wanted) = (Arc::clone(&interrupt.writing), Arc::clone(&interrupt.wanted));
        let installed = ctrlc::set_handler(move || {
            if !writing.load(Ordering::Relaxed) || wanted.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
        if let Err(error) = installed {
            errln!("warning: Ctrl-C will quit at once: {error}");
        }
        interrupt
    }
}

/// Writes answers, one after another; the cache of what was said is kept between them.
struct Writer<'a> {
    arguments: &'a GenerateArguments,
    models: &'a Models,
    decoder: SpeculativeDecoder<'a>,
    options: DecodeOptions,
    interrupt: Interrupt,
}

impl Writer<'_> {
    /// Reads turns from stdin until it ends.
    fn conversation(
        &mut self,
        messages: &mut Vec<Message>,
    ) -> Result<Option<(Generation, String)>> {
        let mut turns = Turns::open()?;
        let mut last = None;
        while let Some(line) = turns.next()? {
            match Line::read(&line) {
                Line::Nothing => {}
                Line::Say(text) => last = self.said(messages, text)?.or(last),
                Line::Help => errln!("{}", chat::HELP),
                Line::Quit => break,
                Line::Clear => messages.retain(|message| message.role == "system"),
                Line::System(text) => {
                    messages.retain(|message| message.role != "system");
                    if !text.is_empty() {
                        messages.insert(0, Message::new("system", text));
                    }
                }
                Line::Unknown(name) => errln!(
                    "/{name} is not a command: /help lists them, and a line that begins with // is said \
                     with one /"
                ),
            }
        }
        Ok(last)
    }

    /// As [`Self::turn`]; one that the target cannot read is told and taken back, and the conversation goes on.
    fn said(
        &mut self,
        messages: &mut Vec<Message>,
        text: &str,
    ) -> Result<Option<(Generation, String)>> {
        messages.push(Message::new("user", text));
        let prompt = encode_chat(messages, &self.models.tokenizer)?;
        let config = self.models.target.config();
        let (context, vocabulary) = (config.max_position_embeddings, config.vocab_size);
        if let Err(error) = DecodeError::check_prompt(&prompt, context, vocabulary) {
            messages.pop();
            errln!("error: {error}");
            errln!("hint: /clear forgets the conversation; then there is room for more");
            return Ok(None);
        }
        self.reply(messages, &prompt).map(Some)
    }

    /// A user's turn and its answer, which become history.
    fn turn(&mut self, messages: &mut Vec<Message>, text: String) -> Result<(Generation, String)> {
        messages.push(Message::new("user", text));
        let prompt = encode_chat(messages, &self.models.tokenizer)?;
        self.reply(messages, &prompt)
    }

    /// The answer to what was said, which becomes history.
    fn reply(
        &mut self,
        messages: &mut Vec<Message>,
        prompt: &[TargetTokenId],
    ) -> Result<(Generation, String)> {
        self.options.reuse_prefix = true;
        let (generation, text) = self.answer(prompt)?;
        messages.push(Message::new("assistant", &text));
        Ok((generation, text))
    }

    /// Streams an answer; returns it with its text.
    fn answer(&mut self, prompt: &[TargetTokenId]) -> Result<(Generation, String)> {
        let (options, stops) = (&self.options, &self.arguments.stop);
        // A turn of a conversation is a text of its own.
        let goes_on = (!options.reuse_prefix).then_some(prompt);
        let written = Written::new(&self.models.tokenizer, goes_on, &options.stop_tokens, stops)?;
        let mut speaker = Speaker::new(written, self.show());
        self.interrupt.wanted.store(false, Ordering::Relaxed);
        self.interrupt.writing.store(true, Ordering::Relaxed);
        let wanted = &self.interrupt.wanted;
        let generation = self.decoder.generate(prompt, &self.options, &mut |committed| {
            if wanted.load(Ordering::Relaxed) {
                return std::ops::ControlFlow::Break(EndReason::Interrupted);
            }
            speaker.say(committed)
        });
        self.interrupt.writing.store(false, Ordering::Relaxed);
        let (text, rest) = speaker.finish()?;
        let mut generation = generation?;
        generation.end = rest.end(generation.end);
        self.tell(&generation, prompt.len());
        Ok((generation, text))
    }

    /// Whether accepted tokens are shown: if that is wanted, and in a conversation on a terminal.
    fn show(&self) -> Show {
        let GenerateArguments { chat, show_acceptance, .. } = *self.arguments;
        match (show_acceptance, crate::terminal::colours()) {
            (true, false) => Show::Marks,
            (true, true) => Show::Colours,
            (false, colours) if chat && colours => Show::Colours,
            _ => Show::Nothing,
        }
    }

    /// Figures of an answer: dim in a conversation on a terminal.
    fn tell(&self, generation: &Generation, prompt: usize) {
        let decoding = &self.arguments.decoding;
        let pace = decoding.pace.unwrap_or(PaceChoice::Measured);
        let drafts = if self.arguments.no_draft {
            None
        } else if decoding.has_model() {
            Some(figures::Drafts::Model(pace))
        } else {
            decoding.lookup.map(|_| figures::Drafts::Lookup)
        };
        if self.arguments.chat && crate::terminal::colours_aside() {
            errln!("\x1b[2m{}\x1b[0m", figures::line(generation, drafts));
        } else {
            errln!("\n{}", figures::summary(generation, prompt, drafts));
        }
    }
}
