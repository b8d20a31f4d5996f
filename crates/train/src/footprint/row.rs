//! One row of a step: what its terms are functions of, and what they come to.

use longdraft_kernels::linear::{Pass, kept_bytes, slab_bytes};
use longdraft_kernels::linear_cross_entropy::{chunk_rows, rows_at_once};

/// Passes of a map whose input and weight get gradients.
pub const ALL_PASSES: [Pass; 3] = [Pass::Forward, Pass::InputGradient, Pass::WeightGradient];

/// Passes of a map whose weight does not train.
pub const INPUT_PASSES: [Pass; 2] = [Pass::Forward, Pass::InputGradient];

/// Passes of a map whose input gets no gradient.
pub const WEIGHT_PASSES: [Pass; 2] = [Pass::Forward, Pass::WeightGradient];

/// A row as a rank works on it.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Tokens of this rank's part of the row.
    pub tokens: u64,
    /// Learned ones at most: all.
    pub learned: u64,
    /// Ranks that share the row (sequence parallelism); attention gathers their keys.
    pub parts: u64,
    /// Whether the loss forms the teacher's whole distribution.
    pub teacher_logits: bool,
    /// Threads of the rank; 0: an accelerator, which packs no operands.
    pub threads: usize,
    /// Whether products take factors of 16 bits: an accelerator's, where it holds the target so.
    pub half_products: bool,
    /// Whether the target's head is held as quantised blocks, of which a CPU's loss widens some rows at a time.
    pub stored_head: bool,
    /// Logits of a chunk of the loss on an accelerator, at most.
    pub chunk_logits: usize,
}

impl Row {
    /// Whether it is an accelerator that works on it.
    pub fn is_accelerator(&self) -> bool {
        self.threads == 0
    }

    /// Values of f32 that keeping an input of products takes where no other op reads it: half of its own where products
    /// keep the factor of 16 bits that it was.
    pub fn input_values(&self, values: u64) -> u64 {
        if self.half_products { values.div_ceil(2) } else { values }
    }

    /// Rows of a chunk of the loss over a vocabulary.
    pub fn chunk(&self, vocabulary: u64) -> u64 {
        let rows = if self.is_accelerator() {
            rows_at_once(self.chunk_logits, vocabulary as usize)
        } else {
            chunk_rows(vocabulary as usize)
        };
        (rows as u64).min(self.learned)
    }

    /// Bytes of the rows of the target's head that are widened at a time.
    pub fn slab_bytes(&self, width: u64, vocabulary: u64) -> u64 {
        let is_widened = self.stored_head && !self.is_accelerator();
        if is_widened { slab_bytes(vocabulary as usize, width as usize) as u64 } else { 0 }
    }

    /// Bytes of packed operands that the calling thread keeps after products of maps of
    /// `(rows, inputs, outputs)`.
    pub fn packed_bytes(&self, passes: &[Pass], maps: &[(u64, u64, u64)]) -> u64 {
        if self.is_accelerator() {
            return 0;
        }
        let of_pass = |pass: &Pass| {
            let of_map = |&(rows, inputs, outputs): &(u64, u64, u64)| {
                let sizes = (rows as usize, inputs as usize, outputs as usize);
                kept_bytes(*pass, sizes, self.threads) as u64
            };
            maps.iter().map(of_map).max().unwrap_or(0)
        };
        passes.iter().map(of_pass).max().unwrap_or(0)
    }
}

/// What training on a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowMemory {
    /// Activations that the graph keeps.
    pub activations: u64,
    /// A chunk of the loss at the end of the forward pass.
    pub chunks: u64,
    /// Gradients under way in the backward pass, at most; where weights alone count, its end takes more.
    pub backward: u64,
    /// What is left of them when it ends.
    pub left: u64,
    /// Results of rows, plans, factors.
    pub results: u64,
    /// Packed operands that the calling thread keeps.
    pub packed: u64,
    /// Gradients of all weights that it trains.
    pub weight_gradients: u64,
}

impl RowMemory {
    /// What it holds on a CPU at most at the same time, packed operands apart.
    pub fn peak(&self) -> u64 {
        self.activations + self.results + self.chunks.max(self.backward).max(self.left)
    }
}
