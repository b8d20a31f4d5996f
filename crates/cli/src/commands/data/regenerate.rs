//! `longdraft data regenerate`: the target answers prompts itself.
//!
//! A draft is judged by how well it follows its target, so the target's own answers are its best
//! text. Rows are answered several at a time; every row gives one line in the output or one in the
//! file of failures, in order, and a second call goes on after the lines that are there.

mod ledger;
mod prompt;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use longdraft_data::conversation::Conversation;
use longdraft_data::source::{RawRow, read_rows};
use longdraft_decode::drafter::drafter_of;
use longdraft_decode::{
    BatchDecoder, DecodeOptions, DraftShape, EndReason, Generation, Job, Sampling, VerifyRule,
};
use longdraft_models::draft::Draft;
use longdraft_models::target::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::{DeviceChoice, TargetTokenId};
use serde_json::{Value, json};

use crate::cli::{CacheChoice, DataRegenerateArguments, WeightDtype};
use crate::decoding::{finish, open_target, require_draft_len, stop_tokens};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use ledger::{Entry, Ledger, Outcome};

/// Time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Rows that a place of the batch answers before lines are written: an interruption loses these.
const ROWS_OF_A_PLACE: usize = 4;

/// Answers what is not answered yet, and checks that every row is accounted for.
pub(super) fn run(arguments: &DataRegenerateArguments, json: bool) -> Result<()> {
    if arguments.batch == 0 {
        return Err(Failure::usage("--batch must be at least 1"));
    }
    if arguments.max_tokens == 0 || !(0.0..=100.0).contains(&arguments.temperature) {
        return Err(Failure::usage("--max-tokens must be at least 1, --temperature 0 to 100"));
    }
    require_draft_len(arguments.draft_len)?;
    let limit = arguments.limit.unwrap_or(usize::MAX);
    let rows = read_rows(&arguments.prompts)?.take(limit);
    let tokenizer = Target::open_tokenizer(&arguments.target)?;
    let source = arguments.draft.as_deref().map(DraftSource::find).transpose()?;
    let target =
        open_target(&arguments.target, WeightDtype::Stored, CacheChoice::Auto, DeviceChoice::Cpu)?;
    let draft = source.map(|source| source.open(&target)).transpose()?;
    let writer =
        Writer { arguments, target: &target, tokenizer: &tokenizer, draft: draft.as_deref() };
    let mut ledger = Ledger::open(&arguments.output, &writer.recipe())?;
    let before = ledger.len();
    if before > 0 {
        errln!("going on after {before} rows that are done");
    }
    let (mut count, mut last_line, mut open) = (0, Instant::now(), Vec::new());
    let mut finish = |open: &mut Vec<(usize, RawRow)>, ledger: &mut Ledger| -> Result<()> {
        for entry in writer.entries(&std::mem::take(open))? {
            if let Outcome::Error | Outcome::Skipped = entry.outcome {
                let problem = entry.body["problem"].as_str().unwrap_or_default();
                errln!("row {}: {problem}", entry.id);
            }
            ledger.write(&entry)?;
        }
        if last_line.elapsed() >= LINE_EVERY {
            last_line = Instant::now();
            errln!("{}", ledger.summary());
        }
        Ok(())
    };
    let interrupts = Interrupts::listen();
    for (index, row) in rows.enumerate() {
        if interrupts.asked() {
            return tell_stopped(&ledger, arguments, json, &interrupts);
        }
        let row = row?;
        count = index + 1;
        if !ledger.is_done(index, &row.origin())? {
            open.push((index, row));
        }
        if open.len() >= ROWS_OF_A_PLACE * arguments.batch {
            finish(&mut open, &mut ledger)?;
        }
    }
    finish(&mut open, &mut ledger)?;
    ledger.check(count)?;
    outln!("{} = {count} rows: {}", ledger.summary(), arguments.output.display());
    if json {
        let (success, error, skipped) = ledger.counts();
        outln!(
            "{}",
            json!({
                "rows": count, "success": success, "error": error, "skipped": skipped,
                "from_before": before, "output": arguments.output.display().to_string(),
            })
        );
    }
    Ok(())
}

/// Says how many rows are done where a signal stopped the work.
fn tell_stopped(
    ledger: &Ledger,
    arguments: &DataRegenerateArguments,
    json: bool,
    interrupts: &Interrupts,
) -> Result<()> {
    let (success, error, skipped) = ledger.counts();
    if json {
        outln!(
            "{}",
            json!({
                "finished": false, "rows": ledger.len(), "success": success, "error": error,
                "skipped": skipped, "output": arguments.output.display().to_string(),
            })
        );
    } else {
        outln!("stopped after {}: the same command goes on from there", ledger.summary());
    }
    Err(interrupts.failure())
}

/// Answers rows.
struct Writer<'a> {
    arguments: &'a DataRegenerateArguments,
    target: &'a Target,
    tokenizer: &'a TextTokenizer,
    draft: Option<&'a dyn Draft>,
}

