//! Passes that make the same starts again and again, as decoding does.
//!
//! A pass is [recorded](record) while it runs: its starts in their order, and all tensors that they read or write, which keep their
//! places as long as the recording lives. What is to change from pass to pass are [`Inputs`], words on the device. Two
//! recordings of passes with different inputs are [alike](Recording::is_like) where nothing else changed: then the starts can be
//! [made again](Repeat) without the pass, on an NVIDIA GPU as one CUDA graph, in the emulator one by one.
//!
//! What is computed otherwise than by kernels of ours, candle's ops and transfers among it, lies at another place in each
//! recording. So a pass that needs it is never alike. The one thing that does not show is a write into a tensor that
//! stays: whoever makes one says so (`spoil`).

mod inputs;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use candle_core::{DType, Device, Error, Result, Shape, Storage, Tensor, bail};

use super::{Argument, Launch, Program, runs_on, trace};
use crate::at_end::AtEnd;
use crate::composed::FULL_ROWS;
use crate::settings::composed_only;

pub use inputs::Inputs;
use inputs::Put;

/// Most bytes of results that one recording holds.
const MOST_OF_ONE: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };
/// Most bytes that all recordings of the process hold.
const MOST_OF_ALL: usize = 512 << 20;

/// Why a recording was given up that was too large.
const TOO_LARGE: &str = "its results take too much memory";

/// Why one was given up that came beside too many others.
const NO_ROOM: &str = "passes of other sequences take the memory for results";

static OFF: AtomicBool = AtomicBool::new(false);
static HELD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static CURRENT: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Whether passes that repeat are started as a whole, which changes no bit of what they compute. They are, unless a benchmark asks
/// what it brings.
pub fn repeat_passes(repeat: bool) {
    OFF.store(!repeat, Ordering::Relaxed);
}

/// Whether passes of so many rows can be recorded and made again on a device. The library multiplies more rows, and a trace times
/// every start by itself.
pub fn may_repeat(rows: usize, device: &Device) -> bool {
    let is_on = !OFF.load(Ordering::Relaxed) && !composed_only() && !trace::is_on();
    is_on && (1..FULL_ROWS).contains(&rows) && runs_on(device)
}

/// The next part of the inputs of the pass that the calling thread records, if these are its words.
pub(super) fn input(values: &[u32]) -> Option<Tensor> {
    CURRENT.with_borrow_mut(|current| {
        let inputs = &mut current.as_mut()?.inputs;
        inputs.pop_front_if(|(words, _)| words == values).map(|(_, view)| view)
    })
}

/// Words on a device, for kernels of a pass: its next [`Inputs`] where it is recorded and these are they.
///
/// # Errors
/// - the device has no memory
pub fn words(values: &[u32], device: &Device) -> Result<Tensor> {
    super::upload_words(values, device)
}

/// Says that a pass that is being recorded cannot be made again from its starts.
pub(crate) fn spoil(reason: &str) {
    CURRENT.with_borrow_mut(|current| {
        if let Some(recording) = current {
            recording.spoil(reason);
        }
    });
}

/// Notes a start that was made, where the calling thread records.
pub(super) fn note(launch: &Launch<'_>, results: &[Tensor], into: Option<&Tensor>) {
    CURRENT.with_borrow_mut(|current| {
        if let Some(recording) = current {
            recording.add(launch, results, into);
        }
    });
}

/// What a start is given, kept.
#[derive(Debug)]
enum Kept {
    Tensor(Tensor),
    Word(u32),
}

impl Kept {
    fn of(argument: &Argument<'_>) -> Self {
        match argument {
            Argument::Tensor(tensor) => Self::Tensor((*tensor).clone()),
            Argument::U32(value) => Self::Word(*value),
            Argument::Count(value) => Self::Word(*value as u32),
            Argument::F32(value) => Self::Word(value.to_bits()),
        }
    }

    fn argument(&self) -> Argument<'_> {
        match self {
            Self::Tensor(tensor) => Argument::Tensor(tensor),
            Self::Word(word) => Argument::U32(*word),
        }
    }
}

/// One start of a pass.
#[derive(Debug)]
struct Start {
    program: Program,
    kernel: String,
    grid: [usize; 3],
    threads: usize,
    memory: usize,
    arguments: Vec<Kept>,
    results: Vec<Tensor>,
    into: Option<Tensor>,
}

