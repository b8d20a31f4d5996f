//! Training: objectives, optimizers, schedules, the step loop and checkpoints.
//!
//! ```text
//! packed batch -> features (target online, or stored) -> objective (draft forward, loss as
//!   numerator and denominator) -> optimizer -> checkpoint
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod checkpoint;
pub mod config;
pub mod error;
pub mod footprint;
pub mod inputs;
pub mod limits;
pub mod loss;
pub mod memory;
pub mod method;
pub mod metrics;
pub mod objective;
pub mod observer;
pub mod optim;
#[cfg(test)]
mod ranks_tests;
pub mod replay;
pub mod schedule;
pub mod stage;

pub use error::{Result, TrainError};
pub use loss::{Loss, Share};
