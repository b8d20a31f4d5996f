//! `longdraft quickstart`: fetch a target, train a draft, extract it, decode with and without it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use longdraft_decode::DecodeOptions;
use longdraft_decode::drafter::{Drafter, GlideDrafter};
use longdraft_decode::evaluate::{Comparison, compare};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::target::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_train::config::TrainConfig;
use longdraft_train::stage::Ending;
use serde_json::{Value, json};

use crate::cli::QuickstartArguments;
use crate::commands::generate::encode_prompt;
use crate::commands::{extract, fetch, train};
use crate::configuration::parse_train_config;
use crate::failure::{Failure, Result};
use crate::progress::{TrainingProgress, clock, stop_on_interrupt};

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
    let tokenizer = Target::open_tokenizer(&spec)?;
    eprintln!(
        "    {spec}: {} layers, width {}, vocabulary {}",
        target.config().num_hidden_layers,
        target.config().hidden_size,
        target.config().vocab_size
    );
    let data = write_corpus(&arguments.output)?;
    let config = configuration(&spec, &arguments.output, &data, &arguments.overrides)?;
    eprintln!("2/4 training a GLIDE draft against it (Ctrl-C saves; the same command goes on)");
    let mut progress = TrainingProgress::new(stop_on_interrupt());
    let (ending, _) = train::train(config, &target, &mut progress)?;
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
    let draft = GlideDraft::open(&draft_folder, &target)?;
    let comparison = measure(&target, &tokenizer, &draft, &data.join(TEST_FILE))?;
    print_result(&comparison, &spec, &draft_folder, started.elapsed().as_secs_f64());
    if json {
        println!("{}", to_json(&comparison, started.elapsed().as_secs_f64()));
    }
    if comparison.lossless() {
        return Ok(());
    }
    let differing = comparison.prompts - comparison.equal;
    Err(Failure::work(format!("{differing} outputs differ between plain and draft decoding")))
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
    let mut config = parse_train_config(CONFIG, "conf/quickstart/smollm2.yaml", overrides)?;
    config.target = target.to_owned();
    config.output = output.to_path_buf();
    for source in config.data.train.iter_mut().chain(&mut config.data.held_out) {
        if source.path.is_relative() && data.join(&source.path).is_file() {
            source.path = data.join(&source.path);
        }
    }
    Ok(config)
}

fn measure(
    target: &Target,
    tokenizer: &TextTokenizer,
    draft: &GlideDraft,
    questions: &Path,
) -> Result<Comparison> {
    let chat = tokenizer.chat_template().is_some();
    let prompts: Vec<Vec<TargetTokenId>> = longdraft_data::source::read_jsonl(questions)?
        .map(|row| encode_prompt(row?.text("question")?, chat, tokenizer, target))
        .collect::<Result<_>>()?;
    let options = DecodeOptions {
        draft_len: DRAFT_LEN,
        max_new_tokens: NEW_TOKENS,
        stop_tokens: super::generate::stop_tokens(target),
    };
    let new_drafter = || Ok(Box::new(GlideDrafter::new(draft, target)?) as Box<dyn Drafter>);
    Ok(compare(target, &new_drafter, &prompts, &options, &mut |totals| {
        eprintln!(
            "    {:>2} prompts: tau {:.3}, {} equal, {:.1} tok/s without, {:.1} with",
            totals.prompts,
            totals.acceptance.acceptance_length(),
            totals.equal,
            totals.plain_tokens_per_second(),
            totals.speculative_tokens_per_second()
        );
    })?)
}

fn print_result(comparison: &Comparison, target: &str, draft: &Path, seconds: f64) {
    let positions: Vec<String> = comparison
        .acceptance
        .conditional_acceptance()
        .iter()
        .map(|rate| format!("{:.0} %", 100.0 * rate))
        .collect();
    println!(
        "tau {:.3} tokens per target pass (the target's own token included), chains of \
         {DRAFT_LEN}, temperature 0",
        comparison.acceptance.acceptance_length()
    );
    println!("accepted by position, where tested: {}", positions.join(", "));
    println!(
        "decoding: {:.1} tok/s without the draft, {:.1} with it (x {:.2})",
        comparison.plain_tokens_per_second(),
        comparison.speculative_tokens_per_second(),
        comparison.speed_up()
    );
    println!("outputs equal: {} of {}", comparison.equal, comparison.prompts);
    println!("took {}", clock(seconds));
    println!(
        "next: longdraft generate --target {target} --draft {} --chat --prompt \"What is 12 * 7?\"",
        draft.display()
    );
}

fn to_json(comparison: &Comparison, seconds: f64) -> Value {
    json!({
        "tau": comparison.acceptance.acceptance_length(),
        "conditional_acceptance": comparison.acceptance.conditional_acceptance(),
        "plain_tokens_per_second": comparison.plain_tokens_per_second(),
        "speculative_tokens_per_second": comparison.speculative_tokens_per_second(),
        "speed_up": comparison.speed_up(),
        "prompts": comparison.prompts, "equal": comparison.equal,
        "lossless": comparison.lossless(), "seconds": seconds,
    })
}
