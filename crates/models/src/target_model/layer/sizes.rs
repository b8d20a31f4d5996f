//! The sizes and switches that a layer needs at run time.

use crate::config::{LayerHeads, QkNorm, TargetConfig};
use crate::target_model::tensor_parallel::LayerShare;

/// The sizes and switches that a layer needs at run time.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of a layer")]
pub(in crate::target_model) struct LayerSizes {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f64,
    /// Whether tokens see a window only.
    pub(super) slides: bool,
    /// Factor of queries where scores are scaled by something else than `1/√D`.
    pub(super) query_factor: Option<f64>,
    /// Where scores are bent.
    pub(super) softcap: Option<f64>,
    /// What norms of queries and keys reach over.
    pub(super) qk_norm: QkNorm,
    /// Whether there is no rotary embedding.
    pub(super) still: bool,
    /// Whether queries grow with their position.
    pub(super) grows: bool,
    /// Factor of what is added to the stream.
    pub(super) residual_scale: Option<f64>,
    /// As [`TargetConfig::has_half_heads`].
    pub(super) half_heads: bool,
    /// The earlier layer whose keys and values are read.
    pub(in crate::target_model) keys_owner: Option<usize>,
}

impl LayerSizes {
    pub(in crate::target_model) fn new(
        config: &TargetConfig,
        index: usize,
        share: &LayerShare,
    ) -> Self {
        let latent = config.parts.latent;
        let LayerHeads { kv_heads, head_dim } = config.heads_of(index);
        Self {
            keys_owner: config.keys_owner(index),
            slides: config.window_of(index).is_some(),
            query_factor: match latent {
                // Scores of latent rows are scaled by their own width.
                Some(latent) => {
                    let scalar = config.parts.query_scalar.unwrap_or(config.head_dim as f64);
                    Some((latent.cached() as f64 / scalar).sqrt())
                }
                None => config.parts.query_factor(head_dim),
            },
            softcap: config.parts.attention_softcap,
            qk_norm: config.qk_norm(),
            still: config.parts.is_still(index),
            grows: config
                .parts
                .query_growth
                .is_some_and(|growth| !growth.only_still || config.parts.is_still(index)),
            residual_scale: config.parts.residual_scale,
            half_heads: config.has_half_heads(index),
            heads: config.num_attention_heads / share.size(),
            kv_heads: kv_heads / share.size(),
            head_dim,
            eps: config.rms_norm_eps,
        }
    }
}
