//! How many tokens a server's passes gave, from whatever it reveals.

use std::time::{Duration, Instant};

use longdraft_decode::acceptance::AcceptanceMetrics;
use serde_json::Value;

use super::answer::Answer;
use super::client::{Kind, Server};
use super::counters::Counters;

/// How long counters that lag are waited for, and between two looks.
const LAG: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(100);

/// Passes of the target after the one that read the prompt, the tokens that they gave, and what of the tokens that
/// were proposed to them was accepted.
fn passes(
    rounds: usize,
    committed: usize,
    (proposed, accepted): (usize, usize),
) -> AcceptanceMetrics {
    AcceptanceMetrics {
        rounds,
        committed,
        drafted: proposed,
        nodes: proposed,
        accepted,
        ..AcceptanceMetrics::default()
    }
}

/// What tells of passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    /// `usage` of longdraft.
    Usage,
    /// `usage` in OpenAI's own words.
    Predictions,
    /// `timings` of llama.cpp.
    Timings,
    /// Counters of vLLM.
    Counters,
    /// The gauge of SGLang.
    Gauge,
}

impl Told {
    /// In words.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage.completion_tokens_details.target_passes",
            Self::Predictions => "usage.completion_tokens_details.accepted_prediction_tokens",
            Self::Timings => "timings.draft_n_accepted",
            Self::Counters => "vllm:spec_decode_num_drafts of /metrics",
            Self::Gauge => "sglang:spec_accept_length of /metrics, its mean of recent passes",
        }
    }
}

/// Hears of every answer of a server.
pub(super) struct Listener<'a> {
    server: &'a Server,
    /// The last look at its counters.
    counters: Option<Counters>,
    told: Option<Told>,
    /// Answers without a draft's fields before the first one with them: llama.cpp tells of drafts only
    /// where there were some.
    undrafted: Vec<(usize, AcceptanceMetrics)>,
    /// Accepted by position, over all answers, and the drafts that had positions.
    by_position: Vec<usize>,
    drafts: usize,
    /// Weighted by tokens: sum of the gauge, and tokens.
    gauge: (f64, f64),
    /// Tokens that were written here, and that the server counted.
    written: (usize, Option<usize>),
    /// By prompt.
    of_prompts: Vec<AcceptanceMetrics>,
}

impl<'a> Listener<'a> {
    /// Before the first answer to so many prompts.
    pub(super) fn new(server: &'a Server, prompts: usize) -> Self {
        Self {
            server,
            counters: server.counters(),
            told: None,
            undrafted: Vec::new(),
            by_position: Vec::new(),
            drafts: 0,
            gauge: (0.0, 0.0),
            written: (0, None),
            of_prompts: vec![AcceptanceMetrics::default(); prompts],
        }
    }

    pub(super) fn hear(&mut self, prompt: usize, answer: &Answer) {
        self.written.0 += answer.tokens.unwrap_or(answer.events);
        match of_answer(answer) {
            Some((told, passes)) => {
                self.told = Some(told);
                self.add(prompt, &passes);
                for (prompt, passes) in std::mem::take(&mut self.undrafted) {
                    self.add(prompt, &passes);
                }
                return;
            }
            None if answer.timings.is_object() => {
                let committed = answer.tokens.unwrap_or(1).saturating_sub(1);
                let plain = passes(committed, committed, (0, 0));
                if self.told == Some(Told::Timings) {
                    self.add(prompt, &plain);
                } else {
                    self.undrafted.push((prompt, plain));
                }
                return;
            }
            None => {}
        }
        self.look(prompt, answer.tokens.unwrap_or(answer.events));
    }

    /// Looks at the counters after an answer.
    fn look(&mut self, prompt: usize, tokens: usize) {
        // A server without a page of counters is not asked again.
        let Some(before) = &self.counters else { return };
        let Some(now) = self.server.counters() else { return };
        if let Some(counted) = now.since(before) {
            self.told = Some(Told::Counters);
            self.drafts += counted.drafts;
            let length = self.by_position.len().max(counted.by_position.len());
            self.by_position.resize(length, 0);
            for (sum, more) in self.by_position.iter_mut().zip(&counted.by_position) {
                *sum += more;
            }
            if let Some(more) = counted.written {
                self.written.1 = Some(self.written.1.unwrap_or(0) + more);
            }
            let committed = counted.drafts + counted.accepted;
            let proposed = (counted.proposed, counted.accepted);
            self.add(prompt, &passes(counted.drafts, committed, proposed));
        } else if let Some(length) = now.accept_length().filter(|length| *length > 0.0) {
            self.told = Some(Told::Gauge);
            self.gauge.0 += length * tokens as f64;
            self.gauge.1 += tokens as f64;
        }
        self.counters = Some(now);
    }

    fn add(&mut self, prompt: usize, passes: &AcceptanceMetrics) {
        if let Some(metrics) = self.of_prompts.get_mut(prompt) {
            metrics.merge(passes);
        }
    }

    /// All answers were heard; what they told of passes.
    pub(super) fn end(mut self) -> Revealed {
        if self.told == Some(Told::Counters) {
            self.wait_for_counters();
        }
        self.revealed()
    }

