//! What a draft method minimises.

mod eagle3;
mod glide;

use longdraft_data::Batch;
use longdraft_models::draft::Draft;

use crate::error::Result;
use crate::features::{BatchFeatures, FeatureNeeds};
use crate::loss::Loss;

pub use eagle3::{
    Eagle3Compat, Eagle3Loss, Eagle3Metrics, Eagle3Objective, Eagle3ObjectiveConfig, Eagle3Outcome,
    MaskRule, OovRows, RowPlan, StepCounts,
};
pub use glide::{GlideObjective, GlideObjectiveConfig, SoftTargetKind, TailKind};

/// A draft with its loss. It cannot tell where features come from.
pub trait Objective {
    /// The draft being trained.
    fn draft(&self) -> &dyn Draft;

    /// What it needs of the target for every batch.
    fn needs(&self) -> FeatureNeeds;

    /// `Σ ℓ` over the batch's learned rows, with the gradient to the draft if `train`.
    ///
    /// # Errors
    /// - the features are not those that [`Self::needs`] names, or shapes do not fit
    fn loss(&self, batch: &Batch, features: &BatchFeatures, train: bool) -> Result<Loss>;
}
