//! Answers rows, as many at a time as there are places: a place whose answer ends takes the next one.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::iter::Enumerate;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use longdraft_data::conversation::{Conversation, VARIABLES};
use longdraft_data::source::{RawRow, read_rows};
use longdraft_data::template::form;
use longdraft_decode::drafter::{
    Combination, CombinedDrafter, Drafter, LookupDrafter, Proposer, drafter_of,
};
use longdraft_decode::{
    BatchEngine, DecodeOptions, DraftShape, Generation, LogProbs, Pacing, Sampling, VerifyRule,
};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::{ChatTemplate, TextTokenizer, variables_text};
use longdraft_models::{ModelError, TargetTokenId};
use serde_json::Value;

use super::dialogue::{Dialogue, asked, opened, plain};
use super::ledger::{Entry, Ledger, Outcome};
use super::{Answered, Hears, Reached, failures_file};
use crate::cli::DataRegenerateArguments;
use crate::decoding::stop_tokens;
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Rows that a place of the batch may be ahead of the first one that is not answered, for lines are written
/// in the order of rows: a kill loses these.
const ROWS_OF_A_PLACE: usize = 4;
/// Rows without an answer that are told one by one: a wrong `--field` has as many as there are prompts.
const MOST_TOLD: usize = 10;

/// Answers rows.
pub(crate) struct Writer<'a> {
    pub(crate) arguments: &'a DataRegenerateArguments,
    pub(crate) target: &'a Target,
    pub(crate) tokenizer: &'a TextTokenizer,
    pub(crate) draft: Option<&'a Proposer>,
    pub(crate) hears: Option<&'a RefCell<dyn Hears + 'a>>,
}

/// Rows that are read and not written yet, in their order, and what answers them.
struct Work<'w, 'a, I> {
    writer: &'w Writer<'a>,
    rows: Enumerate<I>,
    /// Whether that was the last one.
    is_read: bool,
    open: VecDeque<Open>,
    most_open: usize,
    engine: BatchEngine<'w>,
    ledger: Ledger,
    /// Hash of how rows are asked.
    asking: blake3::Hasher,
    answered: Answered,
    /// Rows without an answer.
    failed: usize,
}

