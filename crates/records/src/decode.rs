//! `decode.json`: what `eval decode` measured, as it writes and `report` reads it.

use std::io::{Error, ErrorKind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use longdraft_decode::acceptance::AcceptanceMetrics;
use longdraft_decode::evaluate::{Comparison, wilson_interval};
use longdraft_decode::{Committed, DraftShape, Origin, Pacing};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use time::OffsetDateTime;

pub use crate::drafter_parts::{DrafterParts, Lookup};
use crate::other_layout;

/// File in a run's directory.
pub const DECODE_FILE: &str = "decode.json";
/// Layout of the file.
pub const VERSION: u32 = 2;
/// Prompts below which timings are marked as a small sample.
pub const FEW_PROMPTS: usize = 30;

/// Everything of one call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeRecord {
    /// Layout of the file: [`VERSION`].
    pub version: u32,
    /// Version of the program.
    pub binary_version: String,
    /// As it was named.
    pub target: String,
    /// Of its weights.
    pub target_fingerprint: String,
    /// Where it lay, if there was one.
    pub draft: Option<String>,
    /// Name of the prompts.
    pub prompts: String,
    /// Variables of the chat template that all prompts had; those of a row stand beside its prompt.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub chat_template_kwargs: Map<String, Value>,
    /// Type that weights were held in.
    pub dtype: String,
    /// That everything was computed on.
    pub threads: usize,
    /// Tokens of an answer at most.
    pub max_new_tokens: usize,
    /// In the order in which they were measured.
    pub cells: Vec<Cell>,
    /// Absent where the figures alone are told ([`Self::without_circumstances`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub circumstances: Option<Circumstances>,
}

/// When, where and how it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Circumstances {
    /// `YYYY-MM-DD HH:MM` in UTC, at the end.
    pub date: String,
    /// As typed.
    pub command: String,
    /// The processor's own name.
    pub processor: Option<String>,
    /// Values of the target.
    pub target_parameters: usize,
    /// Trained values of the draft.
    pub draft_parameters: Option<usize>,
    /// Of measuring, in the last process that worked on it.
    pub seconds: f64,
}

impl DecodeRecord {
    /// Reads what was measured of a run.
    ///
    /// # Errors
    /// - the file is not there, cannot be read, or is no such record of this layout
    pub fn read(folder: &Path) -> std::io::Result<Self> {
        let text = std::fs::read_to_string(folder.join(DECODE_FILE))?;
        if let Some(layout) = other_layout(&text, VERSION) {
            let problem = format!(
                "another version wrote it (layout {layout}): measure again with `longdraft eval decode`"
            );
            return Err(Error::new(ErrorKind::InvalidData, problem));
        }
        Ok(serde_json::from_str(&text)?)
    }

    /// The way to use among some of the cells, with its place: the fastest. One that drafts in every round has to be surely
    /// faster than those whose pace adapts to what a round takes: it loses where the machine is less busy than it was when
    /// this was measured.
    pub fn best(&self, is_meant: impl Fn(&Cell) -> bool) -> Option<(usize, &Cell)> {
        let cells = self.cells.iter().enumerate().filter(|(_, cell)| is_meant(cell));
        let speeds = cells.map(|(index, Cell { figures, pace, .. })| Speed {
            index,
            times: figures.speed_up,
            interval: figures.speed_up_interval,
            every_round: *pace == Pacing::Fixed,
        });
        to_use(&speeds.collect::<Vec<_>>()).map(|index| (index, &self.cells[index]))
    }

    /// The figures alone, for others than who measured: no texts, paths of commands, machines.
    #[must_use]
    pub fn without_circumstances(mut self) -> Self {
        self.circumstances = None;
        self.cells.iter_mut().for_each(|cell| cell.sample = None);
        self
    }
}

/// How fast a way is beside plain decoding.
struct Speed {
    index: usize,
    times: f64,
    interval: (f64, f64),
    every_round: bool,
}

