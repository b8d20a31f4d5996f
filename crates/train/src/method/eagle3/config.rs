//! The keys of `draft.method: eagle3`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Eagle3ObjectiveConfig;

/// One layer over three of the target's layers and its own states, trained for several steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Eagle3 {
    /// The network.
    #[serde(flatten)]
    pub network: Eagle3DraftConfig,
    /// What is minimised.
    #[serde(flatten)]
    pub objective: Eagle3ObjectiveConfig,
}

/// An EAGLE-3 draft. Sizes that are not given are those of the draft to start from, else the target's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches of a file")]
pub struct Eagle3DraftConfig {
    /// Tokens that the draft can propose, the most frequent supervised ones (default: as many as `draft.from`, else 32000,
    /// or all of a smaller vocabulary). Fixed once a draft has been trained.
    pub draft_vocab_size: Option<usize>,
    /// With `draft.from`: choose the vocabulary anew; head rows of shared tokens move along.
    pub remap: bool,
    /// Three layers of the target whose outputs are read, counted from 0 (default: those of
    /// `draft.from`, else 1, n/2 − 1 and n − 4 of n).
    pub target_layers: Option<[usize; 3]>,
    /// A norm for each layer's states before `fc` (EAGLE-3.1).
    pub fc_norm: bool,
    /// The next step reads the normalised state (EAGLE-3.1).
    pub norm_output: bool,
    /// Attention and MLP are added to the normalised state; not every engine computes that.
    pub norm_before_residual: bool,
    /// Width of the draft.
    pub hidden_size: Option<usize>,
    /// Width of its MLP.
    pub intermediate_size: Option<usize>,
    /// Query heads.
    pub num_attention_heads: Option<usize>,
    /// Key-value heads.
    pub num_key_value_heads: Option<usize>,
    /// Size of a head.
    pub head_dim: Option<usize>,
    /// Projects the target's embeddings; a draft of another width needs it.
    pub embed_proj: bool,
    /// Context tokens before its own that a token sees (default: as in `draft.from`, else all).
    pub attention_window: Option<usize>,
}