    /// Waits for counters that come after the last answer.
    fn wait_for_counters(&mut self) {
        let (since, last) = (Instant::now(), self.of_prompts.len().saturating_sub(1));
        while since.elapsed() < LAG && self.lacks_tokens() {
            std::thread::sleep(LOOK);
            self.look(last, 0);
        }
        if let (own, Some(all)) = self.written
            && all > own + own / 20
        {
            errln!(
                "warning: {} wrote {all} tokens meanwhile, {own} of them for this measurement: others ask it, \
                 and its counts are theirs, too",
                self.server.address()
            );
        }
    }

    fn lacks_tokens(&self) -> bool {
        matches!(self.written, (own, Some(counted)) if counted < own)
    }

    fn revealed(self) -> Revealed {
        let positions = self.by_position.iter();
        let survival: Vec<f64> = if self.drafts == 0 {
            Vec::new()
        } else {
            positions.map(|count| *count as f64 / self.drafts as f64).collect()
        };
        let why_not = match (self.told, self.server.kind) {
            (Some(_), _) => None,
            (None, Kind::LlamaCpp) => Some(
                "no answer has timings.draft_n: the server has no draft (llama-server --model-draft), or it never \
                 proposed anything",
            ),
            (None, Kind::Vllm) => Some(
                "its /metrics has no vllm:spec_decode_num_drafts: it has no draft (vllm serve --speculative-config), or \
                 tells no figures (--disable-log-stats)",
            ),
            (None, Kind::Sglang) => Some(
                "no sglang:spec_accept_length above 0: it has no draft, or tells no figures \
                 (sglang.launch_server --enable-metrics), or did not update them meanwhile",
            ),
            (None, Kind::Longdraft | Kind::Unknown) => {
                Some("neither its answers nor its /metrics tell what a pass of the target gave")
            }
        };
        let gauge = (self.told == Some(Told::Gauge)).then(|| self.gauge.0 / self.gauge.1.max(1.0));
        Revealed { told: self.told, why_not, gauge, survival, of_prompts: self.of_prompts }
    }
}

/// What a server revealed of its passes.
#[derive(Debug, Clone, Default)]
pub(super) struct Revealed {
    pub(super) told: Option<Told>,
    /// Why nothing told of them.
    pub(super) why_not: Option<&'static str>,
    /// A mean that the server itself made.
    pub(super) gauge: Option<f64>,
    /// Share of drafts of which position 1, 2, ... was accepted.
    pub(super) survival: Vec<f64>,
    pub(super) of_prompts: Vec<AcceptanceMetrics>,
}

/// What an answer itself tells.
fn of_answer(answer: &Answer) -> Option<(Told, AcceptanceMetrics)> {
    let count = |value: &Value| value.as_u64().map(|count| count as usize);
    // The first token comes of the pass that reads the prompt.
    let committed = answer.tokens?.saturating_sub(1);
    let details = &answer.usage["completion_tokens_details"];
    let predicted = count(&details["accepted_prediction_tokens"])
        .zip(count(&details["rejected_prediction_tokens"]));
    let (accepted, rejected) = predicted.unwrap_or_default();
    let proposed = accepted + rejected;
    if let Some(rounds) = count(&details["target_passes"]) {
        return Some((Told::Usage, passes(rounds, committed, (proposed, accepted))));
    }
    let timings = &answer.timings;
    let timed = count(&timings["draft_n"]).zip(count(&timings["draft_n_accepted"]));
    let predicted = (proposed > 0).then_some((proposed, accepted));
    let told = timed.map_or(Told::Predictions, |_| Told::Timings);
    let (proposed, accepted) = timed.or(predicted)?;
    let rounds = committed.saturating_sub(accepted).max(usize::from(committed > 0));
    Some((told, passes(rounds, committed, (proposed, accepted))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(usage: Value, timings: Value) -> Answer {
        Answer { tokens: Some(21), usage, timings, ..Answer::default() }
    }

    #[test]
    fn answers_tell_of_passes_in_the_words_of_their_server() {
        let details = |value: Value| json!({ "completion_tokens_details": value });
        let both = json!({ "accepted_prediction_tokens": 12, "rejected_prediction_tokens": 4 });
        let mut own = both.clone();
        own["target_passes"] = json!(9);
        let drafted = json!({ "draft_n": 30, "draft_n_accepted": 10 });
        for (usage, timings, want) in [
            (details(own), Value::Null, Some((Told::Usage, 9, 16, 12))),
            (details(both), Value::Null, Some((Told::Predictions, 8, 16, 12))),
            (Value::Null, drafted, Some((Told::Timings, 10, 30, 10))),
            (Value::Null, json!({ "predicted_n": 21 }), None),
            (details(json!({ "accepted_prediction_tokens": null })), Value::Null, None),
            (
                details(
                    json!({ "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0 }),
                ),
                Value::Null,
                None,
            ),
        ] {
            let got = of_answer(&answer(usage, timings));
            let got = got.map(|(told, passes)| {
                assert_eq!(passes.committed, 20);
                (told, passes.rounds, passes.nodes, passes.accepted)
            });
            assert_eq!(got, want);
        }
    }
}
