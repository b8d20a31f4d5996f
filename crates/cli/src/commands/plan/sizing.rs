//! A plan over ways to share the work, as the Markdown table of docs/cluster.md.

use std::fmt::Write;

use longdraft_models::TargetConfig;
use longdraft_train::config::{FeatureMode, TrainConfig};
use longdraft_train::method::Method;
use longdraft_train::plan::{Layout, Workload};

use super::Machine;
use super::table::seconds;
use crate::failure::Result;

/// Ranks that share a row.
const SEQUENCES: [usize; 3] = [1, 4, 8];

/// One line for each ZeRO stage, number of ranks a row, and source of features.
pub(super) fn markdown(
    config: &TrainConfig,
    target: &TargetConfig,
    machine: &Machine,
) -> Result<String> {
    let mut out = format!(
        "`{}`, `draft.method: {}`, {} tokens a row, {} rows a step, {} ranks:\n\n| features | `parallel.zero` | ranks a \
         row | weights | peak of a rank | phase | fits | sent a step | step |\n\
         |---|---|---|---|---|---|---|---|---|\n",
        config.target,
        match config.draft.method {
            Method::Glide => "glide",
            Method::Eagle3 => "eagle3",
        },
        config.data.row_tokens,
        config.train.rows_of_a_step(config.data.row_tokens),
        machine.layout.ranks
    );
    for features in [FeatureMode::Online, FeatureMode::Stored("FOLDER".to_owned())] {
        for zero in [1, 3] {
            for sequence in SEQUENCES.into_iter().filter(|n| *n <= machine.layout.ranks) {
                let mut config = config.clone();
                config.train.features = features.clone();
                config.parallel.zero = zero;
                let layout = Layout { sequence, ..machine.layout };
                let workload = Workload::new(&config, target.clone(), layout)?;
                // Writing to a string does not fail.
                let _ = line(&mut out, &workload, (&config, sequence), machine);
            }
        }
    }
    Ok(out)
}

fn line(
    out: &mut String,
    workload: &Workload,
    (config, sequence): (&TrainConfig, usize),
    machine: &Machine,
) -> std::fmt::Result {
    let estimate = workload.estimate();
    let peak = estimate.peak();
    let weights: u64 =
        peak.items.iter().filter(|item| item.name.ends_with(" weights")).map(|i| i.bytes).sum();
    let fits = match workload.verdict(&estimate, machine.free).fits {
        Some(true) => "yes",
        Some(false) => "no",
        None => "?",
    };
    let features = if config.train.features.store().is_some() { "offline" } else { "online" };
    writeln!(
        out,
        "| {features} | {} | {sequence} | {} | {} | {} | {fits} | {} | {} |",
        config.parallel.zero,
        gigabytes(weights),
        gigabytes(peak.bytes()),
        peak.name,
        gigabytes(estimate.sent_bytes()),
        seconds(estimate.seconds(&machine.speed))
    )
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}
