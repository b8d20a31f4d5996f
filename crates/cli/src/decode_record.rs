//! `decode.json`: what `eval decode` measured, as it writes and `report` reads it.

use std::ffi::OsString;
use std::sync::OnceLock;

use longdraft_decode::evaluate::{Comparison, wilson_interval};
use longdraft_decode::metrics::AcceptanceMetrics;
use longdraft_decode::{Committed, Origin};
use longdraft_models::TargetTokenId;
use longdraft_models::target::tensor_specs;
use longdraft_models::tokenizer::TextTokenizer;
use serde::{Deserialize, Serialize};

use crate::decoding::{DecodingArguments, Models, stop_tokens};
use crate::doctor::processor_name;

/// File in a run's directory.
pub(crate) const DECODE_FILE: &str = "decode.json";
/// Layout of the file.
const VERSION: u32 = 1;
/// Prompts below which timings are marked as a small sample.
pub(crate) const FEW_PROMPTS: usize = 30;

/// Everything of one call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecodeRecord {
    pub(crate) version: u32,
    pub(crate) binary_version: String,
    pub(crate) target: String,
    pub(crate) target_fingerprint: String,
    pub(crate) draft: Option<String>,
    pub(crate) prompts: String,
    pub(crate) dtype: String,
    pub(crate) threads: usize,
    pub(crate) max_new_tokens: usize,
    pub(crate) cells: Vec<Cell>,
    /// Absent in files of older versions, as is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) circumstances: Option<Circumstances>,
}

/// When, where and how it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Circumstances {
    /// `YYYY-MM-DD HH:MM` in UTC, at the end.
    pub(crate) date: String,
    /// As typed.
    pub(crate) command: String,
    /// The processor's own name.
    pub(crate) processor: Option<String>,
    pub(crate) target_parameters: usize,
    pub(crate) draft_parameters: Option<usize>,
    /// Of measuring, in the last process that worked on it.
    pub(crate) seconds: f64,
}

impl DecodeRecord {
    /// A record without cells.
    pub(crate) fn new(
        (target, prompts): (&str, &str),
        decoding: &DecodingArguments,
        models: &Models,
        max_new_tokens: usize,
    ) -> Self {
        Self {
            version: VERSION,
            binary_version: env!("CARGO_PKG_VERSION").to_owned(),
            target: target.to_owned(),
            target_fingerprint: models.target.fingerprint().to_owned(),
            draft: decoding.draft.as_ref().map(|path| path.display().to_string()),
            prompts: prompts.to_owned(),
            dtype: format!("{:?}", decoding.dtype).to_lowercase(),
            threads: rayon::current_num_threads(),
            max_new_tokens,
            cells: Vec::new(),
            circumstances: None,
        }
    }

    /// Says when, where and how it was measured, now that it is.
    pub(crate) fn end(&mut self, models: &Models, seconds: f64) {
        let specs = tensor_specs(models.target.config());
        self.circumstances = Some(Circumstances {
            date: now(),
            command: COMMAND.get().cloned().unwrap_or_default(),
            processor: processor_name(),
            target_parameters: specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum(),
            draft_parameters: models.draft_parameters(),
            seconds,
        });
    }

    /// The figures alone, for others than who measured: no texts, paths of commands, machines.
    pub(crate) fn without_circumstances(mut self) -> Self {
        self.circumstances = None;
        self.cells.iter_mut().for_each(|cell| cell.sample = None);
        self
    }
}

/// `YYYY-MM-DD HH:MM` in UTC.
fn now() -> String {
    date_of(std::time::SystemTime::now())
}

/// `YYYY-MM-DD HH:MM` in UTC.
pub(crate) fn date_of(time: std::time::SystemTime) -> String {
    let time = time::OffsetDateTime::from(time);
    let (date, clock) = (time.date(), time.time());
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}",
        date.year(),
        u8::from(date.month()),
        date.day(),
        clock.hour(),
        clock.minute()
    )
}

/// What was typed; nothing where another program works with this one's libraries.
static COMMAND: OnceLock<String> = OnceLock::new();

