//! `longdraft lm quantize`: artifact, read back, scored.

use longdraft_data::token_stream::TokenStream;
use longdraft_models::language_model::open;
use longdraft_models::weights::artifact::{QuantiseConfig, Sizes};
use longdraft_pretrain::{ArtifactConfig, ArtifactReport, ScoredStream, Tokenizer, build_artifact};
use longdraft_rules::Problem;
use longdraft_serving::save_gguf;

use super::print_artifact;
use crate::cli::QuantizeArguments;
use crate::failure::{Failure, Result};

/// Writes the artifact and scores it if there is data.
pub(crate) fn run(arguments: &QuantizeArguments, json: bool) -> Result<()> {
    if arguments.output.extension().is_some_and(|extension| extension == "gguf") {
        if !arguments.data.is_empty() || arguments.budget_bytes.is_some() {
            let problem = "a .gguf is neither scored nor held against a budget here";
            return Err(Failure::usage(problem).hint("score it with `longdraft lm score`"));
        }
        return gguf(arguments, json);
    }
    let config = config(arguments)?;
    let (model, hash) = open(&arguments.model)?;
    let model = model.frozen()?;
    if arguments.data.is_empty() {
        let sizes = build_artifact(&model, &hash, &config, &arguments.output)?;
        print_sizes(arguments, sizes, json);
        return require_fit(sizes);
    }
    let scoring = &arguments.scoring;
    let tokenizer = scoring.tokenizer.as_deref().ok_or_else(|| {
        Failure::usage("bits per byte need the tokenizer").hint("add --tokenizer")
    })?;
    let tokenizer = Tokenizer::open(tokenizer)?;
    if !hash.is_empty() && hash != tokenizer.hash() {
        errln!("warning: the model was trained with another tokenizer");
    }
    let stream = TokenStream::open(&arguments.data)?;
    let vocabulary = model.config().vocab_size;
    stream.check(vocabulary)?;
    let stream = ScoredStream::new(&stream, &tokenizer, vocabulary, scoring.max_tokens)?;
    stream.warnings().iter().for_each(|warning| errln!("warning: {warning}"));
    let (window, stride) = super::bits_per_byte::windows(scoring)?;
    let length = scoring.training_length.unwrap_or(window);
    let lengths = (length, window, stride, scoring.batch_tokens);
    let report =
        ArtifactReport::measure(&model, &hash, &config, &arguments.output, &stream, lengths)?;
    if json {
        outln!("{}", report.to_json());
    } else {
        print_artifact(&report, length, config.compression);
    }
    require_fit(report.sizes)
}

/// Writes a GGUF file.
fn gguf(arguments: &QuantizeArguments, json: bool) -> Result<()> {
    let (model, hash) = open(&arguments.model)?;
    let folder = arguments.scoring.tokenizer.as_deref().ok_or_else(|| {
        Failure::usage("a GGUF file holds its tokenizer")
            .hint("add --tokenizer FOLDER, as in `data.tokenizer` of the run")
    })?;
    if !hash.is_empty() && hash != Tokenizer::open(folder)?.hash() {
        return Err(Failure::usage("the model was trained with another tokenizer"));
    }
    let output = &arguments.output;
    let name = output.file_stem().unwrap_or_default().to_string_lossy();
    save_gguf(&model, &name, folder, output)?;
    let bytes = std::fs::metadata(output).map_or(0, |file| file.len());
    if json {
        outjson!({"output": output.to_string_lossy(), "bytes": bytes});
    } else {
        outln!("{}: {bytes} bytes", output.display());
    }
    Ok(())
}

fn config(arguments: &QuantizeArguments) -> Result<ArtifactConfig> {
    let quantise = QuantiseConfig {
        format: arguments.format,
        keep_max_elements: arguments.keep_max_elements,
        levels: arguments.levels,
        embedding: arguments.embedding,
        ..QuantiseConfig::default()
    };
    let told = |problem: Problem| format!("`--{}` {}", problem.key, problem.text);
    let problems: Vec<String> = quantise.problems().into_iter().map(told).collect();
    if !problems.is_empty() {
        return Err(Failure::usage(problems.join("; ")).hint("add --format modern"));
    }
    Ok(ArtifactConfig {
        quantise,
        compression: arguments.compression,
        code_bytes: arguments.code_bytes,
        budget_bytes: arguments.budget_bytes,
    })
}

fn print_sizes(arguments: &QuantizeArguments, sizes: Sizes, json: bool) {
    if json {
        outjson!({
            "output": arguments.output.to_string_lossy(),
            "artifact_bytes": sizes.artifact_bytes, "payload_bytes": sizes.payload_bytes,
            "code_bytes": sizes.code_bytes, "total_bytes": sizes.total(), "fits": sizes.fits()
        });
    } else {
        outln!(
            "{}: {} bytes ({} before compression), {} with code",
            arguments.output.display(),
            sizes.artifact_bytes,
            sizes.payload_bytes,
            sizes.total()
        );
    }
}

fn require_fit(sizes: Sizes) -> Result<()> {
    if sizes.fits() {
        return Ok(());
    }
    Err(Failure::work(format!("{} bytes are beyond the limit of 16000000", sizes.total()))
        .hint("train a smaller model, or use --format modern with --levels or --budget-bytes")
        .in_result())
}