impl Start {
    fn launch<'a>(&'a self, arguments: &'a [Argument<'a>]) -> Launch<'a> {
        let Self { program, kernel, grid, threads, memory, .. } = self;
        Launch { program, kernel, grid: *grid, threads: *threads, memory: *memory, arguments }
    }

    fn arguments(&self) -> Vec<Argument<'_>> {
        self.arguments.iter().map(Kept::argument).collect()
    }

    /// Makes it again, and puts its results where they were.
    fn again(&self, device: &Device) -> Result<()> {
        let arguments = self.arguments();
        let launch = self.launch(&arguments);
        if let Some(into) = &self.into {
            return launch.run_into(into);
        }
        let shapes: Vec<(Shape, DType)> =
            self.results.iter().map(|t| (t.shape().clone(), t.dtype())).collect();
        for (kept, new) in self.results.iter().zip(launch.started(device, &shapes)?) {
            let (storage, _) = new.storage_and_layout();
            let Storage::Cpu(values) = &*storage else { bail!("emulated results") };
            kept.inplace_op1(&Put(values.clone()))?;
        }
        Ok(())
    }
}

/// Where values come from: a result of a start of the same recording, or memory that was there before; with the first value.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    Made(usize, usize, usize),
    Outside(usize, usize),
}

/// What tells a tensor's memory from that of all others that live.
fn memory_of(tensor: &Tensor) -> (usize, usize) {
    let (storage, layout) = tensor.storage_and_layout();
    (std::ptr::from_ref(&*storage).addr(), layout.start_offset())
}

/// The starts of a pass.
#[derive(Debug)]
pub struct Recording {
    inputs: VecDeque<(Vec<u32>, Tensor)>,
    starts: Vec<Start>,
    /// Start and place among its results by their memory.
    made: HashMap<usize, (usize, usize)>,
    outputs: Vec<Tensor>,
    spoilt: Option<String>,
    /// Of all results.
    bytes: usize,
}

impl Recording {
    fn of(inputs: VecDeque<(Vec<u32>, Tensor)>) -> Self {
        let (starts, outputs, made) = (Vec::new(), Vec::new(), HashMap::new());
        Self { inputs, starts, made, outputs, spoilt: None, bytes: 0 }
    }

    fn spoil(&mut self, reason: &str) {
        self.spoilt.get_or_insert_with(|| reason.to_owned());
        self.release();
    }

    /// Holds nothing any more.
    fn release(&mut self) {
        self.starts.clear();
        self.made.clear();
        HELD.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }

    fn add(&mut self, launch: &Launch<'_>, results: &[Tensor], into: Option<&Tensor>) {
        if self.spoilt.is_some() {
            return;
        }
        let bytes = results.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
        self.bytes += bytes;
        let all = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if self.bytes > MOST_OF_ONE {
            return self.spoil(TOO_LARGE);
        }
        if all > MOST_OF_ALL {
            return self.spoil(NO_ROOM);
        }
        let start = self.starts.len();
        let memory = results.iter().enumerate().map(|(place, t)| (memory_of(t).0, (start, place)));
        self.made.extend(memory);
        self.starts.push(Start {
            program: launch.program.clone(),
            kernel: launch.kernel.to_owned(),
            grid: launch.grid,
            threads: launch.threads,
            memory: launch.memory,
            arguments: launch.arguments.iter().map(Kept::of).collect(),
            results: results.to_vec(),
            into: into.cloned(),
        });
    }

    fn origin(&self, tensor: &Tensor) -> Origin {
        let (memory, first) = memory_of(tensor);
        match self.made.get(&memory) {
            Some((start, place)) => Origin::Made(*start, *place, first),
            None => Origin::Outside(memory, first),
        }
    }

    /// Why it was given up, if its results take too much memory: a pass of fewer rows may do.
    pub fn is_too_large(&self) -> Option<&str> {
        self.spoilt.as_deref().filter(|reason| *reason == TOO_LARGE)
    }

    /// Whether it was given up because other recordings take the memory: a later one may do.
    pub fn is_without_room(&self) -> bool {
        self.spoilt.as_deref() == Some(NO_ROOM)
    }

    /// Starts that were recorded.
    pub fn starts(&self) -> usize {
        self.starts.len()
    }