fn to_use(speeds: &[Speed]) -> Option<usize> {
    let most = |every_round| {
        let ways = speeds.iter().filter(move |speed| speed.every_round == every_round);
        ways.max_by(|a, b| a.times.total_cmp(&b.times))
    };
    let best = match (most(false), most(true)) {
        (Some(paced), Some(full)) if full.interval.0 > paced.interval.1 => full,
        (paced, full) => paced.or(full)?,
    };
    Some(best.index)
}

/// `YYYY-MM-DD HH:MM` in UTC; of a file's time that no calendar has, the first day of 1970.
pub fn date_of(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    let time = OffsetDateTime::from_unix_timestamp(seconds);
    let time = time.unwrap_or(OffsetDateTime::UNIX_EPOCH);
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

/// One way to draft at one temperature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Name of what proposed: `glide + lookup (merged)`, `none`.
    pub drafter: String,
    /// The same as values.
    pub drafter_parts: DrafterParts,
    /// Name of the layout: `chain`, `tree-static`, ... with sizes.
    pub rule: String,
    /// The same as values.
    pub shape: DraftShape,
    /// `greedy`, `candidate`, `ratio` or `match`.
    pub verifier: String,
    /// 0 of greedy decoding.
    pub temperature: f64,
    /// Most likely tokens that sampling was limited to.
    pub top_k: Option<usize>,
    /// Probability that it was limited to.
    pub top_p: f64,
    /// Least probability, as a share of the largest one.
    pub min_p: f64,
    /// Who decided how much was drafted.
    pub pace: Pacing,
    /// Confidence of the draft below which it proposed no further, where there was such a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence_threshold: Option<f64>,
    /// Times that every prompt was answered.
    pub runs: usize,
    /// Of all prompts.
    pub figures: Figures,
    /// By position, of all target passes: tau is 1 more than their sum, less the share of cut passes.
    pub accepted_share: Vec<f64>,
    /// By position: accepted proposals, of those with all earlier ones accepted.
    pub conditional_acceptance: Vec<f64>,
    /// 95 % intervals of them.
    pub conditional_acceptance_intervals: Vec<(f64, f64)>,
    /// Proposals that they count.
    pub tested_by_position: Vec<usize>,
    /// By position: accepted proposals, of all.
    pub survival: Vec<f64>,
    /// Accepted tokens that lookup proposed, of all accepted.
    pub lookup_share: f64,
    /// Of a round.
    pub milliseconds: Milliseconds,
    /// Of each run.
    pub speed_up_of_runs: Vec<f64>,
    /// Outputs that had to be equal to plain decoding's, and those that were.
    pub checked: usize,
    /// Those that were equal.
    pub equal: usize,
    /// By how much the target prefers plain decoding's token where outputs part, in nats.
    pub largest_regret: Option<f64>,
    /// Residuals without mass, in whose place the target's distribution was drawn from.
    pub residual_fallbacks: usize,
    /// By category of the prompts.
    pub categories: Vec<Figures>,
    /// By prompt length: tokens up to the power of two that names the group.
    pub contexts: Vec<Figures>,
    /// The first prompt's answer; absent where it cannot be put into words, and where the figures alone are told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// An answer, token by token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The end of the prompt.
    pub prompt: String,
    /// What was answered, in order.
    pub tokens: Vec<SampleToken>,
}

/// The text of a token, or of several that make a character together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleToken {
    /// As it is read.
    pub text: String,
    /// What proposed it: `draft` or `lookup`; nothing where it is the target's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposed_by: Option<Origin>,
}