impl Writer<'_> {
    /// What lines of one file must have in common. A draft changes no distribution, so it is left
    /// out.
    fn recipe(&self) -> String {
        let DataRegenerateArguments { temperature, seed, max_tokens, .. } = self.arguments;
        let target = self.target.fingerprint();
        format!("{target} temperature={temperature} seed={seed} max_tokens={max_tokens}")
    }

    /// Answers rows together: all first turns, then all second ones, ...
    fn entries(&self, rows: &[(usize, RawRow)]) -> Result<Vec<Entry>> {
        let mut rows: Vec<(Entry, Option<Dialogue>)> =
            rows.iter().map(|(index, row)| opened(*index, row, self.arguments)).collect();
        loop {
            let (mut asked, mut jobs) = (Vec::new(), Vec::new());
            for (place, (entry, dialogue)) in rows.iter_mut().enumerate() {
                let Some(open) = dialogue else { continue };
                if !open.next_turn() {
                    entry.outcome = Outcome::Success;
                    entry.body = open.to_json();
                    *dialogue = None;
                    continue;
                }
                match self.render(&open.done) {
                    Ok(text) => {
                        jobs.push(self.job(&text, [entry.row as u64, open.turn as u64])?);
                        asked.push((place, text));
                    }
                    Err(problem) => {
                        entry.fail(Outcome::Error, &problem);
                        *dialogue = None;
                    }
                }
            }
            if jobs.is_empty() {
                return Ok(rows.into_iter().map(|(entry, _)| entry).collect());
            }
            let answers = self.decode(&jobs)?;
            for ((place, text), answer) in asked.into_iter().zip(answers) {
                let (entry, dialogue) = &mut rows[place];
                match answer {
                    Ok(generation) => {
                        let answer = self.text(&text, &generation)?;
                        dialogue.iter_mut().for_each(|open| open.answer(&generation, &answer));
                    }
                    Err(error) => {
                        entry.fail(Outcome::Skipped, &error.to_string());
                        *dialogue = None;
                    }
                }
            }
        }
    }

    fn render(&self, done: &Conversation) -> std::result::Result<String, String> {
        match self.tokenizer.chat_template() {
            Some(template) => template
                .render_messages(&done.messages, done.tools.as_ref(), true)
                .map_err(|error| error.to_string()),
            None => Ok(plain(done)),
        }
    }

    fn job(&self, text: &str, key: [u64; 2]) -> Result<Job> {
        let mut ids = self.tokenizer.encode(text)?.ids;
        if let (None, true, Some(bos)) = (
            self.tokenizer.chat_template(),
            self.tokenizer.adds_bos(),
            self.target.config().bos_token_id,
        ) {
            ids.insert(0, bos);
        }
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
        Ok(Job { prompt: ids.into_iter().map(TargetTokenId).collect(), options })
    }

    fn decode(&self, jobs: &[Job]) -> Result<Vec<longdraft_decode::Result<Generation>>> {
        let drafter = || self.draft.map(|draft| drafter_of(draft, self.target, None)).transpose();
        let places = self.arguments.batch.min(jobs.len());
        let drafters =
            (0..places).map(|_| drafter()).collect::<longdraft_decode::Result<Vec<_>>>()?;
        let mut decoder = BatchDecoder::new(self.target, drafters);
        Ok(decoder.generate(jobs, &mut |_, _| ControlFlow::Continue(()))?)
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

/// A row's line, as failed until it is answered, and its conversation if there is one.
fn opened(
    index: usize,
    row: &RawRow,
    arguments: &DataRegenerateArguments,
) -> (Entry, Option<Dialogue>) {
    let mut entry =
        Entry { row: index, id: row.origin(), outcome: Outcome::Error, body: Value::Null };
    let prompts = row
        .parse()
        .map_err(|error| error.to_string())
        .and_then(|row| prompt::of_row(row, arguments.field.as_deref()));
    match prompts {
        Ok(prompt::Prompts::Turns(prompts)) => return (entry, Some(Dialogue::new(prompts))),
        Ok(prompt::Prompts::Unusable(problem)) => entry.fail(Outcome::Skipped, &problem),
        Err(problem) => entry.fail(Outcome::Error, &problem),
    }
    (entry, None)
}

/// Prompts of which some are answered; every answer is part of what the next one follows on.
struct Dialogue {
    prompts: Conversation,
    done: Conversation,
    /// Index of the prompt that is answered now.
    turn: usize,
    /// Prompts that are part of `done`.
    taken: usize,
    tokens: usize,
    finish: &'static str,
}

impl Dialogue {
    fn new(prompts: Conversation) -> Self {
        let done = Conversation { messages: Vec::new(), tools: prompts.tools.clone() };
        Self { prompts, done, turn: 0, taken: 0, tokens: 0, finish: "stop" }
    }

    /// Goes on to the next prompt of the user; whether there is one.
    fn next_turn(&mut self) -> bool {
        while let Some(message) = self.prompts.messages.get(self.taken) {
            self.done.messages.push(message.clone());
            self.turn = self.taken;
            self.taken += 1;
            if self.prompts.role(self.turn) == "user" {
                return true;
            }
        }
        false
    }

    fn answer(&mut self, generation: &Generation, text: &str) {
        self.tokens += generation.tokens.len();
        if generation.end != EndReason::StopToken {
            self.finish = finish(generation.end);
        }
        self.done.push("assistant", text);
    }

    fn to_json(&self) -> Value {
        json!({ "messages": self.done.messages, "finish": self.finish, "tokens": self.tokens })
    }
}
