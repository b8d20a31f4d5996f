//! How processes share the work.

use longdraft_kernels::linear_cross_entropy::logits_at_once;

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
    /// Bytes of the accelerator's memory in all, where they are known: chunks of losses are larger where there is much.
    pub gpu_memory: Option<u64>,
}

impl Layout {
    /// Processes of some threads that share rows of a step only, with the target in f32.
    pub fn of(ranks: usize, threads: usize) -> Self {
        Self {
            ranks,
            sequence: 1,
            tensor: 1,
            threads,
            target_value_bytes: 4,
            half_states: false,
            gpu_memory: None,
        }
    }

    /// Logits of a chunk of the loss on an accelerator, bent ones or others.
    pub(crate) fn chunk_logits(&self, are_bent: bool) -> usize {
        logits_at_once(self.gpu_memory.filter(|_| !are_bent))
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
