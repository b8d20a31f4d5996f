//! `longdraft generate`: text from the target, with a draft or without.

use std::io::Write;
use std::path::Path;

use candle_core::DType;
use longdraft_decode::drafter::{Drafter, GlideDrafter};
use longdraft_decode::{DecodeOptions, Generation, SpeculativeDecoder};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::glide::{GlideDraft, trained_for};
use longdraft_models::target::{Target, TargetOptions};
use longdraft_models::tokenizer::{Message, TextTokenizer};
use serde_json::json;

use crate::cli::{GenerateArguments, WeightDtype};
use crate::failure::{Failure, Result};

/// Streams text to stdout and figures to stderr.
pub(crate) fn run(arguments: &GenerateArguments, json: bool) -> Result<()> {
    if arguments.max_tokens == 0 {
        return Err(Failure::usage("--max-tokens must be at least 1"));
    }
    let dtype = match arguments.dtype {
        WeightDtype::F32 => DType::F32,
        WeightDtype::Bf16 => DType::BF16,
        WeightDtype::F16 => DType::F16,
    };
    let options = TargetOptions { dtype, ..TargetOptions::default() };
    // The tokenizer first: what building it takes is free again when the weights come.
    let tokenizer = Target::open_tokenizer(&arguments.target)?;
    let target = Target::open(&arguments.target, &options)?;
    let draft = match &arguments.draft {
        Some(path) if !arguments.no_draft => Some(load_draft(path, &target)?),
        _ => None,
    };
    let prompt = encode_prompt(&arguments.prompt, arguments.chat, &tokenizer, &target)?;
    let stop_tokens = if arguments.ignore_eos { Vec::new() } else { stop_tokens(&target) };
    let options = DecodeOptions {
        draft_len: arguments.draft_len,
        max_new_tokens: arguments.max_tokens,
        stop_tokens: stop_tokens.clone(),
    };
    let drafter = match &draft {
        Some(draft) => Some(Box::new(GlideDrafter::new(draft, &target)?) as Box<dyn Drafter>),
        None => None,
    };
    let mut stream = tokenizer.stream();
    let mut stdout = std::io::stdout();
    let mut problem = None;
    let mut print = |token: TargetTokenId| {
        if stop_tokens.contains(&token) || problem.is_some() {
            return;
        }
        let piece = stream.push(token.0).map_err(|error| error.to_string());
        let printed = piece.and_then(|text| {
            let write = write!(stdout, "{text}").and_then(|()| stdout.flush());
            write.map_err(|error| error.to_string())
        });
        problem = printed.err();
    };
    let generation =
        SpeculativeDecoder::new(&target, drafter).generate(&prompt, &options, &mut print)?;
    if let Some(problem) = problem {
        return Err(Failure::work(problem));
    }
    println!("{}", stream.finish()?);
    eprintln!("{}", summary(&generation, prompt.len()));
    if json {
        println!("{}", to_json(&generation));
    }
    Ok(())
}

impl From<longdraft_decode::DecodeError> for Failure {
    fn from(error: longdraft_decode::DecodeError) -> Self {
        use longdraft_decode::DecodeError as E;
        match error {
            E::EmptyPrompt | E::PromptTooLong { .. } => Self::usage(error),
            other => Self::work(other),
        }
    }
}

/// Loads a draft folder or file with the layer that its `config.json` describes, or that fits the
/// target when there is none (published files).
pub(crate) fn load_draft(path: &Path, target: &Target) -> Result<GlideDraft> {
    let draft = GlideDraft::open(path, target)?;
    if let Some(fingerprint) = trained_for(path)
        && fingerprint != target.fingerprint()
    {
        eprintln!(
            "warning: {} was trained for another target (or another file of this one): output stays \
             exact, acceptance may be low",
            path.display()
        );
    }
    Ok(draft)
}

/// Tokens that end a text.
pub(crate) fn stop_tokens(target: &Target) -> Vec<TargetTokenId> {
    target.config().eos_token_ids.iter().map(|id| TargetTokenId(*id)).collect()
}

/// Ids of a raw prompt, or of a user's turn; a raw prompt gets the start token of Llama models
/// that have one.
pub(crate) fn encode_prompt(
    text: &str,
    chat: bool,
    tokenizer: &TextTokenizer,
    target: &Target,
) -> Result<Vec<TargetTokenId>> {
    let text = match (chat, tokenizer.chat_template()) {
        (true, Some(template)) => template.render(&[Message::new("user", text)], true)?,
        (true, None) => {
            return Err(Failure::usage("the target has no chat template")
                .hint("leave out --chat to continue the text as it is"));
        }
        (false, _) => text.to_owned(),
    };
    let mut ids = tokenizer.encode(&text)?.ids;
    if let (false, true, Some(bos)) = (chat, tokenizer.adds_bos(), target.config().bos_token_id)
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok(ids.into_iter().map(TargetTokenId).collect())
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
    format!(
        "\n{} tokens after a prompt of {prompt}: {acceptance}; {:.1} tok/s decoding, prompt {:.2} s",
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
        "rounds": metrics.rounds, "drafted": metrics.drafted, "accepted": metrics.accepted,
        "decode_tokens_per_second": generation.decode_tokens_per_second(),
        "prefill_seconds": generation.prefill_seconds,
        "end": format!("{:?}", generation.end),
    })
}
