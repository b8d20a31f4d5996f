//! One self-contained HTML page about runs: what decoding gained, then how the draft was trained.
//!
//! ```text
//! decode.json   -> run -> result (tiles, sample, speeds) --------------------------> page (HTML)
//! decode.json   -> run -> decoding ---------------------------> charts -> plot (SVG) ->
//! metrics.jsonl -> metrics_log -> run -> figures (one quantity a chart) -> charts -> plot ->
//! config.yaml   -> run -> header, differences ---------------------------------------->
//! fit.json, events.jsonl -> live (as it goes) ----------------------------------------->
//! ```

mod axes;
mod chart;
mod charts;
mod decoding;
mod differences;
mod figures;
mod header;
mod ink;
pub(crate) mod live;
mod metrics_log;
mod page;
mod plot;
mod result;
mod run;
mod series;
mod summary;
mod svg;
mod ticks;
pub(crate) mod words;

pub(crate) use differences::of_runs as differences;
pub(crate) use page::{render, render_live};
pub(crate) use run::Run;
pub(crate) use summary::StageSummary;

/// File that a report goes to when no other is named.
pub(crate) const REPORT_FILE: &str = "report.html";
