//! DeepSeek-V3 (<https://arxiv.org/abs/2412.19437>): keys and values are made of a short latent row a token, which
//! is what is cached; experts by groups of logistic scores.

use serde_json::Value;

use super::super::experts::ExpertsConfig;
use super::super::latent::LatentConfig;
use super::super::parts::{Rotary, Router};
use super::super::rope::yarn_attention_factor;
use super::{Defaults, JsonKeys, Parts, Sizes, limits};

pub(super) fn defaults() -> Defaults {
    Defaults {
        max_position_embeddings: 4096,
        norm_eps: ("rms_norm_eps", 1e-6),
        ..Defaults::default()
    }
}

/// Sizes of the latent attention.
fn latent(keys: &mut JsonKeys<'_>) -> LatentConfig {
    let query_rank = match keys.value.get("q_lora_rank") {
        None => Some(1536),
        Some(Value::Null) => None,
        Some(_) => keys.size("q_lora_rank"),
    };
    LatentConfig {
        query_rank,
        rank: keys.size("kv_lora_rank").unwrap_or(512),
        plain_dim: keys.size("qk_nope_head_dim").unwrap_or(128),
        turned_dim: keys.size("qk_rope_head_dim").unwrap_or(64),
        value_dim: keys.size("v_head_dim").unwrap_or(128),
        interleaved: keys.flag("rope_interleave", true),
    }
}

/// Dim of a head of queries and keys.
pub(in super::super) fn head_dim(keys: &mut JsonKeys<'_>) -> usize {
    latent(keys).head_dim()
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        let other = keys.value.get(key).filter(|value| !value.is_null());
        if let Some(other) = other.filter(|other| other.as_str() != Some(known)) {
            keys.problems.push(format!("`{key}` = {other} is not supported (\"{known}\" is)"));
        }
    }
    if keys.size("moe_layer_freq").is_some_and(|every| every != 1) {
        keys.problems.push("`moe_layer_freq` other than 1 is not supported");
    }
    let latent = latent(keys);
    let head_dim = sizes.head_dim as f64;
    let stretch = score_stretch(keys);
    Parts {
        latent: Some(latent),
        rotary: Rotary { dimensions: Some(latent.turned_dim), ..Rotary::default() },
        router: Router::Sigmoid {
            groups: keys.size("n_group").unwrap_or(8),
            kept_groups: keys.size("topk_group").unwrap_or(4),
            scale: keys.finite("routed_scaling_factor").unwrap_or(2.5),
        },
        // `q · k / √a` with `a = D / g⁴` is `q · k g² / √D`.
        query_scalar: stretch.map(|stretch| head_dim / (stretch * stretch)),
        ..Parts::default()
    }
}

/// Experts in all layers but the first ones.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> ExpertsConfig {
    let layers = keys.size("num_hidden_layers").unwrap_or(1).min(limits::LAYERS);
    let first = keys.size("first_k_dense_replace").unwrap_or(3).min(layers);
    let width = keys.size("moe_intermediate_size").unwrap_or(2048);
    let shared = keys.size("n_shared_experts").unwrap_or(1);
    ExpertsConfig {
        num_experts: keys.size("n_routed_experts").unwrap_or(256),
        num_experts_per_tok: keys.size("num_experts_per_tok").unwrap_or(8),
        moe_intermediate_size: width,
        shared_expert_intermediate_size: (shared > 0).then(|| width.saturating_mul(shared)),
        norm_topk_prob: keys.flag("norm_topk_prob", true),
        decoder_sparse_step: 1,
        mlp_only_layers: (0..first).collect(),
    }
}

/// What YaRN multiplies scores by, `(0.1 m ln(factor) + 1)²` with `m` = `mscale_all_dim`.
fn score_stretch(keys: &mut JsonKeys<'_>) -> Option<f64> {
    let rope = keys.object("rope_parameters").or_else(|| keys.object("rope_scaling"))?;
    let number = |key: &str| rope.get(key).and_then(Value::as_f64);
    let kind = ["rope_type", "type"].iter().find_map(|key| rope.get(*key).and_then(Value::as_str));
    let all = number("mscale_all_dim").filter(|all| *all != 0.0)?;
    let (factor, is_yarn) = (number("factor")?, kind == Some("yarn"));
    let plain = yarn_attention_factor(factor, None, Some(all), Some(0.0));
    is_yarn.then_some(plain * plain).filter(|stretch| stretch.is_finite() && *stretch > 0.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::TargetConfig;
    use super::*;

    fn config() -> Value {
        json!({
            "model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 61,
            "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 4,
            "q_lora_rank": null, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
            "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
            "rope_scaling": {
                "type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 64
            }
        })
    }

    #[test]
    fn scores_are_stretched_and_latent_rows_cached() {
        let read = TargetConfig::from_json(&config()).expect("valid");
        assert_eq!((read.head_dim, read.parts.rotary.dimensions), (20, Some(8)));
        assert_eq!((read.cached_values(0), read.cached_dim()), (28, 28));
        let g = 0.05 * 8.0_f64.ln() + 1.0;
        let scalar = read.parts.query_scalar.expect("a scalar");
        assert!((scalar - 20.0 / g.powi(4)).abs() < 1e-9);
        let sparse: Vec<bool> = (0..4).map(|layer| read.experts_in(layer).is_some()).collect();
        assert_eq!(sparse, [false, true, true, true]);
        assert_eq!(read.sharing_ranks(), [1]);
        let mut plain = config();
        plain["rope_scaling"] = Value::Null;
        assert_eq!(TargetConfig::from_json(&plain).expect("valid").parts.query_scalar, None);
    }

    #[test]
    fn hostile_sizes_are_named_by_key() {
        for (key, wrong) in [
            ("kv_lora_rank", json!(0)),
            ("kv_lora_rank", json!(u64::MAX)),
            ("qk_nope_head_dim", json!(u64::MAX)),
            ("v_head_dim", json!(0)),
            ("n_group", json!(0)),
            ("n_group", json!(3)),
            ("topk_group", json!(0)),
            ("topk_group", json!(5)),
            ("num_experts_per_tok", json!(7)),
            ("n_routed_experts", json!(6)),
            ("scoring_func", json!("softmax")),
            ("topk_method", json!("greedy")),
            ("moe_layer_freq", json!(2)),
        ] {
            let mut value = config();
            value[key] = wrong.clone();
            let problem = TargetConfig::from_json(&value).expect_err("invalid").to_string();
            let told = if key == "n_routed_experts" { "n_group" } else { key };
            assert!(problem.contains(told), "{key} = {wrong}: {problem}");
        }
        let mut odd = config();
        odd["qk_rope_head_dim"] = json!(7);
        assert!(TargetConfig::from_json(&odd).is_err());
    }
}
