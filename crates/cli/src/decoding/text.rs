//! Text on its way to a target's tokens, and what ends an answer.

use longdraft_decode::EndReason;
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::{Message, TextTokenizer};
use serde_json::{Map, Value};

use crate::failure::{Failure, Result};

/// How a text ended, in the words of files of answers and of `--json`.
pub(crate) fn finish(end: EndReason) -> &'static str {
    match end {
        EndReason::StopToken | EndReason::StopString => "stop",
        EndReason::TokenLimit | EndReason::ContextLimit => "length",
        EndReason::Interrupted => "interrupted",
    }
}

/// Tokens that end an answer: the target's, unless they are ignored, and those named, as the tokenizer
/// writes them or by their ids.
pub(crate) fn stops(
    ignore_eos: bool,
    named: &[String],
    tokenizer: &TextTokenizer,
    target: &Target,
) -> Result<Vec<TargetTokenId>> {
    let own = if ignore_eos { Vec::new() } else { stop_tokens(target) };
    let named = named.iter().map(|token| {
        let by_name = tokenizer.id(token);
        let vocabulary = target.config().vocab_size;
        let by_id = token.parse().ok().filter(|id: &u32| (*id as usize) < vocabulary);
        by_name.or(by_id).map(TargetTokenId).ok_or_else(|| {
            Failure::usage(format!("`{token}` is not a token of the target"))
                .hint("give a token as the tokenizer writes it, or its id; --stop takes any text")
        })
    });
    own.into_iter().map(Ok).chain(named).collect()
}

/// Tokens that end what the target generates.
pub(crate) fn stop_tokens(target: &Target) -> Vec<TargetTokenId> {
    target.config().end_token_ids().into_iter().map(TargetTokenId).collect()
}

/// Ids of a text to continue; it gets the start token of Llama models that have one.
pub(crate) fn encode_text(
    text: &str,
    tokenizer: &TextTokenizer,
    target: &Target,
) -> Result<Vec<TargetTokenId>> {
    let ids = tokenizer.encode_prompt(text, target.config().bos_token_id)?;
    Ok(ids.into_iter().map(TargetTokenId).collect())
}

/// Ids of a conversation, up to where the answer begins.
pub(crate) fn encode_chat(
    messages: &[Message],
    tokenizer: &TextTokenizer,
) -> Result<Vec<TargetTokenId>> {
    encode_chat_with(messages, &Map::new(), tokenizer)
}

/// The same of a conversation that has variables of its own for the chat template.
pub(crate) fn encode_chat_with(
    messages: &[Message],
    own: &Map<String, Value>,
    tokenizer: &TextTokenizer,
) -> Result<Vec<TargetTokenId>> {
    let Some(template) = tokenizer.chat_template() else {
        return Err(Failure::usage("the target has no chat template")
            .hint("leave out --chat to continue the text as it is"));
    };
    let text = template.with_variables(own).render(messages, true)?;
    Ok(tokenizer.encode(&text)?.ids.into_iter().map(TargetTokenId).collect())
}
