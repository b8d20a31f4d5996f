//! A plan over ways to share the work, as the Markdown table of docs/results/ranks.md.

use std::fmt::Write;

use longdraft_features::FeatureMode;
use longdraft_models::TargetConfig;
use longdraft_plan::{Layout, Workload};
use longdraft_train::config::TrainConfig;

use super::Machine;
use super::table::seconds;
use crate::failure::Result;

/// Ranks that share a row, or every layer of the target.
const SHARING: [usize; 3] = [1, 4, 8];

/// One line for each source of features, ZeRO stage, and number of ranks a row or a layer.
pub(super) fn markdown(
    config: &TrainConfig,
    target: &TargetConfig,
    machine: &Machine,
) -> Result<String> {
    let mut out = format!(
        "`{}`, `draft.method: {}`, {} tokens a row, {} rows a step, {} ranks:\n\n| features | `parallel.zero` | ranks a \
         row | ranks a layer | weights | peak of a rank | phase | fits | sent a step | step |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
        config.target,
        config.draft.method.name(),
        config.data.row_tokens,
        config.train.rows_of_a_step(config.data.row_tokens),
        machine.layout.ranks
    );
    for features in [FeatureMode::Online, FeatureMode::Stored("FOLDER".to_owned())] {
        for (zero, sequence, tensor) in ways(&features, target, machine.layout.ranks) {
            let mut config = config.clone();
            config.train.features = features.clone();
            config.parallel.zero = zero;
            let layout = Layout { sequence, tensor, ..machine.layout };
            let workload = Workload::new(&config, target.clone(), layout)?
                .with_documents(machine.document_tokens);
            // Writing to a string does not fail.
            let _ = line(&mut out, &workload, (&config, layout), machine);
        }
    }
    Ok(out)
}

/// ZeRO stages with the numbers of ranks that share a row and a layer; only a target that runs has layers
/// to share.
fn ways(features: &FeatureMode, target: &TargetConfig, ranks: usize) -> Vec<(u8, usize, usize)> {
    let sharing = || SHARING.into_iter().filter(move |n| *n <= ranks);
    let rows = [1, 3].into_iter().flat_map(|zero| sharing().map(move |n| (zero, n, 1)));
    let shareable = target.sharing_ranks();
    let divides = |n: &usize| *n > 1 && ranks.is_multiple_of(*n) && shareable.contains(n);
    let layers = sharing().filter(divides).filter(|_| features.store().is_none());
    rows.chain(layers.map(|n| (1, 1, n))).collect()
}

fn line(
    out: &mut String,
    workload: &Workload,
    (config, layout): (&TrainConfig, Layout),
    machine: &Machine,
) -> std::fmt::Result {
    let estimate = workload.estimate();
    let peak = estimate.peak();
    let weights = peak.items.iter().filter(|item| item.is_weights());
    let weights = weights.filter(|item| item.place == estimate.place).map(|item| item.bytes).sum();
    let fits = match workload.verdict(&estimate, machine.free).fits {
        Some(true) => "yes",
        Some(false) => "no",
        None => "?",
    };
    let features = if config.train.features.store().is_some() { "offline" } else { "online" };
    writeln!(
        out,
        "| {features} | {} | {} | {} | {} | {} | {} | {fits} | {} | {} |",
        config.parallel.zero,
        layout.sequence,
        layout.tensor,
        gigabytes(weights),
        gigabytes(estimate.bytes()),
        peak.name,
        gigabytes(estimate.sent_bytes()),
        machine.speed.map_or("?".to_owned(), |speed| seconds(estimate.time(&speed).total()))
    )
}

pub(super) fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}
