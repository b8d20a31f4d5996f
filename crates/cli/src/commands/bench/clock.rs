//! Steps between two looks at the clock, and the memory they take.

use std::time::Instant;

use candle_core::{Device, Tensor};
use longdraft_kernels::device;
use longdraft_kernels::trace::{OpTime, Trace};
use longdraft_records::median;
use longdraft_train::memory::peak_resident_mib;
use serde_json::{Map, Value, json};

use super::Place;
use crate::cli::BenchArguments;
use crate::failure::{Failure, Result};

pub(super) struct Timed {
    /// Of every timed step, in order.
    pub(super) seconds: Vec<f64>,
    /// Mean loss of the last step, where there is one.
    loss: Option<f64>,
    warm_ups: usize,
    peak_device: Option<u64>,
    /// Starts of all timed steps, the longest op first, if they were traced.
    trace: Option<Vec<OpTime>>,
}

/// Runs `step` on what `prepare` makes for it, first the warm-ups, then the timed ones. The device is
/// idle whenever the clock is read.
/// It fails as these do, or where the last loss is not finite.
pub(super) fn time<I>(
    place: &Place,
    arguments: &BenchArguments,
    mut prepare: impl FnMut(usize) -> Result<I>,
    mut step: impl FnMut(I) -> Result<Option<Tensor>>,
) -> Result<Timed> {
    let (device, warm_ups) = (&place.device, arguments.warm_ups);
    let mut seconds = Vec::with_capacity(arguments.steps);
    let mut loss = None;
    let mut trace = arguments.trace.then(|| Trace::of(device)).transpose()?;
    device::reset_peak_memory(device);
    for index in 0..warm_ups + arguments.steps {
        let input = prepare(index)?;
        device.synchronize()?;
        let mut traced = trace.as_mut().filter(|_| index >= warm_ups);
        if let Some(trace) = &mut traced {
            trace.begin()?;
        }
        let started = Instant::now();
        loss = step(input)?;
        device.synchronize()?;
        if index >= warm_ups {
            seconds.push(started.elapsed().as_secs_f64());
        }
        if let Some(trace) = traced {
            trace.end()?;
        }
    }
    let loss = loss.map(|loss| value(&loss)).transpose()?;
    let trace = trace.map(|trace| trace.ops());
    Ok(Timed { seconds, loss, warm_ups, peak_device: device::peak_memory(device), trace })
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
            "peak_device_mib": self.peak_device.map(mib),
            "peak_rss_mib": peak_resident_mib().map(|mib| mib as u64),
            "loss": self.loss,
        });
        let mut figures = super::object(figures);
        if let Some(ops) = &self.trace {
            figures.insert("trace".to_owned(), self.traced(ops));
        }
        figures
    }

    /// Ops of all timed steps, and what else these took: candle's ops, copies, and gaps.
    fn traced(&self, ops: &[OpTime]) -> Value {
        let all_ms = 1e3 * self.seconds.iter().sum::<f64>();
        let ops_ms: f64 = ops.iter().map(|op| op.ms).sum();
        let line = |op: &OpTime| json!({"op": op.op, "starts": op.starts, "ms": op.ms});
        json!({
            "steps": self.seconds.len(), "all_ms": all_ms, "other_ms": all_ms - ops_ms,
            "ops": ops.iter().map(line).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traced_case_says_what_its_ops_leave() {
        let op = |op: &str, starts, ms| OpTime { op: op.to_owned(), starts, ms };
        let trace = vec![op("attention_forward", 4, 30.0), op("rms_norm", 8, 2.0)];
        let mut timed = Timed {
            seconds: vec![0.02, 0.03],
            loss: None,
            warm_ups: 1,
            peak_device: None,
            trace: Some(trace),
        };
        let figures = timed.figures(8);
        let told = &figures["trace"];
        assert_eq!(told["ops"][0], json!({"op": "attention_forward", "starts": 4, "ms": 30.0}));
        assert_eq!((&told["steps"], &told["all_ms"]), (&2.into(), &50.0.into()));
        assert_eq!(told["other_ms"], 18.0);
        timed.trace = None;
        assert!(!timed.figures(8).contains_key("trace"));
    }
}
