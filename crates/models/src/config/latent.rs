//! Sizes of attention over latent rows (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>).

use super::limits;
use crate::error::Problems;

/// Added under the root of the latent rows' norms, whatever the other norms have.
pub(crate) const LATENT_EPS: f64 = 1e-6;

/// Sizes of latent attention; keys are the published ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentConfig {
    /// `q_lora_rank`: width of what queries are made of; without it they come from hidden states.
    pub query_rank: Option<usize>,
    /// `r` = `kv_lora_rank`: width of the rows that keys and values are made of.
    pub rank: usize,
    /// `qk_nope_head_dim`: values of a head that are not turned; they stand first.
    pub plain_dim: usize,
    /// `qk_rope_head_dim`: values of a head that are; all heads of keys have the same.
    pub turned_dim: usize,
    /// `v_head_dim`
    pub value_dim: usize,
    /// Whether files hold the turned values as neighbouring pairs.
    pub interleaved: bool,
}

impl LatentConfig {
    /// Dim of a head of queries and keys.
    pub fn head_dim(&self) -> usize {
        self.plain_dim.saturating_add(self.turned_dim)
    }

    /// Values that are cached of a token: the latent row, and the turned part of the keys.
    pub fn cached(&self) -> usize {
        self.rank.saturating_add(self.turned_dim)
    }

    pub(super) fn validate(&self, problems: &mut Problems) {
        limits::check(
            problems,
            &[
                ("q_lora_rank", self.query_rank.unwrap_or(1), limits::HIDDEN),
                ("kv_lora_rank", self.rank, limits::HEAD_DIM),
                ("qk_nope_head_dim", self.plain_dim, limits::HEAD_DIM),
                ("qk_rope_head_dim", self.turned_dim, limits::HEAD_DIM),
                ("v_head_dim", self.value_dim, limits::HEAD_DIM),
            ],
        );
    }
}
