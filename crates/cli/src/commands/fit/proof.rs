//! Prompts that nothing was trained on, answered with the draft and without it.

use std::path::Path;
use std::time::{Duration, Instant};

use longdraft_data::conversation::Conversation;
use longdraft_data::source::read_jsonl;
use longdraft_decode::DecodeOptions;
use longdraft_decode::evaluate::{Progress, Prompt};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::TOKEN_COUNTS_FILE;
use longdraft_models::draft::files::open_weights;
use longdraft_models::draft::vocabulary::MAP;
use longdraft_models::sha256;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_records::decode::{Cell, DecodeRecord};
use longdraft_records::events::{Advance, Events};
use serde_json::{Map, Value};

use super::lookup;
use super::measure::Machine;
use super::prompts;
use super::rules::Plan;
use super::state::Settings;
use crate::cli::{DecodingArguments, LookupChoice, PaceChoice};
use crate::commands::eval::{self, Unfinished};
use crate::decoding::{Models, encode_text};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::recording;
use crate::terminal::counted;

/// Tokens of an answer at most.
pub(super) const NEW_TOKENS: usize = 128;
/// Share of them that answers have.
const ANSWER: f64 = 0.7;
/// Prompts that every way answers, whatever they take.
const LEAST_PROMPTS: usize = 2;
/// Tokens that a prompt must leave for its answer.
const ROOM: usize = 8;

/// The prompts that were set aside, encoded; what leaves no room for an answer is left out.
pub(super) fn held_out(
    folder: &Path,
    (target, tokenizer): (&Target, &TextTokenizer),
) -> Result<Vec<Prompt>> {
    let path = prompts::files(folder).1;
    let context = target.config().max_position_embeddings;
    let mut found = Vec::new();
    let mut refused = None;
    for row in read_jsonl(&path)? {
        let row = row?;
        // A template may refuse what stands there, such as a system message: the target does not answer it either.
        let asked = first_turn(row.value("messages")?, &row.fields);
        let tokens = match encode(&asked, (target, tokenizer)) {
            Ok(tokens) => tokens,
            Err(failure) => {
                refused = Some(failure);
                continue;
            }
        };
        if leaves_room(tokens.len(), context) {
            let category = row.value("category").ok().and_then(Value::as_str).unwrap_or("all");
            found.push(Prompt { category: category.to_owned(), tokens });
        }
    }
    if let (true, Some(failure)) = (found.is_empty(), refused) {
        return Err(failure.or_hint("no prompt that was set aside can be asked: give others"));
    }
    if found.is_empty() {
        return Err(Failure::usage(format!(
            "every prompt that was set aside fills the target's context of {context} tokens"
        ))
        .hint("give shorter prompts"));
    }
    Ok(found)
}

/// A conversation with its tools as the target reads it, up to where its answer begins.
pub(super) fn encode(
    asked: &Conversation,
    (target, tokenizer): (&Target, &TextTokenizer),
) -> Result<Vec<TargetTokenId>> {
    let Some(template) = tokenizer.chat_template() else {
        let texts = asked.messages.iter().filter_map(|message| message.get("content")?.as_str());
        return encode_text(&texts.collect::<Vec<_>>().join("\n"), tokenizer, target);
    };
    let template = template.with_variables(&asked.variables);
    let text = template.render_messages(&asked.messages, asked.tools.as_ref(), true)?;
    Ok(tokenizer.encode(&text)?.ids.into_iter().map(TargetTokenId).collect())
}

/// Whether a prompt of so many tokens can be answered.
pub(super) fn leaves_room(tokens: usize, context: usize) -> bool {
    tokens + ROOM < context
}

/// Messages up to the first one of the user, with what stands with them in their row.
pub(super) fn first_turn(messages: &Value, row: &Map<String, Value>) -> Conversation {
    let mut turn = beside(row);
    for message in messages.as_array().into_iter().flatten() {
        let role = message["role"].as_str().unwrap_or("user");
        turn.push(role, message["content"].as_str().unwrap_or_default());
        if role == "user" {
            break;
        }
    }
    turn
}

/// A conversation without messages yet: the tools and variables of a row, which an earlier phase wrote.
pub(super) fn beside(row: &Map<String, Value>) -> Conversation {
    let variables = Conversation::variables_of(row).unwrap_or_default();
    Conversation { tools: row.get("tools").cloned(), variables, ..Conversation::default() }
}

