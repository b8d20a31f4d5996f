//! A roofline of a step: which limit of a GPU each part of it meets, and how long it takes then.
//!
//! ```text
//! seconds of a term = max(operations / (peak · efficiency), bytes / (bandwidth · efficiency)) + starts · start
//! ```
//!
//! Terms are kernels of one kind in one part of a step. Efficiencies are those of kernels that were measured alone on an
//! NVIDIA H200, and are taken for other GPUs as well; docs/results/gpu.md holds predictions against measured steps.

use serde::Serialize;

use crate::machine::Gpu;

/// Shares of the peak that products of 16 or 32 bits, attention, and its gradients reach. Products of some thousand rows
/// reached 373 to 694 of 989.5 TFLOP/s, attention by itself 460, its gradients 330.
const OF_PRODUCTS: f64 = 0.65;
const OF_ATTENTION: f64 = 0.46;
const OF_ITS_GRADIENTS: f64 = 0.33;

/// Share of the bandwidth that kernels reach which only read and write: AdamW moved 3.6 TB/s of 4.8, a product of one row
/// 3.4. Between these and a slower cast, 2.2, a decoding pass of one row decided.
const OF_BANDWIDTH: f64 = 0.7;

/// Seconds that a kernel's start takes.
const START: f64 = 4.6e-6;

/// Bytes a second between main memory and a GPU.
const UPLOAD: f64 = 8e9;

/// Products of bf16 terms that attention takes in place of one in f32.
const TERMS_OF_F32: f64 = 3.0;

/// Kinds of kernels, which differ in what they reach of a GPU's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Of matrices.
    Product,
    Attention,
    AttentionBackward,
    /// Reading and writing.
    Memory,
    /// From or to main memory.
    Upload,
}

/// Parts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The target's layers.
    Target,
    /// The draft's layers.
    Forward,
    /// Heads, their gradients and what is made of logits.
    Loss,
    /// Gradients of the draft's layers.
    Backward,
    /// Sums of the gradients of a step's rows.
    Sums,
    /// The update.
    Optimizer,
    /// Rows of a store on their way to the GPU, while it computes.
    Upload,
}

impl Part {
    /// All of them, as a step has them.
    const ALL: [Self; 7] = [
        Self::Target,
        Self::Forward,
        Self::Loss,
        Self::Backward,
        Self::Sums,
        Self::Optimizer,
        Self::Upload,
    ];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Target => "target forward",
            Self::Forward => "draft forward",
            Self::Loss => "heads and loss",
            Self::Backward => "draft backward",
            Self::Sums => "sums of gradients",
            Self::Optimizer => "update",
            Self::Upload => "features to the GPU",
        }
    }
}

/// What limits a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Compute,
    /// The GPU's memory.
    Memory,
    /// Starts of kernels.
    Starts,
    /// The way to main memory.
    Upload,
}

impl Bound {
    const ALL: [Self; 4] = [Self::Compute, Self::Memory, Self::Starts, Self::Upload];

    /// In a word or two.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Memory => "memory",
            Self::Starts => "starts",
            Self::Upload => "main memory",
        }
    }
}

/// Kernels of a kind in a part of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Term {
    pub(crate) part: Part,
    pub(crate) kernel: Kernel,
    /// Whether factors of products have 16 bits.
    pub(crate) half: bool,
    pub(crate) operations: f64,
    /// Operations that are made for each that is asked for: tiles of a product are whole.
    pub(crate) waste: f64,
    /// Bytes that they read and write.
    pub(crate) bytes: f64,
    pub(crate) starts: f64,
}

impl Term {
    /// Nothing yet.
    pub(crate) fn new(part: Part, kernel: Kernel) -> Self {
        Self { part, kernel, half: true, operations: 0.0, waste: 1.0, bytes: 0.0, starts: 0.0 }
    }

    /// Seconds of the larger of arithmetic and memory, with that which it is, and of starts.
    fn seconds(&self, gpu: &Gpu) -> ((Bound, f64), f64) {
        let (bf16, single) = (gpu.bf16, if self.half { 1.0 } else { TERMS_OF_F32 });
        let peak = match self.kernel {
            Kernel::Product if self.half => OF_PRODUCTS * bf16,
            Kernel::Product | Kernel::Memory | Kernel::Upload => OF_PRODUCTS * gpu.f32,
            Kernel::Attention => OF_ATTENTION * bf16 / single,
            Kernel::AttentionBackward => OF_ITS_GRADIENTS * bf16 / single,
        };
        let compute = self.waste * self.operations / peak;
        let starts = START * self.starts;
        let moved = match self.kernel {
            Kernel::Upload => return ((Bound::Upload, self.bytes / UPLOAD), starts),
            _ => self.bytes / (OF_BANDWIDTH * gpu.bandwidth),
        };
        let larger =
            if compute >= moved { (Bound::Compute, compute) } else { (Bound::Memory, moved) };
        (larger, starts)
    }
}

/// A part of a step on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PartTime {
    /// Which.
    pub part: Part,
    /// Floating-point operations.
    pub operations: f64,
    /// Bytes that its kernels read and write.
    pub bytes: f64,
    /// Kernels that it starts.
    pub starts: f64,
    /// Seconds, by estimate.
    pub seconds: f64,
    /// What most of them go to.
    pub bound: Bound,
}

/// The parts of a step that have work, in their order.
pub(crate) fn parts(terms: &[Term], gpu: &Gpu) -> Vec<PartTime> {
    let all = Part::ALL.into_iter();
    let of_part = |part: Part| {
        let terms = || terms.iter().filter(move |term| term.part == part);
        let sum = |of: fn(&Term) -> f64| -> f64 { terms().map(of).sum() };
        let of_bound = |bound: Bound| -> f64 {
            let of_term = |term: &Term| match (term.seconds(gpu), bound) {
                ((_, starts), Bound::Starts) => starts,
                (((own, seconds), _), _) if own == bound => seconds,
                _ => 0.0,
            };
            terms().map(of_term).sum()
        };
        let largest = Bound::ALL.into_iter().max_by(|a, b| of_bound(*a).total_cmp(&of_bound(*b)));
        PartTime {
            part,
            operations: sum(|term| term.operations),
            bytes: sum(|term| term.bytes),
            starts: sum(|term| term.starts),
            seconds: Bound::ALL.into_iter().map(of_bound).sum(),
            bound: largest.unwrap_or(Bound::Compute),
        }
    };
    all.map(of_part).filter(|part| part.seconds > 0.0).collect()
}

impl PartTime {
    /// Seconds of some parts one after the other, but for uploads, which pass meanwhile.
    pub fn total(parts: &[Self]) -> f64 {
        let of = |is_upload: bool| -> f64 {
            let parts = parts.iter().filter(|part| (part.part == Part::Upload) == is_upload);
            parts.map(|part| part.seconds).sum()
        };
        of(false).max(of(true))
    }
}
