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
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod decode;
mod drafter_parts;
pub mod events;
mod statistics;

pub use statistics::median;

use serde::Deserialize;

/// Configuration that a run was made with, in its folder.
pub const CONFIG_FILE: &str = "config.yaml";
/// State of `longdraft fit`, in its folder.
pub const FIT_FILE: &str = "fit.json";
/// The layout of [`FIT_FILE`] that this version reads and writes.
pub const FIT_LAYOUT: u32 = 2;
/// How the runs of a fit's rounds are called, before their number.
pub const ROUND_PREFIX: &str = "training-";

/// The layout (`version`) that a state file says it has, where that is not `own`: nothing else of it may be read then.
pub fn other_layout(text: &str, own: u32) -> Option<u32> {
    #[derive(Deserialize)]
    struct Layout {
        version: u32,
    }
    let Layout { version } = serde_json::from_str(text).ok()?;
    (version != own).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_whatever_else_the_file_holds() {
        assert_eq!(other_layout(r#"{"phase": 7, "version": 1}"#, FIT_LAYOUT), Some(1));
        let own = format!("{{\"version\": {FIT_LAYOUT}}}");
        for text in [own.as_str(), "{\"version\": \"2\"}", "{\"vers", "{}", "[]", ""] {
            assert_eq!(other_layout(text, FIT_LAYOUT), None, "{text}");
        }
    }
}
