//! Sizes, defaults and faults of published configurations.

use serde_json::json;

use super::super::RopeParameters;
use super::super::parts::{Parts, QueryGrowth};
use super::*;
use crate::test_support::assert_refused;
use longdraft_kernels::rope::RopeScaling;

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 320, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2]
    })
}

#[test]
fn llama_defaults() {
    let config = read(&llama()).expect("valid");
    assert_eq!((config.head_dim, config.qkv_bias, config.tie_word_embeddings), (16, false, false));
    assert_eq!(config.eos_token_ids, [1, 2]);
    assert_eq!(config.rope, RopeParameters::plain(10_000.0));
}

#[test]
fn qwen2_has_query_bias_without_output_bias_and_qwen3_its_own_head_dim() {
    let mut value = llama();
    value["model_type"] = json!("qwen2");
    for bias in [Value::Null, json!(false)] {
        value["attention_bias"] = bias;
        let config = read(&value).expect("valid");
        assert!(config.qkv_bias && !config.attention_output_bias);
    }
    value["model_type"] = json!("qwen3");
    let config = read(&value).expect("valid");
    assert!(
        config.qk_norm() == crate::config::QkNorm::PerHead
            && !config.qkv_bias
            && config.head_dim == 128
    );
}

#[test]
fn llama_attention_bias_covers_the_output_projection() {
    let mut value = llama();
    value["attention_bias"] = json!(true);
    let config = read(&value).expect("valid");
    assert!(config.qkv_bias && config.attention_output_bias);
}

#[test]
fn experts_are_read_from_both_spellings_and_checked() {
    let mut value = llama();
    value["model_type"] = json!("qwen3_moe");
    let text = read(&value).expect_err("no experts").to_string();
    for key in ["num_experts", "num_experts_per_tok", "moe_intermediate_size"] {
        assert!(text.contains(&format!("`{key}` is missing")), "{key} not in {text}");
    }
    value["num_local_experts"] = json!(8);
    value["num_experts_per_tok"] = json!(2);
    value["moe_intermediate_size"] = json!(24);
    let experts = read(&value).expect("valid").experts.expect("experts");
    assert_eq!((experts.num_experts, experts.norm_topk_prob), (8, false));
    value["num_experts"] = json!(1);
    value["mlp_only_layers"] = json!("all");
    value["decoder_sparse_step"] = json!(0);
    assert_refused(
        read(&value),
        &[
            "`num_experts_per_tok` = 2 exceeds `num_experts` = 1",
            "`mlp_only_layers` = \"all\"",
            "`decoder_sparse_step` = 0",
        ],
    );
}

#[test]
fn a_mixtral_has_experts_as_wide_as_its_mlp_in_every_layer() {
    let mut value = llama();
    value["model_type"] = json!("mixtral");
    value["num_local_experts"] = json!(4);
    value["num_experts_per_tok"] = json!(2);
    let config = read(&value).expect("valid");
    let experts = config.experts.as_ref().expect("experts");
    assert_eq!((experts.moe_intermediate_size, experts.norm_topk_prob), (160, true));
    assert!((0..2).all(|layer| config.experts_in(layer).is_some()));
    value["sliding_window"] = json!(24);
    let config = read(&value).expect("valid");
    assert_eq!([0, 1, 2].map(|layer| config.window_of(layer)), [Some(24), Some(24), None]);
}

fn windows(value: &Value) -> Vec<Option<usize>> {
    let config = read(value).expect("valid");
    (0..config.num_hidden_layers).map(|layer| config.window_of(layer)).collect()
}

fn problem(value: &Value) -> String {
    read(value).expect_err("invalid").to_string()
}

