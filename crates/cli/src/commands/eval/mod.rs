//! `longdraft eval decode`: drafting measured on prompts, against plain decoding in the same
//! engine.

pub(crate) mod held_out;
pub(crate) mod prompts;
mod server;
mod table;
mod unfinished;

use std::fs::File;
use std::path::Path;

use longdraft_data::source::Row;
use longdraft_decode::evaluate::{Comparison, Progress, Prompt, Schedule, compare};
use longdraft_decode::{DecodeOptions, DraftShape, VerifyRule};
use longdraft_models::sha256;
use longdraft_records::decode::{
    Cell, DECODE_FILE, DecodeRecord, DrafterParts, Figures, Milliseconds, Sample,
    acceptance_intervals,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::{DecodingArguments, EvalDecodeArguments, PaceChoice, WeightDtype};
use crate::commands::recorded::last_change;
use crate::commands::write_json;
use crate::decoding::{Models, stop_tokens};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::Lines;
use crate::recording;
use crate::terminal::counted;
use prompts::PromptSet;

pub(crate) use table::print;
pub(crate) use unfinished::Unfinished;

/// Regret in nats up to which a differing output of rounded weights is a near-tie.
const NEAR_TIE: f64 = 0.1;
/// Share of prompts that may differ by near-ties.
const MOST_NEAR_TIES: f64 = 0.01;

/// Measures; fails if an output differs from plain decoding.
pub(crate) fn run(arguments: &EvalDecodeArguments, json: bool) -> Result<()> {
    if arguments.server.server.is_some() {
        return server::run(arguments, json);
    }
    let decoding = &arguments.decoding;
    check(arguments)?;
    decoding.warn_of_unused_layout();
    let _held = take_output(arguments)?;
    let models = decoding.open(arguments.target_name())?;
    let prompts = read(arguments, &models)?;
    let interrupts = Interrupts::listen();
    let sides = if decoding.drafts() {
        "plainly and with drafting"
    } else {
        "plainly, twice: without --draft PATH, --mtp or --lookup the two differ by the measurement's error"
    };
    let (asked, times) = (counted(prompts.len(), "prompt"), counted(arguments.runs, "time"));
    errln!("{asked}, each answered {times} {sides}");
    let Some(record) = evaluate(arguments, &models, &prompts, &interrupts, &mut print)? else {
        match &arguments.output {
            Some(folder) => tell_stopped(folder, json),
            None if json => outjson!({ "output": null, "finished": false }),
            None => outln!("stopped while measuring; nothing is kept without --output DIR"),
        }
        return Err(interrupts.failure());
    };
    if let Some(folder) = &arguments.output {
        outln!("wrote {}", folder.join(DECODE_FILE).display());
    }
    if json {
        outln!("{}", to_json(&record));
    }
    record.cells.iter().try_for_each(|cell| require_lossless(cell, decoding.held.dtype))
}

/// The prompts that are asked for.
pub(crate) fn read(arguments: &EvalDecodeArguments, models: &Models) -> Result<Vec<Prompt>> {
    prompts::read(&PromptSet::of(arguments), &models.target, &models.tokenizer)
}

/// The prompts that rows of a program hold.
pub(crate) fn of_rows(
    arguments: &EvalDecodeArguments,
    rows: Vec<Row>,
    models: &Models,
) -> Result<Vec<Prompt>> {
    prompts::of_rows(&PromptSet::of(arguments), rows, &models.target, &models.tokenizer)
}

/// Refuses what measures nothing; the options of every temperature.
pub(crate) fn check(arguments: &EvalDecodeArguments) -> Result<Vec<DecodeOptions>> {
    if arguments.runs == 0 || arguments.max_tokens == 0 || arguments.limit == Some(0) {
        return Err(Failure::usage("--runs, --max-tokens and --limit must be at least 1"));
    }
    if arguments.temperature.is_empty() {
        return Err(Failure::usage("--temperature names none to measure at"));
    }
    let is_chat = arguments.chat || prompts::is_named(&arguments.prompts);
    arguments.decoding.template.require_chat(is_chat, "add --chat")?;
    let options = |temperature: &f64| arguments.decoding.options(*temperature, PaceChoice::Fixed);
    arguments.temperature.iter().map(options).collect()
}

/// Takes the folder of `--output` before anything is measured, until the file is closed.
/// It fails where another process measures there, or it cannot be written.
pub(crate) fn take_output(arguments: &EvalDecodeArguments) -> Result<Option<File>> {
    arguments.output.as_deref().map(unfinished::take).transpose()
}

/// Measures at every temperature, from where an earlier call stopped, and tells of each. Where `output`
/// is given, figures lie there. Nothing if it was asked to stop.
pub(crate) fn evaluate(
    arguments: &EvalDecodeArguments,
    models: &Models,
    prompts: &[Prompt],
    interrupts: &Interrupts,
    tell: &mut dyn FnMut(&Cell),
) -> Result<Option<DecodeRecord>> {
    let (decoding, requests) = (&arguments.decoding, check(arguments)?);
    let about = (arguments.target_name(), arguments.prompts.as_str());
    let mut record = recording::begin(about, decoding, models, arguments.max_tokens);
    let settings = settings(arguments, models, prompts, &requests);
    let all = (prompts.len(), "temperature");
    let mut unfinished = Unfinished::open(arguments.output.as_deref(), settings, all);
    for (index, mut options) in requests.into_iter().enumerate() {
        options.max_new_tokens = arguments.max_tokens;
        options.stop_tokens = stop_tokens(&models.target);
        let cell = if let Some(cell) = unfinished.cell(index) {
            cell.clone()
        } else {
            let (schedule, from) = ((&options, arguments.runs), unfinished.progress());
            let mut line = lines(prompts.len(), arguments.runs);
            let keep = &mut |progress: &Progress| {
                line(progress);
                unfinished.keep(progress, interrupts.asked());
                !interrupts.asked()
            };
            let cell = measure(decoding, models, prompts, schedule, from, keep, &|_| false)?;
            let Some(cell) = cell else { return Ok(None) };
            unfinished.end_cell(&cell);
            cell
        };
        tell(&cell);
        record.cells.push(cell);
    }
    record.circumstances = Some(recording::circumstances(models, unfinished.seconds()));
    if let Some(folder) = &arguments.output {
        keep(folder, DECODE_FILE, &record)?;
    }
    unfinished.remove();
    Ok(Some(record))
}

/// All that figures depend on, as a hash.
fn settings(
    arguments: &EvalDecodeArguments,
    models: &Models,
    prompts: &[Prompt],
    requests: &[DecodeOptions],
) -> String {
    let decoding = &arguments.decoding;
    let draft = decoding.draft.as_deref().and_then(|path| DraftSource::find(path).ok());
    let changed = draft.map(|draft| last_change(draft.place()));
    let limits = (arguments.runs, arguments.max_tokens, rayon::current_num_threads());
    sha256::of_text(&format!(
        "{} {} {:?} {changed:?} {:?} {limits:?} {requests:?} {prompts:?} {}",
        env!("CARGO_PKG_VERSION"),
        models.target.fingerprint(),
        decoding.draft,
        decoding.held.dtype,
        decoding.drafter_parts(models),
    ))
}

/// Says that a signal stopped the measurement; what is kept of it lies in `output`.
pub(crate) fn tell_stopped(output: &Path, json: bool) {
    if json {
        let output = output.to_string_lossy();
        outjson!({ "output": output, "finished": false });
    } else {
        outln!("stopped while measuring: the same command goes on from there");
    }
}

/// Decodes every prompt plainly and with drafting, in so many runs, from where an earlier call came; fewer prompts
/// where `is_enough` says so. `None` if `goes_on`, which hears of every prompt, ended it early.
pub(crate) fn measure(
    decoding: &DecodingArguments,
    models: &Models,
    prompts: &[Prompt],
    (options, runs): (&DecodeOptions, usize),
    from: Progress,
    goes_on: &mut dyn FnMut(&Progress) -> bool,
    is_enough: &dyn Fn(&Progress) -> bool,
) -> Result<Option<Cell>> {
    let drafter = decoding.drafter(models)?;
    let (verifier, must_be_equal) = verifier(decoding, options);
    let schedule = Schedule { runs, options, must_be_equal };
    let mut stopped = false;
    let on_prompt = &mut |progress: &Progress| {
        stopped = !goes_on(progress);
        !stopped && !is_enough(progress)
    };
    let mut comparison = compare(&models.target, drafter, prompts, &schedule, from, on_prompt)?;
    if stopped {
        return Ok(None);
    }
    if comparison.speed_up_of_runs.is_empty() {
        // The first run ended early.
        comparison.speed_up_of_runs.push(comparison.speed_up());
    }
    let parts = decoding.drafter_parts(models);
    let mut cell = cell((parts, verifier), options, runs, &comparison);
    let stops = stop_tokens(&models.target);
    cell.sample = prompts
        .first()
        .and_then(|first| Sample::of(&comparison, &first.tokens, &models.tokenizer, &stops));
    Ok(Some(cell))
}

/// Tells every some seconds how far a measurement of so many prompts in so many runs has come.
pub(crate) fn lines(prompts: usize, runs: usize) -> impl FnMut(&Progress) {
    let mut lines = Lines::later();
    move |progress| {
        if !lines.are_due(false) {
            return;
        }
        let totals = &progress.comparison;
        errln!(
            "    run {} of {runs}, {} of {prompts} prompts: tau {:.3}, {:.1} tok/s plain, {:.1} with drafting",
            progress.runs + 1,
            progress.prompts,
            totals.acceptance().acceptance_length(),
            totals.plain().decode_tokens_per_second(),
            totals.drafted().decode_tokens_per_second()
        );
    }
}

/// How proposals are tested, and whether this makes outputs functions of prompt and seed.
fn verifier(decoding: &DecodingArguments, options: &DecodeOptions) -> (&'static str, bool) {
    let drawn = decoding.has_model()
        && matches!(options.shape, DraftShape::Chain { .. } | DraftShape::Sampled { .. });
    match (options.sampling.is_greedy(), options.rule) {
        (true, _) => ("greedy", true),
        (false, VerifyRule::Match) => ("match", true),
        (false, VerifyRule::Ratio) if drawn => ("ratio", false),
        (false, VerifyRule::Ratio) => ("candidate", true),
    }
}

fn cell(
    (parts, verifier): (DrafterParts, &str),
    options: &DecodeOptions,
    runs: usize,
    comparison: &Comparison,
) -> Cell {
    let acceptance = comparison.acceptance();
    let (checked, equal) = comparison.equal();
    let regrets = comparison.prompts.iter().filter_map(|prompt| prompt.divergence);
    let of_group = |(name, group): (String, Comparison)| Figures::of(name, &group);
    let contexts = comparison.groups(|prompt| prompt.prompt_tokens.next_power_of_two());
    Cell {
        drafter: parts.to_string(),
        drafter_parts: parts,
        rule: options.shape.name(),
        shape: options.shape.clone(),
        verifier: verifier.to_owned(),
        temperature: options.sampling.temperature,
        top_k: options.sampling.top_k,
        top_p: options.sampling.top_p,
        min_p: options.sampling.min_p,
        pace: options.pacing,
        confidence_threshold: Some(options.confidence_threshold).filter(|least| *least > 0.0),
        runs,
        figures: Figures::of("all", comparison),
        accepted_share: acceptance.accepted_share(),
        conditional_acceptance: acceptance.conditional_acceptance(),
        conditional_acceptance_intervals: acceptance_intervals(&acceptance),
        tested_by_position: acceptance.tested_by_position.clone(),
        survival: acceptance.survival(),
        lookup_share: acceptance.lookup_share(),
        milliseconds: Milliseconds::of(comparison),
        speed_up_of_runs: comparison.speed_up_of_runs.clone(),
        checked,
        equal,
        largest_regret: regrets.map(|at| at.regret).reduce(f64::max),
        residual_fallbacks: acceptance.residual_fallbacks,
        categories: comparison
            .groups(|prompt| prompt.category.clone())
            .into_iter()
            .map(of_group)
            .collect(),
        contexts: contexts.into_iter().map(|(k, group)| of_group((k.to_string(), group))).collect(),
        sample: None,
    }
}

/// Writes `decode.json` into a run's folder, and says so.
pub(crate) fn write(folder: &Path, record: &DecodeRecord) -> Result<()> {
    keep(folder, DECODE_FILE, record)?;
    outln!("wrote {}", folder.join(DECODE_FILE).display());
    Ok(())
}

/// Writes figures into a folder, whole or not at all.
fn keep(folder: &Path, file: &str, record: &impl Serialize) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Failure::at(folder))?;
    write_json(&folder.join(file), record)
}

