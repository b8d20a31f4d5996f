//! `longdraft data records`: tokens and masks of the public EAGLE-3 trainer's feature records.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically_with;
use longdraft_train::features::published::{PublishedDocument, record_files};
use serde_json::json;

use crate::cli::DataRecordsArguments;
use crate::failure::{Failure, Result};

/// What the rows amount to.
#[derive(Default)]
struct Counts {
    tokens: usize,
    learned: usize,
    longest: usize,
}

/// Writes a row for every record; the file appears when it is complete.
pub(super) fn run(arguments: &DataRecordsArguments, json: bool) -> Result<()> {
    let output = &arguments.output;
    require_folder(&arguments.folder)?;
    let files = record_files(&arguments.folder)?;
    if files.contains(output) {
        let problem = format!("--output {} is one of the records", output.display());
        return Err(Failure::usage(problem));
    }
    let written = write_atomically_with(output, |file| write(&files, output, file));
    let Counts { tokens, learned, longest } = written?;
    let records = files.len();
    let output = output.display().to_string();
    if json {
        outln!(
            "{}",
            json!({"output": output, "records": records, "tokens": tokens, "learned": learned,
                   "longest": longest})
        );
    } else {
        let share = 100.0 * learned as f64 / tokens.max(1) as f64;
        outln!(
            "{records} records, {tokens} tokens, {share:.1} % of them learned, {longest} in the longest: {output}"
        );
        outln!(
            "next: longdraft capture CONFIG 'data.train=[{{path: {output}, template: {{kind: tokens}}}}]' \
             data.anchor.enabled=false train.features=STORE --records {}",
            arguments.folder.display()
        );
    }
    Ok(())
}

/// Refuses what cannot hold records.
pub(crate) fn require_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    Err(Failure::usage(format!("{}: no such folder of records", path.display())))
}

fn write(files: &[PathBuf], output: &Path, file: &mut BufWriter<File>) -> Result<Counts> {
    let mut counts = Counts::default();
    for path in files {
        let document = PublishedDocument::read(path)?;
        let mask: Vec<u8> = document.loss_mask.iter().map(|mask| u8::from(*mask)).collect();
        counts.tokens += document.ids.len();
        counts.longest = counts.longest.max(document.ids.len());
        counts.learned += document.loss_mask.iter().filter(|mask| **mask).count();
        let record = path.display().to_string();
        let row = json!({"record": record, "input_ids": document.ids, "loss_mask": mask});
        writeln!(file, "{row}")
            .map_err(|error| Failure::work(format!("{}: {error}", output.display())))?;
    }
    Ok(counts)
}
