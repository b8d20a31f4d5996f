//! The model card: what the draft is for, how it was made, what was measured, how to serve it.

use std::fmt::Write;

use longdraft_models::hub::is_repository;
use serde_json::Value;

use crate::Manifest;
use crate::engine::commands::HUB_NAME;

/// Markdown with the hub's front matter; `license` as the hub spells licences.
pub fn render(manifest: &Manifest, repo: &str, license: Option<&str>) -> String {
    let mut out = String::from("---\n");
    let target = public_name(&manifest.target.name);
    if let Some(license) = license {
        line(&mut out, format_args!("license: {license}"));
    }
    if is_hub_name(&manifest.target.name) {
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
    let commands: Vec<(&String, String)> = manifest
        .serve
        .iter()
        .map(|(engine, command)| {
            let target = in_command(&manifest.target.name);
            (engine, command.replace("DIR", repo).replace(&manifest.target.name, target))
        })
        .collect();
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
    let prompts = prompts.rsplit('/').next().unwrap_or(prompts);
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

/// `org/name`, not a path on this machine.
pub fn is_hub_name(name: &str) -> bool {
    let ends = |ending: &str| name.to_ascii_lowercase().ends_with(ending);
    let is_file = ends(".gguf") || ends(".safetensors");
    is_repository(name) && !is_file
}

/// What a command of the card loads: no path of this machine, but for a file's name.
fn in_command(name: &str) -> &str {
    if is_hub_name(name) || name.to_ascii_lowercase().ends_with(".gguf") {
        public_name(name)
    } else {
        HUB_NAME
    }
}

/// A name that tells nothing about the machine that it was made on.
fn public_name(name: &str) -> &str {
    if is_hub_name(name) {
        name
    } else {
        name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hub_names_are_told() {
        assert!(is_hub_name("Qwen/Qwen3-8B"));
        for path in ["/data/models/x", "models/x.gguf", "./a", "a", "a/b/c", "../b"] {
            assert!(!is_hub_name(path), "{path}");
        }
        assert_eq!(public_name("/data/models/smollm"), "smollm");
        assert_eq!(in_command("/data/models/smollm"), HUB_NAME);
        assert_eq!(in_command("/data/models/smollm.Q4_1.gguf"), "smollm.Q4_1.gguf");
        assert_eq!(in_command("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B");
    }
}
