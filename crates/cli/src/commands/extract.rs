//! `longdraft extract`: draft weights out of a checkpoint.

use std::path::Path;

use longdraft_models::draft::DraftKind;
use longdraft_models::draft::TOKEN_COUNTS_FILE;
use longdraft_models::draft::files::DRAFT_FILE;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_train::checkpoint::{Located, Wanted, read_draft, read_state, stages};

use crate::cli::ExtractArguments;
use crate::commands::require_writable;
use crate::draft_source::{configuration, find_checkpoint};
use crate::failure::{Failure, Result};
use crate::recording::quoted;

/// Writes the draft's folder.
pub(crate) fn run(arguments: &ExtractArguments, json: bool) -> Result<()> {
    let wanted = if arguments.best { Wanted::Best } else { Wanted::Newest };
    let Located { checkpoint, run } = find_checkpoint(&arguments.checkpoint, wanted)?;
    // A curriculum's draft is its own, as the quickstart writes it.
    let path = &arguments.checkpoint;
    let home = if stages(path).is_empty() { &run } else { path };
    let output = arguments.output.clone().unwrap_or_else(|| home.join("draft"));
    let step = read_state(&checkpoint)?.progress.step;
    let tensors = extract(&checkpoint, &output)?;
    let best =
        find_checkpoint(&run, Wanted::Best).and_then(|best| Ok(read_state(&best.checkpoint)?));
    let best = best.ok().map(|best| best.progress.step).filter(|best| *best != step);
    if json {
        outjson!({
            "output": output.to_string_lossy(), "tensors": tensors,
            "checkpoint": checkpoint.to_string_lossy(), "step": step, "best_step": best,
        });
        return Ok(());
    }
    outln!("took {} (step {step})", checkpoint.display());
    if let Some(step) = best {
        outln!("the best checkpoint on held-out rows is that of step {step}: --best takes it");
    }
    outln!("wrote {tensors} tensors to {}", output.join(DRAFT_FILE).display());
    let target = configuration(&run)["target"].as_str().map(quoted);
    let target = target.unwrap_or_else(|| "TARGET".to_owned());
    let draft = quoted(&output.display().to_string());
    outln!(
        "next:\n  longdraft generate --target {target} --draft {draft} --prompt \"Once upon a time\"\n  \
         longdraft eval decode --target {target} --draft {draft} --prompts prompts.jsonl"
    );
    Ok(())
}

/// Refuses a folder whose configuration or tokenizer is not that of an extracted draft, such as a target's: both
/// would be written over. A draft's weights are written before them.
fn require_own(output: &Path) -> Result<()> {
    let holds = |name: &str| output.join(name).is_file();
    let ours = ["config.json", "tokenizer.json", "tokenizer_config.json"];
    match ours.into_iter().find(|name| holds(name)) {
        Some(name) if !holds(DRAFT_FILE) => Err(Failure::usage(format!(
            "{}: its {name} would be written over, and is that of no extracted draft",
            output.display()
        ))
        .hint("give another place with --output")),
        _ => Ok(()),
    }
}

/// Writes weights, configuration and tokenizer of a checkpoint; returns the number of tensors.
pub(crate) fn extract(checkpoint: &Path, output: &Path) -> Result<usize> {
    let state = read_state(checkpoint)?;
    require_writable(output)?;
    require_own(output)?;
    let tensors = read_draft(checkpoint)?;
    std::fs::create_dir_all(output).map_err(Failure::unwritable(output))?;
    let kind = DraftKind::named(&state.method)?;
    (kind.save)(output, &state.draft, &tensors, &state.target_fingerprint)?;
    TextTokenizer::from_folder(checkpoint)?.save(output)?;
    let counts = checkpoint.join(TOKEN_COUNTS_FILE);
    if counts.is_file() {
        std::fs::copy(&counts, output.join(TOKEN_COUNTS_FILE)).map_err(Failure::at(output))?;
    }
    Ok(tensors.len())
}
