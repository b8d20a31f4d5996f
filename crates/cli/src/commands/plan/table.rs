//! A plan as text.

use std::fmt::Write;

use longdraft_train::plan::{Estimate, Verdict};

use super::Machine;
use crate::doctor::readable_bytes;

/// The largest phase term by term, the other phases, traffic, time, and the verdict.
pub(super) fn text(estimate: &Estimate, verdict: &Verdict, machine: &Machine) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, estimate, verdict, machine);
    out
}

fn write(
    out: &mut String,
    estimate: &Estimate,
    verdict: &Verdict,
    machine: &Machine,
) -> std::fmt::Result {
    let peak = estimate.peak();
    let ranks = machine.layout.ranks;
    let each = if ranks == 1 { String::new() } else { format!(", each of {ranks} ranks") };
    writeln!(out, "memory at most, in the {} phase{each}:", peak.name)?;
    for item in &peak.items {
        writeln!(out, "  {:<28}{:>12}", item.name, readable_bytes(item.bytes))?;
    }
    writeln!(out, "  {:<28}{:>12}", "total", readable_bytes(peak.bytes()))?;
    let others = estimate.phases.iter().filter(|phase| phase.name != peak.name);
    let others: Vec<String> =
        others.map(|phase| format!("{} {}", phase.name, readable_bytes(phase.bytes()))).collect();
    writeln!(out, "other phases: {}", others.join(", "))?;
    for sent in &estimate.sent {
        writeln!(out, "  sends {:<22}{:>12} a step", sent.name, readable_bytes(sent.bytes))?;
    }
    let (speed, measured) = (&machine.speed, if machine.measured { ", measured" } else { "" });
    writeln!(
        out,
        "a step of {} tokens: {:.1} TFLOP a rank, about {} at {:.0} GFLOP/s{measured}{}",
        estimate.tokens,
        estimate.operations / 1e12,
        seconds(estimate.seconds(speed)),
        speed.gflops,
        if estimate.sent.is_empty() {
            String::new()
        } else {
            format!(" and {} GB/s", speed.gigabytes_per_second)
        }
    )?;
    match (verdict.fits, machine.free) {
        (Some(true), Some(free)) => writeln!(out, "fits: {} free", readable_bytes(free)),
        (Some(false), Some(free)) => {
            writeln!(out, "does not fit: {} free; one of these lowers it:", readable_bytes(free))?;
            verdict.remedies.iter().try_for_each(|remedy| writeln!(out, "  {remedy}"))
        }
        _ => writeln!(out, "how much memory is free is not known here: give --memory"),
    }
}

/// A time with the unit that fits.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
