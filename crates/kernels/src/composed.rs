//! Sizes of ops that are composed of plain tensor ops.

/// Values, at most, that exist at a time of an intermediate result such as logits or scores.
pub(crate) const CHUNK_VALUES: usize = 1 << 25;

/// Rows of a pass without gradients up to which it is filled up with rows of zeros: then a library
/// chooses the same kernel however many tokens are verified together, and a row's sums run alike.
pub(crate) const FULL_ROWS: usize = 64;
