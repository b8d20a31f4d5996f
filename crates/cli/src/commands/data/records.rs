//! `longdraft data records`: what other trainers and engines captured, as rows and as our store.

mod masks;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use longdraft_features::records::RecordFolder;
use longdraft_models::weights::atomic::write_atomically_with;
use serde_json::json;

use self::masks::Masks;
use crate::cli::{CaptureArguments, DataRecordsArguments};
use crate::commands::capture;
use crate::failure::{Failure, Result};
use crate::recording::quoted;

/// What the rows amount to.
#[derive(Default)]
struct Counts {
    tokens: usize,
    learned: usize,
    longest: usize,
}

/// Writes a row for every record; the file appears when it is complete. With a configuration the features are
/// then captured from the records.
pub(super) fn run(arguments: &DataRecordsArguments, json: bool) -> Result<()> {
    let output = &arguments.output;
    require_folder(&arguments.folder)?;
    let records = RecordFolder::open(&arguments.folder)?;
    if records.files().contains(output) {
        let problem = format!("--output {} is one of the records", output.display());
        return Err(Failure::usage(problem));
    }
    let masks = Masks::of(arguments)?;
    let written = write_atomically_with(output, |file| write(&records, &masks, output, file));
    let Counts { tokens, learned, longest } = written?;
    let records = records.len();
    let capture = capture_of(arguments);
    let output = output.display().to_string();
    if json && capture.is_none() {
        outjson!({"output": output, "records": records, "tokens": tokens, "learned": learned,
                  "longest": longest});
    } else if !json {
        let share = 100.0 * learned as f64 / tokens.max(1) as f64;
        outln!(
            "{records} records, {tokens} tokens, {share:.1} % of them learned, {longest} in the longest: {output}"
        );
    }
    match capture {
        Some(capture) => capture::run(&capture, json),
        None if json => Ok(()),
        None => {
            let changes = changes(&arguments.output).map(|change| quoted(&change)).join(" ");
            let folder = arguments.folder.display().to_string();
            let features = quoted(&format!("train.features={}", json!(folder)));
            let folder = quoted(&folder);
            outln!("next: longdraft train CONFIG {changes} {features}");
            outln!(
                "or:   longdraft capture CONFIG {changes} train.features=STORE --records {folder}"
            );
            Ok(())
        }
    }
}

/// What makes a configuration train on the rows of records.
fn changes(output: &Path) -> [String; 2] {
    // A text of JSON is one of YAML, too.
    let path = json!(output.display().to_string());
    [
        format!("data.train=[{{path: {path}, template: {{kind: tokens}}}}]"),
        "data.anchor.enabled=false".to_owned(),
    ]
}

/// The capture that follows, where a configuration is named.
fn capture_of(arguments: &DataRecordsArguments) -> Option<CaptureArguments> {
    let config = arguments.capture.clone()?;
    let own = arguments.overrides.iter().cloned();
    let overrides = changes(&arguments.output).into_iter().chain(own).collect();
    Some(CaptureArguments {
        config,
        overrides,
        records: Some(arguments.folder.clone()),
        ..CaptureArguments::default()
    })
}

/// Refuses what cannot hold records.
pub(crate) fn require_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    Err(Failure::usage(format!("{}: no such folder of records", path.display())))
}

fn write(
    records: &RecordFolder,
    masks: &Masks,
    output: &Path,
    file: &mut BufWriter<File>,
) -> Result<Counts> {
    let mut counts = Counts::default();
    for index in 0..records.len() {
        let document = records.document(index)?;
        let loss_mask = masks.of_document(&document)?;
        counts.tokens += document.ids.len();
        counts.longest = counts.longest.max(document.ids.len());
        counts.learned += loss_mask.iter().filter(|mask| **mask).count();
        let mask: Vec<u8> = loss_mask.iter().map(|mask| u8::from(*mask)).collect();
        let row = json!({"record": document.place, "input_ids": document.ids, "loss_mask": mask});
        writeln!(file, "{row}").map_err(Failure::at(output))?;
    }
    Ok(counts)
}
