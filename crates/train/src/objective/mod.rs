//! What a draft method minimises.

mod glide;

use longdraft_data::Batch;
use longdraft_models::draft::Draft;

use crate::error::Result;
use crate::features::{BatchFeatures, FeatureNeeds};
use crate::loss::Loss;

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
