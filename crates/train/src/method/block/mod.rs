//! What methods with block drafts share: drawn blocks, weights of slots, the objective, the footprint.

mod blocks;
mod build;
mod drawn;
mod footprint;
mod measure;
mod objective;
mod recipe;
mod selected;
mod teacher;
mod weights;

pub(super) use blocks::{Slots, context, give_keys};
pub(super) use build::{build, check_start, keys_of};
pub(super) use footprint::BlockFootprint;
pub(super) use measure::replay;
pub(super) use recipe::recipe;

pub use blocks::{BlockBudget, BlockDraws};
pub use drawn::DrawnBlocks;
pub use objective::{BlockLoss, BlockObjective};
pub use selected::SelectorLoss;
pub use teacher::SoftLoss;
pub use weights::SlotWeights;
