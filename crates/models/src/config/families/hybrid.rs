//! Qwen3-Next and Qwen3.5: gated delta nets, every fourth layer attends. Heads of attention turn a quarter of
//! their values and have output gates.

use super::super::mixers::{DeltaNetConfig, Mixer};
use super::super::parts::Rotary;
use super::{Architecture, Defaults, ExpertDefaults, GgufKeys, JsonKeys, Parts, Sizes};
use longdraft_kernels::recurrence::DeltaSizes;

/// Every so manieth layer attends.
const INTERVAL: usize = 4;
/// The part of a head that is turned.
const ROTARY_SHARE: f64 = 0.25;

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let (key_value_heads, intermediate_size, experts) = match architecture {
        Architecture::Qwen35 => (4, Some(12_288), None),
        Architecture::Qwen3Next => (2, Some(5632), Some((512, 10))),
        _ => (2, None, Some((256, 8))),
    };
    let width = experts.map(|_| 512);
    Defaults {
        num_attention_heads: Some(16),
        num_key_value_heads: Some(key_value_heads),
        head_dim: Some(256),
        max_position_embeddings: 32_768,
        intermediate_size,
        experts: ExpertDefaults {
            num_experts: experts.map(|(count, _)| count),
            num_experts_per_tok: experts.map(|(_, per_token)| per_token),
            width,
            shared_width: width,
        },
        ..Defaults::default()
    }
}

/// What every file of the families has in common.
fn common(mixers: Vec<Mixer>, delta_net: DeltaNetConfig, rotary_dim: usize) -> Parts {
    Parts {
        mixers,
        delta_net: Some(delta_net),
        output_gate: true,
        rotary: Rotary { dimensions: Some(rotary_dim), ..Rotary::default() },
        ..Parts::default()
    }
}

