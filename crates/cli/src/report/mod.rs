//! One self-contained HTML page about training runs.
//!
//! ```text
//! metrics.jsonl -> metrics_log -> run -> series (smoothed, thinned) -> charts -> plot (SVG) -> page (HTML)
//! decode.json   -> run -> decoding ---------------------------------> charts
//! config.yaml   -> run -> differences ------------------------------------------------------->
//! ```

mod charts;
mod decoding;
mod differences;
mod ink;
mod metrics_log;
mod page;
mod plot;
mod run;
mod series;
mod summary;
mod ticks;

pub(crate) use page::render;
pub(crate) use run::Run;
pub(crate) use summary::StageSummary;

/// File that a report goes to when no other is named.
pub(crate) const REPORT_FILE: &str = "report.html";
