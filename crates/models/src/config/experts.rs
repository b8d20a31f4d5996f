//! Sizes and routing of a mixture of experts.

use super::limits;
use crate::error::Problems;

/// How the sparse layers of a target are built; keys are the published ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// `E`
    pub num_experts: usize,
    /// Experts that a token visits.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width of the expert that every token visits, if there is one.
    pub shared_expert_intermediate_size: Option<usize>,
    /// Whether the weights of a token's experts sum to one.
    pub norm_topk_prob: bool,
    /// Every how many layers experts stand; the others have a plain MLP.
    pub decoder_sparse_step: usize,
    /// Layers that have a plain MLP all the same.
    pub mlp_only_layers: Vec<usize>,
}

/// Routers whose scores are logistic, with a correction that enters the choice alone; keys are the published
/// ones. The shared expert is not gated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoredRouter {
    /// Groups of experts.
    pub n_group: usize,
    /// Those that count.
    pub topk_group: usize,
    /// Factor of weights.
    pub routed_scaling_factor: f64,
}

impl ScoredRouter {
    pub(super) fn validate(&self, experts: &ExpertsConfig, problems: &mut Problems) {
        let Self { n_group, topk_group, routed_scaling_factor } = *self;
        limits::check(
            problems,
            &[("n_group", n_group, limits::EXPERTS), ("topk_group", topk_group, n_group.max(1))],
        );
        let count = experts.num_experts;
        if n_group > 0 && !count.is_multiple_of(n_group) {
            problems.push(format!("`n_group` = {n_group} does not divide {count} experts"));
        } else if let Some(of_group) = count.checked_div(n_group) {
            let (eligible, chosen) =
                (topk_group.saturating_mul(of_group), experts.num_experts_per_tok);
            if eligible < chosen {
                problems.push(format!(
                    "`num_experts_per_tok` = {chosen} exceeds the {eligible} experts of `topk_group` groups"
                ));
            }
        }
        if !routed_scaling_factor.is_finite() {
            problems.push("`routed_scaling_factor` is not finite");
        }
    }
}

impl ExpertsConfig {
    /// Whether layer `index` holds experts.
    pub fn in_layer(&self, index: usize) -> bool {
        (index + 1).is_multiple_of(self.decoder_sparse_step.max(1))
            && !self.mlp_only_layers.contains(&index)
    }

    /// Inner states that a token makes of its experts.
    pub(super) fn width_of_a_token(&self) -> usize {
        let shared = self.shared_expert_intermediate_size.unwrap_or(0);
        self.num_experts_per_tok.saturating_mul(self.moe_intermediate_size).saturating_add(shared)
    }

    pub(super) fn validate(&self, layers: usize, problems: &mut Problems) {
        let shared = self.shared_expert_intermediate_size;
        limits::check(
            problems,
            &[
                ("num_experts", self.num_experts, limits::EXPERTS),
                ("num_experts_per_tok", self.num_experts_per_tok, limits::EXPERTS),
                ("moe_intermediate_size", self.moe_intermediate_size, limits::INNER),
                ("shared_expert_intermediate_size", shared.unwrap_or(1), limits::INNER),
                ("decoder_sparse_step", self.decoder_sparse_step, limits::LAYERS),
            ],
        );
        if self.mlp_only_layers.len() > layers {
            let listed = self.mlp_only_layers.len();
            problems.push(format!("`mlp_only_layers` lists {listed} of {layers} layers"));
        }
        if self.num_experts_per_tok > self.num_experts {
            problems.push(format!(
                "`num_experts_per_tok` = {} exceeds `num_experts` = {}",
                self.num_experts_per_tok, self.num_experts
            ));
        }
        if self.num_experts.saturating_mul(layers) > limits::ALL_EXPERTS {
            problems.push(format!(
                "`num_experts` = {} in each of {layers} layers: more than {} in all",
                self.num_experts,
                limits::ALL_EXPERTS
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_layers_follow_the_step_and_the_exceptions() {
        let mut config = ExpertsConfig {
            num_experts: 4,
            num_experts_per_tok: 2,
            moe_intermediate_size: 8,
            shared_expert_intermediate_size: None,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: vec![1],
        };
        let sparse = |config: &ExpertsConfig| -> Vec<usize> {
            (0..6).filter(|layer| config.in_layer(*layer)).collect()
        };
        assert_eq!(sparse(&config), [0, 2, 3, 4, 5]);
        config.decoder_sparse_step = 2;
        assert_eq!(sparse(&config), [3, 5]);
    }
}