#[test]
fn windows_follow_the_family_unless_the_layers_are_listed() {
    let mut value = llama();
    value["num_hidden_layers"] = json!(4);
    value["model_type"] = json!("qwen3");
    value["sliding_window"] = json!(7);
    value["max_window_layers"] = json!(3);
    assert_eq!(windows(&value), [None; 4]);
    assert_eq!(read(&value).expect("valid").parts, Parts::default());
    value["use_sliding_window"] = json!(true);
    assert_eq!(windows(&value), [None, None, None, Some(7)]);
    value["layer_types"] =
        json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    assert_eq!(windows(&value), [Some(7), None, None, None]);
    let mut mistral = llama();
    mistral["model_type"] = json!("mistral");
    assert_eq!(windows(&mistral), [Some(4096); 2]);
    mistral["sliding_window"] = Value::Null;
    assert_eq!(windows(&mistral), [None; 2]);
    let mut gemma = llama();
    gemma["model_type"] = json!("gemma2");
    gemma["num_hidden_layers"] = json!(3);
    gemma["sliding_window"] = json!(5);
    assert_eq!(windows(&gemma), [Some(5), None, Some(5)]);
    gemma["model_type"] = json!("gemma3_text");
    gemma["sliding_window_pattern"] = json!(2);
    assert_eq!(windows(&gemma), [Some(5), None, Some(5)]);
}

#[test]
fn windows_of_qwen_s_mixtures_are_those_of_their_classes() {
    let mut value = llama();
    for (key, number) in [
        ("num_hidden_layers", 6),
        ("sliding_window", 7),
        ("max_window_layers", 4),
        ("num_experts", 4),
        ("num_experts_per_tok", 2),
        ("moe_intermediate_size", 24),
        ("shared_expert_intermediate_size", 24),
    ] {
        value[key] = number.into();
    }
    let window = Some(7);
    for (kind, wanted) in
        [("qwen2_moe", [window, None, window, None, None, None]), ("qwen3_moe", [window; 6])]
    {
        value["model_type"] = kind.into();
        value["use_sliding_window"] = json!(true);
        assert_eq!(windows(&value), wanted, "{kind}");
        value["use_sliding_window"] = json!(false);
        assert_eq!(windows(&value), [None; 6], "{kind}");
    }
}

#[test]
fn hostile_windows_are_named_by_key() {
    let mut value = llama();
    value["model_type"] = json!("mistral");
    for window in [json!(0), json!(-3), json!("wide"), json!(1_u64 << 40)] {
        value["sliding_window"] = window.clone();
        let text = problem(&value);
        assert!(text.contains("`sliding_window`"), "{window}: {text}");
    }
    value["sliding_window"] = json!(9);
    value["layer_types"] = json!(["sliding_attention"]);
    assert!(problem(&value).contains("`layer_types` lists 1 of 2 layers"));
    value["layer_types"] = json!(["sliding_attention", "linear_attention"]);
    assert!(problem(&value).contains("`layer_types[1]` = \"linear_attention\""));
    value["layer_types"] = json!(["sliding_attention", "full_attention"]);
    value["sliding_window"] = Value::Null;
    assert!(problem(&value).contains("`sliding_window` is null"));
    value["model_type"] = json!("qwen2");
    assert!(problem(&value).contains("`use_sliding_window` is false"));
    value["model_type"] = json!("gemma3_text");
    value["layer_types"] = Value::Null;
    value["sliding_window"] = json!(9);
    value["sliding_window_pattern"] = json!(0);
    assert!(problem(&value).contains("`sliding_window_pattern` = 0"));
    let mut value = llama();
    value["use_sliding_window"] = json!(true);
    assert!(problem(&value).contains("`use_sliding_window` = true"));
    // So many layers are never listed.
    value["model_type"] = json!("mistral");
    value["num_hidden_layers"] = json!(1_u64 << 60);
    assert!(problem(&value).contains("`num_hidden_layers`"));
}

