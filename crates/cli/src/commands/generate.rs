//! `longdraft generate`: text from the target, with a draft or without; one answer, or a chat.

mod speaker;

use std::io::{BufRead, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use longdraft_decode::{DecodeOptions, EndReason, Generation, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::Message;
use serde_json::json;

use crate::cli::GenerateArguments;
use crate::decoding::{Models, PaceChoice, encode_chat, encode_text, stop_tokens};
use crate::failure::{Failure, Result};
use speaker::Speaker;

/// Streams text to stdout and figures to stderr.
pub(crate) fn run(arguments: &GenerateArguments, json: bool) -> Result<()> {
    let decoding = &arguments.decoding;
    if arguments.max_tokens == 0 {
        return Err(Failure::usage("--max-tokens must be at least 1"));
    }
    if !arguments.no_draft && decoding.draft.is_none() && decoding.lookup.is_none() {
        return Err(Failure::usage("there is nothing to draft with")
            .hint("give --draft PATH, --lookup, or --no-draft to decode plainly"));
    }
    let mut options = decoding.options(arguments.temperature, PaceChoice::Measured)?;
    options.max_new_tokens = arguments.max_tokens;
    let text = prompt_text(arguments)?;
    if text.is_none() && !arguments.chat {
        return Err(Failure::usage("there is no prompt")
            .hint("give --prompt TEXT, --prompt-file FILE, or --chat for a conversation"));
    }
    let models = decoding.open(&arguments.target)?;
    options.stop_tokens = stops(arguments, &models)?;
    let drafter = if arguments.no_draft { None } else { decoding.drafter(&models)? };
    let decoder = SpeculativeDecoder::new(&models.target, drafter);
    let interrupt = Interrupt::install();
    let mut writer = Writer { arguments, models: &models, decoder, options, interrupt };
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(Message::new("system", system));
    }
    let last = match text {
        Some(text) if arguments.chat => Some(writer.turn(&mut messages, text)?),
        Some(text) => {
            let prompt = encode_text(&text, &models.tokenizer, &models.target)?;
            Some(writer.answer(&prompt)?.0)
        }
        None => writer.conversation(&mut messages)?,
    };
    if let (true, Some(generation)) = (json, last) {
        outln!("{}", to_json(&generation));
    }
    Ok(())
}

/// The prompt that the arguments name.
fn prompt_text(arguments: &GenerateArguments) -> Result<Option<String>> {
    let Some(path) = &arguments.prompt_file else { return Ok(arguments.prompt.clone()) };
    let bytes = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    let bytes = bytes.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::usage(format!("{}: no UTF-8 at byte {at}", path.display()))
            .hint("convert the file to UTF-8")
    })
}

/// Tokens that end the text: the target's, unless they are ignored, and those named.
fn stops(arguments: &GenerateArguments, models: &Models) -> Result<Vec<TargetTokenId>> {
    let own = if arguments.ignore_eos { Vec::new() } else { stop_tokens(&models.target) };
    let named = arguments.stop_token.iter().map(|token| {
        let by_name = models.tokenizer.id(token);
        let vocabulary = models.target.config().vocab_size;
        let by_id = token.parse().ok().filter(|id: &u32| (*id as usize) < vocabulary);
        by_name.or(by_id).map(TargetTokenId).ok_or_else(|| {
            Failure::usage(format!("`{token}` is no token of the target"))
                .hint("give a token as the tokenizer writes it, or its id; --stop takes any text")
        })
    });
    own.into_iter().map(Ok).chain(named).collect()
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
    fn conversation(&mut self, messages: &mut Vec<Message>) -> Result<Option<Generation>> {
        let asks = std::io::stdin().is_terminal();
        let mut last = None;
        loop {
            if asks {
                err!("> ");
            }
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            if read.map_err(|error| Failure::usage(format!("stdin: {error}")))? == 0 {
                return Ok(last);
            }
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            last = Some(self.turn(messages, line.to_owned())?);
        }
    }

    /// A user's turn and its answer, which become history.
    fn turn(&mut self, messages: &mut Vec<Message>, text: String) -> Result<Generation> {
        messages.push(Message::new("user", text));
        let prompt = encode_chat(messages, &self.models.tokenizer)?;
        self.options.reuse_prefix = true;
        self.options.request = vec![messages.len() as u64];
        let (generation, text) = self.answer(&prompt)?;
        messages.push(Message::new("assistant", text));
        Ok(generation)
    }

    /// Streams an answer; returns it with its text.
    fn answer(&mut self, prompt: &[TargetTokenId]) -> Result<(Generation, String)> {
        let colours = self.arguments.show_acceptance;
        let mut speaker =
            Speaker::new(&self.models.tokenizer, &self.options.stop_tokens, &self.arguments.stop)
                .with_colours(colours);
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
        let text = speaker.finish()?;
        let generation = generation?;
        errln!("{}", summary(&generation, prompt.len()));
        Ok((generation, text))
    }
}

fn summary(generation: &Generation, prompt: usize) -> String {
    let metrics = &generation.metrics;
    let positions: Vec<String> = metrics
        .conditional_acceptance()
        .iter()
        .map(|rate| format!("{:.0}", 100.0 * rate))
        .collect();
    let acceptance = if positions.is_empty() {
        "no draft".to_owned()
    } else {
        format!(
            "tau {:.3} (tokens per target pass, the target's own included), accepted by position \
             {} %",
            metrics.acceptance_length(),
            positions.join(" ")
        )
    };
    let kept = match generation.reused_tokens {
        0 => String::new(),
        kept => format!(" ({kept} kept from before)"),
    };
    let end = if generation.end == EndReason::Interrupted { ", interrupted" } else { "" };
    format!(
        "\n{} tokens after a prompt of {prompt}{kept}{end}: {acceptance}; {:.1} tok/s decoding, \
         prompt {:.2} s",
        generation.tokens.len(),
        generation.decode_tokens_per_second(),
        generation.prefill_seconds
    )
}

fn to_json(generation: &Generation) -> serde_json::Value {
    let metrics = &generation.metrics;
    json!({
        "tokens": generation.tokens,
        "tau": metrics.acceptance_length(),
        "conditional_acceptance": metrics.conditional_acceptance(),
        "rounds": metrics.rounds, "plain_rounds": metrics.plain_rounds,
        "drafted": metrics.drafted, "nodes": metrics.nodes, "accepted": metrics.accepted,
        "lookup_share": metrics.lookup_share(),
        "decode_tokens_per_second": generation.decode_tokens_per_second(),
        "tokens_per_second": generation.tokens_per_second(),
        "prefill_seconds": generation.prefill_seconds,
        "reused_tokens": generation.reused_tokens,
        "end": format!("{:?}", generation.end),
    })
}
