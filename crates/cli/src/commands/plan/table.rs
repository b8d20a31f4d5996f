//! A plan as text.

use std::fmt::Write;

use longdraft_models::disk::readable_bytes;
use longdraft_plan::{Estimate, Links, Pace, Part, PartTime, Phase, Place, Verdict};

use super::Machine;

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
    let place = estimate.place;
    let whose = if place == Place::Accelerator { "the GPU's memory" } else { "memory" };
    writeln!(out, "{whose} at most, in the {} phase{each}:", peak.name)?;
    for item in peak.items.iter().filter(|item| item.place == place) {
        writeln!(out, "  {:<28}{:>12}", item.name, readable_bytes(item.bytes))?;
    }
    writeln!(out, "  {:<28}{:>12}", "total", readable_bytes(peak.bytes(place)))?;
    let others = estimate.phases.iter().filter(|phase| phase.name != peak.name);
    let sum = |phase: &Phase| format!("{} {}", phase.name, readable_bytes(phase.bytes(place)));
    writeln!(out, "other phases: {}", others.map(sum).collect::<Vec<_>>().join(", "))?;
    if place == Place::Accelerator {
        let beside = readable_bytes(estimate.bytes_in(Place::Host));
        writeln!(out, "beside it, of main memory at most: {beside}")?;
    }
    for sent in &estimate.sent {
        let (bytes, took) = (readable_bytes(sent.bytes), seconds(machine.links.seconds(sent)));
        writeln!(out, "  sends {:<22}{bytes:>12} a step, about {took}", sent.name)?;
    }
    if let Some(parts) = machine.parts(estimate) {
        write_parts(out, &parts)?;
    }
    let time = time(estimate, machine);
    let work = operations(estimate.operations);
    writeln!(out, "a step of {} tokens: {work} a rank, {time}", estimate.tokens)?;
    match (verdict.fits, machine.free) {
        (Some(true), Some(free)) => writeln!(out, "fits: {} free", readable_bytes(free)),
        (Some(false), Some(free)) => {
            let advice = match verdict.is_enough {
                Some(false) => "nothing here makes it fit, but these lower it:",
                _ => "one of these makes it fit:",
            };
            writeln!(out, "does not fit: {} free; {advice}", readable_bytes(free))?;
            verdict.remedies.iter().try_for_each(|remedy| writeln!(out, "  {remedy}"))
        }
        _ => writeln!(out, "how much memory is free is not known here: give --memory"),
    }
}

/// What a step takes, in words.
fn time(estimate: &Estimate, machine: &Machine) -> String {
    let Some(speed) = machine.speed else {
        let options = if estimate.has_parts() { "--gflops or --gpu" } else { "--gflops" };
        return format!("{options} tells its time");
    };
    let step = estimate.time(&speed).total();
    let measured = if machine.measured { ", measured" } else { "" };
    let link = format!(" and {}", links(&speed.links));
    let link = if estimate.sent.is_empty() { "" } else { &link };
    let rate = match speed.pace {
        Pace::Gpu(_) => format!(", {:.0} tokens a second", estimate.tokens as f64 / step),
        Pace::Gflops(_) => String::new(),
    };
    format!("about {} {}{measured}{link}{rate}", seconds(step), at_pace(speed.pace))
}

/// The parts of a step by a roofline, and their sum.
fn write_parts(out: &mut String, parts: &[PartTime]) -> std::fmt::Result {
    writeln!(
        out,
        "a step's work by estimate:     TFLOP      GB moved    starts      takes  bound by"
    )?;
    for own in parts {
        let PartTime { part, operations, bytes, starts, bound, .. } = *own;
        let (tflop, gb) = (operations / 1e12, bytes / 1e9);
        let (name, took) = (part.name(), seconds(own.seconds));
        let bound = bound.name();
        let beside = if part == Part::Upload { ", beside the rest" } else { "" };
        writeln!(
            out,
            "  {name:<24}{tflop:>10.2}{gb:>14.1}{starts:>10.0}{took:>11}  {bound}{beside}"
        )?;
    }
    let sum = |of: fn(&PartTime) -> f64| -> f64 { parts.iter().map(of).sum() };
    let tflop = sum(|own| own.operations) / 1e12;
    let gb = sum(|own| own.bytes) / 1e9;
    let (starts, took) = (sum(|own| own.starts), seconds(PartTime::total(parts)));
    writeln!(out, "  {:<24}{tflop:>10.2}{gb:>14.1}{starts:>10.0}{took:>11}", "sum")
}

/// How fast a rank computes, in words.
pub(super) fn at_pace(pace: Pace) -> String {
    match pace {
        Pace::Gflops(gflops) => format!("at {gflops:.0} GFLOP/s"),
        Pace::Gpu(gpu) => format!("on {} by its roofline", gpu.name),
    }
}

/// Operations in a unit that leaves digits.
fn operations(number: f64) -> String {
    if number < 1e12 {
        format!("{:.1} GFLOP", number / 1e9)
    } else {
        format!("{:.1} TFLOP", number / 1e12)
    }
}

/// Bandwidths in words.
pub(super) fn links(links: &Links) -> String {
    let Links { machine_ranks, within, between, .. } = *links;
    if within.total_cmp(&between).is_eq() {
        return format!("{within} GB/s");
    }
    format!("{within} GB/s within machines of {machine_ranks}, {between} GB/s a rank between them")
}

/// A time with the unit that fits.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} ms", 1e3 * s),
        s if s < 1e-2 => format!("{:.1} ms", 1e3 * s),
        s if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
