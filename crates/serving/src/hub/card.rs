//! The model card: what the draft is for, how it was made, what was measured, how to serve it.

use std::fmt::Write;

use serde_json::Value;

use crate::Manifest;
use crate::hub_name::{HUB_NAME, is_hub_name};
use crate::manifest::in_folder;

/// Adds a line; writing into a string does not fail.
macro_rules! line {
    ($out:expr, $($text:tt)*) => {{
        let _ = writeln!($out, $($text)*);
    }};
}

/// Markdown with the hub's front matter, from a manifest without paths ([`Manifest::public`]);
/// `license` as the hub spells licences.
pub fn render(manifest: &Manifest, repo: &str, license: Option<&str>) -> String {
    let mut out = String::from("---\n");
    let target = &manifest.target.name;
    if let Some(license) = license {
        line!(out, "license: {license}");
    }
    if is_hub_name(target) {
        line!(out, "base_model: {target}\nbase_model_relation: adapter");
    }
    line!(out, "tags:\n- speculative-decoding\n- {}\n- longdraft\n---\n", manifest.method);
    line!(out, "# Draft model for {target}\n");
    line!(
        out,
        "A draft for speculative decoding of **{target}**: it proposes tokens, the target checks \
         them, and the output stays the target's own.\n"
    );
    line!(out, "| | |\n|---|---|");
    let mut row = |name: &str, value: String| line!(out, "| {name} | {value} |");
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
        line!(out, "\n> **Note:** {warning}");
    }
    acceptance(&mut out, manifest.provenance.evaluation.as_ref());
    line!(out, "\n## Serve\n");
    let commands = manifest.serve.iter();
    let commands: Vec<(&String, String)> =
        commands.map(|(engine, command)| (engine, in_folder(command, repo))).collect();
    if commands.iter().any(|(_, command)| command.contains(HUB_NAME)) {
        let words = "stands for the target's name on the hub, which is not known here.";
        line!(out, "`{HUB_NAME}` {words}\n");
    }
    for (engine, command) in commands {
        line!(out, "{engine}:\n\n```sh\n{command}\n```\n");
    }
    out
}

/// tau of every way to draft that was measured.
fn acceptance(out: &mut String, evaluation: Option<&Value>) {
    line!(out, "\n## Acceptance\n");
    let cells = evaluation.and_then(|record| record["cells"].as_array());
    let Some(cells) = cells.filter(|cells| !cells.is_empty()) else {
        line!(out, "Not measured.");
        return;
    };
    let prompts = evaluation.and_then(|record| record["prompts"].as_str()).unwrap_or("prompts");
    line!(
        out,
        "Measured on {prompts} with `longdraft eval decode`. tau: tokens per target pass, the \
         target's own token included.\n"
    );
    line!(
        out,
        "| drafting | temperature | prompts | tau (95 %) | accepted by position | equal outputs |"
    );
    line!(out, "|---|---|---|---|---|---|");
    for cell in cells {
        let figures = &cell["figures"];
        let number = |value: &Value| value.as_f64().unwrap_or_default();
        let rates: Vec<String> = cell["conditional_acceptance"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|rate| format!("{:.0} %", 100.0 * number(rate)))
            .collect();
        let rule = cell["rule"].as_str().unwrap_or_default();
        let interval = &figures["tau_interval"];
        let [tau, low, high] = [&figures["tau_incl_bonus"], &interval[0], &interval[1]].map(number);
        line!(
            out,
            "| {rule} | {} | {} | {tau:.3} ({low:.3} to {high:.3}) | {} | {} of {} |",
            number(&cell["temperature"]),
            figures["prompts"],
            rates.join(", "),
            cell["equal"],
            cell["checked"]
        );
    }
}
