//! The keys of `draft.method: dflash`.

use longdraft_models::draft::block::BlockConfig;
use longdraft_models::{LayerId, TargetConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::block::{BlockKeys, SlotKeys, SlotLabels, SlotLoss};

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
    /// The network and the blocks.
    #[serde(flatten)]
    pub shared: BlockKeys,
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
            shared: BlockKeys::default(),
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
        if let Some(heads) = self.shared.num_key_value_heads {
            config.num_key_value_heads = heads;
        }
        if let Some(size) = self.shared.draft_vocab_size {
            config.draft_vocab_size = size.min(target.vocab_size);
        }
        self.shared.attention.set(&mut config);
        config
    }

    /// γ of the decaying weights. The published values, 7 for 16 slots and 4 for 8, lie on this line.
    pub(super) fn decay(&self) -> f64 {
        self.slot_decay.unwrap_or(1.0 + 0.375 * self.block_size as f64)
    }
}
