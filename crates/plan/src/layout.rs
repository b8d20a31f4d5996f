//! How processes share the work.

/// How processes share the work, beyond what the configuration says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Processes.
    pub ranks: usize,
    /// Processes that share a row.
    pub sequence: usize,
    /// Processes that share every layer of the target.
    pub tensor: usize,
    /// Threads of a process, whose products pack their operands; 0: an accelerator, which does not.
    pub threads: usize,
    /// Bytes of a value of the target's matrices.
    pub target_value_bytes: usize,
    /// Whether the frozen target computes in bf16 between its norms and its f32 sums: on an NVIDIA GPU whose products
    /// take bf16.
    pub half_states: bool,
}

impl Layout {
    /// Processes of some threads that share rows of a step only, with the target in f32.
    pub fn of(ranks: usize, threads: usize) -> Self {
        let (target_value_bytes, half_states) = (4, false);
        Self { ranks, sequence: 1, tensor: 1, threads, target_value_bytes, half_states }
    }

    /// Whether models and activations lie in an accelerator's memory.
    pub(crate) fn is_accelerator(&self) -> bool {
        self.threads == 0
    }

    /// Whether the target is held as quantised blocks, a byte a value and less, in main memory.
    pub(crate) fn has_stored_head(&self) -> bool {
        !self.is_accelerator() && self.target_value_bytes == 1
    }

    /// Whether products take factors of 16 bits: an accelerator's, where it holds the target so.
    pub(crate) fn has_half_products(&self) -> bool {
        self.is_accelerator() && self.target_value_bytes == 2
    }
}
