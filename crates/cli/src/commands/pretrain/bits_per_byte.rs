//! `longdraft lm score`: bits per byte of our models and of any target.

use std::path::{Path, PathBuf};

use longdraft_data::source::read_jsonl;
use longdraft_data::token_stream::{START_OF_DOCUMENT, TokenStream};
use longdraft_models::bits_per_byte::{
    Scorer, TargetScorer, Window, isolated_windows, plain_windows, sliding_windows,
};
use longdraft_models::language_model::{self, LanguageModel};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_pretrain::{ScoredStream, Tokenizer};

use crate::cli::{BpbArguments, EvalBpbArguments};
use crate::commands::data::encode_with_bytes;
use crate::failure::{Failure, Result};
use crate::model_source::training_length;

/// Either kind of model.
enum Model {
    Own(Box<LanguageModel>),
    Target(Box<Target>),
}

/// Window and stride, checked.
pub(super) fn windows(arguments: &BpbArguments) -> Result<(usize, usize)> {
    let window = arguments.window;
    let stride = arguments.stride.unwrap_or((window / 4).max(1));
    if window == 0 || window > 1 << 22 || !(1..=window).contains(&stride) {
        let problem = format!("--stride {stride} must be in 1 to --window {window}");
        return Err(Failure::usage(problem));
    }
    Ok((window, stride))
}

/// Scores.
pub(crate) fn run(arguments: &EvalBpbArguments, json: bool) -> Result<()> {
    let scoring = &arguments.scoring;
    let (window, stride) = windows(scoring)?;
    let (model, base, rule) = open(arguments, window)?;
    let (stream, start) = stream(arguments, &model)?;
    stream.warnings().iter().for_each(|warning| errln!("warning: {warning}"));
    if stream.targets() == 0 {
        return Err(Failure::usage("there is nothing to score"));
    }
    let list: Vec<Window> = if arguments.doc_isolated {
        isolated_windows(stream.tokens(), start, window, stride)
    } else if arguments.plain {
        plain_windows(stream.targets(), window)
    } else {
        sliding_windows(stream.targets(), window, stride, arguments.tail)
    };
    let scorer: &dyn Scorer = match &model {
        Model::Own(model) => model.as_ref(),
        Model::Target(target) => &TargetScorer(target),
    };
    let started = std::time::Instant::now();
    let score = stream.score_windows(scorer, &list, window, scoring.batch_tokens)?;
    let seconds = started.elapsed().as_secs_f64();
    let kind = if arguments.plain { "plain" } else { "sliding" };
    let recorded = || training_length(Path::new(&arguments.model));
    let trained = scoring.training_length.or_else(recorded);
    let starts = stream.document_starts(start);
    if json {
        outjson!({
            "bits_per_byte": score.bits_per_byte(), "loss": score.loss(),
            "nll_sum": score.nll_sum, "tokens": score.tokens,
            "total_tokens": score.total_tokens, "bytes": score.bytes,
            "windows": score.windows, "window": window, "stride": stride, "kind": kind,
            "training_length": trained, "rope_base": base, "rope_rule": rule,
            "document_starts": starts, "seconds": seconds,
        });
        return Ok(());
    }
    outln!("{:.6} bits per byte, {:.6} nats a token", score.bits_per_byte(), score.loss());
    outln!(
        "{} of {} targets scored, {} bytes, {} windows of {window} ({kind}{}), {seconds:.1} s",
        score.tokens,
        score.total_tokens,
        score.bytes,
        score.windows,
        if arguments.plain { String::new() } else { format!(", stride {stride}") },
    );
    let trained = trained.map_or_else(|| "unknown".to_owned(), |length| length.to_string());
    outln!("training length {trained}; RoPE {rule}, base {base:.1}");
    if starts > 0 {
        outln!(
            "{starts} document starts count with 0 bytes; tools that leave them out report less"
        );
    }
    Ok(())
}

