//! The thread of a session: it answers one prompt after another.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use longdraft_decode::{EndReason, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::Message;

use super::options::AnswerOptions;
use super::stream::{Answer, Piece, Told};
use crate::answer::{Written, to_json};
use crate::api::error::Result;
use crate::cli::{DecodingArguments, PaceChoice, TemplateArguments};
use crate::decoding::{Models, encode_chat_with, stops};
use crate::failure::Failure;

/// What a session's thread is asked to do.
pub(super) struct Task {
    pub(super) prompt: Prompt,
    pub(super) options: AnswerOptions,
    pub(super) tell: Sender<Told>,
    pub(super) cancelled: Arc<AtomicBool>,
}

/// What is answered.
pub(super) enum Prompt {
    /// A text, which the answer continues.
    Text(Vec<TargetTokenId>),
    /// A user's turn, which becomes a part of its conversation, and how many conversations were before that.
    Turn(String, u64),
}

/// What was said in a conversation.
#[derive(Default)]
pub(super) struct Said {
    /// In order.
    pub(super) messages: Vec<Message>,
    /// Conversations before this one: a turn of one of them no longer counts.
    pub(super) before: u64,
}

pub(super) type History = Arc<Mutex<Said>>;

/// The conversation, for as long as nobody else needs it.
pub(super) fn locked(history: &History) -> MutexGuard<'_, Said> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Works until the session is dropped.
pub(super) fn answer_all(
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
            let own = &asked.chat_template_kwargs;
            TemplateArguments::of(own.clone()).check(&models.tokenizer)?;
            (Cow::Owned(encode_chat_with(&messages, own, &models.tokenizer)?), None)
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
    let mut generation = generation?;
    let (text, rest) = text?;
    generation.end = rest.end(generation.end);
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
