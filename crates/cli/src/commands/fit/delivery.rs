//! What is handed over: the draft's folder with its card, exports, the page, and the commands to use them.

use std::fmt::Write;
use std::path::Path;

use longdraft_models::weights::atomic::write_atomically;
use longdraft_records::decode::{Cell, DecodeRecord, Figures};
use longdraft_report::words;
use longdraft_serving::Profile;
use longdraft_train::checkpoint::Wanted;
use serde_json::{Map, Value, json};

use super::answers::Cleaned;
use super::proof::Way;
use super::rules::Plan;
use super::state::Settings;
use crate::cli::{ExportArguments, ExportOptions, LookupChoice, PaceChoice, VerifyArguments};
use crate::commands::{export, extract, verify};
use crate::draft_source::find_checkpoint;
use crate::failure::{Failure, Result};
use crate::recording::quoted;

/// Writes a round's draft into the folder.
pub(super) fn extract_draft(folder: &Path, run: &Path) -> Result<()> {
    let found = find_checkpoint(run, Wanted::Newest)?;
    extract::extract(&found.checkpoint, &folder.join("draft"))?;
    Ok(())
}

/// Writes and checks what an engine reads.
pub(super) fn export_for(
    (folder, profile): (&Path, Profile),
    run: &Path,
    (settings, target_name): (&Settings, Option<&str>),
    draft_len: usize,
) -> Result<()> {
    let output = folder.join("exports").join(profile.name());
    export::run(
        &ExportArguments {
            draft: run.to_path_buf(),
            to: vec![profile.name().to_owned()],
            output: output.clone(),
            options: ExportOptions {
                target: Some(settings.target.clone()),
                target_name: target_name.map(str::to_owned),
                draft_len: Some(draft_len),
                ..ExportOptions::default()
            },
        },
        false,
    )?;
    verify::run(
        &VerifyArguments {
            folder: output,
            target: Some(settings.target.clone()),
            checkpoint: Some(run.to_path_buf()),
            ..VerifyArguments::default()
        },
        false,
    )
}

/// The arguments that make `generate` and `serve` decode in a way.
pub(super) fn arguments(way: &Way) -> String {
    let decoding = &way.decoding;
    let mut text = String::new();
    if let Some(draft) = &decoding.draft {
        let _ = write!(
            text,
            " --draft {} --draft-len {}",
            quoted(&draft.display().to_string()),
            decoding.draft_len
        );
    }
    if let Some(size) = decoding.draft_vocab_size {
        let _ = write!(text, " --draft-vocab-size {size}");
    }
    match decoding.lookup {
        Some(LookupChoice::Switch) => text.push_str(" --lookup=switch"),
        Some(LookupChoice::Merge) => text.push_str(" --lookup=merge"),
        None => {}
    }
    // Both commands draft at measured pace by themselves.
    if way.pace == PaceChoice::Fixed {
        text.push_str(" --pace fixed");
    }
    text
}

/// The arguments that give the target's chat template its variables.
pub(super) fn template(variables: &Map<String, Value>) -> String {
    if variables.is_empty() {
        return String::new();
    }
    format!(" --chat-template-kwargs {}", quoted(&json!(variables).to_string()))
}

/// The commands that use a way at a temperature, a line each.
pub(crate) fn commands(
    target: &str,
    arguments: &str,
    temperature: f64,
    is_chat: bool,
) -> [String; 2] {
    let target = quoted(target);
    let how = if is_chat { "--chat" } else { "--prompt \"Once upon a time\"" };
    // `generate` takes the most likely token by itself, `serve` samples.
    let generated =
        if temperature > 0.0 { format!(" --temperature {temperature}") } else { String::new() };
    [
        format!("longdraft generate --target {target}{arguments}{generated} {how}"),
        format!("longdraft serve {target}{arguments} --temperature {temperature}"),
    ]
}

/// A way and what it brings, in words.
pub(super) fn figures(figures: &Figures) -> String {
    let (low, high) = figures.speed_up_interval;
    format!(
        "{:.2} times as fast [{low:.2}, {high:.2}], tau {:.2} [{:.2}, {:.2}], {:.0} tok/s against {:.0}",
        figures.speed_up,
        figures.tau_incl_bonus,
        figures.tau_interval.0,
        figures.tau_interval.1,
        figures.decode_tok_s,
        figures.plain_decode_tok_s
    )
}

/// What a card tells of how a draft was made.
pub(super) struct Making<'a> {
    pub(super) settings: &'a Settings,
    /// Of the prompts, in words.
    pub(super) source: &'a str,
    pub(super) cleaned: &'a Cleaned,
    pub(super) plan: &'a Plan,
}

