//! `longdraft quickstart`: the whole pipeline on a target and text that the program carries.

pub(super) mod assets;
mod measure;

use std::path::{Path, PathBuf};

use longdraft_configuration::{LocatedStage, parse_stages};
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_report::words::clock;
use longdraft_train::checkpoint::Wanted;
use longdraft_train::stage::ResumePolicy;
use serde_json::json;

use crate::cache::cache_folder;
use crate::cli::QuickstartArguments;
use crate::commands::curriculum::{self, Audience, End};
use crate::commands::{eval, extract, fetch, report, require_writable};
use crate::draft_source::find_checkpoint;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::recording::quoted;

/// The target that needs no network.
const DEMONSTRATION: &str = "demonstration";

/// Name and text of a configuration.
type Configuration = (&'static str, &'static str);

const DEMONSTRATION_STAGES: Configuration = (
    "conf/quickstart/demonstration.yaml",
    include_str!("../../../conf/quickstart/demonstration.yaml"),
);
const OTHER_STAGES: Configuration =
    ("conf/quickstart/smollm2.yaml", include_str!("../../../conf/quickstart/smollm2.yaml"));

/// Runs the pipeline; a second call goes on where the first one stopped.
pub(crate) fn run(arguments: &QuickstartArguments, json: bool) -> Result<()> {
    let started = std::time::Instant::now();
    if arguments.questions == 0 {
        return Err(Failure::usage("--questions needs at least 1"));
    }
    let output = &arguments.output;
    require_writable(output)?;
    let (target, stages) = match arguments.target.as_str() {
        DEMONSTRATION => (assets::write_target(output)?, DEMONSTRATION_STAGES),
        "smollm2" => (fetch::fetch_smollm2(&cache_folder()?)?, OTHER_STAGES),
        other => (PathBuf::from(other), OTHER_STAGES),
    };
    let target = target.display().to_string();
    tell_target(&target)?;
    let data = assets::write_corpus(output)?;
    let stages = configured(stages, &target, output, &data, &arguments.overrides)?;
    let count = stages.len();
    let mut number = 0;
    let mut tell = |name: &str| {
        number += 1;
        errln!("\n[train {number}/{count}] {}", about_stage(name));
    };
    errln!("Ctrl-C at any time: the same command goes on from there.");
    let (policy, world) = (ResumePolicy::Strict, World::single());
    let end = if let Some(end) = curriculum::finished(output, &stages, policy, &world) {
        end
    } else {
        let mut audience = Audience::person(&mut tell);
        curriculum::train_all(output, stages, policy, &world, &mut audience)?
    };
    let finished = match end {
        End::Stopped(stopped) => {
            stopped.tell(output, json);
            return Err(stopped.failure);
        }
        End::OnFirstRank => return Ok(()),
        End::Finished(finished) => finished,
    };
    let draft = output.join("draft");
    let found = find_checkpoint(&finished.last_run, Wanted::Newest)?;
    let tensors = extract::extract(&found.checkpoint, &draft)?;
    errln!("\n[extract] {tensors} tensors of the draft go to {}", draft.display());
    errln!(
        "\n[measure] test questions are answered without the draft, with it, and with it and prompt \
         lookup"
    );
    let interrupts = Interrupts::listen();
    let measured = measure::run(&target, &draft, &data, arguments.questions, &interrupts)?;
    let Some(record) = measured else {
        eval::tell_stopped(output, json);
        return Err(interrupts.failure());
    };
    eval::write(output, &record)?;
    let page = report::write_page(output)?;
    let seconds = started.elapsed().as_secs_f64();
    measure::tell(&record);
    outln!("took {}; plots: {}", clock(seconds), page.display());
    tell_next(&target, &draft, &arguments.target);
    if json {
        let mut value = eval::to_json(&record);
        value["seconds"] = json!(seconds);
        value["report"] = json!(page.to_string_lossy());
        outln!("{value}");
    }
    record.cells.iter().try_for_each(|cell| eval::require_lossless(cell, measure::DTYPE))
}

fn tell_target(target: &str) -> Result<()> {
    let config = Target::open_config(target)?;
    errln!(
        "A small draft model learns to guess what a target model will say next; the target then \
         checks several guesses in one pass, and its output stays the same.\n\n[target] {target}: \
         {} layers, width {}, {} tokens, context {}",
        config.num_hidden_layers,
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings
    );
    Ok(())
}

/// What a stage is for, in a line.
fn about_stage(name: &str) -> &'static str {
    match name {
        "base" => "short text: the draft learns to follow the target",
        "long" => "long text: the same at positions deep in the context",
        "reasoning" => "worked answers: what the target will be asked for",
        _ => "the draft learns to follow the target",
    }
}

/// What to do next: commands that the program itself is enough for.
fn tell_next(target: &str, draft: &Path, chosen: &str) {
    for (word, command) in next(target, draft, chosen) {
        outln!("{word}:\n  {command}");
    }
}

fn next(target: &str, draft: &Path, chosen: &str) -> Vec<(&'static str, String)> {
    let (target, draft) = (quoted(target), quoted(&draft.display().to_string()));
    let question =
        "Tom has 3 boxes with 12 pens each. He gives away 9 pens. How many pens are left?";
    let mut next = vec![(
        "next, see it write",
        format!(
            "longdraft generate --target {target} --draft {draft} --show-acceptance --prompt \"{question}\""
        ),
    )];
    if chosen == DEMONSTRATION {
        next.push((
            "then the same with a real model (SmolLM2-135M, 98 MB are fetched)",
            "longdraft quickstart --target smollm2 --output runs/quickstart-smollm2".to_owned(),
        ));
    } else {
        next.push((
            "then a better draft, in as much time as you give it",
            format!("longdraft fit {target} --time 1h"),
        ));
        next.push((
            "or a training whose settings you choose",
            format!("longdraft init mine.yaml --for train --target {target}"),
        ));
    }
    next
}

/// The stages with target, run directory and the place of the text.
fn configured(
    (name, text): Configuration,
    target: &str,
    output: &Path,
    data: &Path,
    overrides: &[String],
) -> Result<Vec<LocatedStage>> {
    let output = json!(output.display().to_string());
    let own = [format!("output={output}"), format!("target={}", json!(target))];
    let mut stages = parse_stages(text, name, &[&own[..], overrides].concat())?;
    for stage in &mut stages {
        let sources = &mut stage.located.config.data;
        for source in sources.train.iter_mut().chain(&mut sources.held_out) {
            if source.path.is_relative() && data.join(&source.path).is_file() {
                source.path = data.join(&source.path);
            }
        }
    }
    Ok(stages)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who installed the program alone has no `conf/`.
    #[test]
    fn what_is_said_to_be_next_is_understood_and_needs_no_checkout() {
        for chosen in [DEMONSTRATION, "smollm2"] {
            for (_, command) in next("model.gguf", Path::new("runs/q/draft"), chosen) {
                let words = shlex::split(&command).expect("a command");
                let read = <crate::cli::Cli as clap::Parser>::try_parse_from(words);
                assert!(read.is_ok(), "{command}: {:?}", read.err());
                assert!(!command.contains("conf/"), "{command}");
            }
        }
    }
}
