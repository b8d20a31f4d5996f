//! Prompts that nothing was trained on, answered with the draft and without it.

use std::path::Path;
use std::time::Instant;

use longdraft_data::source::read_jsonl;
use longdraft_decode::DecodeOptions;
use longdraft_decode::evaluate::{Progress, Prompt};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::TOKEN_COUNTS_FILE;
use longdraft_models::draft::files::open_weights;
use longdraft_models::draft::vocabulary::MAP;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::{Message, TextTokenizer};
use longdraft_records::decode::{Cell, DecodeRecord};
use longdraft_records::events::{Advance, Events};
use serde_json::Value;

use super::measure::Machine;
use super::prompts;
use super::rules::Plan;
use super::state::Settings;
use crate::cli::{DecodingArguments, LookupChoice, PaceChoice};
use crate::commands::eval;
use crate::decoding::{encode_chat, encode_text, stop_tokens};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::recording;
use crate::terminal::counted;

/// Tokens of an answer at most.
pub(super) const NEW_TOKENS: usize = 128;
/// Share of them that answers have.
const ANSWER: f64 = 0.7;
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
        let tokens = match encode(&first_turn(row.value("messages")?), (target, tokenizer)) {
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

/// Messages as the target reads them, up to where its answer begins.
pub(super) fn encode(
    messages: &[Message],
    (target, tokenizer): (&Target, &TextTokenizer),
) -> Result<Vec<TargetTokenId>> {
    if tokenizer.chat_template().is_some() {
        return encode_chat(messages, tokenizer);
    }
    let texts: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
    encode_text(&texts.join("\n"), tokenizer, target)
}

/// Whether a prompt of so many tokens can be answered.
pub(super) fn leaves_room(tokens: usize, context: usize) -> bool {
    tokens + ROOM < context
}

/// Messages up to the first one of the user.
pub(super) fn first_turn(messages: &Value) -> Vec<Message> {
    let mut turn = Vec::new();
    for message in messages.as_array().into_iter().flatten() {
        let role = message["role"].as_str().unwrap_or("user");
        turn.push(Message::new(role, message["content"].as_str().unwrap_or_default()));
        if role == "user" {
            break;
        }
    }
    turn
}

/// A way to decode with a name and the arguments that a user gives for it.
pub(super) struct Way {
    pub(super) decoding: DecodingArguments,
    temperature: f64,
    pace: PaceChoice,
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
        ..DecodingArguments::plain()
    };
    let lookup = Some(LookupChoice::Switch);
    let both = DecodingArguments { lookup, ..alone.clone() };
    let only = DecodingArguments { lookup, ..DecodingArguments::plain() };
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
        let mut options = self.decoding.options(self.temperature, self.pace)?;
        options.max_new_tokens = NEW_TOKENS.min(settings.max_tokens);
        options.stop_tokens = stop_tokens(target);
        Ok(options)
    }
}

/// Seconds in which a prompt is answered plainly.
pub(super) fn of_prompt(settings: &Settings, machine: &Machine) -> f64 {
    let answer = ANSWER * NEW_TOKENS.min(settings.max_tokens) as f64;
    answer * machine.step() + machine.first_prompt() * machine.prefill
}

/// Measures all ways within a time; `None` if a signal stopped it.
pub(super) fn measure(
    folder: &Path,
    (settings, machine): (&Settings, &Machine),
    ways: &[Way],
    seconds: f64,
    (interrupts, events): (&Interrupts, &mut Events),
) -> Result<Option<DecodeRecord>> {
    let Some(first) = ways.first() else { return Ok(None) };
    let models = first.decoding.open(&settings.target)?;
    let mut prompts = held_out(folder, (&models.target, &models.tokenizer))?;
    let new_tokens = NEW_TOKENS.min(settings.max_tokens);
    // Plainly, too, and with a draft in as long at most.
    let of_prompt = 2.0 * of_prompt(settings, machine);
    let affordable = (seconds / (of_prompt * ways.len() as f64)).max(2.0);
    prompts.truncate(affordable as usize);
    errln!(
        "answering {} that {} set aside, with the draft and without it, in {}",
        counted(prompts.len(), "prompt"),
        if prompts.len() == 1 { "was" } else { "were" },
        counted(ways.len(), "way")
    );
    let name = prompts::files(folder).1.display().to_string();
    let about = (settings.target.as_str(), name.as_str());
    let mut record = recording::begin(about, &first.decoding, &models, new_tokens);
    let started = Instant::now();
    let (count, all) = (prompts.len(), prompts.len() * ways.len());
    for (index, way) in ways.iter().enumerate() {
        let options = way.options(settings, &models.target)?;
        let mut line = eval::lines(count, 1);
        let goes_on = &mut |progress: &Progress| {
            line(progress);
            let done = index * count + progress.prompts;
            let what = "answers".to_owned();
            events.progress(Advance { what, done, all, ..Advance::default() });
            !interrupts.asked()
        };
        let lookup_alone = way.decoding.draft.is_none();
        // Lookup alone needs the same target without the draft.
        let own = if lookup_alone { Some(way.decoding.open(&settings.target)?) } else { None };
        let models = own.as_ref().unwrap_or(&models);
        let from = Progress::default();
        let cell = eval::measure(&way.decoding, models, &prompts, (&options, 1), from, goes_on)?;
        let Some(cell) = cell else { return Ok(None) };
        record.cells.push(cell);
    }
    let seconds = started.elapsed().as_secs_f64();
    record.circumstances = Some(recording::circumstances(&models, seconds));
    Ok(Some(record))
}

/// The fastest way, or the fastest of those that use the draft: of those that decode as it will be served.
pub(super) fn best(record: &DecodeRecord, with_draft: bool) -> Option<(usize, &Cell)> {
    let cells = record.cells.iter().enumerate();
    // The last way is lookup alone.
    let count = record.cells.len() - usize::from(with_draft && record.cells.len() > 1);
    let temperature = record.cells.last().map_or(0.0, |cell| cell.temperature);
    let is_as_served = |cell: &Cell| (cell.temperature - temperature).abs() < 1e-9;
    let found = cells.take(count).filter(|(_, cell)| is_as_served(cell));
    found.max_by(|a, b| a.1.figures.speed_up.total_cmp(&b.1.figures.speed_up))
}
