//! What a stage cannot do whose ranks share the target's layers.

use longdraft_models::TargetConfig;
use longdraft_models::target_model::Target;

use super::TrainConfig;
use crate::error::{Result, TrainError};

impl TrainConfig {
    /// Refuses what ranks that share the target's layers cannot do, before anything is loaded.
    ///
    /// # Errors
    /// - features are stored: no layers run; as `ParallelConfig::check_tensor`
    /// - the target's configuration cannot be read
    pub fn check_shared_layers(&self, ranks: usize) -> Result<()> {
        if self.parallel.tensor <= 1 {
            return Ok(());
        }
        self.check_layers_of(ranks, &Target::open_config(&self.target)?)
    }

    /// The same for a target of these sizes.
    ///
    /// # Errors
    /// - as [`Self::check_shared_layers`]
    pub fn check_layers_of(&self, ranks: usize, target: &TargetConfig) -> Result<()> {
        let tensor = self.parallel.tensor;
        if tensor <= 1 {
            return Ok(());
        }
        if let Some(store) = self.train.features.store() {
            return Err(TrainError::Unsupported {
                problem: format!(
                    "`parallel.tensor: {tensor}` shares the target's layers, and none run with the features \
                     stored at `train.features: {store}`: set `parallel.tensor: 1`"
                ),
            });
        }
        Ok(self.parallel.check_tensor(ranks, target)?)
    }
}