#[test]
fn a_gemma_3_has_the_defaults_of_its_class_and_two_rotary_bases() {
    let mut value = json!({
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    });
    let config = read(&value).expect("valid");
    assert_eq!(
        (config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        (8, 4, 256)
    );
    assert_eq!((config.vocab_size, config.tie_word_embeddings), (262_208, true));
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert!((config.rope.theta - 1e6).abs() < 1e-9);
    assert_eq!(config.parts.sliding_rope, Some(RopeParameters::plain(1e4)));
    assert_eq!((config.parts.logits_softcap, config.parts.attention_softcap), (None, None));
    assert_eq!(config.parts.query_scalar, Some(256.0));
    value["rope_parameters"] = json!({
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}
    });
    let config = read(&value).expect("valid");
    // The older key beside the newer ones is of full layers.
    let stretched = RopeScaling::Linear { factor: 8.0 };
    assert_eq!(config.rope, RopeParameters { scaling: stretched, ..RopeParameters::plain(5e5) });
    assert_eq!(config.parts.sliding_rope, Some(RopeParameters::plain(2e4)));
    value["rope_scaling"] = Value::Null;
    assert_eq!(read(&value).expect("valid").rope, RopeParameters::plain(5e5));
    for (key, wrong) in [
        ("query_pre_attn_scalar", json!(0)),
        ("final_logit_softcapping", json!(-1.0)),
        ("final_logit_softcapping", json!("wide")),
        ("hidden_activation", json!("relu")),
        ("use_bidirectional_attention", json!(true)),
    ] {
        let mut value = value.clone();
        value[key] = wrong;
        assert!(problem(&value).contains(&format!("`{key}`")), "{key}");
    }
}

#[test]
fn a_gemma_2_has_soft_caps_unless_they_are_null() {
    let mut value = llama();
    value["model_type"] = json!("gemma2");
    let parts = read(&value).expect("valid").parts;
    assert_eq!((parts.attention_softcap, parts.logits_softcap), (Some(50.0), Some(30.0)));
    value["attn_logit_softcapping"] = Value::Null;
    value["final_logit_softcapping"] = json!(6.0);
    let parts = read(&value).expect("valid").parts;
    assert_eq!((parts.attention_softcap, parts.logits_softcap), (None, Some(6.0)));
}

#[test]
fn the_text_part_of_a_model_that_sees_is_read() {
    let mut text = llama();
    text["model_type"] = Value::Null;
    let text = text.as_object_mut().expect("an object");
    text.remove("model_type");
    text.remove("eos_token_id");
    let value = json!({
        "model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 32}
    });
    let config = read(&value).expect("valid");
    assert_eq!(config.architecture, Architecture::Gemma3);
    assert_eq!(config.eos_token_ids, [1, 106]);
    let value = json!({"model_type": "mistral3", "text_config": text});
    assert_eq!(read(&value).expect("valid").architecture, Architecture::Mistral);
    let value = json!({"model_type": "llava", "text_config": text});
    let told = problem(&value);
    assert!(told.contains("unknown architecture `llava`") && told.contains("mistral3"), "{told}");
    assert!(!told.contains("hidden_size"), "{told}");
}

#[test]
fn the_outer_model_decides_whether_the_head_is_tied() {
    let tied = |(outer, inner): (&str, &str), outer_says: Value, inner_says: Value| {
        let mut text = llama();
        text["model_type"] = inner.into();
        text["tie_word_embeddings"] = inner_says;
        let value = json!({
            "model_type": outer, "text_config": text, "tie_word_embeddings": outer_says
        });
        read(&value).expect("valid").tie_word_embeddings
    };
    let of_class = [
        (("mistral3", "mistral"), true),
        (("gemma3", "gemma3_text"), true),
        (("gemma4", "gemma4_text"), true),
        (("gemma4_unified", "gemma4_unified_text"), true),
    ];
    for (names, ties) in of_class {
        assert_eq!(tied(names, Value::Null, json!(!ties)), ties, "{names:?}");
    }
    let plain = ("qwen3_5", "qwen3_5_text");
    assert!(tied(plain, Value::Null, json!(true)) && !tied(plain, Value::Null, Value::Null));
    for names in of_class.map(|(names, _)| names).into_iter().chain([plain]) {
        for says in [false, true] {
            assert_eq!(tied(names, json!(says), json!(!says)), says, "{names:?}");
        }
    }
}

