//! How many ranks can share a target's layers.

use super::{QkNorm, TargetConfig};

impl TargetConfig {
    /// What keeps `ranks` ranks from sharing the layers (tensor parallel), by key; nothing if they can.
    pub fn sharing_problems(&self, ranks: usize) -> Vec<String> {
        if ranks > 1 && self.is_recurrent() {
            let problem = "layers with a recurrent state are not shared by ranks";
            return vec![problem.to_owned()];
        }
        if ranks > 1 && !self.parts.heads.is_empty() {
            return vec!["layers whose heads differ are not shared by ranks".to_owned()];
        }
        if ranks > 1 && self.parts.latent.is_some() {
            return vec!["layers with latent attention are not shared by ranks".to_owned()];
        }
        let undivided = self.shared_sizes().into_iter().filter(|(_, size)| !fits(*size, ranks));
        let told =
            undivided.map(|(key, size)| format!("`{key}` = {size} is not a multiple of {ranks}"));
        let whole = (ranks > 1 && self.qk_norm() == QkNorm::Whole)
            .then(|| "norms over all of the queries and keys are not shared by ranks".to_owned());
        told.chain(whole).collect()
    }

    /// The numbers of ranks that can share the layers, from 1.
    pub fn sharing_ranks(&self) -> Vec<usize> {
        let can = |ranks: &usize| self.sharing_problems(*ranks).is_empty();
        (1..=self.num_key_value_heads).filter(can).collect()
    }

    /// What is cut into as many parts as there are ranks.
    fn shared_sizes(&self) -> Vec<(&'static str, usize)> {
        let mut sizes = vec![
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
        ];
        if (0..self.num_hidden_layers).any(|layer| self.experts_in(layer).is_none()) {
            sizes.push(("intermediate_size", self.intermediate_size));
        }
        if let Some(experts) = &self.experts {
            sizes.push(("moe_intermediate_size", experts.moe_intermediate_size));
            let shared = experts.shared_expert_intermediate_size;
            sizes.extend(shared.map(|size| ("shared_expert_intermediate_size", size)));
        }
        sizes
    }
}

fn fits(size: usize, ranks: usize) -> bool {
    ranks > 0 && size.is_multiple_of(ranks)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn heads_and_inner_widths_limit_how_many_ranks_share_a_layer() {
        let config = json!({
            "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "num_experts": 3,
            "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0],
        });
        let config = TargetConfig::from_json(&config).expect("configuration");
        assert_eq!(config.sharing_ranks(), [1, 2, 4]);
        assert!(config.sharing_problems(4).is_empty());
        assert_eq!(
            config.sharing_problems(8),
            ["`moe_intermediate_size` = 12 is not a multiple of 8"]
        );
        assert_eq!(config.sharing_problems(5).len(), 4);
        assert_eq!(config.sharing_problems(0).len(), 4);
    }
}
