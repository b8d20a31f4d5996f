//! The keys of `draft.method: dflash2`: those of `dflash`, and its own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::dflash::Dflash;

/// A DFlash draft with convolutions along the slots, whose tokens are chosen among the best of a slot by
/// the token before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Dflash2 {
    /// The keys of `dflash`.
    #[serde(flatten)]
    pub block: Dflash,
    /// Slots that a convolution reads: its own, and those before it.
    pub conv_kernel_size: usize,
    /// Channels that share a kernel that is computed from the input; divides the target's width.
    pub conv_group_size: usize,
    /// Values of a token in each of the selector's two codebooks.
    pub selector_rank: usize,
    /// Candidates of a slot.
    pub selector_top_k: usize,
    /// Weight of the selector's loss beside that of the slots.
    pub selector_weight: f64,
    /// Share of all steps, 0 to 1, over which that weight grows from 0 (published: 0.0005).
    pub selector_ramp: f64,
    /// Divides the selector's loss by the weights of slots whose label is a candidate, instead of by
    /// those of all slots.
    pub selector_over_hits: bool,
    /// Puts a label that is no candidate in the place of the weakest one, so that the selector learns at every slot, as
    /// earlier trainers did; not counted as found.
    pub selector_keeps_labels: bool,
    /// Whether the selector's loss trains the selector alone, and leaves the draft's layers to the loss of the slots.
    pub selector_stops_gradient: bool,
}

impl Default for Dflash2 {
    fn default() -> Self {
        Self {
            block: Dflash::default(),
            conv_kernel_size: 2,
            conv_group_size: 16,
            selector_rank: 256,
            selector_top_k: 16,
            selector_weight: 1.0,
            selector_ramp: 0.0,
            selector_over_hits: false,
            selector_keeps_labels: false,
            selector_stops_gradient: false,
        }
    }
}
