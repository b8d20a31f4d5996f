//! What a run is of: target, draft, date, command.

use longdraft_models::draft::DraftKind;
use longdraft_records::decode::{Circumstances, DecodeRecord, date_of};
use serde::Serialize;
use serde_json::Value;

use super::run::Run;
use super::ticks::number;

/// A line of the header.
#[derive(Debug, Serialize)]
pub(super) struct Fact {
    label: &'static str,
    value: String,
    /// Whether it is to be typed.
    is_code: bool,
}

/// All that is known, of one run.
pub(super) fn facts(run: &Run) -> Vec<Fact> {
    let record = run.decoding.as_ref();
    let circumstances = record.and_then(|record| record.circumstances.as_ref());
    let sized = |name: String, parameters: Option<usize>| match parameters {
        Some(count) => format!("{name} ({} parameters)", number(count as f64, 3)),
        None => name,
    };
    let target = record.map(|record| record.target.clone());
    let target = target.or_else(|| configured(run, &["target"]));
    let target = target.map(|name| sized(name, circumstances.map(|c| c.target_parameters)));
    let draft =
        draft(run, record).map(|name| sized(name, circumstances.and_then(|c| c.draft_parameters)));
    let prompts = record.map(|record| {
        // Ways that had no more time answered fewer.
        let counts = || record.cells.iter().map(|cell| cell.figures.prompts);
        let (least, most) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
        let count = if least == most { most.to_string() } else { format!("{least} to {most}") };
        format!("{count} of {}, up to {} tokens each", record.prompts, record.max_new_tokens)
    });
    let date = circumstances.map(|c| c.date.clone()).or_else(|| run.written.map(date_of));
    let command = circumstances.map(|c: &Circumstances| c.command.clone());
    let command = command.filter(|command| !command.is_empty());
    let facts = [
        ("Target", target, false),
        ("Draft", draft, false),
        ("Prompts", prompts, false),
        ("Date", date.map(|date| format!("{date} UTC")), false),
        ("Command", command, true),
    ];
    let known = |(label, value, is_code): (_, Option<String>, _)| {
        Some(Fact { label, value: value?, is_code })
    };
    facts.into_iter().filter_map(known).collect()
}

fn draft(run: &Run, record: Option<&DecodeRecord>) -> Option<String> {
    let method = configured(run, &["draft", "method"])
        .map(|method| DraftKind::named(&method).map_or(method, |kind| kind.title.to_owned()));
    let folder = record.and_then(|record| record.draft.clone());
    match (method, folder) {
        (Some(method), Some(folder)) => Some(format!("{method}, {folder}")),
        (method, folder) => method.or(folder),
    }
}

/// A text of the last stage's configuration.
fn configured(run: &Run, keys: &[&str]) -> Option<String> {
    let value = run.stages.last()?.configured(keys);
    value.and_then(Value::as_str).map(str::to_owned)
}
