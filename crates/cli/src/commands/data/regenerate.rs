//! `longdraft data regenerate`: the target answers prompts itself.
//!
//! A draft is judged by how well it follows its target, so the target's own answers are its best
//! text. Rows are answered one by one, in order; every row gives one line in the output or one in
//! the file of failures, and a second call goes on behind the lines that are there.

mod ledger;
mod prompt;

use std::time::{Duration, Instant};

use longdraft_data::source::{RawRow, read_rows};
use longdraft_data::template::conversation::Conversation;
use longdraft_decode::drafter::drafter_of;
use longdraft_decode::{
    DecodeError, DecodeOptions, DraftShape, EndReason, Generation, Sampling, SpeculativeDecoder,
    VerifyRule,
};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::AnyDraft;
use longdraft_models::target::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Value, json};

use crate::cli::DataRegenerateArguments;
use crate::decoding::{load_draft, stop_tokens};
use crate::failure::{Failure, Result};
use ledger::{Entry, Ledger, Outcome};

/// Time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Answers what is not answered yet, and checks that every row is accounted for.
pub(super) fn run(arguments: &DataRegenerateArguments, json: bool) -> Result<()> {
    if arguments.max_tokens == 0 || !(0.0..=100.0).contains(&arguments.temperature) {
        return Err(Failure::usage("--max-tokens must be at least 1, --temperature 0 to 100"));
    }
    let limit = arguments.limit.unwrap_or(usize::MAX);
    let rows = read_rows(&arguments.prompts)?.take(limit);
    let tokenizer = Target::open_tokenizer(&arguments.target)?;
    let target = Target::open(&arguments.target, &TargetOptions::default())?;
    let draft = arguments.draft.as_ref().map(|path| load_draft(path, &target)).transpose()?;
    let writer =
        Writer { arguments, target: &target, tokenizer: &tokenizer, draft: draft.as_ref() };
    let mut ledger = Ledger::open(&arguments.output, &writer.recipe())?;
    let before = ledger.len();
    if before > 0 {
        eprintln!("going on behind {before} rows that are done");
    }
    let (mut count, mut last_line) = (0, Instant::now());
    for (index, row) in rows.enumerate() {
        let row = row?;
        count = index + 1;
        if ledger.is_done(index, &row.origin())? {
            continue;
        }
        let entry = writer.entry(index, &row)?;
        if let Outcome::Error | Outcome::Skipped = entry.outcome {
            eprintln!("row {}: {}", entry.id, entry.body["problem"].as_str().unwrap_or_default());
        }
        ledger.write(&entry)?;
        if last_line.elapsed() >= LINE_EVERY {
            last_line = Instant::now();
            eprintln!("{}", ledger.summary());
        }
    }
    ledger.check(count)?;
    println!("{} = {count} rows: {}", ledger.summary(), arguments.output.display());
    if json {
        let (success, error, skipped) = ledger.counts();
        println!(
            "{}",
            json!({
                "rows": count, "success": success, "error": error, "skipped": skipped,
                "from_before": before, "output": arguments.output,
            })
        );
    }
    Ok(())
}

/// Answers rows.
struct Writer<'a> {
    arguments: &'a DataRegenerateArguments,
    target: &'a Target,
    tokenizer: &'a TextTokenizer,
    draft: Option<&'a AnyDraft>,
}

