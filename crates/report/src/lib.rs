//! One self-contained HTML page about runs: what decoding gained, then how the draft was trained.
//!
//! ```text
//! decode.json   -> run -> result (tiles, sample, speeds) --------------------------> page (HTML)
//! decode.json   -> run -> decoding ---------------------------> charts -> plot (SVG) ->
//! metrics.jsonl -> metrics_log -> run -> figures (one quantity a chart) -> charts -> plot ->
//! config.yaml   -> run -> header, differences ---------------------------------------->
//! fit.json, events.jsonl -> live (as it goes) ----------------------------------------->
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod axes;
mod chart;
mod charts;
mod decoding;
mod differences;
mod error;
mod figures;
mod header;
mod ink;
mod live;
mod metrics_log;
mod page;
mod plot;
mod result;
mod run;
mod section;
mod series;
mod summary;
mod svg;
mod ticks;
pub mod words;

pub use differences::{Difference, of_runs as differences};
pub use error::{ReportError, Result};
pub use live::{Expected, Follower, Left, Live, Phase, Pulse, Stand};
pub use page::{render, render_live};
pub use run::Run;
pub use summary::StageSummary;

/// File that a report goes to when no other is named.
pub const REPORT_FILE: &str = "report.html";
