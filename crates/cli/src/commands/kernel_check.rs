//! `longdraft kernel-check`: every op against f64 on a device, and how fast it is there.

use candle_core::Device;
use longdraft_kernels::check::{
    self, Measured, Options, Rate, Report, Size, Speed, check, measure, timed_names,
};
use longdraft_kernels::dispatch::Products;
use serde_json::{Value, json};

use crate::cli::KernelCheckArguments;
use crate::failure::{Failure, Result};

/// Checks or times the ops; fails if one does not hold or cannot run.
pub(crate) fn run(arguments: &KernelCheckArguments, json: bool) -> Result<()> {
    let device = arguments.device.open(0)?;
    let largest = if matches!(device, Device::Cpu) { Size::Small } else { Size::Real };
    let default = if arguments.bench { largest } else { Size::Small };
    let options = Options {
        size: arguments.size.chosen().unwrap_or(default),
        repeat: arguments.repeat as usize,
        names: arguments.names.clone(),
        device,
    };
    if arguments.bench {
        refuse_unknown(&options.names, &timed_names().collect::<Vec<_>>())?;
        return time(&options, json);
    }
    refuse_unknown(&options.names, &check::names().collect::<Vec<_>>())?;
    let (mut count, mut passed) = (0, 0);
    check(&options, |report| {
        count += 1;
        passed += usize::from(report.passed());
        print_report(report, json);
    });
    summarise((count, passed), "checks", json)
}

fn time(options: &Options, json: bool) -> Result<()> {
    let (mut count, mut timed) = (0, 0);
    measure(options, |speed| {
        count += 1;
        timed += usize::from(speed.outcome.is_ok());
        print_speed(speed, json);
    });
    summarise((count, timed), "timings", json)
}

/// Every name must be the beginning of one that is there.
fn refuse_unknown(names: &[String], known: &[&str]) -> Result<()> {
    let unknown = names.iter().find(|name| !known.iter().any(|one| one.starts_with(name.as_str())));
    match unknown {
        None => Ok(()),
        Some(name) => Err(Failure::usage(format!("no op is called `{name}`"))
            .hint(format!("take one of {}", known.join(", ")))),
    }
}

pub(super) fn summarise((count, passed): (usize, usize), what: &str, json: bool) -> Result<()> {
    let all = passed == count;
    if json {
        outjson!({what: count, "passed": passed, "pass": all});
    } else {
        outln!("{passed} of {count} {what} passed");
    }
    if all {
        return Ok(());
    }
    Err(Failure::work(format!("{} {what} failed", count - passed)).in_result())
}

fn name_of(products: Products) -> &'static str {
    match products {
        Products::Single => "f32",
        Products::Half => "bf16",
    }
}

fn print_report(report: &Report, json: bool) {
    let Report { name, shape, products, outcome } = report;
    if json {
        outln!("{}", report_line(report));
        return;
    }
    let verdict = if report.passed() { "pass" } else { "FAIL" };
    let products = name_of(*products);
    match outcome {
        Ok(Measured { max_error, worst, tolerance, equal_bits, milliseconds }) => {
            let bits = if *equal_bits { "" } else { "  bits differ between runs" };
            outln!(
                "{verdict} {name:<24} {products:<4} error {max_error:.1e} of {tolerance:.0e} \
                 ({worst})  {milliseconds:.2} ms  {shape}{bits}"
            );
        }
        Err(problem) => outln!("{verdict} {name:<24} {products:<4} {problem}  {shape}"),
    }
}

/// A check as one line; JSON has no NaN or infinity, they become null.
fn report_line(report: &Report) -> Value {
    let Report { name, shape, products, outcome } = report;
    let mut line = json!({
        "name": name, "shape": shape, "products": name_of(*products), "passed": report.passed(),
    });
    match outcome {
        Ok(Measured { max_error, worst, tolerance, equal_bits, milliseconds }) => {
            line["max_error"] = json!(max_error);
            line["worst"] = json!(worst);
            line["tolerance"] = json!(tolerance);
            line["equal_bits"] = json!(equal_bits);
            line["ms"] = json!(milliseconds);
        }
        Err(problem) => line["error"] = json!(problem),
    }
    line
}

fn print_speed(speed: &Speed, json: bool) {
    let Speed { name, shape, products, outcome } = speed;
    let products = name_of(*products);
    if json {
        let mut line = json!({"name": name, "shape": shape, "products": products});
        match outcome {
            Ok((milliseconds, rate)) => {
                let (_, key, value) = unit_of(*rate);
                line["ms"] = json!(milliseconds);
                line[key] = json!(value);
            }
            Err(problem) => line["error"] = json!(problem),
        }
        outln!("{line}");
        return;
    }
    match outcome {
        Ok((milliseconds, rate)) => {
            let (unit, _, value) = unit_of(*rate);
            outln!(
                "{name:<22} {products:<4} {value:>10.3} {unit:<8} {milliseconds:>10.3} ms  {shape}"
            );
        }
        Err(problem) => outln!("FAIL {name:<22} {products:<4} {problem}  {shape}"),
    }
}

/// A rate's unit, its key in JSON, its value.
fn unit_of(rate: Rate) -> (&'static str, &'static str, f64) {
    match rate {
        Rate::Teraflops(value) => ("TFLOP/s", "tflops", value),
        Rate::Gigabytes(value) => ("GB/s", "gb_per_s", value),
        Rate::HostMicroseconds(value) => ("us/call", "host_us", value),
    }
}
