//! Steps between two looks at the clock, and the memory they take.

use std::time::Instant;

use candle_core::{Device, Tensor};
use longdraft_kernels::device;
use serde_json::{Map, Value, json};

use super::Place;
use crate::cli::BenchArguments;
use crate::failure::{Failure, Result};
use crate::statistics::median;

/// Timed steps.
pub(super) struct Timed {
    /// Of every timed step, in order.
    pub(super) seconds: Vec<f64>,
    /// Mean loss of the last step, where there is one.
    loss: Option<f64>,
    warm_ups: usize,
    peak_device: Option<u64>,
}

/// Runs `step` on what `prepare` makes for it, first the warm-ups, then the timed ones. The device is
/// idle whenever the clock is read.
///
/// # Errors
/// - as `prepare` and `step`, or the last loss is not finite
pub(super) fn time<I>(
    place: &Place,
    arguments: &BenchArguments,
    mut prepare: impl FnMut(usize) -> Result<I>,
    mut step: impl FnMut(I) -> Result<Option<Tensor>>,
) -> Result<Timed> {
    let (device, warm_ups) = (&place.device, arguments.warm_ups);
    let mut seconds = Vec::with_capacity(arguments.steps);
    let mut loss = None;
    device::reset_peak_memory(device);
    for index in 0..warm_ups + arguments.steps {
        let input = prepare(index)?;
        device.synchronize()?;
        let started = Instant::now();
        loss = step(input)?;
        device.synchronize()?;
        if index >= warm_ups {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    let loss = loss.map(|loss| value(&loss)).transpose()?;
    Ok(Timed { seconds, loss, warm_ups, peak_device: device::peak_memory(device) })
}

fn value(loss: &Tensor) -> Result<f64> {
    let value = f64::from(loss.to_device(&Device::Cpu)?.to_scalar::<f32>()?);
    if value.is_finite() {
        Ok(value)
    } else {
        Err(Failure::work(format!("the loss of the last step is {value}")))
    }
}

impl Timed {
    /// What a line says of steps over `tokens` tokens each.
    pub(super) fn figures(&self, tokens: usize) -> Map<String, Value> {
        let median = median(&self.seconds);
        let least = self.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let mib = |bytes: u64| bytes >> 20;
        let figures = json!({
            "warm_ups": self.warm_ups, "seconds": self.seconds, "median_s": median,
            "least_s": least, "tokens_per_s": tokens as f64 / median,
            "peak_device_mib": self.peak_device.map(mib), "peak_rss_mib": peak_rss_mib(),
            "loss": self.loss,
        });
        super::object(figures)
    }
}

/// Largest resident set of this process so far, in MiB (Linux).
fn peak_rss_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
}
