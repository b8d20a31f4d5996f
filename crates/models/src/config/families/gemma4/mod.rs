//! Gemma 4: norms on both sides as in Gemma 3, norms on values too, wider heads in full layers, late layers that read
//! earlier ones' keys and values, tables of inputs for every layer, experts beside an MLP.

mod gguf;

use serde_json::{Value, json};

use super::super::experts::ExpertsConfig;
use super::super::parts::{Activation, NormPlaces};
use super::super::shared_keys::LayerHeads;
use super::{BY_LAYER, Defaults, JsonKeys, Parts, RopeParameters, Sizes, limits};
use crate::error::Problems;

pub(super) use gguf::{of_gguf, own_sizes};

/// `model_type` of the text part of models that see and hear without parts of their own for it; it has no inputs
/// for every layer.
pub(in super::super) const UNIFIED: &str = "gemma4_unified_text";

/// What the class has where a file leaves the key out, and that of [`UNIFIED`].
const WINDOW: usize = 512;
const UNIFIED_WINDOW: usize = 1024;
/// Every so manieth layer is full, and the last one.
const PATTERN: usize = 6;
const FULL_BASE: f64 = 1e6;
const SLIDING_BASE: f64 = 1e4;
/// The part of a full layer's head that is turned, where a file says nothing of the embedding.
const ROTARY_SHARE: f64 = 0.25;
/// Dim of a full layer's heads.
const FULL_HEAD_DIM: usize = 512;
/// Values of a token for each layer.
const PER_LAYER_INPUT: usize = 256;
/// Tokens of the table of inputs.
const PER_LAYER_VOCABULARY: usize = 262_144;
/// What frequencies of values that are not turned are divided by.
const STANDSTILL: f32 = 1e30;

