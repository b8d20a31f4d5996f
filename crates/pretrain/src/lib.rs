//! Pretraining a small language model.
//!
//! ```text
//! token shards -> loader -> [B, S] -> decoder -> cross-entropy -> Muon and Adam -> checkpoint
//!                                        \-> bits per byte, plain and sliding -> artifact
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod checkpoint;
mod config;
mod error;
mod inputs;
mod muon;
mod observer;
mod outcome;
mod run;
mod score;
pub mod warmdown;

pub use config::{
    ArtifactConfig, BitsPerByteConfig, LengthPhase, PretrainConfig, PretrainData, PretrainRun,
    WarmdownConfig, WarmdownKind,
};
pub use error::{PretrainError, Result};
pub use inputs::input_problems;
pub use muon::{Muon, MuonConfig, MuonOutcome, MuonState, Orthogonalisation, TensorState};
pub use observer::{PretrainEvent, PretrainObserver, PretrainStep};
pub use outcome::{ArtifactReport, build_artifact};
pub use run::{Pretraining, Standing};
pub use score::{ScoredStream, Tokenizer};
