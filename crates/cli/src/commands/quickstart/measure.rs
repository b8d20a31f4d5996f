//! Decoding with the trained draft, alone and with prompt lookup, against plain decoding.

use std::path::Path;
use std::time::Instant;

use longdraft_decode::evaluate::Progress;
use longdraft_models::target_model::Target;
use longdraft_records::decode::DecodeRecord;
use longdraft_report::words;

use super::assets::TEST_FILE;
use crate::cli::{DecodingArguments, LookupChoice, PaceChoice, WeightDtype};
use crate::commands::eval;
use crate::commands::eval::prompts::PromptSet;
use crate::decoding::Models;
use crate::failure::Result;
use crate::interrupts::Interrupts;
use crate::recording;

pub(super) const DTYPE: WeightDtype = WeightDtype::F32;

const NEW_TOKENS: usize = 128;
const DRAFT_LEN: usize = 4;
/// Runs of each way, in turns with plain decoding.
const RUNS: usize = 2;
/// Share of the vocabulary that is proposed: the rest is rare, and the draft reads a smaller head.
const PROPOSED: usize = 4;

/// Decodes the shipped questions; the output must be that of plain decoding. `None` if a signal
/// stopped it.
pub(super) fn run(
    target: &str,
    draft: &Path,
    data: &Path,
    questions: usize,
    interrupts: &Interrupts,
) -> Result<Option<DecodeRecord>> {
    let size = Target::open_config(target)?.vocab_size / PROPOSED;
    let alone = DecodingArguments {
        draft_vocab_size: Some(size),
        ..DecodingArguments::chain(draft, DRAFT_LEN)
    };
    let models = alone.open(target)?;
    let Models { target: opened, tokenizer, .. } = &models;
    let set = PromptSet {
        name: &data.join(TEST_FILE).display().to_string(),
        field: "question",
        chat: tokenizer.chat_template().is_some(),
        limit: Some(questions),
        contexts: &[],
        max_tokens: NEW_TOKENS,
    };
    let prompts = eval::prompts::read(&set, opened, tokenizer)?;
    let mut record = recording::begin((target, TEST_FILE), &alone, &models, NEW_TOKENS);
    let started = Instant::now();
    let mut measure = |decoding: &DecodingArguments, pace| -> Result<bool> {
        let options = decoding.request((0.0, pace), NEW_TOKENS, opened)?;
        let (schedule, from) = ((&options, RUNS), Progress::default());
        let mut line = eval::lines(prompts.len(), RUNS);
        let goes_on = &mut |progress: &Progress| {
            line(progress);
            !interrupts.asked()
        };
        let is_enough = |_: &Progress| false;
        let cell = eval::measure(decoding, &models, &prompts, schedule, from, goes_on, &is_enough)?;
        let Some(cell) = cell else { return Ok(false) };
        eval::print(&cell);
        outln!();
        record.cells.push(cell);
        Ok(true)
    };
    let combined = DecodingArguments { lookup: Some(LookupChoice::Switch), ..alone.clone() };
    let whole = measure(&alone, PaceChoice::Fixed)? && measure(&combined, PaceChoice::Measured)?;
    let seconds = started.elapsed().as_secs_f64();
    record.circumstances = Some(recording::circumstances(&models, seconds));
    Ok(whole.then_some(record))
}

/// The figures that matter, a line for each way.
pub(super) fn tell(record: &DecodeRecord) {
    for cell in &record.cells {
        let figures = &cell.figures;
        outln!(
            "{}: {:.2} times as fast ({:.0} tok/s, {:.0} plain), {:.2} tokens per target pass, {} of \
             {} outputs equal",
            words::way(&cell.drafter_parts),
            figures.speed_up,
            figures.decode_tok_s,
            figures.plain_decode_tok_s,
            figures.tau_incl_bonus,
            cell.equal,
            cell.checked
        );
    }
}
