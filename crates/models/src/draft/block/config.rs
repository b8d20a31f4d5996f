//! Sizes and switches that all block drafts share.

use longdraft_kernels::bend::Bend;

use crate::config::{RopeParameters, TargetConfig, limits};
use crate::error::{Problems, without_backtrace};
use crate::ids::LayerId;

/// Why a draft cannot read layer −1, as trainers that know it count.
pub const NO_EMBEDDINGS: &str = "layer -1 is the output of the embeddings, and features are outputs of layers here, \
                                 counted from 0, whether they are computed, stored or exported";

/// What a problem with a list of layers says where the list names the embeddings.
pub(super) fn no_embeddings(are_named: bool) -> String {
    if are_named { format!(": {NO_EMBEDDINGS}") } else { String::new() }
}

/// Which context a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// All of it.
    Full,
    /// The last tokens of a window.
    Sliding,
}

/// Short convolutions around attention and MLP of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionSizes {
    /// Taps: a slot and those before it.
    pub kernel_size: usize,
    /// Channels that share a computed kernel.
    pub group_size: usize,
}

/// A head that chooses among the candidates of a slot by the token before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectorSizes {
    /// `r`, values of a token in a codebook.
    pub rank: usize,
    /// `K`, candidates of a slot.
    pub top_k: usize,
}

/// How a chain mixes the token before a slot with the slot's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainKind {
    /// The token alone.
    Vanilla,
    /// Gated by the state.
    Gated,
    /// With a state of its own along the block.
    Rnn,
}

/// Heads that look at the tokens chosen before a slot. A draft that has them proposes from slot 0 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainSizes {
    /// `r`, values of a token; 0 where slots do not depend on one another.
    pub rank: usize,
    /// The head.
    pub kind: ChainKind,
    /// A head that tells the chance of acceptance: whether it reads the token before, too.
    pub confidence: Option<bool>,
}

/// The network of a block draft.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockConfig {
    /// `H`, also of the target.
    pub hidden_size: usize,
    /// `I`
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// `V`, of the target.
    pub vocab_size: usize,
    /// `Vd`, tokens that the draft proposes: fewer than `V` through a head of its own, all through the target's.
    pub draft_vocab_size: usize,
    /// Added under the root of every norm.
    pub rms_norm_eps: f64,
    /// Base and scaling of the rotary embedding.
    pub rope: RopeParameters,
    /// Longest context in tokens, the target's.
    pub max_position_embeddings: usize,
    /// Biases on the four projections of attention.
    pub attention_bias: bool,
    /// The layers, the first one first.
    pub layers: Vec<LayerKind>,
    /// Tokens that a sliding layer sees, the query itself included.
    pub sliding_window: Option<usize>,
    /// Whether a slot sees only itself and slots before it. Where it is not given, sliding layers
    /// are causal inside of a block and full ones are not.
    pub is_causal: Option<bool>,
    /// `G`, slots of a block.
    pub block_size: usize,
    /// Token that stands where nothing is known yet.
    pub mask_token_id: u32,
    /// Layers whose output is read, ascending, in the order of the columns of `fc`.
    pub target_layers: Vec<LayerId>,
    /// Layers of the target.
    pub num_target_layers: usize,
    /// Short convolutions, if the draft has them.
    pub convolution: Option<ConvolutionSizes>,
    /// Selector among candidates, if the draft has one.
    pub selector: Option<SelectorSizes>,
    /// Sequential heads, if the draft has them.
    pub chain: Option<ChainSizes>,
    /// What a file says becomes of the head's products, plain if it says nothing. The target decides.
    pub bend: Bend,
    /// What the target's embeddings are multiplied by; `None` reads its table as it is stored.
    pub embedding_scale: Option<f64>,
    /// Deviation of freshly drawn matrices.
    pub initializer_range: f64,
}

impl BlockConfig {
    /// Largest number of slots; published blocks have up to 16.
    const SLOTS: usize = limits::DRAFT_LENGTH;

