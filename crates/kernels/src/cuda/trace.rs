//! Where the time of a step goes: a clock around every start of a kernel of ours and every product of ours
//! while a [`Trace`] is on, one atomic load while none is.
//!
//! On a GPU the clock is that of its one stream: an event before a start and one after it. Time that a device
//! waits between the two for the host to start it counts as well, so small ops show what a start takes. The
//! emulator's starts are read off the host's clock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(any(test, feature = "emulate-cuda"))]
use std::time::Instant;

use candle_core::{Device, Result, bail};

use super::emulated;

/// Whether a trace is on, in all threads of the process: a device has one stream for all of them.
static ON: AtomicBool = AtomicBool::new(false);
/// Starts since the trace is on.
static SPANS: Mutex<Vec<Span>> = Mutex::new(Vec::new());

/// Whether starts are timed one by one.
pub(super) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The starts of one op, and how long they took together.
#[derive(Debug, Clone, PartialEq)]
pub struct OpTime {
    /// A kernel, or a product with its type and sizes (rows x inner x columns).
    pub op: String,
    /// How often it was started.
    pub starts: usize,
    /// Milliseconds of all starts.
    pub ms: f64,
}

/// Sums of starts by op, over the times between [`begin`](Self::begin) and [`end`](Self::end).
#[derive(Debug)]
pub struct Trace {
    device: Device,
    is_on: bool,
    sums: BTreeMap<String, (usize, f64)>,
}

impl Trace {
    /// A trace of what is started on `device`, not on yet.
    ///
    /// # Errors
    /// - no kernels of ours are started on the device
    pub fn of(device: &Device) -> Result<Self> {
        match device {
            Device::Cuda(_) => {}
            Device::Cpu if emulated() => {}
            _ => bail!("only kernels of an NVIDIA GPU can be traced"),
        }
        Ok(Self { device: device.clone(), is_on: false, sums: BTreeMap::new() })
    }

    /// From here on every start is timed.
    ///
    /// # Errors
    /// - another trace is on
    pub fn begin(&mut self) -> Result<()> {
        if ON.swap(true, Ordering::Relaxed) {
            bail!("another trace is on");
        }
        self.is_on = true;
        spans().clear();
        Ok(())
    }

    /// Waits for the device and adds up what was started since [`begin`](Self::begin). From here on nothing is
    /// timed.
    ///
    /// # Errors
    /// - the device fails
    pub fn end(&mut self) -> Result<()> {
        self.turn_off();
        self.device.synchronize()?;
        for span in std::mem::take(&mut *spans()) {
            let ms = span.time.ms()?;
            let (starts, sum) = self.sums.entry(span.op).or_default();
            *starts += 1;
            *sum += ms;
        }
        Ok(())
    }

    /// What was found, the longest first.
    pub fn ops(&self) -> Vec<OpTime> {
        let of = |(op, (starts, ms)): (&String, &(usize, f64))| OpTime {
            op: op.clone(),
            starts: *starts,
            ms: *ms,
        };
        let mut ops: Vec<OpTime> = self.sums.iter().map(of).collect();
        ops.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        ops
    }

    fn turn_off(&mut self) {
        if std::mem::take(&mut self.is_on) {
            ON.store(false, Ordering::Relaxed);
        }
    }
}

/// A step that fails or panics leaves no trace on.
impl Drop for Trace {
    fn drop(&mut self) {
        self.turn_off();
    }
}

/// One start.
struct Span {
    op: String,
    time: Time,
}

enum Time {
    #[cfg(any(test, feature = "emulate-cuda"))]
    Host(std::time::Duration),
    #[cfg(feature = "cuda")]
    Events(on_cuda::Events),
}

impl Time {
    #[cfg_attr(
        not(feature = "cuda"),
        allow(clippy::unnecessary_wraps, reason = "events of a GPU can fail")
    )]
    fn ms(self) -> Result<f64> {
        match self {
            #[cfg(any(test, feature = "emulate-cuda"))]
            Self::Host(taken) => Ok(1e3 * taken.as_secs_f64()),
            #[cfg(feature = "cuda")]
            Self::Events(events) => events.ms(),
        }
    }
}

fn spans() -> MutexGuard<'static, Vec<Span>> {
    SPANS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
