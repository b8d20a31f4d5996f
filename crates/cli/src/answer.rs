//! An answer while it is written: tokens into text, and what it came to.

use std::ops::ControlFlow;

use longdraft_decode::stop::{AnswerText, Streamed};
use longdraft_decode::{Committed, EndReason, Generation};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::{ModelError, TargetTokenId};
use serde_json::{Value, json};

use crate::decoding::finish;
use crate::failure::{Failure, Result};

/// The text of an answer as its tokens come: whole characters, without what ends it.
pub(crate) struct Written<'a> {
    answer: AnswerText<'a>,
    stop_tokens: &'a [TargetTokenId],
    text: String,
    problem: Option<ModelError>,
}

impl<'a> Written<'a> {
    /// An answer without text yet; one that goes on with the text of its prompt knows its tokens.
    /// It fails where the tokenizer cannot decode them.
    pub(crate) fn new(
        tokenizer: &'a TextTokenizer,
        prompt: Option<&[TargetTokenId]>,
        stop_tokens: &'a [TargetTokenId],
        stops: &[String],
    ) -> Result<Self> {
        let answer = AnswerText::new(tokenizer, prompt, stops)?;
        Ok(Self { answer, stop_tokens, text: String::new(), problem: None })
    }

    /// Adds a token and tells the text that it makes certain; ends the answer at a stop string.
    pub(crate) fn hear(
        &mut self,
        committed: Committed,
        tell: &mut dyn FnMut(&str),
    ) -> ControlFlow<EndReason> {
        if self.stop_tokens.contains(&committed.token) {
            return ControlFlow::Continue(());
        }
        match self.answer.push(committed.token.0) {
            Ok(piece) => {
                self.add(&piece.text, tell);
                if piece.stopped {
                    return ControlFlow::Break(EndReason::StopString);
                }
                ControlFlow::Continue(())
            }
            Err(error) => {
                self.problem = Some(error);
                ControlFlow::Break(EndReason::Interrupted)
            }
        }
    }

    fn add(&mut self, text: &str, tell: &mut dyn FnMut(&str)) {
        if !text.is_empty() {
            self.text.push_str(text);
            tell(text);
        }
    }

    /// Tells the rest; returns the whole text, and the rest, which may have ended at a stop string.
    /// It fails where the tokenizer could not decode something.
    pub(crate) fn finish(mut self, tell: &mut dyn FnMut(&str)) -> Result<(String, Streamed)> {
        let rest = self.answer.finish()?;
        self.add(&rest.text, tell);
        match self.problem {
            Some(problem) => Err(Failure::work(problem)),
            None => Ok((self.text, rest)),
        }
    }
}

/// Text and figures of an answer.
pub(crate) fn to_json(generation: &Generation, text: &str) -> Value {
    let metrics = &generation.metrics;
    json!({
        "text": text,
        "tokens": generation.tokens,
        "finish": finish(generation.end),
        "end": format!("{:?}", generation.end),
        "tau": metrics.acceptance_length(),
        "accepted_share": metrics.accepted_share(),
        "conditional_acceptance": metrics.conditional_acceptance(),
        "rounds": metrics.rounds, "plain_rounds": metrics.plain_rounds,
        "drafted": metrics.drafted, "nodes": metrics.nodes, "accepted": metrics.accepted,
        "lookup_share": metrics.lookup_share(),
        "decode_tokens_per_second": generation.decode_tokens_per_second(),
        "tokens_per_second": generation.tokens_per_second(),
        "prefill_seconds": generation.prefill_seconds,
        "reused_tokens": generation.reused_tokens,
    })
}
