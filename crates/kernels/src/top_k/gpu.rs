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

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

fn program() -> Program {
    let numbers = [("THREADS", THREADS), ("CANDIDATES", CANDIDATES)];
    Program::new("top_k", include_str!("gpu.cu"), &numbers)
}

/// To compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn compiled() -> crate::cuda::Compiled {
    (program(), vec![crate::cuda::Block::plain("top_k_rows", THREADS)])
}

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

/// What [`top_k`] found in one part after the other, on the host, by one transfer. It fails where that fails.
pub(super) fn downloaded(parts: &[[Tensor; 2]]) -> Result<TopK> {
    if parts.is_empty() {
        return Ok(TopK::default());
    }
    let flat = |which: usize| parts.iter().map(move |part| part[which].flatten_all());
    let all = flat(0).chain(flat(1)).collect::<Result<Vec<_>>>()?;
    let mut ids: Vec<f32> = Tensor::cat(&all, 0)?.to_vec1()?;
    let log_probs = ids.split_off(ids.len() / 2);
    Ok(TopK { ids: ids.into_iter().map(f32::to_bits).collect(), log_probs })
}