thread_local! {
    /// What the thread started.
    static STARTED: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// What `f` gives, and the kernels and products that it starts on the calling thread's emulator, in their order.
#[cfg(test)]
pub(crate) fn starts_of<T>(f: impl FnOnce() -> T) -> (T, Vec<String>) {
    STARTED.take();
    let result = f();
    (result, STARTED.take())
}

/// What `start` gives, timed by the host's clock while a trace is on.
#[cfg(any(test, feature = "emulate-cuda"))]
pub(super) fn on_host<T>(
    op: impl FnOnce() -> String,
    start: impl FnOnce() -> Result<T>,
) -> Result<T> {
    #[cfg(test)]
    let op = {
        let name = op();
        STARTED.with_borrow_mut(|all| all.push(name.clone()));
        || name
    };
    if !ON.load(Ordering::Relaxed) {
        return start();
    }
    let started = Instant::now();
    let result = start()?;
    let time = Time::Host(started.elapsed());
    spans().push(Span { op: op(), time });
    Ok(result)
}

#[cfg(feature = "cuda")]
pub(super) use on_cuda::on_stream;

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
    use candle_core::{Error, Result};

    use super::{ON, Span, Time, spans};

    /// Points of a stream before and after a start.
    pub(super) struct Events {
        before: CudaEvent,
        after: CudaEvent,
    }

    impl Events {
        pub(super) fn ms(self) -> Result<f64> {
            self.before.elapsed_ms(&self.after).map(f64::from).map_err(Error::wrap)
        }
    }

    /// What `start` gives, which puts work into the stream, timed by the stream's clock while a trace is on.
    pub(in super::super) fn on_stream<T>(
        stream: &Arc<CudaStream>,
        op: impl FnOnce() -> String,
        start: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !ON.load(Ordering::Relaxed) {
            return start();
        }
        // With the default flags an event knows when it was passed.
        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let (before, after) = (event().map_err(Error::wrap)?, event().map_err(Error::wrap)?);
        before.record(stream).map_err(Error::wrap)?;
        let result = start()?;
        after.record(stream).map_err(Error::wrap)?;
        spans().push(Span { op: op(), time: Time::Events(Events { before, after }) });
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::emulator::emulated;
    use super::super::{Argument, Launch, Program, product};
    use super::*;
    use candle_core::{Shape, Tensor};

    const PROBE: &str = "
extern \"C\" __global__ void trace_probe(const float *in, unsigned count, float *out) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) out[i] = 2 * in[i];
}
KERNEL(trace_probe)
";

    fn start(count: usize) -> Result<Vec<f32>> {
        let x = Tensor::arange(0.0_f32, count as f32, &Device::Cpu)?;
        let program = Program::new("trace_probe", PROBE, &[]);
        let (arguments, blocks) = ([Argument::from(&x), count.into()], usize::from(count > 0));
        let launch = Launch::new(&program, "trace_probe", ([blocks, 1, 1], 32), &arguments);
        let [out] = launch.run(&Device::Cpu, [Shape::from(count)])?;
        out.to_vec1()
    }

    fn of(trace: &Trace, op: &str) -> Option<OpTime> {
        trace.ops().into_iter().find(|found| found.op == op)
    }

    /// One test for all that turns a trace on: there is one at a time. Other tests' kernels may be in it.
    #[test]
    fn starts_are_counted_by_name_while_a_trace_is_on() -> Result<()> {
        emulated(|| {
            let mut trace = Trace::of(&Device::Cpu)?;
            start(3)?;
            trace.begin()?;
            assert!(Trace::of(&Device::Cpu)?.begin().is_err(), "a second one at a time");
            assert_eq!(start(3)?, [0.0, 2.0, 4.0]);
            // Nothing is started for no rows.
            start(0)?;
            trace.end()?;
            start(3)?;
            trace.begin()?;
            start(4)?;
            let wide = Tensor::ones((3, 71), candle_core::DType::F32, &Device::Cpu)?;
            product::product(&wide, &wide.t()?)?;
            trace.end()?;
            let probe = of(&trace, "trace_probe").expect("it was started");
            assert_eq!(probe.starts, 2);
            assert!(probe.ms > 0.0);
            assert_eq!(of(&trace, "product f32 3x71x3").expect("a product").starts, 1);
            assert!(trace.ops().is_sorted_by(|a, b| a.ms >= b.ms));
            trace.begin()?;
            drop(trace);
            Trace::of(&Device::Cpu)?.begin()
        })
    }

    #[test]
    fn a_plain_cpu_is_refused() {
        let error = Trace::of(&Device::Cpu).expect_err("no kernels").to_string();
        assert!(error.contains("only kernels of an NVIDIA GPU"), "{error}");
    }
}