/// Keeps what was typed, this program's name first.
pub(crate) fn set_command(words: &[OsString]) {
    let words = words.iter().skip(1).map(|word| word.to_string_lossy().into_owned());
    let _ = COMMAND.set(command_line(words));
}

/// What was typed, such that a shell reads it again.
fn command_line(arguments: impl Iterator<Item = String>) -> String {
    let quoted = |argument: String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
        if !argument.is_empty() && argument.chars().all(plain) {
            argument
        } else {
            format!("'{}'", argument.replace('\'', "'\\''"))
        }
    };
    let words: Vec<String> = arguments.map(quoted).collect();
    format!("longdraft {}", words.join(" "))
}

/// One way to draft at one temperature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cell {
    pub(crate) drafter: String,
    /// `chain`, `tree-static`, ... with sizes.
    pub(crate) rule: String,
    /// `greedy`, `candidate`, `ratio` or `match`.
    pub(crate) verifier: String,
    pub(crate) temperature: f64,
    pub(crate) top_k: Option<usize>,
    pub(crate) top_p: f64,
    pub(crate) min_p: f64,
    pub(crate) pace: String,
    /// Confidence of the draft below which it proposed no further, where there was such a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) confidence_threshold: Option<f64>,
    pub(crate) runs: usize,
    pub(crate) figures: Figures,
    /// By position, of all target passes: tau is 1 more than their sum, less the share of cut passes.
    #[serde(default)]
    pub(crate) accepted_share: Vec<f64>,
    pub(crate) conditional_acceptance: Vec<f64>,
    pub(crate) conditional_acceptance_intervals: Vec<(f64, f64)>,
    pub(crate) tested_by_position: Vec<usize>,
    pub(crate) survival: Vec<f64>,
    pub(crate) lookup_share: f64,
    pub(crate) milliseconds: Milliseconds,
    pub(crate) speed_up_of_runs: Vec<f64>,
    /// Outputs that had to be equal to plain decoding's, and those that were.
    pub(crate) checked: usize,
    pub(crate) equal: usize,
    pub(crate) largest_regret: Option<f64>,
    pub(crate) residual_fallbacks: usize,
    pub(crate) categories: Vec<Figures>,
    /// By prompt length: tokens up to the power of two that names the group.
    pub(crate) contexts: Vec<Figures>,
    /// The first prompt's answer; absent in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sample: Option<Sample>,
}

/// An answer, token by token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sample {
    /// The end of the prompt.
    pub(crate) prompt: String,
    /// What was answered, in order.
    pub(crate) tokens: Vec<SampleToken>,
}

/// The text of a token, or of several that make a character together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SampleToken {
    pub(crate) text: String,
    /// What proposed it: `draft` or `lookup`; nothing where it is the target's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) proposed_by: Option<Origin>,
}

impl SampleToken {
    /// An answer without what ends it; none where it cannot be put into words.
    pub(crate) fn of(
        answer: &[Committed],
        tokenizer: &TextTokenizer,
        stops: &[TargetTokenId],
    ) -> Option<Vec<Self>> {
        let mut stream = tokenizer.stream();
        let mut tokens = Vec::new();
        for committed in answer.iter().filter(|committed| !stops.contains(&committed.token)) {
            let text = stream.push(committed.token.0).ok()?;
            tokens.push(Self { text, proposed_by: committed.proposed_by });
        }
        tokens.push(Self { text: stream.finish().ok()?, proposed_by: None });
        tokens.retain(|token| !token.text.is_empty());
        Some(tokens)
    }
}

/// Letters of a prompt that are kept with its answer.
const PROMPT_LETTERS: usize = 1500;

impl Sample {
    /// The first answer of a comparison; none where it cannot be put into words.
    pub(crate) fn of(
        comparison: &Comparison,
        prompt: &[TargetTokenId],
        models: &Models,
    ) -> Option<Self> {
        if comparison.first_answer.is_empty() {
            return None;
        }
        let ids: Vec<u32> = prompt.iter().map(|token| token.0).collect();
        let text = models.tokenizer.decode(&ids, true).ok()?;
        let skipped = text.chars().count().saturating_sub(PROMPT_LETTERS);
        let prompt = text.chars().skip(skipped).collect();
        let stops = stop_tokens(&models.target);
        let tokens = SampleToken::of(&comparison.first_answer, &models.tokenizer, &stops)?;
        Some(Self { prompt, tokens })
    }
}

