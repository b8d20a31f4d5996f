//! `decode.json`: what `eval decode` measured, as it writes and `report` reads it.

use longdraft_decode::evaluate::{Comparison, wilson_interval};
use longdraft_decode::metrics::AcceptanceMetrics;
use serde::{Deserialize, Serialize};

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
}

impl DecodeRecord {
    pub(crate) const VERSION: u32 = VERSION;
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