    /// A draft of full layers that fits a target and reads the default choice of its layers.
    pub fn for_target(
        target: &TargetConfig,
        layers: usize,
        block_size: usize,
        mask_token_id: u32,
    ) -> Self {
        Self {
            hidden_size: target.hidden_size,
            intermediate_size: target.intermediate_size,
            num_attention_heads: target.num_attention_heads,
            num_key_value_heads: target.num_key_value_heads,
            head_dim: target.head_dim,
            vocab_size: target.vocab_size,
            draft_vocab_size: target.vocab_size,
            rms_norm_eps: target.rms_norm_eps,
            rope: target.rope_of_drafts(),
            max_position_embeddings: target.max_position_embeddings,
            attention_bias: false,
            layers: vec![LayerKind::Full; layers],
            sliding_window: None,
            is_causal: None,
            block_size,
            mask_token_id,
            target_layers: default_layers(target.num_hidden_layers, layers),
            num_target_layers: target.num_hidden_layers,
            convolution: None,
            selector: None,
            chain: None,
            bend: Bend::default(),
            embedding_scale: None,
            initializer_range: 0.02,
        }
    }

    /// Width of all query heads.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key-value heads.
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Whether it proposes through a head of its own, over some of the target's tokens.
    pub fn has_own_head(&self) -> bool {
        self.draft_vocab_size != self.vocab_size
    }

    /// Whether a slot of a layer sees no slot after it.
    pub fn is_causal_in(&self, kind: LayerKind) -> bool {
        self.is_causal.unwrap_or(kind == LayerKind::Sliding)
    }

    /// These sizes as read, unless there are problems: those of reading, or else what does not fit together.
    pub(super) fn checked(self, read: Problems) -> Result<Self, Problems> {
        let mut problems = if read.0.is_empty() { self.problems() } else { read };
        if problems.0.is_empty()
            && let Err(error) = self.rope.build(self.head_dim)
        {
            problems.push(without_backtrace(error));
        }
        if problems.0.is_empty() { Ok(self) } else { Err(problems) }
    }

    /// What does not fit together.
    pub fn problems(&self) -> Problems {
        let mut problems = Problems::default();
        limits::check(
            &mut problems,
            &[
                ("hidden_size", self.hidden_size, limits::HIDDEN),
                ("intermediate_size", self.intermediate_size, limits::INNER),
                ("num_attention_heads", self.num_attention_heads, limits::HEADS),
                ("num_key_value_heads", self.num_key_value_heads, limits::HEADS),
                ("head_dim", self.head_dim, limits::HEAD_DIM),
                ("vocab_size", self.vocab_size, limits::VOCABULARY),
                ("draft_vocab_size", self.draft_vocab_size, self.vocab_size),
                ("max_position_embeddings", self.max_position_embeddings, limits::CONTEXT),
                ("num_hidden_layers", self.layers.len(), limits::LAYERS),
                ("num_target_layers", self.num_target_layers, limits::LAYERS),
                ("block_size", self.block_size, Self::SLOTS),
            ],
        );
        let heads = (self.num_attention_heads, self.num_key_value_heads);
        limits::heads(&mut problems, heads, self.head_dim);
        limits::norm_eps(&mut problems, self.rms_norm_eps);
        if self.mask_token_id as usize >= self.vocab_size {
            problems.push(format!(
                "`mask_token_id` = {} is not a row of a table of {} tokens",
                self.mask_token_id, self.vocab_size
            ));
        }
        self.check_layers(&mut problems);
        if let Some(ConvolutionSizes { kernel_size, group_size }) = self.convolution {
            limits::check(&mut problems, &[("conv_kernel_size", kernel_size, Self::SLOTS)]);
            if group_size == 0 || !self.hidden_size.is_multiple_of(group_size) {
                problems.push(format!(
                    "`conv_group_size` = {group_size} does not divide `hidden_size` = {}",
                    self.hidden_size
                ));
            }
        }
        if let Some(SelectorSizes { rank, top_k }) = self.selector {
            limits::check(
                &mut problems,
                &[
                    ("selector_rank", rank, limits::HIDDEN),
                    ("selector_top_k", top_k, self.vocab_size),
                ],
            );
        }
        if self.has_own_head() && self.selector.is_some() {
            problems.push(
                "a smaller `draft_vocab_size` stands beside a selector, which knows all tokens",
            );
        }
        if let Some(ChainSizes { rank, .. }) = self.chain {
            if rank > limits::HIDDEN {
                problems.push(format!("`markov_rank` = {rank} is more than {}", limits::HIDDEN));
            }
            if self.selector.is_some() || self.convolution.is_some() {
                problems.push("`markov_rank` stands beside the keys of a selector or convolutions");
            }
        }
        problems
    }

    /// Tokens that a block proposes: one for every slot but the anchor's, or also for that one.
    pub fn proposals(&self) -> usize {
        self.block_size - usize::from(self.chain.is_none())
    }

