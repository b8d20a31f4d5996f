//! Byte tables, windows, losses of every target and bits per byte.

use longdraft_data::token_stream::TokenStream;
use longdraft_models::bits_per_byte::{
    ByteTable, Tail, Window, evaluate, plain_windows, sliding_windows,
};
use longdraft_models::language_model::LanguageModel;
use longdraft_models::tokenizer::SentencePieces;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::Value;

use super::case::Case;
use crate::error::Result;
use crate::{CaseReport, Place, ROUNDED, floats, malformed, relative, worst};

const NLL: f64 = 2e-4;
const BITS_PER_BYTE: f64 = 1e-6;
/// Absolute, with 16-bit factors.
const ROUNDED_NLL: f64 = 0.2;

/// The evaluation stream with its byte counts.
struct Stream {
    tokens: Vec<u32>,
    bytes: Vec<u32>,
}

pub(super) fn check(
    case: &Case<'_>,
    dequantised: Option<&MemorySource>,
    place: &Place,
    report: &mut CaseReport,
) -> Result<()> {
    let want = case.file("eval.safetensors")?;
    let stream = check_stream(case, &want, report)?;
    let trained = case.file("weights_trained.safetensors")?;
    let sources: [(&str, Option<&dyn WeightSource>); 2] =
        [("fp32", Some(&trained)), ("int8", dequantised.map(|source| source as &dyn WeightSource))];
    for (tag, source) in sources {
        let Some(evaluations) = case.meta["eval"][tag].as_object() else { continue };
        let Some(source) = source else { continue };
        let model =
            LanguageModel::from_source(&case.model, source)?.to_device(&place.device)?.frozen()?;
        for (name, evaluation) in evaluations {
            let tag = format!("{tag}.{name}");
            let stream = (&stream, place);
            check_evaluation(case, &model, stream, &tag, evaluation, &want, report)?;
        }
    }
    Ok(())
}

fn check_stream(
    case: &Case<'_>,
    want: &SafetensorsSource,
    report: &mut CaseReport,
) -> Result<Stream> {
    let shard = TokenStream::open(&[case.folder.join("val_000000.bin")])?;
    shard.check(case.model.vocab_size)?;
    let tokens: Vec<u32> = shard.read(0..shard.len())?.into_iter().map(u32::from).collect();
    let count = &case.meta["eval"]["stream_tokens"];
    report.check_count("tokens of the stream", tokens.len() as u64, count);
    let pieces = SentencePieces::open(&case.folder.join("tokenizer.model"))?;
    let table = ByteTable::new(&pieces, case.model.vocab_size);
    let inputs = case.file("inputs.safetensors")?;
    let base: Vec<i64> = table.base().iter().map(|bytes| i64::from(*bytes)).collect();
    let flags = |flags: &[bool]| flags.iter().map(|flag| i64::from(*flag)).collect::<Vec<i64>>();
    let (lead, boundary) = (flags(table.lead()), flags(table.boundary()));
    for (name, got) in
        [("lut.base_bytes", base), ("lut.leading_space", lead), ("lut.boundary", boundary)]
    {
        report.check_stored(&inputs, name, &got)?;
    }
    let bytes = table.of_stream(&tokens);
    let counts: Vec<i64> = bytes.iter().map(|bytes| i64::from(*bytes)).collect();
    report.check_equal("byte counts", &counts, &want.load_i64("byte_counts")?);
    Ok(Stream { tokens, bytes })
}

fn check_evaluation(
    case: &Case<'_>,
    model: &LanguageModel,
    (stream, place): (&Stream, &Place),
    tag: &str,
    evaluation: &Value,
    want: &SafetensorsSource,
    report: &mut CaseReport,
) -> Result<()> {
    let size = |key: &str| evaluation[key].as_u64().map(|n| n as usize);
    let (Some(window), Some(stride)) = (size("window"), size("stride")) else {
        return Err(malformed(case.folder, format!("meta.json: {tag}: no window or stride")));
    };
    if !(1..=window).contains(&stride) {
        return Err(malformed(case.folder, format!("meta.json: {tag}: stride {stride}")));
    }
    if let Some(base) = evaluation["rope_base"].as_f64() {
        let own = case.model.effective_rope_base(window);
        report.check(format!("{tag} RoPE base"), relative(own, base), 1e-12);
    }
    let targets = stream.bytes.len();
    let full = sliding_windows(targets, window, stride, Tail::Score);
    if want.shape(&format!("{tag}.windows")).is_some() {
        let list: Vec<i64> = full
            .iter()
            .flat_map(|w| [w.start, w.length, w.scored.start, w.scored.end])
            .map(|value| value as i64)
            .collect();
        report.check_equal(
            format!("{tag} windows"),
            &list,
            &want.load_i64(&format!("{tag}.windows"))?,
        );
    }
    let plain_tag = tag.split("_s").next().unwrap_or(tag);
    let parts = [
        ("sliding_full", full, Some(format!("{tag}.nll"))),
        (
            "sliding_complete_windows_only",
            sliding_windows(targets, window, stride, Tail::Drop),
            None,
        ),
        (
            "non_overlap",
            plain_windows(targets, window),
            Some(format!("{plain_tag}.non_overlap_nll")),
        ),
    ];
    for (part, windows, losses) in parts {
        let sums = &evaluation[part];
        if sums.is_object() {
            let label = format!("{tag} {part}");
            let losses = losses.filter(|name| want.shape(name).is_some());
            let losses = losses.map(|name| floats(want, &name)).transpose()?;
            let stream = (stream, place);
            check_windows(model, stream, (&windows, window), &label, sums, losses, report)?;
        }
    }
    Ok(())
}

fn check_windows(
    model: &LanguageModel,
    (stream, place): (&Stream, &Place),
    windows: (&[Window], usize),
    label: &str,
    sums: &Value,
    losses: Option<Vec<f32>>,
    report: &mut CaseReport,
) -> Result<()> {
    let mut nll = Vec::new();
    let mut each = |_, loss| nll.push(loss);
    let score = evaluate(model, &stream.tokens, &stream.bytes, windows, 4096, &mut each)?;
    for (key, got) in [("tokens", score.tokens), ("bytes", score.bytes), ("windows", score.windows)]
    {
        report.check_count(format!("{label} {key}"), got, &sums[key]);
    }
    for (key, got) in [("val_loss", score.loss()), ("val_bpb", score.bits_per_byte())] {
        if let Some(want) = sums[key].as_f64() {
            let tolerance = place.allowed(BITS_PER_BYTE, ROUNDED.loss);
            report.check(format!("{label} {key}"), (got - want).abs(), tolerance);
        }
    }
    if let Some(want) = sums["nll_sum"].as_f64() {
        let tolerance = place.allowed(1e-6, ROUNDED.loss);
        report.check(format!("{label} nll_sum"), relative(score.nll_sum, want), tolerance);
    }
    if let Some(want) = losses {
        let error = if want.len() == nll.len() {
            let pairs = nll.iter().zip(&want);
            pairs.map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, worst)
        } else {
            f64::INFINITY
        };
        let tolerance = place.allowed(NLL, ROUNDED_NLL);
        report.check(format!("{label} nll of every target"), error, tolerance);
    }
    Ok(())
}