impl Writer<'_> {
    /// What lines of one file must have in common. A draft changes no law, so it is left out.
    fn recipe(&self) -> String {
        let DataRegenerateArguments { temperature, seed, max_tokens, .. } = self.arguments;
        let target = self.target.fingerprint();
        format!("{target} temperature={temperature} seed={seed} max_tokens={max_tokens}")
    }

    fn entry(&self, index: usize, row: &RawRow) -> Result<Entry> {
        let failed = |outcome, problem: String| Entry {
            row: index,
            id: row.origin(),
            outcome,
            body: json!({ "problem": problem }),
        };
        let prompts = row
            .parse()
            .map_err(|error| error.to_string())
            .and_then(|row| prompt::of_row(&row, self.arguments.field.as_deref()));
        let prompts = match prompts {
            Ok(prompt::Prompts::Turns(prompts)) => prompts,
            Ok(prompt::Prompts::Unusable(problem)) => return Ok(failed(Outcome::Skipped, problem)),
            Err(problem) => return Ok(failed(Outcome::Error, problem)),
        };
        match self.answer(index, &prompts)? {
            Answered::Whole(body) => {
                Ok(Entry { row: index, id: row.origin(), outcome: Outcome::Success, body })
            }
            Answered::TooLong(problem) => Ok(failed(Outcome::Skipped, problem)),
            Answered::Refused(problem) => Ok(failed(Outcome::Error, problem)),
        }
    }

    /// Goes through the prompts; every answer is part of what the next one follows on.
    fn answer(&self, index: usize, prompts: &Conversation) -> Result<Answered> {
        let mut done = Conversation { messages: Vec::new(), tools: prompts.tools.clone() };
        let (mut tokens, mut finish) = (0, "stop");
        for (turn, message) in prompts.messages.iter().enumerate() {
            done.messages.push(message.clone());
            if prompts.role(turn) != "user" {
                continue;
            }
            let rendered = match self.tokenizer.chat_template() {
                Some(template) => {
                    template.render_messages(&done.messages, done.tools.as_ref(), true)
                }
                None => Ok(plain(&done)),
            };
            let text = match rendered {
                Ok(text) => text,
                Err(error) => return Ok(Answered::Refused(error.to_string())),
            };
            let mut ids = self.tokenizer.encode(&text)?.ids;
            if let (None, true, Some(bos)) = (
                self.tokenizer.chat_template(),
                self.tokenizer.adds_bos(),
                self.target.config().bos_token_id,
            ) {
                ids.insert(0, bos);
            }
            let ids: Vec<TargetTokenId> = ids.into_iter().map(TargetTokenId).collect();
            let generation = match self.generate(&ids, [index as u64, turn as u64]) {
                Ok(generation) => generation,
                Err(error @ (DecodeError::PromptTooLong { .. } | DecodeError::EmptyPrompt)) => {
                    return Ok(Answered::TooLong(error.to_string()));
                }
                Err(error) => return Err(error.into()),
            };
            tokens += generation.tokens.len();
            if generation.end != EndReason::StopToken {
                finish = "length";
            }
            done.push("assistant", &self.text(&text, &generation)?);
        }
        Ok(Answered::Whole(
            json!({ "messages": done.messages, "finish": finish, "tokens": tokens }),
        ))
    }

    fn generate(
        &self,
        prompt: &[TargetTokenId],
        key: [u64; 2],
    ) -> longdraft_decode::Result<Generation> {
        let DataRegenerateArguments { temperature, seed, .. } = *self.arguments;
        let options = DecodeOptions {
            shape: DraftShape::Chain { length: self.arguments.draft_len },
            max_new_tokens: self.arguments.max_tokens,
            stop_tokens: stop_tokens(self.target),
            sampling: Sampling::at(temperature),
            // The draft must not show in the answers: a file may be finished with another one.
            rule: VerifyRule::Match,
            seed,
            request: key.to_vec(),
            ..DecodeOptions::default()
        };
        let drafter = self.draft.map(|draft| drafter_of(draft, self.target, None)).transpose()?;
        let mut decoder = SpeculativeDecoder::new(self.target, drafter);
        decoder.generate(prompt, &options, &mut |_| std::ops::ControlFlow::Continue(()))
    }

    /// The answer without the token that ended it; a thought that the prompt opened belongs to it.
    fn text(&self, prompt: &str, generation: &Generation) -> Result<String> {
        let stops = stop_tokens(self.target);
        let ids: Vec<u32> =
            generation.tokens.iter().filter(|id| !stops.contains(id)).map(|id| id.0).collect();
        let text = self.tokenizer.decode(&ids, false)?;
        Ok(if prompt.trim_end().ends_with("<think>") { format!("<think>\n{text}") } else { text })
    }
}

/// The texts one after another, for a target without a chat template.
fn plain(conversation: &Conversation) -> String {
    let texts = conversation.messages.iter().filter_map(|message| message["content"].as_str());
    texts.collect::<Vec<_>>().join("\n")
}

enum Answered {
    Whole(Value),
    TooLong(String),
    Refused(String),
}