/// A row under way: it is over when it has no conversation any more.
struct Open {
    entry: Entry,
    dialogue: Option<Dialogue>,
    /// The text that is answered now.
    running: Option<String>,
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
        let ledger = Ledger::open(output, (&self.recipe(), &self.form()?))?;
        let (counts, before) = (ledger.counts, ledger.len());
        let mut work = Work {
            writer: self,
            rows: rows.enumerate(),
            is_read: false,
            open: VecDeque::new(),
            most_open: ROWS_OF_A_PLACE * batch,
            engine: BatchEngine::new(self.target, self.drafters()?),
            ledger,
            asking: self.asking()?,
            answered: Answered {
                counts,
                rows: 0,
                before,
                failed_before: 0,
                reached: Reached::TheEnd,
            },
            failed: 0,
        };
        tell(&work.answered);
        loop {
            work.fill()?;
            if work.write_first()? {
                tell(&work.answered);
            }
            if work.engine.running() > 0 {
                let is_over = until.is_some_and(|until| Instant::now() >= until);
                if interrupts.asked() || is_over {
                    let signal = interrupts.asked();
                    work.answered.reached =
                        if signal { Reached::ASignal } else { Reached::ItsTime };
                    work.write_all()?;
                    tell(&work.answered);
                    return Ok(work.answered);
                }
                work.round()?;
            } else if work.is_read {
                work.ledger.check(work.answered.rows)?;
                return Ok(work.answered);
            }
        }
    }

    fn drafters(&self) -> Result<Vec<Option<Box<dyn Drafter + '_>>>> {
        let drafter = |_| -> longdraft_decode::Result<Option<Box<dyn Drafter + '_>>> {
            let model = match self.draft {
                Some(Proposer { draft, head }) => {
                    Some(drafter_of(Arc::clone(draft), self.target, head.as_ref())?)
                }
                None => None,
            };
            Ok(match (model, self.arguments.lookup) {
                (Some(model), true) => {
                    let lookup = LookupDrafter::new();
                    Some(Box::new(CombinedDrafter::new(model, lookup, Combination::Switch)))
                }
                (None, true) => Some(Box::new(LookupDrafter::new())),
                (model, false) => model,
            })
        };
        Ok((0..self.arguments.batch).map(drafter).collect::<longdraft_decode::Result<_>>()?)
    }

    /// What lines of one file must have in common. A draft changes no distribution, so it is left
    /// out.
    fn recipe(&self) -> String {
        let DataRegenerateArguments { temperature, seed, max_tokens, .. } = self.arguments;
        let target = self.target.fingerprint();
        let recipe =
            format!("{target} temperature={temperature} seed={seed} max_tokens={max_tokens}");
        let variables = self.tokenizer.chat_template().map(ChatTemplate::variables);
        match variables.map(variables_text).unwrap_or_default() {
            none if none.is_empty() => recipe,
            // A recipe's values have no spaces.
            text => format!("{recipe} {VARIABLES}={}", text.replace(' ', "\\u0020")),
        }
    }

    /// Hash of what makes tokens of a conversation.
    fn form(&self) -> Result<String> {
        self.form_of(self.tokenizer.chat_template())
    }

    fn form_of(&self, template: Option<&ChatTemplate>) -> Result<String> {
        let template = template.map(ChatTemplate::fingerprint);
        Ok(form(&self.tokenizer.fingerprint()?, template.as_deref()))
    }

    /// The line of a row whose prompts are all answered.
    fn line(&self, row: &Dialogue) -> Result<Value> {
        let Some(template) = self.tokenizer.chat_template() else { return Ok(row.to_text()) };
        let own = template.with_variables(&row.done.variables);
        Ok(row.to_json(&self.form_of(Some(&own))?, own.variables()))
    }

    /// Hash of how rows are asked: a row that failed would fail again while it is the same.
    fn asking(&self) -> Result<blake3::Hasher> {
        let mut hasher = blake3::Hasher::new();
        let template = self.tokenizer.chat_template().map(ChatTemplate::fingerprint);
        let field = self.arguments.field.as_deref();
        let version = env!("CARGO_PKG_VERSION");
        let parts = (version, self.recipe(), self.tokenizer.fingerprint()?, template, field);
        // With quotes, so that no two lists of parts give one text.
        hasher.update(format!("{parts:?}").as_bytes());
        Ok(hasher)
    }

    fn render(&self, done: &Conversation) -> longdraft_models::Result<String> {
        match self.tokenizer.chat_template() {
            Some(template) => template.with_variables(&done.variables).render_messages(
                &done.messages,
                done.tools.as_ref(),
                true,
            ),
            None => Ok(plain(done.messages.iter())),
        }
    }

    fn request(&self, text: &str, key: [u64; 2]) -> Result<(Vec<TargetTokenId>, DecodeOptions)> {
        let ids = match self.tokenizer.chat_template() {
            Some(_) => self.tokenizer.encode(text)?.ids,
            None => self.tokenizer.encode_prompt(text, self.target.config().bos_token_id)?,
        };
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
            // Prompts begin alike, and a dialogue with what it was before.
            reuse_prefix: true,
            ..DecodeOptions::default()
        };
        Ok((ids.into_iter().map(TargetTokenId).collect(), options))
    }

    /// The stop token that ended an answer, as it is written.
    fn stop_of(&self, generation: &Generation) -> Option<String> {
        let stops = stop_tokens(self.target);
        let last = generation.tokens.last().filter(|token| stops.contains(token))?;
        self.tokenizer.token(last.0)
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

impl<I: Iterator<Item = longdraft_data::Result<RawRow>>> Work<'_, '_, I> {
    /// Gives every free place something to answer: first what follows on an answer, then rows.
    fn fill(&mut self) -> Result<()> {
        while self.engine.has_room() {
            let waits = |open: &Open| open.dialogue.is_some() && open.running.is_none();
            if let Some(at) = self.open.iter().position(waits) {
                self.begin(at)?;
                continue;
            }
            if self.open.len() >= self.most_open {
                return Ok(());
            }
            let Some((index, row)) = self.rows.next() else {
                self.is_read = true;
                return Ok(());
            };
            let row = row?;
            self.answered.rows = index + 1;
            let id = row.origin();
            let field = self.writer.arguments.field.as_deref();
            let template = self.writer.tokenizer.chat_template();
            if self.ledger.is_done(index, &id, || asked(&row, field, template))? {
                continue;
            }
            let attempt = self.attempt(&row);
            if self.ledger.failed_before(index, &id, &attempt) {
                self.answered.failed_before += 1;
                self.answered.counts = self.ledger.counts;
                continue;
            }
            let (entry, dialogue) = opened(index, (&row, attempt), field);
            self.open.push_back(Open { entry, dialogue, running: None });
        }
        Ok(())
    }

    /// Fingerprint of all that a row's failure follows from.
    fn attempt(&self, row: &RawRow) -> String {
        let mut attempt = self.asking.clone();
        attempt.update(row.raw().as_bytes());
        attempt.finalize().to_hex()[..16].to_owned()
    }

    /// Has a row's next prompt answered, if there is one.
    fn begin(&mut self, at: usize) -> Result<()> {
        let Open { entry, dialogue, running } = &mut self.open[at];
        let Some(open) = dialogue else { return Ok(()) };
        if !open.next_turn() {
            entry.outcome = Outcome::Success;
            entry.body = self.writer.line(open)?;
            *dialogue = None;
            return Ok(());
        }
        let failed = match self.writer.render(&open.done) {
            Err(error) => {
                // That follows from the machine as well: the next call tries the row again.
                if matches!(error, ModelError::Rendering(_)) {
                    entry.attempt = None;
                }
                Some((Outcome::Error, error.to_string()))
            }
            Ok(text) => {
                let (prompt, options) =
                    self.writer.request(&text, [entry.row as u64, open.turn as u64])?;
                match self.engine.join(entry.row, &prompt, &options) {
                    Ok(()) => {
                        if let Some(hears) = self.writer.hears {
                            hears.borrow_mut().begin(entry.row, &prompt);
                        }
                        *running = Some(text);
                        None
                    }
                    Err(error) if error.is_of_the_prompt() => {
                        Some((Outcome::Skipped, error.to_string()))
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        if let Some((outcome, problem)) = failed {
            entry.fail(outcome, &problem);
            *dialogue = None;
        }
        Ok(())
    }

    /// One round of all that run.
    fn round(&mut self) -> Result<()> {
        let hears = self.writer.hears;
        let ended = self.engine.round(&mut |row, committed, _: Option<&LogProbs>| {
            if let Some(hears) = hears {
                hears.borrow_mut().token(row, committed);
            }
            ControlFlow::Continue(())
        })?;
        for (row, generation) in ended {
            let Some(open) = self.open.iter_mut().find(|open| open.entry.row == row) else {
                continue;
            };
            let prompt = open.running.take().unwrap_or_default();
            match generation {
                Ok(generation) => {
                    let answer = self.writer.text(&prompt, &generation)?;
                    if let Some(dialogue) = &mut open.dialogue {
                        let stop = self.writer.stop_of(&generation);
                        let ended = (generation.tokens.len(), generation.end, stop);
                        dialogue.answer(ended, &answer);
                    }
                }
                Err(error) => {
                    open.entry.fail(Outcome::Skipped, &error.to_string());
                    open.dialogue = None;
                }
            }
        }
        Ok(())
    }

    /// Writes the first rows that are over; whether there was one.
    fn write_first(&mut self) -> Result<bool> {
        let mut wrote = false;
        while let Some(open) = self.open.pop_front_if(|open| open.dialogue.is_none()) {
            self.write(&open.entry)?;
            wrote = true;
        }
        Ok(wrote)
    }

    /// Writes all rows that are over; the others are left out.
    fn write_all(&mut self) -> Result<()> {
        let open = std::mem::take(&mut self.open);
        let over = open.iter().filter(|open| open.dialogue.is_none());
        over.map(|open| &open.entry).try_for_each(|entry| self.write(entry))
    }

    /// Says why a row has no answer, of the first ones.
    fn tell_failed(&mut self, entry: &Entry) {
        self.failed += 1;
        if self.failed <= MOST_TOLD {
            let problem = entry.body["problem"].as_str().unwrap_or_default();
            // Some problems begin with their place.
            let place = format!("{}: ", entry.id);
            let reason = problem.split_once(&place).map_or(problem, |(_, reason)| reason);
            errln!("row {place}{reason}");
        } else if self.failed == MOST_TOLD + 1 {
            let path = failures_file(&self.writer.arguments.output);
            errln!("further rows without an answer are told in {} alone", path.display());
        }
    }

    fn write(&mut self, entry: &Entry) -> Result<()> {
        if let Outcome::Error | Outcome::Skipped = entry.outcome {
            self.tell_failed(entry);
        }
        self.ledger.write(entry)?;
        self.answered.counts = self.ledger.counts;
        Ok(())
    }
}