/// Acceptance and speed of some prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Figures {
    pub(crate) name: String,
    pub(crate) prompts: usize,
    /// Tokens per target pass, the target's own included.
    pub(crate) tau_incl_bonus: f64,
    pub(crate) tau_interval: (f64, f64),
    pub(crate) tau_accepted_only: f64,
    pub(crate) tau_uncut: f64,
    pub(crate) tau_per_prompt: f64,
    pub(crate) acceptance_rate: f64,
    pub(crate) first_acceptance: Option<f64>,
    /// After the first token.
    pub(crate) plain_decode_tok_s: f64,
    pub(crate) decode_tok_s: f64,
    /// Prefill included.
    pub(crate) plain_e2e_tok_s: f64,
    pub(crate) e2e_tok_s: f64,
    pub(crate) speed_up: f64,
    pub(crate) speed_up_interval: (f64, f64),
    pub(crate) small_sample: bool,
}

/// Where the time of a round with proposals goes, and of a plain step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Milliseconds {
    pub(crate) draft: f64,
    pub(crate) verify: f64,
    pub(crate) rest: f64,
    pub(crate) plain_step: f64,
    /// Rounds without proposals, of all.
    pub(crate) plain_share: f64,
}

impl Figures {
    pub(crate) fn of(name: impl Into<String>, comparison: &Comparison) -> Self {
        let acceptance = comparison.acceptance();
        let (plain, drafted) = (comparison.plain(), comparison.drafted());
        Self {
            name: name.into(),
            prompts: comparison.prompts.len(),
            tau_incl_bonus: acceptance.acceptance_length(),
            tau_interval: comparison.acceptance_length_interval(),
            tau_accepted_only: acceptance.accepted_length(),
            tau_uncut: acceptance.uncut_acceptance_length(),
            tau_per_prompt: comparison.acceptance_length_per_prompt(),
            acceptance_rate: acceptance.acceptance_rate(),
            first_acceptance: acceptance.conditional_acceptance().first().copied(),
            plain_decode_tok_s: plain.decode_tokens_per_second(),
            decode_tok_s: drafted.decode_tokens_per_second(),
            plain_e2e_tok_s: plain.tokens_per_second(),
            e2e_tok_s: drafted.tokens_per_second(),
            speed_up: comparison.speed_up(),
            speed_up_interval: comparison.speed_up_interval(),
            small_sample: comparison.prompts.len() < FEW_PROMPTS,
        }
    }
}

impl Milliseconds {
    pub(crate) fn of(comparison: &Comparison) -> Self {
        let acceptance = comparison.acceptance();
        let AcceptanceMetrics { rounds, plain_rounds, seconds, .. } = acceptance;
        let drafted = (rounds - plain_rounds).max(1) as f64;
        let plain = comparison.plain();
        let steps = plain.tokens.saturating_sub(plain.requests).max(1) as f64;
        Self {
            draft: 1e3 * seconds.draft / drafted,
            verify: 1e3 * seconds.verify / drafted,
            rest: 1e3 * seconds.rest / drafted,
            plain_step: 1e3 * plain.decode_seconds / steps,
            plain_share: plain_rounds as f64 / rounds.max(1) as f64,
        }
    }
}

/// Intervals of conditional acceptance, position by position.
pub(crate) fn acceptance_intervals(metrics: &AcceptanceMetrics) -> Vec<(f64, f64)> {
    let positions = metrics.accepted_by_position.iter().zip(&metrics.tested_by_position);
    positions.map(|(accepted, tested)| wilson_interval(*accepted, *tested)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_quoted_as_a_shell_needs_them() {
        let words = ["eval", "--prompts", "my file.jsonl", "it's", ""].map(str::to_owned);
        let text = command_line(words.into_iter());
        assert_eq!(text, "longdraft eval --prompts 'my file.jsonl' 'it'\\''s' ''");
    }

    #[test]
    fn dates_are_of_the_calendar() {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_hours(264_384);
        assert_eq!(date_of(time), "2000-02-29 00:00");
    }
}
