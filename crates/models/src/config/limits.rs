//! The largest sizes that are read from files, several times those of any published model. A wrong
//! file asks for no more than these, and tensors are looked for before anything of a size is made.

use crate::error::Problems;

/// Decoder layers; published models have up to 126.
pub(crate) const LAYERS: usize = 1 << 12;
/// Hidden sizes; published up to 16 384.
pub(crate) const HIDDEN: usize = 1 << 18;
/// Inner widths of an MLP; published up to 53 248.
pub(crate) const INNER: usize = 1 << 20;
/// Heads of attention; published up to 128.
pub(crate) const HEADS: usize = 1 << 12;
/// Width of a head; published up to 576.
pub(crate) const HEAD_DIM: usize = 1 << 13;
/// Tokens of a vocabulary; published up to 262 144.
pub(crate) const VOCABULARY: usize = 1 << 22;
/// Experts of a layer; published up to 512.
pub(crate) const EXPERTS: usize = 1 << 13;
/// Experts of all layers; published up to some 25 000.
pub(crate) const ALL_EXPERTS: usize = 1 << 17;
/// Tokens of a context; published up to 10 million.
pub(crate) const CONTEXT: usize = 1 << 24;
/// Tokens that a draft's own attention reaches back; published 512. A ring of so many keys is held.
pub(crate) const WINDOW: usize = 1 << 16;
/// Tokens that a draft proposes in a row; published up to 15.
pub(crate) const DRAFT_LENGTH: usize = 1 << 10;

/// Factors, divisors and bounds of activations; published from 0.001 to some thousands. Beyond these f32 has
/// infinities.
pub(crate) const SCALES: std::ops::RangeInclusive<f64> = 1e-4..=1e6;
/// Bases of rotary embeddings; published from 10 000 to some 10 million.
pub(crate) const ROPE_BASES: std::ops::RangeInclusive<f64> = 1.0 + 1e-3..=1e15;

/// What queries grow by; published 0.1.
pub(crate) const GROWTHS: std::ops::RangeInclusive<f64> = -1e4..=1e4;

/// A factor of activations; another than one of [`SCALES`] is told.
pub(crate) fn scale(problems: &mut Problems, name: &str, scale: f64) -> Option<f64> {
    within(problems, name, scale, &SCALES)
}

/// A number of a range; another is told.
pub(crate) fn within(
    problems: &mut Problems,
    name: &str,
    number: f64,
    range: &std::ops::RangeInclusive<f64>,
) -> Option<f64> {
    if range.contains(&number) {
        return Some(number);
    }
    let (least, most) = (range.start(), range.end());
    problems.push(format!("`{name}` = {number:?} is not between {least:?} and {most:?}"));
    None
}

/// What is added under the root of norms; a number that is not between 0 and 1 is told.
pub(crate) fn norm_eps(problems: &mut Problems, eps: f64) {
    if !(eps > 0.0 && eps < 1.0) {
        problems.push(format!("`rms_norm_eps` = {eps} is not in (0, 1)"));
    }
}

/// Taps of a short convolution; published up to 4.
pub(crate) const TAPS: usize = 1 << 8;
/// Values of a layer's recurrent state; published up to 1 048 576.
pub(crate) const STATE: usize = 1 << 26;

/// Query heads that key-value heads do not divide, and heads that cannot be rotated.
pub(crate) fn heads(problems: &mut Problems, (heads, kv_heads): (usize, usize), head_dim: usize) {
    if kv_heads > 0 && !heads.is_multiple_of(kv_heads) {
        problems.push(format!(
            "`num_key_value_heads` = {kv_heads} does not divide `num_attention_heads` = {heads}"
        ));
    }
    if !head_dim.is_multiple_of(2) {
        problems.push(format!("`head_dim` = {head_dim} is odd"));
    }
}

/// Names every size that is not between 1 and its limit.
pub(crate) fn check(problems: &mut Problems, sizes: &[(&str, usize, usize)]) {
    for (name, size, largest) in sizes {
        if !(1..=*largest).contains(size) {
            problems.push(format!("`{name}` = {size} is not between 1 and {largest}"));
        }
    }
}
