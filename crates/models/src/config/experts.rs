//! Sizes and routing of a mixture of experts.

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

impl ExpertsConfig {
    /// Most experts of a target in all: a limit on what a wrong file can ask for.
    const LARGEST: usize = 1 << 20;

    /// Whether layer `index` holds experts.
    pub fn in_layer(&self, index: usize) -> bool {
        (index + 1).is_multiple_of(self.decoder_sparse_step.max(1))
            && !self.mlp_only_layers.contains(&index)
    }

    pub(super) fn validate(&self, layers: usize, largest: usize, problems: &mut Problems) {
        let sizes = [
            ("num_experts", Some(self.num_experts)),
            ("num_experts_per_tok", Some(self.num_experts_per_tok)),
            ("moe_intermediate_size", Some(self.moe_intermediate_size)),
            ("shared_expert_intermediate_size", self.shared_expert_intermediate_size),
            ("decoder_sparse_step", Some(self.decoder_sparse_step)),
        ];
        for (name, size) in sizes {
            if size.is_some_and(|size| size == 0 || size > largest) {
                let size = size.unwrap_or_default();
                problems.push(format!("`{name}` = {size} is not between 1 and {largest}"));
            }
        }
        if self.num_experts_per_tok > self.num_experts {
            problems.push(format!(
                "`num_experts_per_tok` = {} exceeds `num_experts` = {}",
                self.num_experts_per_tok, self.num_experts
            ));
        }
        if self.num_experts.saturating_mul(layers) > Self::LARGEST {
            problems.push(format!(
                "`num_experts` = {} in each of {layers} layers: more than {} in all",
                self.num_experts,
                Self::LARGEST
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
