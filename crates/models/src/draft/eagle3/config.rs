//! Sizes and switches of an EAGLE-3 draft.

use crate::config::{RopeParameters, TargetConfig, limits};
use crate::error::Problems;
use crate::ids::LayerId;

/// Layers of the target that a draft reads.
pub const TAPPED_LAYERS: usize = 3;

/// An EAGLE-3 draft.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of the published format")]
pub struct Eagle3Config {
    /// `H`, of the draft.
    pub hidden_size: usize,
    /// `Ht`, of the target.
    pub target_hidden_size: usize,
    /// `I`
    pub intermediate_size: usize,
    /// `N`
    pub num_attention_heads: usize,
    /// `K`
    pub num_key_value_heads: usize,
    /// `D`
    pub head_dim: usize,
    /// `V`
    pub vocab_size: usize,
    /// `Vd`
    pub draft_vocab_size: usize,
    /// Added under the root of every norm.
    pub rms_norm_eps: f64,
    /// Base and scaling of the rotary embedding.
    pub rope: RopeParameters,
    /// Factor of dynamic NTK scaling: the base grows with documents longer than
    /// `max_position_embeddings`.
    pub dynamic_ntk: Option<f64>,
    /// Longest context in tokens, the target's.
    pub max_position_embeddings: usize,
    /// Layers whose output the draft reads, in the order of `fc`'s columns.
    pub target_layers: [LayerId; TAPPED_LAYERS],
    /// A norm for each layer's states before `fc` (EAGLE-3.1).
    pub fc_norm: bool,
    /// The next step reads `RMS_norm(h)` instead of `h` (EAGLE-3.1).
    pub norm_output: bool,
    /// Attention and MLP are added to `RMS_hid(g)` instead of `g`.
    pub norm_before_residual: bool,
    /// A trained projection of the target's embeddings to the draft's width.
    pub embed_proj: bool,
    /// Context tokens before its own that a token sees; all of them if absent.
    pub attention_window: Option<usize>,
    /// Deviation of freshly drawn matrices.
    pub initializer_range: f64,
}

impl Eagle3Config {
    /// Customary size of a draft's vocabulary.
    pub const DRAFT_VOCABULARY: usize = 32_000;

    /// A draft as wide as the target, with its rotary embedding, on the published layers.
    ///
    /// # Errors
    /// - the target has too few layers for three different ones
    pub fn for_target(
        target: &TargetConfig,
        draft_vocab_size: usize,
    ) -> std::result::Result<Self, Problems> {
        let layers = Self::published_layers(target.num_hidden_layers)?;
        Ok(Self::for_target_layers(target, draft_vocab_size, layers))
    }

    /// The same on layers of one's own choice.
    pub fn for_target_layers(
        target: &TargetConfig,
        draft_vocab_size: usize,
        target_layers: [LayerId; TAPPED_LAYERS],
    ) -> Self {
        Self {
            hidden_size: target.hidden_size,
            target_hidden_size: target.hidden_size,
            intermediate_size: target.intermediate_size,
            num_attention_heads: target.num_attention_heads,
            num_key_value_heads: target.num_key_value_heads,
            head_dim: target.head_dim,
            vocab_size: target.vocab_size,
            draft_vocab_size,
            rms_norm_eps: target.rms_norm_eps,
            rope: target.rope_of_drafts(),
            dynamic_ntk: None,
            max_position_embeddings: target.max_position_embeddings,
            target_layers,
            fc_norm: false,
            norm_output: false,
            norm_before_residual: false,
            embed_proj: false,
            attention_window: None,
            initializer_range: 0.02,
        }
    }

    /// Layers 1, `⌊n/2⌋ − 1` and `n − 4` of a target with `n`.
    ///
    /// # Errors
    /// - they are not three different layers (`n ≤ 5`): ids have to be given
    pub fn published_layers(
        layers: usize,
    ) -> std::result::Result<[LayerId; TAPPED_LAYERS], Problems> {
        let ids = (layers / 2).checked_sub(1).zip(layers.checked_sub(4));
        match ids {
            Some((middle, high)) if 1 < middle && middle < high => {
                Ok([LayerId(1), LayerId(middle), LayerId(high)])
            }
            _ => Err(Problems(vec![format!(
                "a target of {layers} layers has no published choice of three: give their ids"
            )])),
        }
    }

