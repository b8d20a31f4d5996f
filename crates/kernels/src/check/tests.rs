//! The table itself, on the CPU's ops, on composed ones, and through the emulator.

use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{Device, Result, Tensor};

use super::case::{Case, Output, frozen, only, trained};
use super::run::check_ops;
use super::*;
use crate::cuda::emulator::emulated;
use crate::dispatch::Products;

fn options(names: &[&str]) -> Options {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    Options { device: Device::Cpu, size: Size::Smoke, repeat: 2, names }
}

fn reports(options: &Options) -> Vec<Report> {
    let mut all = Vec::new();
    check(options, |report| all.push(report.clone()));
    all
}

#[track_caller]
fn assert_all_pass(reports: &[Report]) {
    let failed: Vec<String> =
        reports.iter().filter(|report| !report.passed()).map(|r| format!("{r:?}")).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_op_passes_on_the_cpu() {
    let reports = reports(&options(&[]));
    assert_all_pass(&reports);
    for name in names() {
        assert!(reports.iter().any(|report| report.name == name), "{name}");
    }
    assert!(reports.iter().all(|report| report.products == Products::Single));
}

#[test]
fn every_op_passes_through_the_emulator_with_products_of_both_types() {
    let reports = emulated(|| reports(&options(&[])));
    assert_all_pass(&reports);
    for name in names() {
        let of = |products| {
            let found = reports.iter().filter(|r| r.name == name && r.products == products);
            found.filter_map(|r| Some(r.outcome.as_ref().ok()?.max_error)).fold(0.0, f64::max)
        };
        assert_eq!(
            reports.iter().filter(|r| r.name == name && r.products == Products::Half).count(),
            reports.iter().filter(|r| r.name == name && r.products == Products::Single).count(),
            "{name}"
        );
        // Rounded factors show.
        if ["attention", "linear", "gated_mlp", "linear_cross_entropy"].contains(&name) {
            assert!(of(Products::Half) > 20.0 * of(Products::Single), "{name}");
        }
    }
}

/// One op with one case: a sum of squares whose f64 reference is `reference`.
fn reports_of(
    op: fn(&[Tensor]) -> Result<Vec<Output>>,
    reference: fn(&[Tensor]) -> Result<Vec<Output>>,
) -> Vec<Report> {
    let case = Case::new("[3, 4]", [trained("x", [3, 4]), frozen("y", [4])], op, reference);
    let mut all = Vec::new();
    check_ops([("op", false, vec![case])], &options(&[]), &mut |report| all.push(report.clone()));
    all
}

fn squares(t: &[Tensor]) -> Result<Vec<Output>> {
    only(t[0].sqr()?.broadcast_add(&t[1]))
}

#[test]
fn a_right_op_passes_and_wrong_ones_are_told() {
    let right = reports_of(squares, squares);
    assert!(right.iter().all(Report::passed), "{right:?}");
    let value = reports_of(|t| only(t[0].sqr()?.broadcast_sub(&t[1])), squares);
    let measured = value[0].outcome.as_ref().expect("it ran");
    assert_eq!(measured.worst, "result");
    assert!(!value[0].passed() && measured.max_error > 0.1 && measured.equal_bits);
    // Right values whose gradient is lost or doubled.
    let lost = reports_of(|t| only(t[0].detach().sqr()?.broadcast_add(&t[1])), squares);
    assert!(lost[0].outcome.as_ref().is_err_and(|e| e.contains("gradient")), "{lost:?}");
    let doubled = reports_of(
        |t| only(((t[0].sqr()? * 2.0)? - t[0].detach().sqr()?)?.broadcast_add(&t[1])),
        squares,
    );
    let measured = doubled[0].outcome.as_ref().expect("it ran");
    assert_eq!(measured.worst, "gradient of x");
    assert!(!doubled[0].passed());
}

fn changing(t: &[Tensor]) -> Result<Vec<Output>> {
    static TURN: AtomicU32 = AtomicU32::new(0);
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    only((t[0].sqr()? + f64::from(turn) * 1e-7)?.broadcast_add(&t[1]))
}

#[test]
fn values_that_are_none_and_changing_bits_never_pass() {
    let none = reports_of(|t| only((t[0].sqr()? * f64::NAN)?.broadcast_add(&t[1])), squares);
    assert!(!none[0].passed() && none[0].outcome.as_ref().is_ok_and(|m| m.max_error.is_nan()));
    let changing = reports_of(changing, squares);
    let measured = changing[0].outcome.as_ref().expect("it ran");
    assert!(!measured.equal_bits && measured.max_error <= measured.tolerance);
    assert!(!changing[0].passed());
}

#[test]
fn errors_and_panics_of_a_case_hide_no_other() {
    let case = |op: fn(&[Tensor]) -> Result<Vec<Output>>| {
        Case::new("[3, 4]", [trained("x", [3, 4]), frozen("y", [4])], op, squares)
    };
    let cases = vec![
        case(|_| candle_core::bail!("refused")),
        case(|t| panic!("of {} inputs", t.len())),
        case(|t| only(t[0].narrow(0, 0, 2))),
        case(squares),
    ];
    let mut all = Vec::new();
    check_ops([("op", false, cases)], &options(&[]), &mut |report| all.push(report.clone()));
    let problem = |i: usize| all[i].outcome.as_ref().err().cloned().unwrap_or_default();
    assert_eq!(all.len(), 4);
    assert!(problem(0).contains("refused") && problem(1).contains("panic: of 2 inputs"));
    assert!(!all[2].passed() && all[3].passed(), "{all:?}");
}

#[test]
fn names_choose_by_their_beginning() {
    let reports = reports(&options(&["rope", "swi"]));
    assert!(!reports.is_empty());
    assert!(reports.iter().all(|report| ["rope", "swiglu"].contains(&report.name)));
}

#[test]
fn speeds_are_finite_and_positive() {
    let mut names = Vec::new();
    measure(&options(&[]), |speed| {
        let (milliseconds, rate) = speed.outcome.clone().expect(speed.name);
        let (Rate::Teraflops(rate) | Rate::Gigabytes(rate) | Rate::HostMicroseconds(rate)) = rate;
        for figure in [milliseconds, rate] {
            assert!(figure.is_finite() && figure > 0.0, "{speed:?}");
        }
        names.push(speed.name);
    });
    assert!(timed_names().all(|name| names.contains(&name)), "{names:?}");
}
