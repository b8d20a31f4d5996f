//! `longdraft quickstart`: fetch a target, train a draft, extract it, decode with and without it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_models::target::{Target, TargetOptions};
use longdraft_train::config::TrainConfig;
use longdraft_train::parallel::World;
use longdraft_train::stage::{Ending, ResumePolicy};
use serde_json::json;

use crate::cli::{QuickstartArguments, WeightDtype};
use crate::commands::eval::prompts::PromptSet;
use crate::commands::{eval, extract, fetch, report, train};
use crate::configuration::parse_stage;
use crate::decoding::{DecodingArguments, Models, PaceChoice, stop_tokens};
use crate::failure::{Failure, Result};
use crate::progress::{TrainingProgress, clock, stop_on_interrupt};
use crate::ranks::Voice;

const CONFIG: &str = include_str!("../../../../conf/quickstart/smollm2.yaml");

/// Files of the shipped corpus, written into the run directory.
const CORPUS: [(&str, &str); 3] = [
    (
        "gsm8k-train-excerpt.jsonl",
        include_str!("../../../../assets/corpus/gsm8k-train-excerpt.jsonl"),
    ),
    ("books-excerpt.jsonl", include_str!("../../../../assets/corpus/books-excerpt.jsonl")),
    (TEST_FILE, include_str!("../../../../assets/corpus/gsm8k-test-20.jsonl")),
];

const TEST_FILE: &str = "gsm8k-test-20.jsonl";

/// What is measured: greedy chains of 4 on 20 questions.
const NEW_TOKENS: usize = 128;
const DRAFT_LEN: usize = 4;

/// Runs the pipeline; a second call goes on where the first one stopped.
pub(crate) fn run(arguments: &QuickstartArguments, json: bool) -> Result<()> {
    let started = std::time::Instant::now();
    eprintln!("1/4 target");
    let spec = match arguments.target.as_str() {
        "smollm2" => fetch::fetch_smollm2(&fetch::cache_folder()?)?.display().to_string(),
        other => other.to_owned(),
    };
    let target = Arc::new(Target::open(&spec, &TargetOptions::default())?);
    eprintln!(
        "    {spec}: {} layers, width {}, vocabulary {}",
        target.config().num_hidden_layers,
        target.config().hidden_size,
        target.config().vocab_size
    );
    let data = write_corpus(&arguments.output)?;
    let config = configuration(&spec, &arguments.output, &data, &arguments.overrides)?;
    eprintln!("2/4 training a GLIDE draft against it (Ctrl-C saves; the same command goes on)");
    let mut progress = TrainingProgress::new(stop_on_interrupt(), Voice::alone());
    let world = World::single();
    let (ending, _) = train::train(config, &target, ResumePolicy::Strict, &world, &mut progress)?;
    if ending == Ending::Stopped {
        println!("stopped: the same command goes on from here");
        return Ok(());
    }
    let draft_folder = arguments.output.join("draft");
    let (checkpoint, _) = extract::find(&arguments.output)?;
    let tensors = extract::extract(&checkpoint, &draft_folder)?;
    eprintln!("3/4 extracted {tensors} tensors to {}", draft_folder.display());
    eprintln!(
        "4/4 decoding {NEW_TOKENS} tokens after 20 GSM8K test questions, without and with it"
    );
    let decoding = DecodingArguments::chain(&draft_folder, DRAFT_LEN);
    drop(target);
    let models = decoding.open(&spec)?;
    let Models { target, tokenizer, .. } = &models;
    let questions = PromptSet {
        name: &data.join(TEST_FILE).display().to_string(),
        field: "question",
        chat: tokenizer.chat_template().is_some(),
        limit: None,
        contexts: &[],
        max_tokens: NEW_TOKENS,
    };
    let questions = eval::prompts::read(&questions, target, tokenizer)?;
    let mut options = decoding.options(0.0, PaceChoice::Fixed)?;
    options.max_new_tokens = NEW_TOKENS;
    options.stop_tokens = stop_tokens(target);
    let cell = eval::measure(&decoding, &models, &questions, &options, 1)?;
    eval::print(&cell);
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "took {}; plots: {}",
        clock(seconds),
        report::write_page(&arguments.output)?.display()
    );
    println!(
        "next: longdraft generate --target {spec} --draft {} --chat --prompt \"What is 12 * 7?\"",
        draft_folder.display()
    );
    if json {
        let mut value = eval::summary(&cell);
        value["seconds"] = json!(seconds);
        println!("{value}");
    }
    eval::require_lossless(&cell, WeightDtype::F32)
}

/// The shipped text as files, where the data reader and the user can see it.
fn write_corpus(output: &Path) -> Result<PathBuf> {
    let folder = output.join("data");
    let fail = |error: std::io::Error| Failure::work(format!("{}: {error}", folder.display()));
    std::fs::create_dir_all(&folder).map_err(fail)?;
    for (name, text) in CORPUS {
        std::fs::write(folder.join(name), text).map_err(fail)?;
    }
    Ok(folder)
}

fn configuration(
    target: &str,
    output: &Path,
    data: &Path,
    overrides: &[String],
) -> Result<TrainConfig> {
    let mut config = parse_stage(CONFIG, "conf/quickstart/smollm2.yaml", overrides)?;
    target.clone_into(&mut config.target);
    config.output = output.to_path_buf();
    for source in config.data.train.iter_mut().chain(&mut config.data.held_out) {
        if source.path.is_relative() && data.join(&source.path).is_file() {
            source.path = data.join(&source.path);
        }
    }
    Ok(config)
}
