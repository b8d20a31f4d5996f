//! The keys of `draft.method: dflash`.

use longdraft_models::draft::Init;
use longdraft_models::draft::block::BlockConfig;
use longdraft_models::{LayerId, TargetConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::block::{
    BlockAttention, BlockBudget, BlockStarts, SlotKeys, SlotLabels, SlotLoss,
};

/// Blocks of a row where nothing else is asked for.
const BLOCKS_PER_ROW: usize = 512;

/// Layers over several of the target's layers that propose a whole block in one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dflash {
    /// Layers of the draft.
    pub layers: usize,
    /// Layers of the target whose outputs are read, counted from 0 and ascending (default: those of `draft.from`, else
    /// as many as the draft has, from 1 to n − 3 of n in equal steps).
    pub target_layers: Option<Vec<i64>>,
    /// Slots of a block: the token that is known, and those that are proposed.
    pub block_size: usize,
    /// Key-value heads of a layer (default: those of `draft.from`, else the target's). Small targets have few; more of
    /// them let a slot read more of every token.
    pub num_key_value_heads: Option<usize>,
    /// Tokens that the draft can propose, the most frequent supervised ones, through a head of its own: these rows of
    /// the target's, which are not trained (default: all, through the target's head). A draft keeps those that it has.
    /// `dflash2` refuses it, because its selector knows all tokens. So do the losses `reverse_kl`, `jsd` and `renyi`.
    pub draft_vocab_size: Option<usize>,
    /// What slots see.
    #[serde(flatten)]
    pub attention: BlockAttention,
    /// Token that stands in slots that are not known yet (default: that of `draft.from`, else the first
    /// one that the tokenizer and the documents do not use).
    pub mask_token_id: Option<u32>,
    /// What the draft begins with if it starts from no other. `last_layer` wants the layer n − 2 of the
    /// target's n among `target_layers`: it is what the last one reads.
    pub init: Init,
    /// Blocks that are drawn of a row, at most (default: 512).
    pub blocks_per_row: Option<usize>,
    /// Supervised tokens of a row for every block that is drawn of it, in place of `blocks_per_row`.
    pub tokens_per_block: Option<usize>,
    /// Which supervised tokens may begin a block: those that a supervised one follows, those whose whole block lies in
    /// their document (all but one at most, as SpecForge at first), or all but the row's last `block_size` (as
    /// speculators).
    pub block_starts: BlockStarts,
    /// How a slot's distribution is compared with what it learns: the target's, or without `soft_weight` its label as a
    /// distribution of one token. `reverse_kl`, `jsd` and `renyi` compare whole distributions.
    pub loss: SlotLoss,
    /// Which tokens a slot takes for right: those of the text, or what the target finds most likely after it.
    pub labels: SlotLabels,
    /// Weight λ of the target's distribution in a slot's loss, 0 to 1; the rest is cross-entropy with the label.
    pub soft_weight: f64,
    /// Slots after which the weight of `decay` has fallen to 1/e (default: 1 + 3/8 of the block).
    pub slot_decay: Option<f64>,
    /// What slots weigh.
    #[serde(flatten)]
    pub slots: SlotKeys,
}

impl Default for Dflash {
    fn default() -> Self {
        Self {
            layers: 5,
            target_layers: None,
            block_size: 16,
            num_key_value_heads: None,
            draft_vocab_size: None,
            attention: BlockAttention::default(),
            mask_token_id: None,
            init: Init::default(),
            blocks_per_row: None,
            tokens_per_block: None,
            block_starts: BlockStarts::default(),
            loss: SlotLoss::default(),
            labels: SlotLabels::default(),
            soft_weight: 0.0,
            slot_decay: None,
            slots: SlotKeys::default(),
        }
    }
}

impl Dflash {
    /// The network that it asks for, with a mask token.
    pub(in crate::method) fn network(
        &self,
        target: &TargetConfig,
        mask_token_id: u32,
    ) -> BlockConfig {
        let mut config =
            BlockConfig::for_target(target, self.layers, self.block_size, mask_token_id);
        if let Some(ids) = &self.target_layers {
            // An id that is no layer is one beyond the target's.
            let layer = |id: &i64| LayerId(usize::try_from(*id).unwrap_or(usize::MAX));
            config.target_layers = ids.iter().map(layer).collect();
        }
        if let Some(heads) = self.num_key_value_heads {
            config.num_key_value_heads = heads;
        }
        if let Some(size) = self.draft_vocab_size {
            config.draft_vocab_size = size.min(target.vocab_size);
        }
        self.attention.set(&mut config);
        config
    }

    /// How many blocks are drawn of a row.
    pub(in crate::method) fn budget(&self) -> BlockBudget {
        match self.tokens_per_block {
            Some(tokens) => BlockBudget::PerTokens(tokens),
            None => BlockBudget::PerRow(self.blocks_per_row.unwrap_or(BLOCKS_PER_ROW)),
        }
    }

    /// γ of the decaying weights. The published values, 7 for 16 slots and 4 for 8, lie on this line.
    pub(super) fn decay(&self) -> f64 {
        self.slot_decay.unwrap_or(1.0 + 0.375 * self.block_size as f64)
    }
}