/// A way to decode with a name and the arguments that a user gives for it.
pub(super) struct Way {
    pub(super) decoding: DecodingArguments,
    temperature: f64,
    pub(super) pace: PaceChoice,
}

/// Whether a draft's files say which of the target's tokens it proposes.
fn has_own_vocabulary(draft: &Path) -> bool {
    open_weights(draft).is_ok_and(|source| source.shape(MAP[0]).is_some())
}

/// The ways that are compared: the draft alone, every round and greedily, which must lose nothing; the draft
/// with lookup and lookup alone, as they would be used.
pub(super) fn ways(draft: &Path, plan: &Plan, settings: &Settings) -> Vec<Way> {
    // A draft that began with a head of its own has one.
    let counts = draft.join(TOKEN_COUNTS_FILE).is_file() && !has_own_vocabulary(draft);
    let alone = DecodingArguments {
        draft: Some(draft.to_path_buf()),
        draft_vocab_size: plan.proposed.filter(|_| counts),
        draft_len: plan.most.max(1),
        seed: settings.seed,
        ..settings.decoding()
    };
    let lookup = Some(LookupChoice::Switch);
    let both = DecodingArguments { lookup, ..alone.clone() };
    let only = DecodingArguments { lookup, ..settings.decoding() };
    let way = |decoding, temperature, pace| Way { decoding, temperature, pace };
    vec![
        way(alone.clone(), 0.0, PaceChoice::Fixed),
        way(alone, settings.temperature, PaceChoice::Measured),
        way(both, settings.temperature, PaceChoice::Measured),
        way(only, settings.temperature, PaceChoice::Measured),
    ]
}

impl Way {
    /// What a request asks for.
    pub(super) fn options(&self, settings: &Settings, target: &Target) -> Result<DecodeOptions> {
        let most = NEW_TOKENS.min(settings.max_tokens);
        self.decoding.request((self.temperature, self.pace), most, target)
    }
}

/// Seconds in which a prompt is answered plainly, by so many tokens at most.
pub(super) fn of_prompt(max_tokens: usize, machine: &Machine) -> f64 {
    let answer = ANSWER * NEW_TOKENS.min(max_tokens) as f64;
    answer * machine.step() + machine.lengths.first_prompt * machine.prefill
}

/// Seconds of a proof.
#[derive(Debug, Clone, Copy)]
pub(super) struct Time {
    /// Those of all its calls.
    pub(super) planned: f64,
    /// Those that the round has left for it.
    pub(super) left: f64,
}

impl Time {
    /// Those that are to come where earlier calls took some.
    fn after(self, taken: f64) -> f64 {
        (self.planned - taken).max(self.left).clamp(1.0, 1e8)
    }
}

/// Measures all ways within a time, from where an earlier call came with the same `draft`; `None` if a signal stopped it.
/// What is measured lies in the folder until its keeper is removed.
pub(super) fn measure(
    (folder, draft): (&Path, &str),
    (settings, machine): (&Settings, &Machine),
    ways: &[Way],
    time: Time,
    (interrupts, events): (&Interrupts, &mut Events),
) -> Result<Option<(DecodeRecord, Unfinished)>> {
    let Some(first) = ways.first() else { return Ok(None) };
    let models = first.decoding.open(&settings.target)?;
    let prompts = held_out(folder, (&models.target, &models.tokenizer))?;
    // A slow target says less.
    let tokens = lookup::tokens(time.planned / ways.len() as f64, machine.step());
    let new_tokens = tokens.min(settings.max_tokens);
    let request = |way: &Way| -> Result<DecodeOptions> {
        let options = way.options(settings, &models.target)?;
        Ok(DecodeOptions { max_new_tokens: new_tokens, ..options })
    };
    let requests = ways.iter().map(request).collect::<Result<Vec<_>>>()?;
    let about = known_by(draft, &models, &requests, &prompts);
    let mut unfinished = Unfinished::open(Some(folder), about, (prompts.len(), "way"));
    let seconds = time.after(unfinished.seconds());
    // Plainly, too, and with a draft in as long at most.
    let of_prompt = 2.0 * of_prompt(new_tokens, machine) * ways.len() as f64;
    let mut count = ((seconds / of_prompt) as usize).max(LEAST_PROMPTS).min(prompts.len());
    errln!(
        "answering {} that {} set aside, with the draft and without it, in {}",
        counted(count, "prompt"),
        if count == 1 { "was" } else { "were" },
        counted(ways.len(), "way")
    );
    let name = prompts::files(folder).1.display().to_string();
    let about = (settings.target.as_str(), name.as_str());
    let mut record = recording::begin(about, &first.decoding, &models, new_tokens);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let common = Common { settings, models: &models, prompts: &prompts, until, interrupts };
    for (index, way) in ways.iter().zip(&requests).enumerate() {
        if unfinished.cell(index).is_none() {
            let place = (index, ways.len());
            let cell = common.measure(way, place, count, &mut unfinished, events)?;
            let Some(cell) = cell else { return Ok(None) };
            unfinished.end_cell(&cell);
        }
        let Some(cell) = unfinished.cell(index) else { continue };
        // The ways that follow answer no others.
        count = count.min(cell.figures.prompts);
        record.cells.push(cell.clone());
    }
    record.circumstances = Some(recording::circumstances(&models, unfinished.seconds()));
    Ok(Some((record, unfinished)))
}