    /// `N·D`
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// `K·D`
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// These sizes as read, unless there are problems: those of reading, or else what does not fit together.
    pub(super) fn checked(self, read: Problems) -> std::result::Result<Self, Problems> {
        let problems = if read.0.is_empty() { self.problems() } else { read };
        if problems.0.is_empty() { Ok(self) } else { Err(problems) }
    }

    /// What does not fit together.
    pub fn problems(&self) -> Problems {
        let mut problems = Problems::default();
        limits::check(
            &mut problems,
            &[
                ("hidden_size", self.hidden_size, limits::HIDDEN),
                ("target_hidden_size", self.target_hidden_size, limits::HIDDEN),
                ("intermediate_size", self.intermediate_size, limits::INNER),
                ("num_attention_heads", self.num_attention_heads, limits::HEADS),
                ("num_key_value_heads", self.num_key_value_heads, limits::HEADS),
                ("head_dim", self.head_dim, limits::HEAD_DIM),
                ("vocab_size", self.vocab_size, limits::VOCABULARY),
                ("draft_vocab_size", self.draft_vocab_size, limits::VOCABULARY),
                ("max_position_embeddings", self.max_position_embeddings, limits::CONTEXT),
            ],
        );
        let heads = (self.num_attention_heads, self.num_key_value_heads);
        limits::heads(&mut problems, heads, self.head_dim);
        if self.dynamic_ntk.is_some() && self.head_dim <= 2 {
            problems.push("dynamic rope scaling needs a `head_dim` above 2");
        }
        if self.draft_vocab_size > self.vocab_size {
            problems.push(format!(
                "`draft_vocab_size` = {} exceeds `vocab_size` = {}",
                self.draft_vocab_size, self.vocab_size
            ));
        }
        if self.embed_proj && self.hidden_size == self.target_hidden_size {
            problems.push(
                "`embed_proj` with a draft as wide as its target: engines load the target's embeddings there and leave \
                 out the projection; set it only with another `hidden_size`",
            );
        }
        limits::norm_eps(&mut problems, self.rms_norm_eps);
        if let Some(window) = self.attention_window {
            limits::check(&mut problems, &[("attention_window", window, limits::CONTEXT)]);
        }
        let [low, mid, high] = self.target_layers;
        if low == mid || mid == high || low == high {
            let ids = self.target_layers.map(|layer| layer.0);
            problems.push(format!("tapped layers {ids:?} are not three different ones"));
        }
        problems
    }

    /// Sizes that are not the target's.
    pub fn size_problems(&self, target: &TargetConfig) -> Problems {
        let mut problems = Problems::default();
        problems.push_unlike_target(&[
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ]);
        problems
    }

    /// What does not fit the target, or itself.
    pub fn problems_with(&self, target: &TargetConfig) -> Problems {
        let mut problems = self.problems();
        problems.0.extend(self.size_problems(target).0);
        let layers = target.num_hidden_layers;
        for layer in self.target_layers.iter().filter(|layer| layer.0 >= layers) {
            problems.push(format!(
                "tapped layer {} of a target with {layers} layers (counted from 0)",
                layer.0
            ));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_layers_follow_the_number_of_layers() {
        let ids = |n| Eagle3Config::published_layers(n).map(|ids| ids.map(|id| id.0));
        assert_eq!(ids(32), Ok([1, 15, 28]));
        assert_eq!(ids(30), Ok([1, 14, 26]));
        assert_eq!(ids(8), Ok([1, 3, 4]));
        for few in [0, 3, 4, 5, 6] {
            assert!(ids(few).is_err(), "{few} layers");
        }
    }
}
