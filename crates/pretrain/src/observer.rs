//! What a run tells its caller.

use longdraft_parallel::Traffic;
use longdraft_train::observer::{Event, Observer};

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

/// Something that happened. An evaluation tells the bits per byte of the held-out stream in plain windows.
pub type PretrainEvent<'a> = Event<'a, PretrainStep, f64>;

/// Listens to a run and may stop it between steps: an [`Observer`] of [`PretrainStep`] and bits per byte.
pub trait PretrainObserver: Observer<PretrainStep, f64> {}

impl<T: Observer<PretrainStep, f64>> PretrainObserver for T {}
