//! `longdraft data regenerate`: the target answers prompts itself.
//!
//! A draft is judged by how well it follows its target, so the target's own answers are its best
//! text. Rows are answered several at a time; every row gives one line in the output or one in the
//! file of failures, in order, and a second call goes on after the lines that are there.

mod ledger;
mod prompt;

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use longdraft_data::conversation::Conversation;
use longdraft_data::source::{RawRow, read_rows};
use longdraft_decode::drafter::{Combination, CombinedDrafter, Drafter, LookupDrafter, drafter_of};
use longdraft_decode::{
    BatchDecoder, Committed, DecodeOptions, DraftShape, EndReason, Generation, Job, Pacing,
    Sampling, VerifyRule,
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

pub(crate) use prompt::{Prompts, of_row as prompts_of_row};

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
    // Before anything large is read.
    drop(read_rows(&arguments.prompts)?);
    let tokenizer = Target::open_tokenizer(&arguments.target)?;
    let source = arguments.draft.as_deref().map(DraftSource::find).transpose()?;
    let target =
        open_target(&arguments.target, WeightDtype::Stored, CacheChoice::Auto, DeviceChoice::Cpu)?;
    let draft = source.map(|source| source.open(&target)).transpose()?;
    let writer = Writer {
        arguments,
        target: &target,
        tokenizer: &tokenizer,
        draft: draft.as_deref(),
        hears: None,
    };
    let (mut last_line, interrupts) = (Instant::now(), Interrupts::listen());
    let mut tell = |answered: &Answered| {
        if answered.rows == 0 && answered.before > 0 {
            errln!("going on after {} rows that are done", answered.before);
        }
        if last_line.elapsed() >= LINE_EVERY {
            last_line = Instant::now();
            errln!("{}", answered.summary());
        }
    };
    let answered = writer.answer(None, &interrupts, &mut tell)?;
    let (success, error, skipped) = answered.counts;
    let (output, rows) = (arguments.output.display().to_string(), answered.rows);
    if answered.reached != Reached::TheEnd {
        let done = success + error + skipped;
        if json {
            outln!(
                "{}",
                json!({
                    "finished": false, "rows": done, "success": success, "error": error,
                    "skipped": skipped, "output": output,
                })
            );
        } else {
            outln!("stopped after {}: the same command goes on from there", answered.summary());
        }
        return Err(interrupts.failure());
    }
    outln!("{} = {rows} rows: {output}", answered.summary());
    if json {
        outln!(
            "{}",
            json!({
                "rows": rows, "success": success, "error": error, "skipped": skipped,
                "from_before": answered.before, "output": output,
            })
        );
    }
    Ok(())
}

/// Where answering ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reached {
    /// Every row has its line.
    TheEnd,
    /// The time was over; rows that were not whole are not written.
    ItsTime,
    /// A signal asked to stop.
    ASignal,
}

/// How far answering came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered {
    /// Success, error, skipped.
    pub(crate) counts: (usize, usize, usize),
    /// Rows that were read.
    pub(crate) rows: usize,
    /// Rows that were done before.
    pub(crate) before: usize,
    pub(crate) reached: Reached,
}

impl Answered {
    fn summary(&self) -> String {
        let (success, error, skipped) = self.counts;
        format!("{success} success + {error} error + {skipped} skipped")
    }
}

/// Hears of answers as they are written.
pub(crate) trait Hears {
    /// Others are answered from here on.
    fn begin(&mut self, jobs: &[Job]);

    /// A token of a job, by its number among them.
    fn token(&mut self, job: usize, committed: Committed);
}

/// Answers rows.
pub(crate) struct Writer<'a> {
    pub(crate) arguments: &'a DataRegenerateArguments,
    pub(crate) target: &'a Target,
    pub(crate) tokenizer: &'a TextTokenizer,
    pub(crate) draft: Option<&'a dyn Draft>,
    pub(crate) hears: Option<&'a RefCell<dyn Hears + 'a>>,
}