#[test]
fn a_unified_gemma_4_has_no_inputs_by_layer_and_a_longer_window() {
    let of = |kind: &str| {
        let mut value = llama();
        value["model_type"] = kind.into();
        let config = read(&value).expect("valid");
        (config.parts.per_layer_input, config.window_of(0))
    };
    assert_eq!(of("gemma4_unified_text"), (0, Some(1024)));
    assert_eq!(of("gemma4_text"), (256, Some(512)));
}

#[test]
fn a_quantised_folder_is_refused_wherever_it_says_so() {
    let mut text = llama();
    text["model_type"] = json!("mistral");
    let mut value = json!({"model_type": "mistral3", "text_config": text});
    assert!(read(&value).is_ok());
    value["quantization_config"] = json!({"quant_method": "fp8"});
    assert!(problem(&value).contains("`quantization_config` = fp8"));
}

/// A configuration without some keys.
fn without(mut value: Value, keys: &[&str]) -> Value {
    for key in keys {
        value.as_object_mut().expect("an object").remove(*key);
    }
    value
}

#[test]
fn mixtrals_and_ministrals_have_the_defaults_of_their_classes() {
    let keys = ["rms_norm_eps", "num_key_value_heads", "eos_token_id"];
    let mut value = without(llama(), &keys);
    value["num_attention_heads"] = json!(16);
    value["model_type"] = json!("mixtral");
    let config = read(&value).expect("valid");
    let experts = config.experts.as_ref().expect("experts");
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (8, 2));
    assert_eq!((config.num_key_value_heads, config.max_position_embeddings), (8, 131_072));
    assert_eq!(config.rope, RopeParameters::plain(1e6));
    assert!((config.rms_norm_eps - 1e-5).abs() < 1e-12);
    value["model_type"] = json!("ministral3");
    let config = read(&value).expect("valid");
    let stretched = RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 16_384.0,
        attention_factor: 1.0,
        truncate: true,
    };
    assert_eq!(config.rope, RopeParameters { scaling: stretched, ..RopeParameters::plain(1e6) });
    let growth =
        QueryGrowth { beta: 0.1, original_context: 16_384.0, offset: 0, only_still: false };
    assert_eq!(config.parts.query_growth, Some(growth));
    assert!((config.rms_norm_eps - 1e-5).abs() < 1e-12);
    value["rope_parameters"] = json!({"rope_type": "default"});
    let config = read(&value).expect("valid");
    assert_eq!((config.rope, config.parts.query_growth), (RopeParameters::plain(1e4), None));
    value["rope_parameters"] =
        json!({"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 48});
    value["original_max_position_embeddings"] = json!(32);
    let growth = read(&value).expect("valid").parts.query_growth;
    assert_eq!(growth.map(|growth| growth.original_context), Some(32.0));
}

#[test]
fn sizes_of_experts_and_mlps_are_those_of_the_classes_where_a_file_leaves_them_out() {
    let of = |kind: &str, keys: &[&str]| {
        let mut value = without(llama(), keys);
        value["model_type"] = kind.into();
        read(&value).expect("valid")
    };
    let width = ["intermediate_size"];
    for (kind, wanted) in [
        ("qwen3_next", (512, 10, 512, Some(512))),
        ("qwen3_5_moe_text", (256, 8, 512, Some(512))),
        ("glm4_moe", (128, 8, 1408, Some(1408))),
        ("gpt_oss", (128, 4, 160, None)),
        ("llama4_text", (16, 1, 8192, Some(8192))),
    ] {
        let keys = if kind == "llama4_text" { &width[..] } else { &[] };
        let experts = of(kind, keys).experts.expect("experts");
        let sizes = (
            experts.num_experts,
            experts.num_experts_per_tok,
            experts.moe_intermediate_size,
            experts.shared_expert_intermediate_size,
        );
        assert_eq!(sizes, wanted, "{kind}");
    }
    for (kind, wanted) in [("llama4_text", 16_384), ("qwen3_5_text", 12_288), ("phi3", 8192)] {
        assert_eq!(of(kind, &width).intermediate_size, wanted, "{kind}");
    }
}

#[test]
fn queries_of_a_ministral_grow() {
    let mut value = llama();
    value["model_type"] = json!("ministral3");
    value["rope_parameters"] = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 48, "mscale": 1.0, "mscale_all_dim": 1.0
    });
    let config = read(&value).expect("valid");
    assert_eq!(
        config.parts.query_growth,
        Some(QueryGrowth { beta: 0.1, original_context: 48.0, offset: 0, only_still: false })
    );
    assert_eq!((config.head_dim, config.window_of(0)), (128, None));
    for (key, wrong) in
        [("llama_4_scaling_beta", json!("much")), ("original_max_position_embeddings", json!(0))]
    {
        let mut value = value.clone();
        value["rope_parameters"][key] = wrong;
        assert!(problem(&value).contains("`llama_4_scaling_beta` needs"), "{key}");
    }
}

