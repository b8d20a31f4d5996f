//! `longdraft eval decode`: a draft measured on prompts, against plain decoding in the same
//! engine.

use std::path::Path;

use longdraft_decode::DecodeOptions;
use longdraft_decode::drafter::{Drafter, GlideDrafter};
use longdraft_decode::evaluate::{Comparison, compare};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::target::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Value, json};

use super::generate::{encode_prompt, load_draft, stop_tokens};
use crate::cli::EvalDecodeArguments;
use crate::failure::{Failure, Result};

/// Measures; fails if an output differs from plain decoding.
pub(crate) fn run(arguments: &EvalDecodeArguments, json: bool) -> Result<()> {
    let tokenizer = Target::open_tokenizer(&arguments.target)?;
    let target = Target::open(&arguments.target, &TargetOptions::default())?;
    let draft = load_draft(&arguments.draft, &target)?;
    let prompts = Prompts {
        path: &arguments.prompts,
        field: &arguments.field,
        chat: arguments.chat,
        limit: arguments.limit,
    };
    let lengths = (arguments.draft_len, arguments.max_tokens);
    let comparison = measure(&target, &tokenizer, &draft, &prompts, lengths)?;
    print(&comparison, arguments.draft_len);
    if json {
        println!("{}", to_json(&comparison));
    }
    require_lossless(&comparison)
}

/// Where prompts come from.
pub(crate) struct Prompts<'a> {
    pub(crate) path: &'a Path,
    pub(crate) field: &'a str,
    pub(crate) chat: bool,
    pub(crate) limit: Option<usize>,
}

/// Decodes every prompt plainly and with the draft; `lengths` are draft length and new tokens.
pub(crate) fn measure(
    target: &Target,
    tokenizer: &TextTokenizer,
    draft: &GlideDraft,
    prompts: &Prompts<'_>,
    (draft_len, max_new_tokens): (usize, usize),
) -> Result<Comparison> {
    let prompts: Vec<Vec<TargetTokenId>> = longdraft_data::source::read_jsonl(prompts.path)?
        .take(prompts.limit.unwrap_or(usize::MAX))
        .map(|row| encode_prompt(row?.text(prompts.field)?, prompts.chat, tokenizer, target))
        .collect::<Result<_>>()?;
    if prompts.is_empty() {
        return Err(Failure::usage("there are no prompts"));
    }
    let options = DecodeOptions { draft_len, max_new_tokens, stop_tokens: stop_tokens(target) };
    let new_drafter = || Ok(Box::new(GlideDrafter::new(draft, target)?) as Box<dyn Drafter>);
    Ok(compare(target, &new_drafter, &prompts, &options, &mut |totals| {
        eprintln!(
            "    {:>2} prompts: tau {:.3}, {} equal, {:.1} tok/s without, {:.1} with",
            totals.prompts,
            totals.acceptance.acceptance_length(),
            totals.equal,
            totals.plain_tokens_per_second(),
            totals.speculative_tokens_per_second()
        );
    })?)
}

/// The figures with their conventions.
pub(crate) fn print(comparison: &Comparison, draft_len: usize) {
    let positions: Vec<String> = comparison
        .acceptance
        .conditional_acceptance()
        .iter()
        .map(|rate| format!("{:.0} %", 100.0 * rate))
        .collect();
    println!(
        "tau {:.3} tokens per target pass (the target's own token included), chains of \
         {draft_len}, temperature 0",
        comparison.acceptance.acceptance_length()
    );
    println!("accepted by position, where tested: {}", positions.join(", "));
    println!(
        "decoding: {:.1} tok/s without the draft, {:.1} with it (x {:.2})",
        comparison.plain_tokens_per_second(),
        comparison.speculative_tokens_per_second(),
        comparison.speed_up()
    );
    println!("outputs equal: {} of {}", comparison.equal, comparison.prompts);
}

/// The figures as one object.
pub(crate) fn to_json(comparison: &Comparison) -> Value {
    json!({
        "tau": comparison.acceptance.acceptance_length(),
        "conditional_acceptance": comparison.acceptance.conditional_acceptance(),
        "plain_tokens_per_second": comparison.plain_tokens_per_second(),
        "speculative_tokens_per_second": comparison.speculative_tokens_per_second(),
        "speed_up": comparison.speed_up(),
        "prompts": comparison.prompts, "equal": comparison.equal,
        "lossless": comparison.lossless(),
    })
}

/// Fails unless every output was equal.
pub(crate) fn require_lossless(comparison: &Comparison) -> Result<()> {
    if comparison.lossless() {
        return Ok(());
    }
    let differing = comparison.prompts - comparison.equal;
    Err(Failure::work(format!("{differing} outputs differ between plain and draft decoding")))
}
