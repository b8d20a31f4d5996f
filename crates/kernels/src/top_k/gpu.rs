//! The k most likely of rows of logits on an NVIDIA GPU, so that logits need not come down.

use std::sync::LazyLock;

use candle_core::{Result, Shape, Tensor};

use super::TopK;
use crate::cuda::{Launch, Program, takes};

/// Threads of a block.
const THREADS: usize = 512;
/// Candidates that the kernel ranks at once.
const CANDIDATES: usize = 1024;
/// Largest k: far fewer than threads, so that few more than k logits reach the kernel's bound.
const MOST: usize = THREADS / 2;

static PROGRAM: LazyLock<Program> = LazyLock::new(|| {
    let numbers = [("THREADS", THREADS), ("CANDIDATES", CANDIDATES)];
    Program::new("top_k", include_str!("gpu.cu"), &numbers)
});

/// Whether the kernel finds the `k` most likely of such values' `vocabulary`.
pub(super) fn finds(like: &Tensor, vocabulary: usize, k: usize) -> bool {
    (1..=MOST).contains(&k) && k <= vocabulary && takes(&[like])
}

/// Bits of ids and log-probabilities, `[R, k]` each, of `[R, V]` logits; still on the device.
/// It fails where the kernel cannot be compiled or started.
pub(super) fn top_k(logits: &Tensor, k: usize) -> Result<[Tensor; 2]> {
    let (rows, vocabulary) = logits.dims2()?;
    let logits = logits.contiguous()?;
    let arguments = [(&logits).into(), vocabulary.into(), k.into()];
    Launch::new(&PROGRAM, "top_k_rows", ([rows, 1, 1], THREADS), &arguments)
        .run(logits.device(), [Shape::from((rows, k)), Shape::from((rows, k))])
}

/// What [`top_k`] found in one part after the other, on the host. It fails where the transfer fails.
pub(super) fn downloaded(parts: &[[Tensor; 2]]) -> Result<TopK> {
    if parts.is_empty() {
        return Ok(TopK::default());
    }
    let all = |which: usize| -> Result<Vec<f32>> {
        let parts: Vec<&Tensor> = parts.iter().map(|part| &part[which]).collect();
        Tensor::cat(&parts, 0)?.flatten_all()?.to_vec1()
    };
    Ok(TopK { ids: all(0)?.into_iter().map(f32::to_bits).collect(), log_probs: all(1)? })
}
