//! The keys of `draft.method: dflash`.

use longdraft_models::draft::Init;
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_models::{LayerId, TargetConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::block::{BlockBudget, SlotWeights};

/// Blocks of a row where nothing else is asked for.
const BLOCKS_PER_ROW: usize = 512;

/// Layers over several of the target's layers that propose a whole block in one pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dflash {
    /// Layers of the draft.
    pub layers: usize,
    /// Layers of the target whose outputs are read, counted from 0 and ascending (default: as many as
    /// the draft has, from 1 to n − 3 of n in equal steps).
    pub target_layers: Option<Vec<usize>>,
    /// Slots of a block: the token that is known, and those that are proposed.
    pub block_size: usize,
    /// Tokens of the context that a slot sees, in every layer (default: all). With a window, a round
    /// costs the same however long the text is.
    pub sliding_window: Option<usize>,
    /// Whether a slot sees no slot after it.
    pub causal: bool,
    /// Token that stands in slots that are not known yet (default: that of `draft.from`, or the first
    /// one that the tokenizer and the documents do not use).
    pub mask_token_id: Option<u32>,
    /// What the draft begins with if it starts from no other. `last_layer` wants the layer n − 2 of the
    /// target's n among `target_layers`: it is what the last one reads.
    pub init: Init,
    /// Blocks that are drawn of a row, at most (default: 512).
    pub blocks_per_row: Option<usize>,
    /// Supervised tokens of a row for every block that is drawn of it, in place of `blocks_per_row`.
    pub tokens_per_block: Option<usize>,
    /// What a slot's loss is multiplied by.
    pub slot_weights: SlotWeights,
    /// Slots after which the weight of `decay` has fallen to 1/e (default: 1 + 3/8 of the block).
    pub slot_decay: Option<f64>,
    /// Share α of the chance of a slot that does not depend on the draft, 0 to 1, for `dpace` (default: 0.5).
    pub dpace_alpha: Option<f64>,
    /// Weight λ of the target's distribution in a slot's loss, 0 to 1; the rest learns the text.
    pub soft_weight: f64,
    /// Divides the loss of `dpace` by the rows instead of by the weights, as its first trainer did.
    pub divide_by_rows: bool,
}

impl Default for Dflash {
    fn default() -> Self {
        Self {
            layers: 5,
            target_layers: None,
            block_size: 16,
            sliding_window: None,
            causal: false,
            mask_token_id: None,
            init: Init::default(),
            blocks_per_row: None,
            tokens_per_block: None,
            slot_weights: SlotWeights::default(),
            slot_decay: None,
            dpace_alpha: None,
            soft_weight: 0.0,
            divide_by_rows: false,
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
            config.target_layers = ids.iter().map(|id| LayerId(*id)).collect();
        }
        if self.sliding_window.is_some() {
            config.layers = vec![LayerKind::Sliding; self.layers];
            config.sliding_window = self.sliding_window;
        }
        config.is_causal = Some(self.causal);
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
