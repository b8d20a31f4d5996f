//! What `/metrics` tells.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use longdraft_decode::Generation;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::lessons::{Board, Learning};

/// Bounds of times, in seconds.
const SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Path and status of an answer.
type Labels = [(&'static str, String); 2];

/// Name and meaning of what [`Meters::ended`] counts, in its order.
const OF_ANSWERS: [(&str, &str); 8] = [
    ("prompt_tokens", "Tokens of prompts"),
    ("reused_prompt_tokens", "Of them, kept or copied from others"),
    ("generated_tokens", "Tokens of answers"),
    ("proposed_tokens", "Tokens that drafts and lookup proposed"),
    ("accepted_tokens", "Of them, accepted"),
    ("accepted_lookup_tokens", "Of these, proposed by lookup"),
    ("accepted_grammar_tokens", "Of these, forced by a form"),
    ("target_passes", "Passes of the target after prompts, by request"),
];

/// Counters of a server.
#[derive(Default)]
struct Counts {
    requests: Family<Labels, Counter>,
    of_answers: [Counter; 8],
    cancelled: Counter,
    running: Gauge,
    waiting: Gauge,
}

/// State of the learning, as it is when it is asked for.
struct LearningGauges {
    whole: [Gauge; 8],
    real: [Gauge<f64, AtomicU64>; 5],
}

impl LearningGauges {
    fn new(registry: &mut Registry) -> Self {
        let gauges = Self { whole: Default::default(), real: Default::default() };
        let whole = [
            ("learning_rows", "Answers that are kept to learn from"),
            ("learning_dropped_rows", "Answers that were not kept"),
            ("learning_datastore_tokens", "Tokens of the datastore that grows"),
            ("learning_trainings", "Trainings that ended"),
            ("learning_replaced_drafts", "Candidates that took the draft's place"),
            ("learning_failed_trainings", "Trainings and checks that failed"),
            ("learning_checks", "Comparisons of the learned draft with the given one"),
            ("learning_learned_rests", "Whether the given draft proposes although one was learned"),
        ];
        for ((name, about), gauge) in whole.into_iter().zip(&gauges.whole) {
            registry.register(name, about, gauge.clone());
        }
        let real = [
            (
                "learning_last_training_timestamp_seconds",
                "When the last training ended, since 1970",
            ),
            ("learning_tau_before", "Tokens per pass before the last training, held out"),
            ("learning_tau_after", "The same of its candidate"),
            ("learning_check_tau_given", "Tokens per pass with the given draft, newest answers"),
            ("learning_check_tau_learned", "The same with the learned draft"),
        ];
        for ((name, about), gauge) in real.into_iter().zip(&gauges.real) {
            registry.register(name, about, gauge.clone());
        }
        gauges
    }

    fn set(&self, learning: &Learning) {
        let Learning { rows, dropped, datastore, trainings, replaced, failed, checks, .. } =
            *learning;
        let rests = usize::from(learning.rests);
        let whole = [rows, dropped, datastore, trainings, replaced, failed, checks, rests];
        for (gauge, value) in self.whole.iter().zip(whole) {
            gauge.set(value as i64);
        }
        let (of_trainings, of_checks) = self.real.split_at(3);
        let set = |gauges: &[Gauge<f64, AtomicU64>], values: &[f64]| {
            for (gauge, value) in gauges.iter().zip(values) {
                gauge.set(*value);
            }
        };
        if let Some(last) = &learning.last {
            set(of_trainings, &[last.at as f64, last.before, last.after]);
        }
        if let Some(check) = &learning.check {
            set(of_checks, &[check.given, check.learned]);
        }
    }
}

/// Everything that is measured.
pub(crate) struct Meters {
    registry: Registry,
    counts: Counts,
    first_token: Histogram,
    between_tokens: Histogram,
    /// Gauges of the learning, if there is any.
    learning: Option<(Arc<Board>, LearningGauges)>,
    /// Milliseconds of the last answer.
    last: AtomicU64,
}

impl Meters {
    pub(crate) fn new(board: Option<Arc<Board>>) -> Self {
        let counts = Counts::default();
        let (first_token, between_tokens) = (Histogram::new(SECONDS), Histogram::new(SECONDS));
        let mut registry = Registry::with_prefix("longdraft");
        let about = "Answers to HTTP requests, by path and status";
        registry.register("http_requests", about, counts.requests.clone());
        for ((name, about), counter) in OF_ANSWERS.into_iter().zip(&counts.of_answers) {
            registry.register(name, about, counter.clone());
        }
        let about = "Answers whose client went away";
        registry.register("cancelled_answers", about, counts.cancelled.clone());
        registry.register("running_answers", "Answers that are written", counts.running.clone());
        let about = "Answers that wait for a place";
        registry.register("waiting_answers", about, counts.waiting.clone());
        let about = "Seconds from a request to its first token";
        registry.register("first_token_seconds", about, first_token.clone());
        let about = "Mean seconds from token to token of an answer";
        registry.register("between_tokens_seconds", about, between_tokens.clone());
        let learning = board.map(|board| (board, LearningGauges::new(&mut registry)));
        let last = AtomicU64::new(0);
        Self { registry, counts, first_token, between_tokens, learning, last }
    }

    pub(crate) fn answered(&self, path: &str, status: u16) {
        let labels = [("path", path.to_owned()), ("status", status.to_string())];
        self.counts.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// An answer ended; it was `asked` for so long ago.
    pub(crate) fn ended(&self, generation: &Generation, prompt: usize, asked: Duration) {
        let metrics = &generation.metrics;
        let (reused, tokens) = (generation.reused_tokens, generation.tokens.len());
        let of_draft = [metrics.nodes, metrics.accepted, metrics.from_lookup, metrics.from_grammar];
        let counts = [prompt, reused, tokens].into_iter().chain(of_draft).chain([metrics.rounds]);
        for (counter, count) in self.counts.of_answers.iter().zip(counts) {
            counter.inc_by(count as u64);
        }
        if generation.tokens.len() > 1 {
            self.between_tokens.observe(1.0 / generation.decode_tokens_per_second());
        }
        self.last.store(asked.as_millis() as u64, Ordering::Relaxed);
    }

    pub(crate) fn cancelled(&self) {
        self.counts.cancelled.inc();
    }

    /// Answers that are written, and that wait.
    pub(crate) fn load(&self, running: usize, waiting: usize) {
        let set = |gauge: &Gauge<i64, AtomicI64>, value: usize| {
            gauge.set(value as i64);
        };
        set(&self.counts.running, running);
        set(&self.counts.waiting, waiting);
    }

    /// Seconds after which a place is likely to be free: what the last answer took, at most a minute.
    pub(crate) fn retry_after(&self) -> u64 {
        self.last.load(Ordering::Relaxed).div_ceil(1000).clamp(1, 60)
    }

    /// All of it, in the text format of OpenMetrics.
    pub(crate) fn to_text(&self) -> Result<String, std::fmt::Error> {
        if let Some((board, gauges)) = &self.learning {
            gauges.set(&board.learning());
        }
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use longdraft_decode::EndReason;
    use longdraft_decode::acceptance::AcceptanceMetrics;
    use longdraft_models::TargetTokenId;

    use super::*;

    #[test]
    fn what_an_answer_came_to_is_counted_under_its_name() {
        let meters = Meters::new(None);
        let metrics = AcceptanceMetrics {
            nodes: 40,
            accepted: 30,
            from_lookup: 20,
            from_grammar: 10,
            rounds: 5,
            ..AcceptanceMetrics::default()
        };
        let generation = Generation {
            tokens: vec![TargetTokenId(1); 60],
            metrics,
            end: EndReason::TokenLimit,
            reused_tokens: 70,
            prefill_seconds: 1.0,
            decode_seconds: 1.0,
        };
        meters.ended(&generation, 80, Duration::from_secs(2));
        let text = meters.to_text().expect("text");
        for (name, count) in [
            ("prompt_tokens", 80),
            ("reused_prompt_tokens", 70),
            ("generated_tokens", 60),
            ("proposed_tokens", 40),
            ("accepted_tokens", 30),
            ("accepted_lookup_tokens", 20),
            ("accepted_grammar_tokens", 10),
            ("target_passes", 5),
            ("cancelled_answers", 0),
        ] {
            let wanted = format!("longdraft_{name}_total {count}");
            assert!(text.lines().any(|line| line == wanted), "{wanted}: {text}");
        }
    }
}