/// All that the figures of a proof depend on, as a hash.
fn known_by(
    draft: &str,
    models: &Models,
    requests: &[DecodeOptions],
    prompts: &[Prompt],
) -> String {
    sha256::of_text(&format!(
        "{} {} {draft} {} {requests:?} {prompts:?}",
        env!("CARGO_PKG_VERSION"),
        models.target.fingerprint(),
        rayon::current_num_threads()
    ))
}

/// What the ways of a proof have in common.
struct Common<'a> {
    settings: &'a Settings,
    models: &'a Models,
    prompts: &'a [Prompt],
    until: Instant,
    interrupts: &'a Interrupts,
}

impl Common<'_> {
    /// Measures one of all ways over some prompts, or over fewer in its share of the time; `None` if a signal stopped it.
    fn measure(
        &self,
        (way, options): (&Way, &DecodeOptions),
        (index, ways): (usize, usize),
        count: usize,
        unfinished: &mut Unfinished,
        events: &mut Events,
    ) -> Result<Option<Cell>> {
        let from = unfinished.progress();
        let prompts = &self.prompts[..count.max(from.prompts).min(self.prompts.len())];
        let (all, interrupts) = (prompts.len(), self.interrupts);
        // Lookup alone needs the same target without the draft.
        let lookup_alone = way.decoding.draft.is_none();
        let own = if lookup_alone { Some(way.decoding.open(&self.settings.target)?) } else { None };
        let models = own.as_ref().unwrap_or(self.models);
        let left = self.until.saturating_duration_since(Instant::now());
        let until = Instant::now() + left / (ways - index) as u32;
        let is_enough =
            |progress: &Progress| progress.prompts >= LEAST_PROMPTS && Instant::now() >= until;
        let mut line = eval::lines(all, 1);
        let mut goes_on = |progress: &Progress| {
            line(progress);
            unfinished.keep(progress, interrupts.asked());
            let (done, all) = (index * all + progress.prompts, ways * all);
            let what = "answers".to_owned();
            events.progress(Advance { what, done, all, ..Advance::default() });
            !interrupts.asked()
        };
        let (decoding, how) = (&way.decoding, (options, 1));
        eval::measure(decoding, models, prompts, how, from, &mut goes_on, &is_enough)
    }
}

/// The way to use, of those that decode as it will be served, or of those among them with the draft.
pub(super) fn best(record: &DecodeRecord, with_draft: bool) -> Option<(usize, &Cell)> {
    record.best(|cell| {
        is_as_served(record, cell) && (!with_draft || cell.drafter_parts.method.is_some())
    })
}

/// Whether a way decodes at the temperature that is served, which is that of the last one.
pub(super) fn is_as_served(record: &DecodeRecord, cell: &Cell) -> bool {
    let served = record.cells.last().map_or(0.0, |cell| cell.temperature);
    (cell.temperature - served).abs() < 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_has_what_was_planned_or_what_is_left() {
        let after = |left: f64, taken: f64| Time { planned: 4.0, left }.after(taken);
        let seconds = [after(-1e6, 1.0), after(-1e6, 9.0), after(7.0, 1.0)];
        assert_eq!(seconds.map(f64::to_bits), [3.0, 1.0, 7.0].map(f64::to_bits));
    }
}