/// What mixes layer `index` where a file does not list it.
fn mixer(interval: usize) -> impl Fn(usize) -> Mixer {
    move |index| {
        if (index + 1).is_multiple_of(interval.max(1)) { Mixer::Attention } else { Mixer::DeltaNet }
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let grouped = sizes.architecture == Architecture::Qwen3Next;
    if !keys.flag("attn_output_gate", true) {
        keys.problems.push("`attn_output_gate` = false is not supported");
    }
    let mut size = |key, default| keys.size(key).unwrap_or(default);
    let delta_net = DeltaNetConfig {
        sizes: DeltaSizes {
            key_heads: size("linear_num_key_heads", 16),
            value_heads: size("linear_num_value_heads", 32),
            key_dim: size("linear_key_head_dim", 128),
            value_dim: size("linear_value_head_dim", 128),
            tiled: false,
        },
        kernel: size("linear_conv_kernel_dim", 4),
        grouped_inputs: grouped,
        grouped_gates: grouped,
        negated_rates: false,
    };
    let interval = keys.size_from_one("full_attention_interval").unwrap_or(INTERVAL);
    let kinds = [("full_attention", Mixer::Attention), ("linear_attention", Mixer::DeltaNet)];
    let listed = keys.layer_kinds(sizes.num_hidden_layers, &kinds);
    let mixers = listed.unwrap_or_else(|| sizes.each_layer(mixer(interval)));
    let parts = common(mixers, delta_net, keys.turning(sizes, ROTARY_SHARE));
    Parts { norms_less_one: true, ..parts }
}

pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let mut size = |key: &str| {
        keys.whole(key).unwrap_or_else(|| {
            keys.problems.push(format!("`{key}` is missing"));
            1
        })
    };
    let (kernel, key_dim) = (size("ssm.conv_kernel"), size("ssm.state_size"));
    let (key_heads, value_heads) = (size("ssm.group_count"), size("ssm.time_step_rank"));
    let inner = size("ssm.inner_size");
    if !inner.is_multiple_of(value_heads) {
        let problem = format!(
            "`ssm.time_step_rank` = {value_heads} does not divide `ssm.inner_size` = {inner}"
        );
        keys.problems.push(problem);
    }
    let is_next = sizes.architecture == Architecture::Qwen3Next;
    let delta_net = DeltaNetConfig {
        sizes: DeltaSizes {
            key_heads,
            value_heads,
            key_dim,
            value_dim: inner / value_heads,
            // Converters re-order the value heads of the newer family.
            tiled: !is_next,
        },
        kernel,
        grouped_inputs: keys.holds("ssm_in.weight"),
        grouped_gates: keys.holds("ssm_ba.weight"),
        negated_rates: true,
    };
    let interval = keys.whole("full_attention_interval").unwrap_or(INTERVAL);
    let recurrent = |recurrent: bool| if recurrent { Mixer::DeltaNet } else { Mixer::Attention };
    let mixers = match keys.flags("attention.recurrent_layers") {
        Some(listed) => listed.into_iter().map(recurrent).collect(),
        None => sizes.each_layer(mixer(interval)),
    };
    if mixers.len() < sizes.num_hidden_layers.min(super::limits::LAYERS) {
        let (listed, layers) = (mixers.len(), sizes.num_hidden_layers);
        let key = "attention.recurrent_layers";
        keys.problems.push(format!("`{key}` lists {listed} of {layers} layers"));
    }
    let mixers = mixers.into_iter().take(sizes.num_hidden_layers).collect();
    let rotary_dim = keys.whole("rope.dimension_count");
    let rotary_dim = rotary_dim.unwrap_or((sizes.head_dim as f64 * ROTARY_SHARE) as usize);
    common(mixers, delta_net, rotary_dim)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::{ExpertsConfig, TargetConfig};
    use super::*;

    fn config(kind: &str) -> Value {
        json!({
            "model_type": kind, "hidden_size": 48, "num_hidden_layers": 6, "vocab_size": 61,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12, "intermediate_size": 72, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2
        })
    }

    fn problem(value: &Value) -> String {
        TargetConfig::from_json(value).expect_err("invalid").to_string()
    }

    #[test]
    fn every_fourth_layer_attends_unless_the_layers_are_listed() {
        let mut value = config("qwen3_5_text");
        let read = TargetConfig::from_json(&value).expect("valid");
        let attends: Vec<usize> =
            (0..6).filter(|layer| read.mixer_of(*layer) == Mixer::Attention).collect();
        assert_eq!((attends, read.last_attention_layer()), (vec![3], Some(3)));
        assert_eq!(read.parts.rotary.dimensions, Some(4));
        let net = read.parts.delta_net.expect("a delta net");
        assert_eq!((net.sizes.value_heads, net.sizes.key_dim, net.kernel), (32, 128, 4));
        assert!(read.parts.norms_less_one && read.parts.output_gate && !net.grouped_inputs);
        // The matrix and its decay, keys, corrections and decays of a chunk of 64, and the rows of the convolution.
        let net = 32 * (128 * 128 + 1 + 64 * (128 + 128 + 1));
        assert_eq!(read.state_values(), 5 * (net + 3 * (2 * 16 * 128 + 32 * 128)));
        value["layer_types"] = json!([
            "full_attention",
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "linear_attention"
        ]);
        value["partial_rotary_factor"] = json!(0.5);
        let read = TargetConfig::from_json(&value).expect("valid");
        assert_eq!((read.last_attention_layer(), read.parts.rotary.dimensions), (Some(0), Some(8)));
        value["layer_types"][1] = json!("sliding_attention");
        assert!(problem(&value).contains("full_attention and linear_attention are"));
    }

    #[test]
    fn mixtures_have_the_defaults_of_their_classes() {
        let experts = |kind: &str| {
            let read = TargetConfig::from_json(&config(kind)).expect("valid");
            (read.experts.expect("experts"), read.parts.delta_net.expect("a delta net"))
        };
        let (next, net) = experts("qwen3_next");
        assert!(net.grouped_inputs && net.grouped_gates);
        let plain = ExpertsConfig { norm_topk_prob: true, ..next.clone() };
        assert_eq!((plain, next.shared_expert_intermediate_size), (next.clone(), Some(12)));
        assert!(!experts("qwen3_5_moe_text").1.grouped_inputs);
        let mut value = config("qwen3_5_moe_text");
        value.as_object_mut().expect("an object").remove("intermediate_size");
        let read = TargetConfig::from_json(&value).expect("valid");
        assert_eq!(read.intermediate_size, 2 * 8 + 12);
        let mut value = config("qwen3_next");
        value["num_experts"] = json!(0);
        assert!(TargetConfig::from_json(&value).expect("valid").experts.is_none());
    }

    #[test]
    fn hostile_sizes_are_named_by_key() {
        for (key, wrong) in [
            ("linear_num_key_heads", json!(0)),
            ("linear_num_key_heads", json!(5)),
            ("linear_num_value_heads", json!(1_u64 << 60)),
            ("linear_key_head_dim", json!(0)),
            ("linear_value_head_dim", json!(u64::MAX)),
            ("linear_conv_kernel_dim", json!(0)),
            ("linear_conv_kernel_dim", json!(1_u64 << 40)),
            ("linear_conv_kernel_dim", json!("wide")),
            ("full_attention_interval", json!(0)),
            ("partial_rotary_factor", json!(0)),
            ("partial_rotary_factor", json!(7)),
            ("partial_rotary_factor", json!(0.2)),
            ("layer_types", json!(["full_attention"])),
            ("head_dim", json!(0)),
        ] {
            let mut value = config("qwen3_5_text");
            value[key] = wrong.clone();
            assert!(problem(&value).contains(key), "{key} = {wrong}: {}", problem(&value));
        }
        let mut value = config("qwen3_5_text");
        value["num_hidden_layers"] = json!(1_u64 << 60);
        assert!(problem(&value).contains("num_hidden_layers"));
    }

    #[test]
    fn ranks_do_not_share_states() {
        let read = TargetConfig::from_json(&config("qwen3_5_text")).expect("valid");
        assert_eq!(read.sharing_ranks(), [1]);
        assert!(read.sharing_problems(2)[0].contains("recurrent state"));
    }
}
