//! LFM2: short convolutions between two gates, some layers attend.

use super::super::mixers::{Mixer, ShortConvolutionConfig};
use super::{Defaults, GgufKeys, JsonKeys, Parts, Sizes};

pub(super) fn defaults() -> Defaults {
    Defaults {
        num_attention_heads: Some(32),
        num_key_value_heads: Some(8),
        max_position_embeddings: 128_000,
        tie_word_embeddings: true,
        norm_eps: ("norm_eps", 1e-5),
        rope_theta: 1e6,
        ..Defaults::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let kinds = [("full_attention", Mixer::Attention), ("conv", Mixer::Convolution)];
    let attending = keys.value.get("full_attn_idxs").is_some_and(|listed| !listed.is_null());
    let attending = attending.then(|| keys.sizes("full_attn_idxs"));
    let pattern = |layer| match &attending {
        Some(listed) if !listed.contains(&layer) => Mixer::Convolution,
        _ => Mixer::Attention,
    };
    let mixers = keys.layer_kinds(sizes.num_hidden_layers, &kinds);
    let mixers = mixers.unwrap_or_else(|| sizes.each_layer(pattern));
    let kernel = keys.size("conv_L_cache").unwrap_or(3);
    let convolution = ShortConvolutionConfig { kernel, bias: keys.flag("conv_bias", false) };
    Parts { mixers, convolution: Some(convolution), ..Parts::default() }
}

/// The width of the MLP, which files may give before it is cut to two thirds and rounded up.
pub(in super::super) fn inner_width(keys: &mut JsonKeys<'_>) -> Option<usize> {
    let given = keys.size("block_ff_dim").or_else(|| keys.size("intermediate_size"))?;
    if !keys.flag("block_auto_adjust_ff_dim", true) {
        return Some(given);
    }
    let cut = given.saturating_mul(2) / 3;
    let factor = match keys.value.get("block_ffn_dim_multiplier") {
        None => Some(1.0),
        Some(factor) if factor.is_null() => None,
        Some(_) => keys.scale("block_ffn_dim_multiplier", None),
    };
    let Some(factor) = factor else { return Some(cut) };
    let multiple = keys.size_from_one("block_multiple_of").unwrap_or(256);
    Some(((cut as f64 * factor) as usize).div_ceil(multiple).saturating_mul(multiple))
}

/// Layers without key heads have a convolution; the others see a window where there is one.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let heads = keys.integers("attention.head_count_kv").unwrap_or_default();
    if heads.len() != sizes.num_hidden_layers && !heads.is_empty() {
        let (listed, layers) = (heads.len(), sizes.num_hidden_layers);
        let key = "attention.head_count_kv";
        keys.problems.push(format!("`{key}` lists {listed} of {layers} layers"));
    }
    let of_layer = |layer: usize| match heads.get(layer) {
        Some(0) => Mixer::Convolution,
        _ => Mixer::Attention,
    };
    let kernel = keys.whole("shortconv.l_cache").unwrap_or(3);
    let convolution = ShortConvolutionConfig { kernel, bias: keys.holds("shortconv.conv.bias") };
    let mixers = sizes.each_layer(of_layer);
    let sliding = mixers.iter().map(|mixer| *mixer == Mixer::Attention).collect();
    let mut parts = Parts { mixers, convolution: Some(convolution), ..Parts::default() };
    let window = keys.number("attention.sliding_window").filter(|window| *window != 0.0);
    let window = window.and_then(|_| keys.whole("attention.sliding_window"));
    if window.is_some() {
        parts.set_windows(window, sliding, &mut keys.problems);
    }
    parts
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::{QkNorm, TargetConfig};

    fn config() -> Value {
        json!({
            "model_type": "lfm2", "hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 61,
            "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2,
            "block_auto_adjust_ff_dim": false, "full_attn_idxs": [1]
        })
    }

    #[test]
    fn layers_follow_the_list_of_those_that_attend() {
        let mut value = config();
        let read = TargetConfig::from_json(&value).expect("valid");
        assert_eq!((read.last_attention_layer(), read.attention_layers()), (Some(1), 1));
        assert!((read.rope.theta - 1e6).abs() < 1e-9 && (read.rms_norm_eps - 1e-5).abs() < 1e-12);
        assert!(read.tie_word_embeddings && read.qk_norm() == QkNorm::PerHead);
        assert_eq!(read.state_values(), 3 * 2 * 48);
        value["tie_embedding"] = json!(false);
        assert!(!TargetConfig::from_json(&value).expect("valid").tie_word_embeddings);
        value["tie_word_embeddings"] = json!(true);
        assert!(!TargetConfig::from_json(&value).expect("valid").tie_word_embeddings);
        value["full_attn_idxs"] = Value::Null;
        let read = TargetConfig::from_json(&value).expect("valid");
        assert_eq!((read.attention_layers(), read.is_recurrent()), (4, false));
        value["layer_types"] = json!(["conv", "conv", "conv", "conv"]);
        let read = TargetConfig::from_json(&value).expect("valid");
        assert_eq!(read.last_attention_layer(), None);
    }

    #[test]
    fn widths_are_adjusted_as_the_class_does() {
        let width = |changes: &[(&str, Value)]| {
            let mut value = config();
            value["block_auto_adjust_ff_dim"] = json!(true);
            changes.iter().for_each(|(key, change)| value[*key] = change.clone());
            TargetConfig::from_json(&value).expect("valid").intermediate_size
        };
        assert_eq!(width(&[]), 256);
        assert_eq!(width(&[("block_multiple_of", json!(7))]), 49);
        let factor = ("block_ffn_dim_multiplier", json!(1.5));
        assert_eq!(width(&[factor, ("block_multiple_of", json!(10))]), 80);
        assert_eq!(width(&[("block_ffn_dim_multiplier", Value::Null)]), 48);
        assert_eq!(width(&[("block_auto_adjust_ff_dim", json!(false))]), 72);
    }

    #[test]
    fn hostile_sizes_are_named_by_key() {
        for (key, wrong) in [
            ("conv_L_cache", json!(0)),
            ("conv_L_cache", json!(u64::MAX)),
            ("full_attn_idxs", json!("all")),
            ("layer_types", json!(["conv", "linear_attention", "conv", "conv"])),
            ("intermediate_size", json!(u64::MAX)),
            ("num_attention_heads", json!(0)),
        ] {
            let mut value = config();
            value[key] = wrong.clone();
            let problem = TargetConfig::from_json(&value).expect_err("invalid").to_string();
            assert!(problem.contains(key), "{key} = {wrong}: {problem}");
        }
    }
}
