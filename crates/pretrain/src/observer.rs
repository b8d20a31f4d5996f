//! What a run tells its caller.

use longdraft_parallel::Traffic;

/// Numbers of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PretrainStep {
    /// From 1.
    pub step: u64,
    /// In all, unless time ends the run.
    pub steps: u64,
    /// Nats a token.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Factor on the gradients.
    pub clip_factor: f64,
    /// Multiplier of every rate.
    pub multiplier: f64,
    /// Muon's momentum.
    pub momentum: f64,
    /// Tokens of the step.
    pub tokens: u64,
    /// Since the start of the run.
    pub total_tokens: u64,
    /// Of the step.
    pub seconds: f64,
    /// Spent fraction of the budget.
    pub progress: f64,
    /// What the first rank sent and how long it waited in this step, where there are several.
    pub traffic: Option<Traffic>,
}

/// Something that happened.
#[derive(Debug)]
pub enum PretrainEvent<'a> {
    /// The run goes on after this many steps.
    Resumed(u64),
    /// Worth knowing.
    Note(&'a str),
    /// Something is off but the run goes on.
    Warning(&'a str),
    /// A step was taken.
    Step(&'a PretrainStep),
    /// Bits per byte of the held-out stream in plain windows.
    Evaluated(u64, f64),
    /// A checkpoint is complete.
    Saved(&'a std::path::Path),
}

/// Listens to a run and may stop it between steps.
pub trait PretrainObserver {
    /// Something happened.
    fn on_event(&mut self, event: PretrainEvent<'_>);

    /// Whether to save and stop before the next step.
    fn should_stop(&self) -> bool {
        false
    }
}
