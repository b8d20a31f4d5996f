//! The keys of the network and of the blocks, beside sizes.

use longdraft_models::draft::Init;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::attention::BlockAttention;
use super::blocks::{BlockBudget, BlockStarts};

/// Blocks of a row where nothing else is asked for.
const BLOCKS_PER_ROW: usize = 512;

/// Keys that all block drafts share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BlockKeys {
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
}

impl BlockKeys {
    /// How many blocks are drawn of a row.
    pub(in crate::method) fn budget(&self) -> BlockBudget {
        match self.tokens_per_block {
            Some(tokens) => BlockBudget::PerTokens(tokens),
            None => BlockBudget::PerRow(self.blocks_per_row.unwrap_or(BLOCKS_PER_ROW)),
        }
    }

    /// The token of unknown slots where only sizes count: one more or less in the table changes none.
    pub(in crate::method) fn any_mask_token(&self) -> u32 {
        self.mask_token_id.unwrap_or_default()
    }
}
