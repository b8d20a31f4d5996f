//! The collectives of a planned step, as the Markdown tables of docs/results/ranks.md.

use std::fmt::Write;

use longdraft_plan::{Estimate, StepTime, Verdict, Way};
use longdraft_train::config::TrainConfig;

use super::Machine;
use super::sizing::gigabytes;
use super::table::{at_pace, links, seconds};

/// One line for each kind of collective, and what a step comes to.
pub(super) fn markdown(
    config: &TrainConfig,
    (estimate, verdict): (&Estimate, &Verdict),
    machine: &Machine,
) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, config, (estimate, verdict), machine);
    out
}

fn write(
    out: &mut String,
    config: &TrainConfig,
    (estimate, verdict): (&Estimate, &Verdict),
    machine: &Machine,
) -> std::fmt::Result {
    let features = if config.train.features.store().is_some() { "offline" } else { "online" };
    writeln!(
        out,
        "`{}`, `draft.method: {}`, {features}, {} tokens a row, {} rows a step, {} ranks, `parallel.zero: {}`, \
         `sequence: {}`, `tensor: {}`:\n\n| collective | ranks | by | calls | sent | takes |\n|---|---|---|---|---|---|",
        config.target,
        config.draft.method.name(),
        config.data.row_tokens,
        config.train.rows_of_a_step(config.data.row_tokens),
        machine.layout.ranks,
        config.parallel.zero,
        config.parallel.sequence,
        config.parallel.tensor,
    )?;
    for sent in &estimate.sent {
        let way = match sent.way {
            Way::Devices => "NCCL",
            Way::Host => "main memory",
        };
        let took = seconds(machine.links.seconds(sent));
        let beside = if sent.is_beside { ", beside the target" } else { "" };
        let (name, calls, ranks) = (sent.name, sent.calls, sent.ranks);
        let bytes = format!("{:.3} GB", sent.bytes as f64 / 1e9);
        writeln!(out, "| {name} | {ranks} | {way} | {calls} | {bytes} | {took}{beside} |")?;
    }
    let fits = match verdict.fits {
        Some(true) => ", which fits",
        Some(false) => ", which does not fit",
        None => "",
    };
    let peak = gigabytes(estimate.bytes());
    let time = machine.speed.map_or_else(
        || "`--gflops` or `--gpu` tells the time of a step".to_owned(),
        |speed| {
            let time = estimate.time(&speed);
            let StepTime { work, collectives, beside } = time;
            let beside = if beside > 0.0 {
                format!(", {} of them beside the target", seconds(beside))
            } else {
                String::new()
            };
            format!(
                "{} of work {} and {} of collectives at {}{beside}: {} a step",
                seconds(work),
                at_pace(speed.pace),
                seconds(collectives),
                links(&speed.links),
                seconds(time.total())
            )
        },
    );
    writeln!(out, "\nBy estimate: {time}. A rank takes {peak} at most{fits}.\n")
}
