//! The keys of `draft.method: dspark`.

use longdraft_models::draft::block::ChainKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::block::{BlockKeys, SlotKeys, SlotLoss};
use crate::method::dflash::Dflash;

/// Layers over several of the target's layers that propose a whole block in one pass, whose slots also see
/// the tokens chosen before them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dspark {
    /// Layers of the draft.
    pub layers: usize,
    /// Layers of the target whose outputs are read, counted from 0 and ascending (default: those of `draft.from`, else
    /// as many as the draft has, from 1 to n − 3 of n in equal steps).
    pub target_layers: Option<Vec<i64>>,
    /// Slots of a block, each of which proposes a token.
    pub block_size: usize,
    /// The network and the blocks.
    #[serde(flatten)]
    pub shared: BlockKeys,
    /// Values of a token in the head that sees the token before a slot; 0 leaves the head out.
    pub markov_rank: usize,
    /// How that head mixes the token with the slot's state. Most engines serve `vanilla` alone.
    pub markov_head: MarkovHead,
    /// Whether a head learns the chance that a slot's token is accepted.
    pub confidence: bool,
    /// Whether that head reads the token before the slot, too.
    pub confidence_reads_token: bool,
    /// Slots after which the weight of `decay` has fallen to 1/e.
    pub slot_decay: f64,
    /// Weight of the cross-entropy with the text.
    pub hard_weight: f64,
    /// How a slot's distribution is compared with the target's; `l1` is the sum of all differences.
    pub distance: SlotLoss,
    /// Weight of that distance.
    pub distance_weight: f64,
    /// Weight of the confidence head's loss.
    pub confidence_weight: f64,
    /// Weighs slots in the confidence head's loss by the chance that they are reached, instead of by their
    /// own weights, or by `decay` where these look at the draft.
    pub confidence_by_reach: bool,
    /// What slots weigh.
    #[serde(flatten)]
    pub slots: SlotKeys,
}

/// How a chain mixes the token before a slot with the slot's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MarkovHead {
    /// The token alone.
    #[default]
    Vanilla,
    /// Gated by the state.
    Gated,
    /// With a state of its own along the block.
    Rnn,
}

impl MarkovHead {
    pub(super) fn kind(self) -> ChainKind {
        match self {
            Self::Vanilla => ChainKind::Vanilla,
            Self::Gated => ChainKind::Gated,
            Self::Rnn => ChainKind::Rnn,
        }
    }

    pub(super) fn of(kind: ChainKind) -> Self {
        match kind {
            ChainKind::Vanilla => Self::Vanilla,
            ChainKind::Gated => Self::Gated,
            ChainKind::Rnn => Self::Rnn,
        }
    }
}

impl Default for Dspark {
    fn default() -> Self {
        Self {
            layers: 5,
            target_layers: None,
            block_size: 7,
            shared: BlockKeys::default(),
            markov_rank: 256,
            markov_head: MarkovHead::default(),
            confidence: true,
            confidence_reads_token: true,
            slot_decay: 4.0,
            hard_weight: 0.1,
            distance: SlotLoss::L1,
            distance_weight: 0.9,
            confidence_weight: 1.0,
            confidence_by_reach: false,
            slots: SlotKeys::default(),
        }
    }
}

impl Dspark {
    /// What it shares with `dflash`.
    pub(super) fn block(&self) -> Dflash {
        Dflash {
            layers: self.layers,
            target_layers: self.target_layers.clone(),
            block_size: self.block_size,
            shared: self.shared.clone(),
            ..Dflash::default()
        }
    }
}