#[test]
fn scaling_is_read_from_both_spellings() {
    let mut value = llama();
    value["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
    assert_eq!(read(&value).expect("valid").rope.scaling, RopeScaling::Linear { factor: 2.0 });
    value["rope_scaling"] = Value::Null;
    value["rope_parameters"] = json!({
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    });
    let rope = read(&value).expect("valid").rope;
    assert!((rope.theta - 500_000.0).abs() < 1e-9);
    assert!(matches!(rope.scaling, RopeScaling::Llama3 { .. }));
}

#[test]
fn values_of_another_kind_are_named_and_not_taken_for_left_out_ones() {
    let yarn = |key: &str, wrong: Value| {
        let mut keys = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64
        });
        keys[key] = wrong;
        keys
    };
    for (key, wrong, part) in [
        ("hidden_act", json!(["gelu"]), "`hidden_act` = [\"gelu\"] is not a text"),
        ("attention_bias", json!("true"), "`attention_bias` = \"true\" is not a flag"),
        ("tie_word_embeddings", json!([true]), "`tie_word_embeddings` = [true] is not a flag"),
        ("rope_parameters", json!("yarn"), "`rope_parameters` = \"yarn\" is not an object"),
        ("rope_scaling", json!(8.0), "`rope_scaling` = 8.0 is not an object"),
        ("rope_scaling", json!({"rope_type": 1}), "`rope_type` = 1 is not a text"),
        ("rope_scaling", yarn("beta_fast", json!("32")), "`beta_fast` = \"32\" is not a number"),
        ("rope_scaling", yarn("truncate", json!(0)), "`truncate` = 0 is not true or false"),
        ("rope_parameters", json!({"full_attention": 3}), "`full_attention` = 3 is not an object"),
        ("eos_token_id", json!("</s>"), "`eos_token_id` = \"</s>\" is not a whole number"),
        ("eos_token_id", json!([1, 0.5]), "`eos_token_id` = [1,0.5] is not a whole number"),
        ("quantization_config", json!("fp8"), "`quantization_config` = \"fp8\" is not an object"),
    ] {
        let mut value = llama();
        value[key] = wrong;
        let text = problem(&value);
        assert!(text.contains(part), "{part} not in {text}");
        value[key] = Value::Null;
        assert!(read(&value).is_ok(), "{key}");
    }
    let mut value = llama();
    value["bos_token_id"] = json!(-1);
    assert_eq!(read(&value).expect("-1 is none").bos_token_id, None);
}

#[test]
fn every_problem_is_named_at_once() {
    let value = json!({
        "model_type": "gpt9", "hidden_size": "big", "num_attention_heads": 3,
        "num_key_value_heads": 2, "intermediate_size": 0, "num_hidden_layers": 1,
        "rope_scaling": {"type": "magic"}, "rms_norm_eps": -1.0
    });
    assert_refused(
        read(&value),
        &[
            "unknown architecture `gpt9`",
            "`hidden_size`",
            "`vocab_size` is missing",
            "`intermediate_size` = 0",
            "does not divide",
            "unknown rope scaling `magic`",
            "`rms_norm_eps`",
        ],
    );
}
