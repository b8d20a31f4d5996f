//! Bytes that a rank sends in a step, by collective.
//!
//! Counted is what leaves the rank if every pair talks directly; rings send as much. Counters and flags,
//! some hundred bytes, are left out.

use longdraft_kernels::adamw::BLOCK;
use longdraft_models::TargetConfig;
use serde::Serialize;

use super::graph::F32;
use super::optimizer::Parameters;
use crate::parallel::{Reduction, ZeroStage, exchanged_bytes};

/// What a step sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sent {
    /// What for.
    pub name: &'static str,
    /// Bytes of the rank that sends most.
    pub bytes: u64,
}

/// Gradients to who sums them: everything but the rank's own part, `4 P (N − 1) / N`; and sums or new
/// weights back: the largest part to everybody else, `4 P (N − 1) / N`. The gradient's norm adds 8
/// bytes for every block of squares where the update is spread.
pub(super) fn of_gradients(parameters: &Parameters, reduction: Reduction) -> Vec<Sent> {
    let shares = parameters.shares();
    let others = parameters.ranks.saturating_sub(1);
    let exchanged = exchanged_bytes(&shares, parameters.bucket_bytes as usize, reduction);
    let blocks: usize = parameters.sizes.iter().map(|size| size.div_ceil(BLOCK)).sum();
    let norm = if parameters.is_sharded() { 8 * blocks as u64 * others } else { 0 };
    let back = if parameters.is_sharded() { "new weights" } else { "summed gradients" };
    vec![
        Sent { name: "gradients", bytes: exchanged.reduced },
        Sent { name: back, bytes: exchanged.gathered },
        Sent { name: "gradient norm", bytes: norm },
    ]
}

/// How rows go through the ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowTraffic {
    pub(super) rows: u64,
    pub(super) ranks: u64,
    pub(super) parts: u64,
    pub(super) tensor: u64,
    pub(super) tokens: u64,
    /// Layers of the target that run.
    pub(super) layers: u64,
    pub(super) target_bytes: u64,
}

impl RowTraffic {
    /// What the ranks that share a row or the weights send for a rank's rows: ZeRO-3 gathers the target
    /// once and the draft twice a row, `(N − 1) / N` of their bytes from every rank's part; sequence
    /// parallelism gathers keys and values, `8 T K·D (S − 1) / S` a layer; tensor parallelism sums the
    /// states behind attention and MLP, `2 · 8 T H (M − 1) / M` a layer.
    pub(super) fn all(&self, config: &TargetConfig, draft: &Parameters) -> Vec<Sent> {
        let share = |bytes: u64, ranks: u64| bytes * ranks.saturating_sub(1) / ranks.max(1);
        let kv = config.kv_size() as u64;
        let keys = 2 * F32 * self.tokens * self.parts * kv / self.tensor;
        let states = 2 * 2 * F32 * self.tokens * config.hidden_size as u64;
        let weights = if draft.zero == ZeroStage::Weights {
            share(self.target_bytes + 2 * F32 * draft.all(), self.ranks)
        } else {
            0
        };
        let of_rows = [
            ("gathered weights (ZeRO-3)", weights),
            // The draft's own keys go forward, their gradients back.
            ("keys and values (sequence)", share(keys, self.parts) * (self.layers + 2)),
            ("states (tensor)", share(states, self.tensor) * self.layers),
        ];
        of_rows.map(|(name, bytes)| Sent { name, bytes: self.rows * bytes }).into()
    }
}