    /// Whether another pass made the same starts, with equal numbers, of the same tensors or the same results, and hands out the
    /// same results: all that may differ is what [`Inputs`] say. The other one must have been recorded while this one lived.
    ///
    /// # Errors
    /// - it did not; the error says what differs
    pub fn is_like(&self, other: &Self) -> std::result::Result<(), String> {
        if let Some(reason) = self.spoilt.as_ref().or(other.spoilt.as_ref()) {
            return Err(reason.clone());
        }
        if self.starts.len() != other.starts.len() {
            return Err(format!("{} and {} starts", self.starts.len(), other.starts.len()));
        }
        let same = |own: &Tensor, theirs: &Tensor| {
            own.shape() == theirs.shape()
                && own.dtype() == theirs.dtype()
                && self.origin(own) == other.origin(theirs)
        };
        for (own, theirs) in self.starts.iter().zip(&other.starts) {
            let sizes = |start: &Start| (start.grid, start.threads, start.memory);
            let kernels = own.kernel == theirs.kernel && own.program.name == theirs.program.name;
            let arguments = own.arguments.len() == theirs.arguments.len()
                && own.arguments.iter().zip(&theirs.arguments).all(|pair| match pair {
                    (Kept::Word(own), Kept::Word(theirs)) => own == theirs,
                    (Kept::Tensor(own), Kept::Tensor(theirs)) => same(own, theirs),
                    _ => false,
                });
            let into = match (&own.into, &theirs.into) {
                (Some(own), Some(theirs)) => same(own, theirs),
                (own, theirs) => own.is_none() && theirs.is_none(),
            };
            if !(kernels && sizes(own) == sizes(theirs) && arguments && into) {
                return Err(format!("`{}` is given something else in every pass", own.kernel));
            }
        }
        if !self.inputs.is_empty() || !other.inputs.is_empty() {
            return Err("an input was not read".to_owned());
        }
        let made = |t: &Tensor| matches!(self.origin(t), Origin::Made(..));
        let pairs = self.outputs.iter().zip(&other.outputs);
        let outputs = self.outputs.len() == other.outputs.len()
            && pairs.into_iter().all(|(own, theirs)| made(own) && same(own, theirs));
        if outputs { Ok(()) } else { Err("a result comes from no kernel of ours".to_owned()) }
    }

    /// What makes its starts again.
    ///
    /// # Errors
    /// - the driver makes no graph of them
    pub fn repeat(self, device: &Device) -> Result<Repeat> {
        if let Some(reason) = &self.spoilt {
            bail!("{reason}");
        }
        Ok(Repeat {
            #[cfg(feature = "cuda")]
            graph: self.graph(device)?,
            recording: self,
            device: device.clone(),
        })
    }

    #[cfg(feature = "cuda")]
    fn graph(&self, device: &Device) -> Result<Option<super::launch::Graph>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        let all = self.starts.iter().map(|start| {
            let mut arguments = start.arguments();
            arguments.extend(start.results.iter().chain(&start.into).map(Argument::from));
            (start, arguments)
        });
        let all: Vec<_> = all.collect();
        let launches: Vec<_> = all.iter().map(|(start, all)| start.launch(all)).collect();
        super::launch::Graph::of(&launches, device).map(Some)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.release();
    }
}

/// What a pass gives, and its recording: `outputs` are the tensors of its result that are wanted of later passes. `parts` are written to
/// the inputs first.
///
/// # Errors
/// - the pass fails, or the inputs have other lengths
pub fn record<R, E: From<Error>>(
    (inputs, parts): (&Inputs, &[&[u32]]),
    outputs: impl FnOnce(&R) -> Vec<Tensor>,
    pass: impl FnOnce() -> std::result::Result<R, E>,
) -> std::result::Result<(R, Recording), E> {
    inputs.set(parts)?;
    CURRENT.set(Some(Recording::of(inputs.views(parts)?)));
    let _off = AtEnd(|| drop(CURRENT.take()));
    let result = pass()?;
    let Some(mut recording) = CURRENT.take() else {
        return Err(Error::msg("a recording within another one").into());
    };
    recording.outputs = outputs(&result);
    Ok((result, recording))
}

/// The starts of a recorded pass, to be made again.
#[derive(Debug)]
pub struct Repeat {
    // Let go of before what it reads and writes.
    #[cfg(feature = "cuda")]
    graph: Option<super::launch::Graph>,
    recording: Recording,
    device: Device,
}

impl Repeat {
    /// Makes all starts once more: the tensors that the pass handed out, which [`record`] was told of, hold what it would hand out with
    /// the inputs as they are.
    ///
    /// # Errors
    /// - the device fails
    pub fn run(&mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let (Some(graph), Device::Cuda(device)) = (&mut self.graph, &self.device) {
            return graph.launch(device);
        }
        self.recording.starts.iter().try_for_each(|start| start.again(&self.device))
    }
}

#[cfg(test)]
mod tests;