pub(super) fn write_card(
    folder: &Path,
    making: &Making<'_>,
    record: &DecodeRecord,
    commands: &[String],
) -> Result<()> {
    let card = format!(
        "{}\n## Figures\n\n{}\n## Use\n\n```sh\n{}\n```\n",
        making.in_words(),
        figures_of(record),
        commands.join("\n")
    );
    write_atomically(&folder.join("draft/README.md"), card.as_bytes()).map_err(Failure::from)
}

impl Making<'_> {
    /// The head of a card.
    fn in_words(&self) -> String {
        let Making { settings, source, cleaned, plan } = self;
        let name = Path::new(&settings.target).file_name();
        let name = name
            .map_or_else(|| settings.target.clone(), |name| name.to_string_lossy().into_owned());
        format!(
            "# Draft model for {name}\n\n\
             A draft for speculative decoding: it proposes tokens, the target checks them, and the output stays the \
             target's own.\n\n\
             | | |\n|---|---|\n\
             | method | {} |\n\
             | target | {name}, fingerprint `{}` |\n\
             | prompts | {source} |\n\
             | learned from | {} answers of the target, {} tokens, temperature {} |\n\
             | made by | longdraft {} fit |\n",
            plan.method,
            settings.weights,
            cleaned.kept,
            cleaned.tokens,
            settings.temperature,
            env!("CARGO_PKG_VERSION")
        )
    }
}

/// What was measured, as a table.
fn figures_of(record: &DecodeRecord) -> String {
    let processor = record.circumstances.as_ref().and_then(|known| known.processor.as_deref());
    let processor = processor.map_or(String::new(), |name| format!(", {name}"));
    let head = format!(
        "Measured on prompts that nothing was trained on, answers of at most {} tokens, {} threads{processor}. tau: tokens \
         per target pass, the target's own token included.\n\n\
         | drafting | temperature | prompts | speed-up (95 %) | tau (95 %) | equal outputs |\n|---|---|---|---|---|---|\n",
        record.max_new_tokens, record.threads
    );
    let rows = |cell| -> String {
        let kinds =
            kinds(cell).map(|figures| row_of(cell, figures, &format!(", {}", figures.name)));
        row_of(cell, &cell.figures, "") + &kinds.collect::<String>()
    };
    record.cells.iter().fold(head, |table, cell| table + &rows(cell))
}

/// Figures of every kind of prompts, where there are several.
pub(super) fn kinds(cell: &Cell) -> impl Iterator<Item = &Figures> {
    cell.categories.iter().filter(|_| cell.categories.len() > 1)
}

/// A way's row for all prompts or those of a kind.
fn row_of(cell: &Cell, figures: &Figures, kind: &str) -> String {
    let equal = match cell.checked {
        _ if !kind.is_empty() => String::new(),
        0 => "-".to_owned(),
        checked => format!("{} of {checked}", cell.equal),
    };
    let between =
        |value: f64, (low, high): (f64, f64)| format!("{value:.2} ({low:.2} to {high:.2})");
    format!(
        "| {}, {}, pace {}{kind} | {} | {} | {} | {} | {equal} |\n",
        words::way(&cell.drafter_parts),
        cell.rule,
        cell.pace,
        cell.temperature,
        figures.prompts,
        between(figures.speed_up, figures.speed_up_interval),
        between(figures.tau_incl_bonus, figures.tau_interval)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::fit::proof;

    #[test]
    fn commands_give_the_template_its_variables() {
        let given = json!({ "enable_thinking": false });
        let words = template(given.as_object().expect("variables"));
        assert_eq!(words, r#" --chat-template-kwargs '{"enable_thinking":false}'"#);
        assert_eq!(template(&Map::new()), "");
    }

    #[test]
    fn commands_draft_in_every_round_where_that_was_measured() {
        let ways = proof::ways(Path::new("draft"), &Plan::default(), &Settings::default());
        let fixed = ways.iter().map(|way| arguments(way).ends_with(" --pace fixed"));
        assert_eq!(fixed.collect::<Vec<_>>(), [true, false, false, false]);
    }

    #[test]
    fn commands_decode_at_the_temperature_that_was_measured() {
        let of = |temperature| commands("model.gguf", " --lookup=switch", temperature, true);
        let [generate, serve] = of(0.7);
        assert_eq!(
            generate,
            "longdraft generate --target model.gguf --lookup=switch --temperature 0.7 --chat"
        );
        assert_eq!(serve, "longdraft serve model.gguf --lookup=switch --temperature 0.7");
        let [generate, serve] = of(0.0);
        assert_eq!(generate, "longdraft generate --target model.gguf --lookup=switch --chat");
        // Its own is 1.
        assert_eq!(serve, "longdraft serve model.gguf --lookup=switch --temperature 0");
    }
}