/// The model, RoPE's base for the windows, and the rule.
fn open(arguments: &EvalBpbArguments, window: usize) -> Result<(Model, f64, &'static str)> {
    let path = Path::new(&arguments.model);
    let device = arguments.device.open(0)?;
    if language_model::locate(path).is_some() {
        let (model, hash) = language_model::open(path)?;
        warn_of_tokenizer(arguments, &hash)?;
        let model = model.to_device(&device)?.frozen()?;
        let base = model.config().effective_rope_base(window);
        return Ok((Model::Own(Box::new(model)), base, "as configured"));
    }
    let mut target =
        Target::open(&arguments.model, &TargetOptions { device, ..TargetOptions::default() })?;
    let plain = target.config().rope.theta;
    let (base, rule) = match arguments.ntk_reference {
        Some(0) => return Err(Failure::usage("--ntk-reference must be at least 1")),
        Some(reference) if window > reference => {
            (target.stretch_rope(window as f64 / reference as f64)?, "ntk")
        }
        _ => (plain, "unchanged"),
    };
    Ok((Model::Target(Box::new(target)), base, rule))
}

/// Bytes of another tokenizer are not those of the model's tokens.
fn warn_of_tokenizer(arguments: &EvalBpbArguments, hash: &str) -> Result<()> {
    let given = arguments.scoring.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
    if given.is_some_and(|given| !hash.is_empty() && hash != given.hash()) {
        errln!("warning: the model was trained with another tokenizer");
    }
    Ok(())
}

/// The stream, and the token that starts a document.
fn stream(arguments: &EvalBpbArguments, model: &Model) -> Result<(ScoredStream, u32)> {
    let scoring = &arguments.scoring;
    let given = scoring.tokenizer.as_deref().map(Tokenizer::open).transpose()?;
    let start = u32::from(START_OF_DOCUMENT);
    let is_bin = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|e| e == "bin");
    let vocabulary = match model {
        Model::Own(model) => model.config().vocab_size,
        Model::Target(target) => target.config().vocab_size,
    };
    if arguments.data.iter().all(is_bin) {
        let tokenizer = given.ok_or_else(|| {
            Failure::usage("bits per byte of token shards need their tokenizer")
                .hint("add --tokenizer with a SentencePiece model or a tokenizer's folder")
        })?;
        let stream = TokenStream::open(&arguments.data)?;
        stream.check(vocabulary)?;
        let scored = ScoredStream::new(&stream, &tokenizer, vocabulary, scoring.max_tokens)?;
        return Ok((scored, start));
    }
    let (tokenizer, start): (TextTokenizer, u32) = match (given, model) {
        (Some(tokenizer), Model::Own(_)) => (tokenizer.text_tokenizer()?, start),
        (given, Model::Target(target)) => {
            let config = target.config();
            let first = config.bos_token_id.or(config.eos_token_ids.first().copied());
            let tokenizer = match given {
                Some(given) => given.text_tokenizer()?,
                None => Target::open_tokenizer(&arguments.model)?,
            };
            (tokenizer, first.unwrap_or(0))
        }
        (None, Model::Own(_)) => {
            return Err(Failure::usage("text needs the model's tokenizer").hint("add --tokenizer"));
        }
    };
    text_stream(arguments, &tokenizer, start)
}

/// Documents of text, each after a start token; bytes are those of the raw text.
fn text_stream(
    arguments: &EvalBpbArguments,
    tokenizer: &TextTokenizer,
    start: u32,
) -> Result<(ScoredStream, u32)> {
    let most = arguments.scoring.max_tokens.unwrap_or(usize::MAX);
    let (mut tokens, mut bytes) = (Vec::new(), Vec::new());
    'files: for path in &arguments.data {
        for row in read_jsonl(path)? {
            let (ids, counts) = encode_with_bytes(tokenizer, row?.text(&arguments.field)?)?;
            tokens.push(start);
            bytes.push(0);
            tokens.extend(ids);
            bytes.extend(counts);
            if tokens.len() >= most {
                break 'files;
            }
        }
    }
    tokens.truncate(most);
    bytes.truncate(most);
    let targets = if bytes.is_empty() { Vec::new() } else { bytes.split_off(1) };
    Ok((ScoredStream::of(tokens, targets), start))
}