    /// What stands in the slots of blocks, and at which positions, `[R]` each: the known token of every
    /// block at its position, then mask tokens at those that follow.
    pub fn inputs(&self, starts: impl Iterator<Item = (u32, u32)>) -> (Vec<u32>, Vec<u32>) {
        let slots = self.block_size as u32;
        let of_block = |(token, position)| {
            (0..slots).map(move |k| (if k == 0 { token } else { self.mask_token_id }, position + k))
        };
        starts.flat_map(of_block).unzip()
    }

    /// The same network without heads and without what DFlash2 adds.
    #[must_use]
    pub fn plain(&self) -> Self {
        Self { convolution: None, selector: None, chain: None, ..self.clone() }
    }

    fn check_layers(&self, problems: &mut Problems) {
        let slides = self.layers.contains(&LayerKind::Sliding);
        match self.sliding_window {
            None if slides => problems.push("`layer_types` slide, but `sliding_window` is missing"),
            Some(window) if !(1..=limits::CONTEXT).contains(&window) => {
                problems.push(format!(
                    "`sliding_window` = {window} must be in 1 to {}",
                    limits::CONTEXT
                ));
            }
            _ => {}
        }
        let ids: Vec<usize> = self.target_layers.iter().map(|layer| layer.0).collect();
        if ids.is_empty() || !ids.windows(2).all(|pair| pair[0] < pair[1]) {
            problems.push(format!("`target_layer_ids` = {ids:?} do not ascend"));
        }
        if let Some(id) = ids.iter().find(|id| **id >= self.num_target_layers) {
            problems.push(format!(
                "`target_layer_ids` name layer {id} of a target with {} layers (counted from 0)",
                self.num_target_layers
            ));
        }
    }

    /// What does not fit the target, or itself.
    pub fn problems_with(&self, target: &TargetConfig) -> Problems {
        let mut problems = self.problems();
        problems.push_unlike_target(&[
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
        ]);
        if !self.bends_like(target) {
            let (said, own) = (self.bend, target.bend());
            problems.push(format!("the file bends logits by {said:?}, the target by {own:?}"));
        }
        if let Some(scale) = self.embedding_scale.filter(|_| !self.scales_like(target)) {
            let own = target.parts.embedding_scale.unwrap_or(1.0);
            problems.push(format!(
                "the draft multiplies embeddings by {scale:?}, the target by {own:?}"
            ));
        }
        problems
    }

    /// Whether the draft reads embeddings as they are stored, or multiplies them as the target does. Some trainers
    /// round the factor to bf16.
    pub fn scales_like(&self, target: &TargetConfig) -> bool {
        self.embedding_scale.is_none_or(|said| {
            let own = target.parts.embedding_scale.unwrap_or(1.0);
            (said - own).abs() <= own.abs() / 256.0
        })
    }

    /// Whether files say of logits what the target does to them, or nothing.
    pub fn bends_like(&self, target: &TargetConfig) -> bool {
        // Files hold the reciprocal, some of them in 32 bits.
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
        let (said, own) = (self.bend, target.bend());
        let is_capped_alike = match (said.softcap, own.softcap) {
            (Some(said), Some(own)) => close(said, own),
            (said, own) => said.is_none() && own.is_none(),
        };
        said.is_plain() || (close(said.divisor, own.divisor) && is_capped_alike)
    }
}

/// The layers of a target of `target_layers` that a draft of `layers` reads by default:
/// `round(1 + i (n − 4) / (L − 1))` with ties to even, `⌊n/2⌋` for one layer. A target of few layers
/// has fewer different ones.
pub fn default_layers(target_layers: usize, layers: usize) -> Vec<LayerId> {
    if layers <= 1 {
        return vec![LayerId(target_layers / 2)];
    }
    let step = (target_layers as f64 - 4.0).max(0.0) / (layers - 1) as f64;
    let id = |i: usize| (1.0 + i as f64 * step).round_ties_even() as usize;
    let mut ids: Vec<LayerId> =
        (0..layers).map(|i| LayerId(id(i).min(target_layers.saturating_sub(1)))).collect();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_layers_round_ties_to_even() {
        let ids = |n, l| default_layers(n, l).into_iter().map(|id| id.0).collect::<Vec<_>>();
        assert_eq!(ids(36, 5), [1, 9, 17, 25, 33]);
        assert_eq!(ids(28, 5), [1, 7, 13, 19, 25]);
        assert_eq!(ids(26, 5), [1, 6, 12, 18, 23]);
        assert_eq!(ids(28, 1), [14]);
        assert_eq!(ids(4, 3), [1]);
        assert_eq!(ids(1, 2), [0]);
    }
}
