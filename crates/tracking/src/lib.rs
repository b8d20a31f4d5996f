//! Experiment tracking: scalars of a run in the formats that people's boards read.
//!
//! ```text
//! Stage --Event--> Tracked --Row--> tensorboard   events.out.tfevents.* in the run directory
//!                     |       \---> wandb         wandb/offline-run-*, uploaded by `wandb sync`
//!                     |       \---> swanlab       swanlog/run-*, uploaded by `swanlab sync`
//!                     v       \---> mlflow        REST, from a thread of its own
//!                  the caller's Observer
//! ```
//!
//! A tracker that fails is switched off with one warning; training never stops or waits for one.
//! After a resume no step shows twice: TensorBoard is told from which step on the new file counts,
//! record logs are cut after the resumed step, an MLflow server is asked for its last step. What
//! they lack of the steps before is taken from `metrics.jsonl`.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod config;
mod error;
mod metrics_log;
mod mlflow;
mod protobuf;
mod record_log;
mod replay;
mod run;
mod scalars;
mod swanlab;
mod tensorboard;
mod timestamp;
mod trackers;
mod wandb;

pub use config::{MlflowConfig, Sink, SwanLabConfig, TrackingConfig, WandbConfig};
pub use error::{Result, TrackerError};
pub use metrics_log::MetricsLog;
pub use mlflow::Mlflow;
pub use run::{Environment, Run};
pub use scalars::scalars;
pub use swanlab::SwanLab;
pub use tensorboard::TensorBoard;
pub use timestamp::Moment;
pub use trackers::{Opened, Trackers};
pub use wandb::Wandb;

/// Scalars of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Optimizer step, from 1.
    pub step: u64,
    /// When it was taken.
    pub time: Moment,
    /// Names such as `train/loss` and their values.
    pub scalars: Vec<(String, f64)>,
}

impl Row {
    /// Of a step that was taken now.
    pub fn now(step: u64, scalars: Vec<(String, f64)>) -> Self {
        Self { step, time: Moment::now(), scalars }
    }
}

/// How a tracked run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The budget is used up.
    Finished,
    /// The user stopped it; it can go on.
    Stopped,
    /// Training failed.
    Failed,
}

/// A place that scalars go to. It is opened with the [`Run`], whose configuration it keeps.
///
/// # Errors
/// Whatever a method returns switches the tracker off; none of them is called again.
pub trait Tracker {
    /// Adds the scalars of a step; steps ascend.
    ///
    /// # Errors
    /// - the place cannot be written or reached
    fn log(&mut self, row: &Row) -> Result<()>;

    /// A checkpoint is about to count on all rows so far: hands them to the disk.
    ///
    /// # Errors
    /// - the disk does not take them
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Ends the run; returns what the user should know, if anything.
    ///
    /// # Errors
    /// - as [`Self::log`]
    fn finish(&mut self, outcome: Outcome, time: Moment) -> Result<Option<String>>;
}