impl SampleToken {
    /// An answer without what ends it; none where it cannot be put into words.
    pub fn of(
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
    pub fn of(
        comparison: &Comparison,
        prompt: &[TargetTokenId],
        tokenizer: &TextTokenizer,
        stops: &[TargetTokenId],
    ) -> Option<Self> {
        if comparison.first_answer.is_empty() {
            return None;
        }
        let ids: Vec<u32> = prompt.iter().map(|token| token.0).collect();
        let text = tokenizer.decode(&ids, true).ok()?;
        let skipped = text.chars().count().saturating_sub(PROMPT_LETTERS);
        let prompt = text.chars().skip(skipped).collect();
        let tokens = SampleToken::of(&comparison.first_answer, tokenizer, stops)?;
        Some(Self { prompt, tokens })
    }
}

/// Acceptance and speed of some prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// Group of prompts.
    pub name: String,
    /// Their number.
    pub prompts: usize,
    /// Tokens per target pass, the target's own included.
    pub tau_incl_bonus: f64,
    /// 95 % interval.
    pub tau_interval: (f64, f64),
    /// The same without the target's own token.
    pub tau_accepted_only: f64,
    /// The same over passes that no stop or limit cut.
    pub tau_uncut: f64,
    /// Mean of the prompts' own.
    pub tau_per_prompt: f64,
    /// Of proposals.
    pub acceptance_rate: f64,
    /// Of first proposals.
    pub first_acceptance: Option<f64>,
    /// After the first token.
    pub plain_decode_tok_s: f64,
    /// The same with drafting.
    pub decode_tok_s: f64,
    /// Prefill included.
    pub plain_e2e_tok_s: f64,
    /// The same with drafting.
    pub e2e_tok_s: f64,
    /// Times as fast as plain decoding, after the first token.
    pub speed_up: f64,
    /// 95 % interval.
    pub speed_up_interval: (f64, f64),
    /// Whether there are too few prompts for its timings to be sure.
    pub small_sample: bool,
}

/// Where the time of a round with proposals goes, and of a plain step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Milliseconds {
    /// Proposing.
    pub draft: f64,
    /// The target's pass.
    pub verify: f64,
    /// Everything else.
    pub rest: f64,
    /// A plain step.
    pub plain_step: f64,
    /// Rounds without proposals, of all.
    pub plain_share: f64,
}

impl Figures {
    /// Of a group of prompts that goes by `name`.
    pub fn of(name: impl Into<String>, comparison: &Comparison) -> Self {
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
    /// Means over the rounds of a comparison.
    pub fn of(comparison: &Comparison) -> Self {
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
pub fn acceptance_intervals(metrics: &AcceptanceMetrics) -> Vec<(f64, f64)> {
    let positions = metrics.accepted_by_position.iter().zip(&metrics.tested_by_position);
    positions.map(|(accepted, tested)| wilson_interval(*accepted, *tested)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    #[test]
    fn drafting_in_every_round_has_to_be_surely_faster() {
        let speed = |index, every_round, low, times, high| Speed {
            index,
            times,
            interval: (low, high),
            every_round,
        };
        let of = |low, times, high| {
            let ways = [
                speed(0, true, low, times, high),
                speed(1, false, 0.9, 1.0, 1.1),
                speed(2, false, 1.0, 1.3, 1.9),
            ];
            to_use(&ways)
        };
        assert_eq!(of(1.3, 1.8, 2.3), Some(2));
        assert_eq!(of(2.0, 2.5, 3.0), Some(0));
        assert_eq!(to_use(&[speed(0, true, 0.9, 1.0, 1.1)]), Some(0));
        assert_eq!(to_use(&[]), None);
    }

    use super::*;

    #[test]
    fn dates_are_of_the_calendar() {
        let after = |seconds: u64| date_of(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(after(264_384 * 3600), "2000-02-29 00:00");
        assert_eq!(after(1 << 40), "1970-01-01 00:00", "no date of the year 36812");
    }

    #[test]
    fn a_file_of_another_layout_is_refused_with_what_to_do() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join(DECODE_FILE), "{\"version\": 1}").expect("written");
        let told = DecodeRecord::read(folder.path()).expect_err("another layout").to_string();
        assert!(told.contains("(layout 1)") && told.contains("eval decode"), "{told}");
    }
}
