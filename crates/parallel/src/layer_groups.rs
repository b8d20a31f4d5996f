//! Groups of ranks that share the target's layers (tensor parallel).
//!
//! ```text
//! parallel.tensor: 2 over 6 ranks
//! ranks 0 1 | 2 3 | 4 5      a copy of the target's layers in each group
//!       rows of its own for each rank, which its group runs in turn
//! ```

use std::sync::Arc;

use longdraft_models::TargetConfig;
use longdraft_models::target_model::Ranks;

use super::{ParallelConfig, World};
use crate::error::{ParallelError, Result};

impl ParallelConfig {
    /// Refuses a number of ranks that cannot share this target's layers.
    ///
    /// # Errors
    /// - `parallel.tensor` does not divide the ranks, or the target's heads or inner width
    pub fn check_tensor(&self, ranks: usize, target: &TargetConfig) -> Result<()> {
        let size = self.tensor;
        let mut problems = Vec::new();
        if !ranks.is_multiple_of(size) {
            problems.push(format!("does not divide the {ranks} ranks into groups"));
        }
        let undivided = target.sharing_problems(size);
        if !undivided.is_empty() {
            let fitting: Vec<String> =
                target.sharing_ranks().iter().map(ToString::to_string).collect();
            problems.push(format!(
                "does not divide the target's layers: {} (it may be {})",
                undivided.join(", "),
                fitting.join(", ")
            ));
        }
        if problems.is_empty() {
            return Ok(());
        }
        let problem = format!("`parallel.tensor: {size}` {}", problems.join("; it "));
        Err(ParallelError::Unsupported { problem })
    }

    /// The ranks that share the target's layers with this one, neighbours; `None` where nobody does. All
    /// ranks call it.
    ///
    /// # Errors
    /// - the ranks do not divide into such groups
    pub fn tensor_group(&self, world: &World) -> Result<Option<World>> {
        // One process alone has nothing to share.
        if self.tensor <= 1 || world.size() == 1 {
            return Ok(None);
        }
        world.neighbours("tensor", self.tensor).map(Some)
    }
}

impl World {
    /// This world as the ranks of a target.
    pub fn as_ranks(&self) -> Arc<dyn Ranks> {
        Arc::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::threads::in_threads;
    use super::*;

    #[test]
    fn what_cannot_be_shared_is_refused_with_what_can() {
        let target = json!({
            "model_type": "llama", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        });
        let target = TargetConfig::from_json(&target).expect("configuration");
        let check = |tensor: usize, ranks: usize| {
            let config = ParallelConfig { tensor, ..ParallelConfig::default() };
            config.check_tensor(ranks, &target).map_err(|error| error.to_string())
        };
        assert!(check(4, 8).is_ok() && check(1, 3).is_ok());
        let error = check(2, 3).expect_err("three ranks");
        assert_eq!(error, "`parallel.tensor: 2` does not divide the 3 ranks into groups");
        let error = check(8, 8).expect_err("eight of four heads");
        assert_eq!(
            error,
            "`parallel.tensor: 8` does not divide the target's layers: `num_key_value_heads` = 4 is not \
             a multiple of 8 (it may be 1, 2, 4)"
        );
    }

    #[test]
    fn neighbours_share_layers() {
        let config = ParallelConfig { tensor: 2, ..ParallelConfig::default() };
        let groups = in_threads(4, |world| {
            let group = config.tensor_group(&world).expect("groups").expect("a group");
            let mut members = [world.rank() as u64];
            group.all_reduce_sum(&mut members);
            (group.rank(), group.size(), members[0])
        });
        assert_eq!(groups, [(0, 2, 1), (1, 2, 1), (0, 2, 5), (1, 2, 5)]);
        assert!(config.tensor_group(&World::single()).expect("alone").is_none());
        assert!(in_threads(3, |world| config.tensor_group(&world).is_err()).iter().all(|e| *e));
    }
}
