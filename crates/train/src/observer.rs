//! What a running stage tells its caller.

use std::path::Path;

use longdraft_parallel::Traffic;
use serde_json::{Value, json};

use crate::metrics::DraftMetrics;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The budget is used up.
    Finished,
    /// The observer asked to stop; a checkpoint was saved.
    Stopped,
}

/// Numbers of one optimizer step.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// In all.
    pub steps: u64,
    /// From 0.
    pub epoch: u64,
    /// Nats per learned row.
    pub loss: f64,
    /// The target's own loss on the same rows, when it was computed.
    pub target_loss: Option<f64>,
    /// Before clipping.
    pub grad_norm: f64,
    /// As used.
    pub learning_rate: f64,
    /// Of this step, learned or not.
    pub tokens: usize,
    /// Since the start of the run.
    pub total_tokens: u64,
    /// Of this step.
    pub seconds: f64,
    /// Of these, those in which the target made features that stay in memory.
    pub capture_seconds: f64,
    /// Largest resident set of this process so far, where the system tells.
    pub memory_mib: Option<f64>,
    /// What the first rank sent and how long it waited in this step, where there are several.
    pub traffic: Option<Traffic>,
    /// Counters of this step.
    pub metrics: DraftMetrics,
}

impl StepReport {
    /// Tokens of this step by its seconds.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }

    /// One line of `metrics.jsonl`.
    pub fn to_json(&self, gamma: usize) -> Value {
        let mut record = json!({
            "step": self.step, "epoch": self.epoch, "loss": self.loss,
            "grad_norm": self.grad_norm, "learning_rate": self.learning_rate,
            "tokens": self.total_tokens,
            "learned_share": self.metrics.rows as f64 / self.tokens.max(1) as f64,
        });
        if let Some(target_loss) = self.target_loss {
            record["target_loss"] = json!(target_loss);
        }
        if let Value::Object(record) = &mut record {
            record.extend(self.metrics.to_json(gamma));
        }
        // The only figures that a resumed run does not repeat exactly.
        record["tokens_per_second"] = json!(self.tokens_per_second());
        if let Some(memory_mib) = self.memory_mib {
            record["memory_mib"] = json!(memory_mib);
        }
        if let Some(Traffic { sent_bytes, seconds }) = self.traffic {
            record["sent_bytes"] = json!(sent_bytes);
            record["waited_seconds"] = json!(seconds);
        }
        record
    }
}

/// Something that happened in a training whose steps tell `S` and whose evaluations tell `M`.
#[derive(Debug)]
pub enum Event<'a, S = StepReport, M = DraftMetrics> {
    /// The run goes on after this many steps.
    Resumed(u64),
    /// Held-out rows measured so far, of all.
    Measured(usize, usize),
    /// Worth knowing.
    Note(&'a str),
    /// Something is off but the run goes on.
    Warning(&'a str),
    /// Rows whose features are captured, of all.
    Captured(usize, usize),
    /// A step was taken.
    Step(&'a S),
    /// Held-out rows were measured after a step; those of a draft at every delay.
    Evaluated(u64, &'a M),
    /// A checkpoint is complete.
    Saved(&'a Path),
}

impl<S, M> Clone for Event<'_, S, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S, M> Copy for Event<'_, S, M> {}

/// Listens to a training and may stop it between steps. Drafts are trained with the default types.
pub trait Observer<S = StepReport, M = DraftMetrics> {
    /// Something happened.
    fn on_event(&mut self, event: Event<'_, S, M>);

    /// Whether to save and stop before the next step.
    fn should_stop(&self) -> bool {
        false
    }
}

/// Nobody listens.
pub struct Unheard;

impl Observer for Unheard {
    fn on_event(&mut self, _: Event<'_>) {}
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Keeps the notes and warnings that it is told.
    #[derive(Default)]
    pub(crate) struct Heard(pub(crate) Vec<String>);

    impl Observer for Heard {
        fn on_event(&mut self, event: Event<'_>) {
            if let Event::Warning(text) | Event::Note(text) = event {
                self.0.push(text.to_owned());
            }
        }
    }
}
