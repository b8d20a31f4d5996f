//! `longdraft data regenerate`: the target answers prompts itself.
//!
//! A draft is judged by how well it follows its target, so the target's own answers are its best
//! text. Rows are answered several at a time; every row gives one line in the output or one in the
//! file of failures, in order, and a second call goes on after the lines that are there.

mod dialogue;
mod ledger;
mod prompt;
mod writer;

use std::time::{Duration, Instant};

use longdraft_data::source::read_rows;
use longdraft_decode::Committed;
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;
use serde_json::json;

use crate::cli::{CacheChoice, DataRegenerateArguments};
use crate::decoding::{open_target, require_draft_len};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

pub(crate) use ledger::failures_file;
pub(crate) use prompt::{Prompts, of_row as prompts_of_row};
pub(crate) use writer::Writer;

/// Time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

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
        open_target(&arguments.target, arguments.dtype, CacheChoice::Auto, arguments.device)?;
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
    /// A row's next prompt is answered from here on; `prompt` is the text so far.
    fn begin(&mut self, row: usize, prompt: &[TargetTokenId]);

    /// A token of a row's answer.
    fn token(&mut self, row: usize, committed: Committed);
}