impl Writer<'_> {
    /// Answers the rows that are not answered yet, until a time if there is one; `tell` hears of them as
    /// they are written.
    pub(crate) fn answer(
        &self,
        until: Option<Instant>,
        interrupts: &Interrupts,
        tell: &mut dyn FnMut(&Answered),
    ) -> Result<Answered> {
        let DataRegenerateArguments { prompts, output, limit, batch, .. } = self.arguments;
        let rows = read_rows(prompts)?.take(limit.unwrap_or(usize::MAX));
        let mut ledger = Ledger::open(output, &self.recipe())?;
        let (counts, before) = (ledger.counts(), ledger.len());
        let mut answered = Answered { counts, rows: 0, before, reached: Reached::TheEnd };
        tell(&answered);
        let is_over = || until.is_some_and(|until| Instant::now() >= until);
        let mut open = Vec::new();
        for (index, row) in rows.enumerate() {
            if interrupts.asked() || is_over() {
                let signal = interrupts.asked();
                answered.reached = if signal { Reached::ASignal } else { Reached::ItsTime };
                return Ok(answered);
            }
            let row = row?;
            answered.rows = index + 1;
            if !ledger.is_done(index, &row.origin())? {
                open.push((index, row));
            }
            if open.len() >= ROWS_OF_A_PLACE * batch {
                self.write(&std::mem::take(&mut open), &mut ledger, until)?;
                answered.counts = ledger.counts();
                tell(&answered);
            }
        }
        self.write(&open, &mut ledger, until)?;
        answered.counts = ledger.counts();
        tell(&answered);
        match ledger.check(answered.rows) {
            Err(_) if is_over() => answered.reached = Reached::ItsTime,
            checked => checked?,
        }
        Ok(answered)
    }

    /// Answers rows and writes their lines.
    fn write(
        &self,
        rows: &[(usize, RawRow)],
        ledger: &mut Ledger,
        until: Option<Instant>,
    ) -> Result<()> {
        for entry in self.entries(rows, until)? {
            if let Outcome::Error | Outcome::Skipped = entry.outcome {
                let problem = entry.body["problem"].as_str().unwrap_or_default();
                errln!("row {}: {problem}", entry.id);
            }
            ledger.write(&entry)?;
        }
        Ok(())
    }

    /// What lines of one file must have in common. A draft changes no distribution, so it is left
    /// out.
    fn recipe(&self) -> String {
        let DataRegenerateArguments { temperature, seed, max_tokens, .. } = self.arguments;
        let target = self.target.fingerprint();
        format!("{target} temperature={temperature} seed={seed} max_tokens={max_tokens}")
    }

    /// Answers rows together: all first turns, then all second ones, ...
    /// Those that are not whole when the time is over are left out.
    fn entries(&self, rows: &[(usize, RawRow)], until: Option<Instant>) -> Result<Vec<Entry>> {
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
            let answers = self.decode(&jobs, until)?;
            let mut cut = Vec::new();
            for ((place, text), answer) in asked.into_iter().zip(answers) {
                let (entry, dialogue) = &mut rows[place];
                match answer {
                    Ok(generation) if generation.end == EndReason::Interrupted => cut.push(place),
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
            cut.into_iter().rev().for_each(|place| drop(rows.remove(place)));
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
            // With lookup some rounds find much and others nothing.
            pacing: if self.arguments.lookup { Pacing::Measured } else { Pacing::Fixed },
            ..DecodeOptions::default()
        };
        Ok(Job { prompt: ids.into_iter().map(TargetTokenId).collect(), options })
    }

    fn decode(
        &self,
        jobs: &[Job],
        until: Option<Instant>,
    ) -> Result<Vec<longdraft_decode::Result<Generation>>> {
        let drafter = || -> longdraft_decode::Result<Option<Box<dyn Drafter + '_>>> {
            let model = self.draft.map(|draft| drafter_of(draft, self.target, None)).transpose()?;
            Ok(match (model, self.arguments.lookup) {
                (Some(model), true) => {
                    let lookup = LookupDrafter::new();
                    Some(Box::new(CombinedDrafter::new(model, lookup, Combination::Switch)))
                }
                (None, true) => Some(Box::new(LookupDrafter::new())),
                (model, false) => model,
            })
        };
        let places = self.arguments.batch.min(jobs.len());
        let drafters =
            (0..places).map(|_| drafter()).collect::<longdraft_decode::Result<Vec<_>>>()?;
        let mut decoder = BatchDecoder::new(self.target, drafters);
        let mut hears = self.hears.map(RefCell::borrow_mut);
        if let Some(hears) = &mut hears {
            hears.begin(jobs);
        }
        Ok(decoder.generate(jobs, &mut |job, committed| {
            if let Some(hears) = &mut hears {
                hears.token(job, committed);
            }
            match until {
                Some(until) if Instant::now() >= until => {
                    ControlFlow::Break(EndReason::Interrupted)
                }
                _ => ControlFlow::Continue(()),
            }
        })?)
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
