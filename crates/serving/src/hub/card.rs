//! The model card: what the draft is for, how it was made, what was measured, how to serve it.

use std::fmt::Write;

use serde_json::Value;

use crate::Manifest;
use crate::hub_name::{HUB_NAME, is_hub_name};
use crate::manifest::in_folder;

/// Markdown with the hub's front matter, from a manifest without paths ([`Manifest::public`]);
/// `license` as the hub spells licences.
pub fn render(manifest: &Manifest, repo: &str, license: Option<&str>) -> String {
    let mut out = String::from("---\n");
    let target = &manifest.target.name;
    if let Some(license) = license {
        line(&mut out, format_args!("license: {license}"));
    }
    if is_hub_name(target) {
        line(&mut out, format_args!("base_model: {target}\nbase_model_relation: adapter"));
    }
    line(
        &mut out,
        format_args!("tags:\n- speculative-decoding\n- {}\n- longdraft\n---\n", manifest.method),
    );
    line(&mut out, format_args!("# Draft model for {target}\n"));
    line(
        &mut out,
        format_args!(
            "A draft for speculative decoding of **{target}**: it proposes tokens, the target checks \
             them, and the output stays the target's own.\n"
        ),
    );
    line(&mut out, format_args!("| | |\n|---|---|"));
    let mut row = |name: &str, value: String| line(&mut out, format_args!("| {name} | {value} |"));
    row("method", manifest.method.clone());
    row("written for", format!("{} ({})", manifest.profile.name(), manifest.compat));
    row("weights", manifest.dtype.clone());
    row("reads", manifest.target_layers_in_words.join(", "));
    row("target", format!("{target}, fingerprint `{}`", manifest.target.fingerprint));
    row("licence", license.unwrap_or("not stated").to_owned());
    let made = &manifest.provenance;
    if !made.data.is_empty() {
        row("training data", made.data.join(", "));
    }
    if let (Some(steps), Some(tokens)) = (made.steps, made.tokens) {
        let hours = made.seconds.unwrap_or_default() / 3600.0;
        row("budget", format!("{steps} steps, {tokens} tokens, {hours:.1} hours"));
    }
    row("made by", format!("longdraft {}", manifest.tool_version));
    for warning in &manifest.warnings {
        line(&mut out, format_args!("\n> **Note:** {warning}"));
    }
    acceptance(&mut out, manifest.provenance.evaluation.as_ref());
    line(&mut out, format_args!("\n## Serve\n"));
    let commands = manifest.serve.iter();
    let commands: Vec<(&String, String)> =
        commands.map(|(engine, command)| (engine, in_folder(command, repo))).collect();
    if commands.iter().any(|(_, command)| command.contains(HUB_NAME)) {
        let words = "stands for the target's name on the hub, which is not known here.";
        line(&mut out, format_args!("`{HUB_NAME}` {words}\n"));
    }
    for (engine, command) in commands {
        line(&mut out, format_args!("{engine}:\n\n```sh\n{command}\n```\n"));
    }
    out
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing into a string does not fail.
    let _ = writeln!(out, "{text}");
}

/// tau of every way to draft that was measured.
fn acceptance(out: &mut String, evaluation: Option<&Value>) {
    line(out, format_args!("\n## Acceptance\n"));
    let cells = evaluation.and_then(|record| record["cells"].as_array());
    let Some(cells) = cells.filter(|cells| !cells.is_empty()) else {
        line(out, format_args!("Not measured."));
        return;
    };
    let prompts = evaluation.and_then(|record| record["prompts"].as_str()).unwrap_or("prompts");
    line(
        out,
        format_args!(
            "Measured on {prompts} with `longdraft eval decode`. tau: tokens per target pass, the \
             target's own token included.\n"
        ),
    );
    line(
        out,
        format_args!(
            "| drafting | temperature | prompts | tau (95 %) | accepted by position | equal outputs |"
        ),
    );
    line(out, format_args!("|---|---|---|---|---|---|"));
    for cell in cells {
        let figures = &cell["figures"];
        let number = |value: &Value| value.as_f64().unwrap_or_default();
        let rates: Vec<String> = cell["conditional_acceptance"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|rate| format!("{:.0} %", 100.0 * number(rate)))
            .collect();
        line(
            out,
            format_args!(
                "| {} | {} | {} | {:.3} ({:.3} to {:.3}) | {} | {} of {} |",
                cell["rule"].as_str().unwrap_or_default(),
                number(&cell["temperature"]),
                figures["prompts"],
                number(&figures["tau_incl_bonus"]),
                number(&figures["tau_interval"][0]),
                number(&figures["tau_interval"][1]),
                rates.join(", "),
                cell["equal"],
                cell["checked"],
            ),
        );
    }
}
