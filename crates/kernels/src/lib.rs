//! Differentiable tensor ops of the hot path, on candle tensors.
//!
//! One op per module: its formula, a `reference` from plain tensor ops (any device, any float type,
//! differentiable), a fused CPU implementation for f32 activations, and tests that hold the two
//! together. Where the reference would keep too much, a `composed` version for other devices goes by
//! chunks and has a backward pass of its own; [`dispatch`] chooses. No model knowledge lives here.
//!
//! Shapes: `T` packed tokens, `H` hidden, `N` query heads, `K` key-value heads, `D` head dim,
//! `V` vocabulary, `R` rows of a product. Tensors are token-major (`[T, N, D]`), row-major.
//!
//! Two promises hold for every fused op: the result does not depend on the number of threads,
//! and a row's bits do not depend on the rows computed beside it. Exact resume rests on the first,
//! lossless greedy decoding on the second.

#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod adamw;
pub mod attention;
pub mod bend;
pub mod block_convolution;
pub mod channel_scale;
pub mod check;
pub mod chosen_products;
pub mod dispatch;
pub mod experts;
pub mod factors;
pub mod gated_mlp;
pub mod geglu;
pub mod graph;
pub mod linear;
pub mod linear_cross_entropy;
pub mod log_sum_exp;
pub mod matrix;
pub mod memory;
pub mod orthogonalise;
pub mod random;
pub mod recurrence;
pub mod relu_squared;
pub mod rms_norm;
pub mod rope;
pub mod rows;
pub mod swiglu;
pub mod threads;
pub mod token_ranges;
pub mod top_k;

mod at_end;
mod chunks;
mod composed;
mod cuda;
mod fused_op;
mod gemm;
mod large_pages;
mod settings;
mod simd;
mod storage;
mod sums;

pub use cuda::collectives;
pub use cuda::device;
#[cfg(feature = "nccl")]
pub use cuda::nccl;
pub use cuda::repeat;
pub use cuda::trace;
pub use cuda::transfer;
pub use graph::{Gradients, differentiable};

#[cfg(test)]
mod test_support;
