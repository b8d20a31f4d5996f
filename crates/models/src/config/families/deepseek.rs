//! DeepSeek-V3 (<https://arxiv.org/abs/2412.19437>): keys and values are made of a short latent row a token, which
//! is what is cached; experts by groups of logistic scores. GGUF files of `deepseek2` are these, and DeepSeek-V2s, whose
//! experts are chosen by softmax (<https://arxiv.org/abs/2405.04434>).

use serde_json::Value;

use super::super::experts::ExpertsConfig;
use super::super::gguf::LOG_MULTIPLIER;
use super::super::latent::LatentConfig;
use super::super::parts::{Rotary, Router};
use super::super::rope::yarn_growth;
use super::{Defaults, GgufKeys, JsonKeys, OwnSizes, Parts, Sizes, routed_experts};

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
    let router = Router::Sigmoid {
        groups: keys.size("n_group").unwrap_or(8),
        kept_groups: keys.size("topk_group").unwrap_or(4),
        scale: keys.finite("routed_scaling_factor").unwrap_or(2.5),
    };
    parts(latent(keys), router, sizes, score_stretch(keys))
}

/// The family's table; YaRN multiplies scores by `stretch`, if by anything.
fn parts(latent: LatentConfig, router: Router, sizes: Sizes, stretch: Option<f64>) -> Parts {
    let head_dim = sizes.head_dim as f64;
    Parts {
        latent: Some(latent),
        rotary: Rotary { dimensions: Some(latent.turned_dim), ..Rotary::default() },
        router,
        // `q · k / √a` with `a = D / g⁴` is `q · k g² / √D`.
        query_scalar: stretch.map(|stretch| head_dim / (stretch * stretch)),
        ..Parts::default()
    }
}

/// Experts in all layers but the first ones.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> ExpertsConfig {
    routed_experts(keys, [256, 2048, 3])
}

/// What any stretching multiplies scores by, `(0.1 m ln(factor) + 1)²` with `m` = `mscale_all_dim`.
fn score_stretch(keys: &mut JsonKeys<'_>) -> Option<f64> {
    let rope = keys.rotary_keys()?;
    let number = |key: &str| rope.get(key).and_then(Value::as_f64);
    let kind = ["rope_type", "type"].iter().find_map(|key| rope.get(*key).and_then(Value::as_str));
    let all = number("mscale_all_dim").filter(|all| *all != 0.0)?;
    let (factor, stretches) = (number("factor")?, kind.is_some_and(|kind| kind != "default"));
    let plain = yarn_growth(factor, all);
    stretches.then_some(plain * plain).filter(|stretch| stretch.is_finite() && *stretch > 0.0)
}

/// A head has two lengths in newer GGUF files, as what is cached and as what attends; older ones have the second.
/// The number of key heads is that of what is cached, 1, in the newer ones.
pub(super) fn own_sizes(keys: &GgufKeys<'_>, heads: usize) -> OwnSizes {
    let length = keys.number("attention.key_length_mla").map(|length| length as usize);
    OwnSizes { head_dim: length, kv_heads: Some(heads), intermediate_size: None }
}

pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    if keys.number("attention.temperature_scale").is_some_and(|scale| scale != 0.0) {
        keys.problems.push(
            "`deepseek2.attention.temperature_scale`: queries that grow with their position are not \
             read in layers of latent attention",
        );
    }
    let latent = latent_of_gguf(keys, sizes);
    let router = router_of_gguf(keys);
    let stretch = score_stretch_of_gguf(keys);
    parts(latent, router, sizes, stretch)
}

/// Sizes of the latent attention; tensors say whether queries have a rank, whatever the keys do.
fn latent_of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> LatentConfig {
    let turned_dim = keys.size("rope.dimension_count");
    if turned_dim >= sizes.head_dim {
        keys.problems.push(format!(
            "`deepseek2.rope.dimension_count` = {turned_dim} leaves nothing of a head of {}",
            sizes.head_dim
        ));
    }
    let of_heads = "attention.value_length_mla";
    let value_length = keys.number(of_heads).map_or("attention.value_length", |_| of_heads);
    let has_rank = keys.holds("attn_q_a.weight");
    LatentConfig {
        query_rank: has_rank.then(|| keys.size("attention.q_lora_rank")),
        rank: keys.size("attention.kv_lora_rank"),
        plain_dim: sizes.head_dim.saturating_sub(turned_dim),
        turned_dim,
        value_dim: keys.size(value_length),
        interleaved: true,
    }
}

/// What scores go through; files that do not say have the sigmoid if they correct the choice.
fn router_of_gguf(keys: &mut GgufKeys<'_>) -> Router {
    let scale = keys.scale_or_none("expert_weights_scale").unwrap_or(1.0);
    let mut count = |key: &str| {
        let given = keys.number(key).filter(|count| *count != 0.0);
        given.and_then(|_| keys.whole(key)).unwrap_or(1)
    };
    let (groups, kept_groups) = (count("expert_group_count"), count("expert_group_used_count"));
    let corrects = keys.holds("exp_probs_b.bias");
    let kind =
        keys.number("expert_gating_func").unwrap_or(if corrects { SIGMOID } else { SOFTMAX });
    if (kind - SIGMOID).abs() < 0.5 {
        return Router::Sigmoid { groups, kept_groups, scale };
    }
    let problem = if (kind - SOFTMAX).abs() >= 0.5 {
        format!(
            "`deepseek2.expert_gating_func` = {kind} is not {SOFTMAX} (softmax) or {SIGMOID} (sigmoid)"
        )
    } else if corrects {
        "corrections of a choice by softmax (`exp_probs_b`) are not read".to_owned()
    } else if groups > 1 && kept_groups < groups {
        format!("{kept_groups} of {groups} groups of a choice by softmax are not read")
    } else {
        return Router::ScaledSoftmax { scale };
    };
    keys.problems.push(problem);
    Router::ScaledSoftmax { scale }
}

/// How the format numbers what scores go through.
const SOFTMAX: f64 = 1.0;
const SIGMOID: f64 = 2.0;

/// What YaRN multiplies scores by, as the format's reader has it: `(a (0.1 m ln(factor) + 1))²`. Converters store
/// `0.1 m` as an f32; `a` is the factor on cos and sin.
fn score_stretch_of_gguf(keys: &mut GgufKeys<'_>) -> Option<f64> {
    let stored = keys.finite(LOG_MULTIPLIER).filter(|stored| *stored != 0.0)?;
    let all = f64::from(stored as f32 / 0.1_f32);
    let factor = keys.yarn_factor()?;
    let plain = yarn_growth(factor, all);
    let plain = plain * keys.number("rope.scaling.attn_factor").unwrap_or(1.0);
    Some(plain * plain).filter(|stretch| stretch.is_finite() && *stretch > 0.0)
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
        let mut linear = config();
        linear["rope_scaling"]["type"] = json!("linear");
        assert_eq!(
            TargetConfig::from_json(&linear).expect("valid").parts.query_scalar,
            Some(scalar)
        );
        let mut plain = config();
        plain["rope_scaling"]["type"] = json!("default");
        assert_eq!(TargetConfig::from_json(&plain).expect("valid").parts.query_scalar, None);
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
