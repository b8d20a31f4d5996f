//! Speculative decoding: a drafter proposes, a verifier accepts, the target's law is kept.
//!
//! A round commits the accepted tokens and one more from the target. Greedy output is equal,
//! token for token, to decoding without a draft: every row of the target's pass has the same bits
//! whatever stands beside it.

#![forbid(unsafe_code)]

pub mod decoder;
pub mod drafter;
pub mod error;
pub mod evaluate;
pub mod metrics;
pub mod verifier;

pub use decoder::{DecodeOptions, Generation, SpeculativeDecoder};
pub use error::{DecodeError, Result};
