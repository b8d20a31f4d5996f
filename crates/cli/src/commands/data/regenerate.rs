//! `longdraft data regenerate`: the target answers prompts itself.
//!
//! A draft is judged by how well it follows its target, so the target's own answers are its best
//! text. Rows are answered several at a time; every row gives one line in the output or one in the
//! file of failures, in order. A second call goes on after the lines that are there. It tries a failed row again only
//! where the row, or how it is asked, changed.

mod dialogue;
mod failures;
mod ledger;
mod prompt;
mod writer;

use longdraft_data::source::read_rows;
use longdraft_decode::Committed;
use longdraft_models::TargetTokenId;
use longdraft_models::paths::parent_of;
use longdraft_models::target_model::Target;

use crate::cli::{DataRegenerateArguments, OpenOptions};
use crate::commands::require_writable;
use crate::decoding::{open_proposer, open_target, require_draft_len};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::model_source::no_target;
use crate::progress::Lines;
use crate::terminal::counted;

pub(crate) use dialogue::{messages_of, plain};
pub(crate) use failures::failures_file;
use ledger::{Counts, require_free};
pub(crate) use prompt::{Prompts, of_row as prompts_of_row};
pub(crate) use writer::Writer;

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
    require_writable(parent_of(&arguments.output))?;
    require_free(&arguments.output)?;
    let tokenizer = Target::open_tokenizer(&arguments.target);
    let tokenizer = tokenizer.map_err(no_target(&arguments.target))?;
    let tokenizer = arguments.template.apply(tokenizer)?;
    let source = arguments.draft.as_deref().map(DraftSource::find).transpose()?;
    let DataRegenerateArguments { dtype, device, .. } = *arguments;
    let held = OpenOptions { dtype, device, ..OpenOptions::default() };
    let target = open_target(&arguments.target, held)?;
    let draft = source.map(|source| open_proposer(&source, &target)).transpose()?;
    let writer = Writer {
        arguments,
        target: &target,
        tokenizer: &tokenizer,
        draft: draft.as_ref(),
        hears: None,
    };
    let (mut lines, interrupts) = (Lines::later(), Interrupts::listen());
    let mut tell = |answered: &Answered| {
        if answered.rows == 0 && answered.before > 0 {
            let done = counted(answered.before, "row");
            errln!("going on after {done} with an answer");
        }
        if lines.are_due(false) {
            errln!("{}", answered.counts);
        }
    };
    let answered = writer.answer(None, &interrupts, &mut tell)?;
    conclude(arguments, answered, &interrupts, json)
}

/// Says what became of the rows.
fn conclude(
    arguments: &DataRegenerateArguments,
    answered: Answered,
    interrupts: &Interrupts,
    json: bool,
) -> Result<()> {
    let Counts { success, error, skipped } = answered.counts;
    let (output, rows) = (arguments.output.display().to_string(), answered.rows);
    if answered.reached != Reached::TheEnd {
        if json {
            outjson!({
                "finished": false, "rows": answered.counts.sum(), "success": success, "error": error,
                "skipped": skipped, "output": output,
            });
        } else {
            outln!("stopped after {}: the same command goes on from there", answered.counts);
        }
        return Err(interrupts.failure());
    }
    if answered.failed_before > 0 {
        let path = failures_file(&arguments.output);
        errln!(
            "not tried again: {} that failed before and did not change; remove {} to try them all",
            counted(answered.failed_before, "row"),
            path.display()
        );
    }
    outln!("{} = {}: {output}", answered.counts, counted(rows, "row"));
    if json {
        outjson!({
            "rows": rows, "success": success, "error": error, "skipped": skipped,
            "from_before": answered.before, "output": output,
        });
    }
    if success == 0 && arguments.limit != Some(0) {
        let prompts = arguments.prompts.display();
        return Err(Failure::work(format!("{prompts}: no row was answered"))
            .hint("--field names the field of the prompt")
            .in_result());
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
    pub(crate) counts: Counts,
    /// Rows that were read.
    pub(crate) rows: usize,
    /// Rows that were done before.
    pub(crate) before: usize,
    /// Rows that failed before, and were not tried again.
    pub(crate) failed_before: usize,
    pub(crate) reached: Reached,
}

/// Hears of answers as they are written.
pub(crate) trait Hears {
    /// A row's next prompt is answered from here on; `prompt` is the text so far.
    fn begin(&mut self, row: usize, prompt: &[TargetTokenId]);

    /// A token of a row's answer.
    fn token(&mut self, row: usize, committed: Committed);
}
