//! What a run writes down of itself beside its metrics.
//!
//! ```text
//! Comparison -> decode.json     what decoding with the draft came to   -> report, runs, export
//! progress   -> events.jsonl    what happens as the run goes           -> live page, terminal
//! ```
//!
//! Each file has its types here, for those who write it and those who read it.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod decode;
mod drafter_parts;
pub mod events;
mod older;
mod statistics;

/// The example of the README is compiled with the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use statistics::median;

/// Configuration that a run was made with, in its folder.
pub const CONFIG_FILE: &str = "config.yaml";
/// State of `longdraft fit`, in its folder.
pub const FIT_FILE: &str = "fit.json";
/// How the runs of a fit's rounds are called, before their number.
pub const ROUND_PREFIX: &str = "training-";
