//! What methods with block drafts share: drawn blocks, weights of slots, the objective, the footprint.

mod attention;
mod blocks;
mod build;
mod divergence;
mod drawn;
mod footprint;
mod heads;
mod keys;
mod labels;
mod loss;
mod measure;
mod objective;
mod recipe;
mod selected;
mod slot_keys;
mod slot_loss;
mod teacher;
mod weights;

pub(super) use blocks::{Slots, context, give_keys};
pub(super) use build::{OPEN_KEYS, check_start, keys_of, objective};
pub(super) use footprint::BlockFootprint;
pub(super) use heads::learned_loss;
pub(super) use measure::{of_whole_row, replay};
pub(super) use recipe::recipe;
pub(super) use slot_loss::{Factors, Terms};
pub(super) use weights::{divisor, reach};

pub use attention::{BlockAttention, LayerType};
pub use blocks::{BlockBudget, BlockDraws, BlockStarts};
pub use drawn::DrawnBlocks;
pub use keys::BlockKeys;
pub use labels::SlotLabels;
pub use loss::BlockLoss;
pub use objective::BlockObjective;
pub use selected::SelectorLoss;
pub use slot_keys::SlotKeys;
pub use slot_loss::{SlotForm, SlotLoss};
pub use teacher::SoftLoss;
pub use weights::{Divisor, SlotWeights};