pub(super) fn defaults() -> Defaults {
    Defaults {
        vocab_size: Some(262_144),
        num_attention_heads: Some(8),
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        max_position_embeddings: 131_072,
        tie_word_embeddings: true,
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        ..Defaults::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let bidirectional = keys.value.get("use_bidirectional_attention");
    if bidirectional.is_some_and(|of| of == true || of == "all") {
        keys.problems.push("`use_bidirectional_attention` is not supported");
    }
    let layers = sizes.num_hidden_layers.min(limits::LAYERS);
    let unified = keys.value.get("model_type").is_some_and(|name| name == UNIFIED);
    let window = keys.window(Some(if unified { UNIFIED_WINDOW } else { WINDOW }));
    let pattern =
        sizes.each_layer(|layer| !(layer + 1).is_multiple_of(PATTERN) && layer + 1 < layers);
    let mut sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    if let Some(last) = sliding.last_mut() {
        *last = false;
    }
    let values_are_keys = keys.flag("attention_k_eq_v", false);
    let heads = layer_heads(keys, sizes, &sliding, values_are_keys);
    let shared = keys.size("num_kv_shared_layers").unwrap_or(0);
    if shared >= layers && shared > 0 {
        keys.problems.push(format!("`num_kv_shared_layers` = {shared} of {layers} layers"));
    }
    let dim_of = |slides: bool| {
        let mut of_kind = sliding.iter().zip(&heads).filter(|(own, _)| **own == slides);
        of_kind.next().map_or(sizes.head_dim, |(_, heads)| heads.head_dim)
    };
    let (full, of_sliding) = ropes(keys, [dim_of(false), dim_of(true)]);
    let absent = if unified { 0 } else { PER_LAYER_INPUT };
    let mut parts = Parts {
        logits_softcap: keys.scale("final_logit_softcapping", None),
        sliding_rope: Some(of_sliding),
        heads,
        shared_keys_from: (shared > 0).then(|| layers.saturating_sub(shared)),
        wide_after_sharing: keys.flag("use_double_wide_mlp", false),
        values_are_keys,
        per_layer_input: keys.size("hidden_size_per_layer_input").unwrap_or(absent),
        per_layer_vocabulary: keys
            .size("vocab_size_per_layer_input")
            .unwrap_or(PER_LAYER_VOCABULARY),
        layer_scalars: true,
        ..common(sizes)
    };
    set_windows(&mut parts, window, sliding, &mut keys.problems);
    (full, parts)
}

/// What all files of the family have.
fn common(sizes: Sizes) -> Parts {
    Parts {
        norms: NormPlaces::BeforeAndAfter,
        embedding_scale: Some((sizes.hidden_size as f64).sqrt()),
        activation: Activation::GeluTanh,
        query_scalar: Some(1.0),
        value_norm: true,
        ..Parts::default()
    }
}

/// Windows, and no rotary embedding of sliding layers where none slides.
fn set_windows(
    parts: &mut Parts,
    window: Option<usize>,
    sliding: Vec<bool>,
    problems: &mut Problems,
) {
    if !sliding.contains(&true) {
        parts.sliding_rope = None;
    }
    parts.set_windows(window, sliding, problems);
}

/// Heads of every layer: as a table by layer says, which takes the place of the older keys of full ones.
fn layer_heads(
    keys: &mut JsonKeys<'_>,
    sizes: Sizes,
    sliding: &[bool],
    values_are_keys: bool,
) -> Vec<LayerHeads> {
    let plain = LayerHeads {
        kv_heads: keys.size("num_key_value_heads").unwrap_or(4),
        head_dim: sizes.head_dim,
    };
    let Some(of_layer) = keys.object(BY_LAYER) else {
        let of_full = keys.size("num_global_key_value_heads").filter(|_| values_are_keys);
        let full = LayerHeads {
            kv_heads: of_full.unwrap_or(plain.kv_heads),
            head_dim: keys.size("global_head_dim").unwrap_or(FULL_HEAD_DIM),
        };
        return sliding.iter().map(|slides| if *slides { plain } else { full }).collect();
    };
    let mut problems = Vec::new();
    let heads = (0..sliding.len()).map(|layer| {
        let mut heads = plain;
        let own = of_layer.get(layer.to_string()).and_then(Value::as_object);
        for (key, value) in own.into_iter().flatten() {
            let size = match key.as_str() {
                "head_dim" => &mut heads.head_dim,
                "num_key_value_heads" => &mut heads.kv_heads,
                other => {
                    let known = "(head_dim and num_key_value_heads are)";
                    problems.push(format!("`{BY_LAYER}.{layer}.{other}` is not supported {known}"));
                    continue;
                }
            };
            match value.as_u64() {
                Some(whole) => *size = whole as usize,
                None if value.is_null() => {}
                None => problems
                    .push(format!("`{BY_LAYER}.{layer}.{key}` = {value} is not a whole number")),
            }
        }
        heads
    });
    let heads = heads.collect();
    problems.into_iter().for_each(|problem| keys.problems.push(problem));
    heads
}

/// Rotary embeddings of full and of sliding layers, whose heads have these dims: by what the file says of a kind, else as
/// the class has them.
fn ropes(keys: &mut JsonKeys<'_>, [full, sliding]: [usize; 2]) -> (RopeParameters, RopeParameters) {
    let (_, [of_full, of_sliding]) = keys.ropes_by_kind();
    let of_class = [
        json!({"rope_type": "proportional", "partial_rotary_factor": ROTARY_SHARE}),
        json!({"rope_type": "default"}),
    ];
    let of_full = ("full_attention", of_full.unwrap_or(&of_class[0]));
    let of_sliding = ("sliding_attention", of_sliding.unwrap_or(&of_class[1]));
    (rope(keys, of_full, FULL_BASE, full), rope(keys, of_sliding, SLIDING_BASE, sliding))
}

/// The rotary embedding of a kind of layers with heads of `dim`.
fn rope(
    keys: &mut JsonKeys<'_>,
    (kind, stated): (&str, &Value),
    base: f64,
    dim: usize,
) -> RopeParameters {
    let number = |key: &str, absent: f64| match stated.get(key) {
        None | Some(Value::Null) => absent,
        Some(number) => number.as_f64().unwrap_or(f64::NAN),
    };
    let theta = number("rope_theta", base);
    if !(theta.is_finite() && theta > 0.0) {
        keys.problems.push(format!("`rope_theta` of {kind} = {theta} is not positive"));
    }
    let rule = ["rope_type", "type"].iter().find_map(|key| stated.get(*key)?.as_str());
    let divisors = match rule.unwrap_or("default") {
        "default" => None,
        "proportional" => {
            let (share, factor) = (number("partial_rotary_factor", 1.0), number("factor", 1.0));
            if !(share > 0.0 && share <= 1.0) {
                keys.problems.push(format!("`partial_rotary_factor` of {kind} is not in (0, 1]"));
            }
            limits::scale(&mut keys.problems, &format!("factor of {kind}"), factor);
            Some(divisors(dim.min(limits::HEAD_DIM), share, factor))
        }
        other => {
            let known = "(known: default, proportional)";
            keys.problems.push(format!("unknown rope scaling `{other}` {known}"));
            None
        }
    };
    RopeParameters { divisors, ..RopeParameters::plain(theta) }
}

/// Divisors of the frequencies of a head of which a share turns, stretched by a factor.
fn divisors(dim: usize, share: f64, factor: f64) -> Vec<f32> {
    let turned = (share * dim as f64 / 2.0) as usize;
    let divisor = |pair: usize| if pair < turned { factor as f32 } else { STANDSTILL };
    (0..dim / 2).map(divisor).collect()
}

/// Experts beside the MLP of every layer.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> Option<ExpertsConfig> {
    if !keys.flag("enable_moe_block", false) {
        return None;
    }
    let mut required = |key: &str| {
        keys.size(key).unwrap_or_else(|| {
            keys.problems.push(format!("`{key}` is missing"));
            1
        })
    };
    Some(ExpertsConfig {
        num_experts: required("num_experts"),
        num_experts_per_tok: required("top_k_experts"),
        moe_intermediate_size: required("moe_intermediate_size"),
        shared_expert_intermediate_size: None,
        norm_topk_prob: true,
        decoder_sparse_step: 1,
        mlp_only_layers: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::TargetConfig;
    use super::*;

    fn config() -> Value {
        json!({
            "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 61,
            "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "attention_k_eq_v": true, "num_kv_shared_layers": 3, "use_double_wide_mlp": true,
            "sliding_window": 9, "hidden_size_per_layer_input": 0
        })
    }

    #[test]
    fn full_layers_have_wider_heads_and_late_ones_read_earlier_keys() {
        let mut value = config();
        value["num_kv_shared_layers"] = json!(0);
        let read = TargetConfig::from_json(&value).expect("valid");
        let full: Vec<usize> = (0..8).filter(|layer| read.window_of(*layer).is_none()).collect();
        assert_eq!(full, [5, 7]);
        assert_eq!(read.heads_of(7), LayerHeads { kv_heads: 1, head_dim: 32 });
        assert_eq!(read.heads_of(0), LayerHeads { kv_heads: 2, head_dim: 16 });
        // Layer 5 shares too, and no full layer stands before it.
        value["num_kv_shared_layers"] = json!(3);
        assert!(TargetConfig::from_json(&value).is_err());
        value["layer_types"] = json!([
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention"
        ]);
        let read = TargetConfig::from_json(&value).expect("valid");
        let owners: Vec<Option<usize>> = (0..8).map(|layer| read.keys_owner(layer)).collect();
        assert_eq!(owners[..5], [None; 5]);
        assert_eq!(owners[5..], [Some(3), Some(3), Some(4)]);
        assert_eq!(read.last_attention_layer(), Some(4));
        assert_eq!((read.inner_of(4), read.inner_of(5)), (40, 80));
        assert_eq!((read.cached_values(4), read.cached_values(7)), (2 * 32, 0));
        let divisors = read.rope.divisors.clone().expect("divisors");
        assert_eq!((divisors.len(), divisors[3], divisors[4]), (16, 1.0, STANDSTILL));
    }

    #[test]
    fn heads_by_layer_come_from_either_spelling() {
        let mut value = config();
        value["num_kv_shared_layers"] = json!(0);
        let older = TargetConfig::from_json(&value).expect("valid");
        for key in ["global_head_dim", "num_global_key_value_heads"] {
            value.as_object_mut().expect("an object").remove(key);
        }
        value["per_layer_config"] = json!({
            "5": {"head_dim": 32, "num_key_value_heads": 1}, "7": {"head_dim": 32, "num_key_value_heads": 1}
        });
        assert_eq!(TargetConfig::from_json(&value).expect("valid"), older);
        // The older keys are left out beside the table.
        value["global_head_dim"] = json!(64);
        value["num_global_key_value_heads"] = json!(2);
        assert_eq!(TargetConfig::from_json(&value).expect("valid"), older);
    }

    #[test]
    fn hostile_keys_are_named() {
        for (key, wrong, told) in [
            ("num_kv_shared_layers", json!(8), "num_kv_shared_layers"),
            ("num_kv_shared_layers", json!(u64::MAX), "num_kv_shared_layers"),
            ("global_head_dim", json!(0), "head_dim"),
            ("global_head_dim", json!(7), "head_dim"),
            ("global_head_dim", json!(u64::MAX), "head_dim"),
            ("num_global_key_value_heads", json!(3), "num_key_value_heads"),
            ("per_layer_config", json!({"5": {"head_dim": "wide"}}), "per_layer_config.5.head_dim"),
            ("per_layer_config", json!({"7": {"head_dim": 8}}), "several widths"),
            (
                "per_layer_config",
                json!({"3": {"sliding_window": 4}}),
                "per_layer_config.3.sliding_window",
            ),
            ("hidden_size_per_layer_input", json!(u64::MAX), "hidden_size_per_layer_input"),
            ("use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
            ("enable_moe_block", json!(true), "num_experts"),
            ("sliding_window", json!(0), "sliding_window"),
        ] {
            let mut value = config();
            if key != "num_kv_shared_layers" {
                value["num_kv_shared_layers"] = json!(0);
            }
            value[key] = wrong.clone();
            let problem = TargetConfig::from_json(&value).expect_err("invalid").to_string();
            assert!(problem.contains(told), "{key} = {wrong}: {problem}");
        }
        for (key, wrong) in [
            ("partial_rotary_factor", json!(3.0)),
            ("partial_rotary_factor", json!("all")),
            ("factor", json!(0)),
            ("factor", json!(1e300)),
            ("rope_theta", json!("big")),
            ("rope_type", json!("yarn")),
        ] {
            for kind in ["full_attention", "sliding_attention"] {
                let mut value = config();
                value["rope_parameters"] = json!({kind: {"rope_type": "proportional"}});
                value["rope_parameters"][kind][key] = wrong.clone();
                let problem = TargetConfig::from_json(&value).expect_err("invalid").to_string();
                let told = if key == "rope_type" { "yarn" } else { key };
                assert!(problem.contains(told), "{kind}.{key} = {wrong}: {problem}");
            }
        }
    }

    #[test]
    fn what_a_file_says_of_an_embedding_takes_the_place_of_the_class_s_own() {
        let mut value = config();
        value["num_kv_shared_layers"] = json!(0);
        let mut of_full = |stated: Value| {
            value["rope_parameters"] = json!({"full_attention": stated});
            TargetConfig::from_json(&value).expect("valid").rope
        };
        assert_eq!(of_full(json!({"rope_theta": 5e5})), RopeParameters::plain(5e5));
        assert_eq!(of_full(json!({"rope_type": "default"})), RopeParameters::plain(1e6));
        // All of the head turns unless the file says less.
        let divisors = of_full(json!({"type": "proportional", "factor": 4.0})).divisors;
        assert_eq!(divisors, Some(vec![4.0; 16]));
        let part = json!({
            "rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0
        });
        let divisors = [vec![2.0; 8], vec![STANDSTILL; 8]].concat();
        assert_eq!(of_full(part.clone()).divisors, Some(divisors));
        value["rope_parameters"] = json!({"sliding_attention": part});
        let read = TargetConfig::from_json(&value).expect("valid");
        let sliding = read.parts.sliding_rope.and_then(|rope| rope.divisors);
        assert_eq!(sliding, Some([vec![2.0; 4], vec![STANDSTILL; 4]].concat()));
        assert_eq!(read.rope.divisors.map(|divisors| divisors[4]), Some(STANDSTILL));
    }
}
