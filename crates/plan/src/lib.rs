//! What a run needs before it runs: memory, operations, bytes between ranks.
//!
//! Everything follows from the configuration and the target's sizes. Each term is a function whose
//! docstring holds its formula; [`Workload::estimate`] says which of them are alive together. Memory is that of
//! the CPU path in f32, the resident set of a rank, or of the path of accelerators, with what its tensors take; tests
//! hold both against measured runs. On an accelerator the terms lie in its own memory but for those of
//! [`Place::Host`].
//!
//! ```text
//! TrainConfig, TargetConfig, Layout -> Workload -> Estimate { phases of terms, bytes sent, operations }
//! ```
//!
//! Not counted: the text's tokens (some 10 bytes each), the tokenizer, and what the system's
//! allocator keeps of tensors below its limit for mapping (32 MiB): up to a sixth more where all
//! tensors are smaller; and what an accelerator's driver and libraries take of its memory.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod advice;
mod communication;
mod estimate;
mod features;
mod half_layer;
mod language_model;
mod layout;
mod links;
mod machine;
mod operations;
mod optimizer;
mod place;
mod roofline;
#[cfg(test)]
mod sample;
mod step_time;
mod target;
mod terms;
mod workload;

pub use advice::{OutOfMemory, Verdict, explain};
pub use communication::{Sent, Way};
pub use estimate::{Estimate, Phase};
pub use language_model::{of_pretraining, pretraining_remedies};
pub use layout::Layout;
pub use links::Links;
pub use machine::{GPUS, Gpu};
pub use place::{Item, Place};
pub use roofline::{Bound, Part, PartTime};
pub use step_time::{Pace, Speed, StepTime};
pub use workload::Workload;
