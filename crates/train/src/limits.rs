//! Largest values of keys, each with its reason: what is beyond them is a slip of the finger, and would
//! end in a hang or without memory instead of a message.

/// Tokens of a row or a sequence. No target reads more, and keys are laid out in 32 bits.
pub const ROW_TOKENS: usize = 1 << 22;

/// Rows of a step, and held-out rows: each of them is a pass of the target.
pub const ROWS: usize = 1 << 20;

/// Counts of a run: beyond this, f64, in which progress is reckoned, skips numbers.
pub const COUNT: u64 = 1 << 53;

/// Passes over the data.
pub const EPOCHS: f64 = 1e6;

/// Minutes of a run: ten years.
pub const MINUTES: f64 = 5_256_000.0;

/// Tokens that a draft is trained to propose in a row. Every delay is trained on its own rows, and a
/// chain of 64 tokens is never accepted whole.
pub const DRAFT_LENGTH: usize = 64;

/// Values of a token in a selector's codebook, and channels of a group: widths of published targets.
pub const SELECTOR_RANK: usize = 1 << 14;

/// Layers of a draft: with as many as a target it is none.
pub const DRAFT_LAYERS: usize = 64;

/// Entries of a teacher that are kept for a token: with more, the whole takes less.
pub const TOP_K: usize = 1 << 16;

/// MiB of a shard of features: 1 TiB.
pub const SHARD_MIB: u64 = 1 << 20;

/// Trained values of a draft or a pretrained model. Optimizer state and gradients take four times
/// their 64 GiB.
pub const PARAMETERS: u64 = 1 << 34;

/// Rates, norms and weights are used in f32.
pub fn is_f32(value: f64) -> bool {
    value.is_finite() && value.abs() <= f64::from(f32::MAX)
}
