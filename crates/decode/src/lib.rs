//! Speculative decoding: a drafter proposes, a verifier accepts, the target's distribution is kept.
//!
//! A round commits the accepted tokens and one more from the target. Greedy output is equal,
//! token for token, to decoding without a draft: every row of the target's pass has the same bits
//! whatever stands beside it.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod acceptance;
pub mod decoder;
pub mod distribution;
pub mod drafter;
pub mod draws;
pub mod error;
pub mod evaluate;
pub mod grammar;
pub mod layout;
pub mod log_probs;
mod match_class;
pub mod pace;
pub mod stop;
pub mod tree;
pub mod verifier;

pub use decoder::{
    BatchEngine, Committed, DecodeOptions, EndReason, Ended, EngineListener, Generation,
    LateTokens, Pacing, READ_ALONE, SpeculativeDecoder,
};
pub use distribution::Sampling;
pub use error::{DecodeError, Result};
pub use grammar::Grammar;
pub use layout::DraftShape;
pub use log_probs::LogProbs;
pub use tree::{Origin, Tree};
pub use verifier::VerifyRule;