/// The first cell's main figures, and everything under `record`.
pub(crate) fn to_json(record: &DecodeRecord) -> Value {
    let mut value = record.cells.first().map_or_else(|| json!({}), summary);
    value["record"] = json!(record);
    value
}

/// The main figures of a cell.
fn summary(cell: &Cell) -> Value {
    let Figures { tau_incl_bonus, plain_decode_tok_s, decode_tok_s, speed_up, prompts, .. } =
        cell.figures;
    json!({
        "tau": tau_incl_bonus,
        "conditional_acceptance": cell.conditional_acceptance,
        "plain_tokens_per_second": plain_decode_tok_s,
        "speculative_tokens_per_second": decode_tok_s,
        "speed_up": speed_up,
        "prompts": prompts, "equal": cell.equal,
        "lossless": cell.equal == cell.checked,
    })
}

/// Fails unless every output that had to be equal was; rounded weights may differ at near-ties.
pub(crate) fn require_lossless(cell: &Cell, dtype: WeightDtype) -> Result<()> {
    let differing = cell.checked - cell.equal;
    let near_ties = matches!(dtype, WeightDtype::Bf16 | WeightDtype::F16)
        && cell.largest_regret.is_some_and(|regret| regret <= NEAR_TIE)
        && differing as f64 <= MOST_NEAR_TIES * cell.checked as f64;
    if differing == 0 || near_ties {
        return Ok(());
    }
    let regret = cell.largest_regret.unwrap_or_default();
    Err(Failure::work(format!(
        "{differing} outputs differ between plain and draft decoding at temperature {} (where they \
         part, the target prefers plain decoding's token by up to {regret:.3} nats)",
        cell.temperature
    ))
    .in_result())
}
