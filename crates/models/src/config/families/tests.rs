//! What families read, and what they refuse, key by key.

use longdraft_kernels::rope::RopeScaling;
use serde_json::{Value, json};

use crate::config::{NormPlaces, Parts, QkNorm, RopeParameters, Router, TargetConfig};

/// A small valid configuration.
fn of(kind: &str) -> Value {
    let mut config = json!({
        "model_type": kind, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512
    });
    let keys = match kind {
        "phi3" => json!({
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1.5], "long_factor": [1, 2, 3, 4]}
        }),
        "glm4_moe" => json!({
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
            "topk_group": 2
        }),
        "gpt_oss" => json!({"num_local_experts": 6, "num_experts_per_tok": 2}),
        "llama4_text" => json!({
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2
        }),
        _ => json!({}),
    };
    for (key, value) in keys.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

fn read(kind: &str, change: impl Fn(&mut Value)) -> TargetConfig {
    let mut config = of(kind);
    change(&mut config);
    TargetConfig::from_json(&config).expect("valid")
}

fn parts(kind: &str) -> Parts {
    read(kind, |_| {}).parts
}

#[test]
fn layers_without_rotary_embedding_are_every_fourth_or_as_listed() {
    let still =
        |config: &TargetConfig| (0..8).filter(|i| config.parts.is_still(*i)).collect::<Vec<_>>();
    assert_eq!(still(&read("smollm3", |_| {})), [3, 7]);
    let third = read("smollm3", |config| config["no_rope_layer_interval"] = 3.into());
    assert_eq!(still(&third), [2, 5]);
    let listed = json!([0, 1, 1, 1, 1, 1, 1, 1]);
    let set = |config: &mut Value| config["no_rope_layers"] = listed.clone();
    assert_eq!(still(&read("smollm3", set)), [0]);
    assert!((read("smollm3", set).rope.theta - 2e6).abs() < 1e-9);
    let windowed = read("smollm3", |config| {
        set(config);
        config["use_sliding_window"] = true.into();
        config["sliding_window"] = 9.into();
    });
    assert_eq!((windowed.window_of(0), windowed.window_of(1)), (Some(9), None));
    // Lists may go on beyond the layers.
    let longer = json!([0, 1, 1, 1, 1, 1, 1, 0, 0, 0]);
    for kind in ["smollm3", "llama4_text"] {
        let longer = read(kind, |config| config["no_rope_layers"] = longer.clone());
        assert_eq!((still(&longer), longer.parts.rotary.still.len()), (vec![0, 7], 8), "{kind}");
    }
    let empty = read("llama4_text", |config| config["no_rope_layers"] = json!([]));
    assert_eq!(still(&empty), [3, 7]);
    assert_eq!((empty.window_of(0), empty.window_of(3)), (Some(8192), None));
}

#[test]
fn multipliers_fold_into_scales() {
    let granite = read("granite", |config| {
        config["attention_multiplier"] = 0.5.into();
        config["logits_scaling"] = 8.into();
    });
    assert_eq!(granite.parts.query_factor(16), Some(2.0));
    assert_eq!((granite.bend().divisor, granite.parts.residual_scale), (8.0, None));
    // A multiplier of scores that is left out is 1, not 1/√D.
    assert_eq!(parts("granite").query_factor(16), Some(4.0));
}

#[test]
fn a_share_of_a_head_that_turns_is_read_or_refused_wherever_it_stands() {
    for (kind, turning) in [("glm", 8), ("glm4", 8), ("glm4_moe", 8), ("phi3", 8)] {
        assert_eq!(parts(kind).turning(16), turning, "{kind}");
    }
    let by_kind = |share: &Value| {
        let base = json!({"rope_type": "default", "rope_theta": 1e4});
        let mut part = base.clone();
        part["partial_rotary_factor"] = share.clone();
        json!({"full_attention": base, "sliding_attention": part})
    };
    for (kind, place) in [
        ("llama", "top"),
        ("llama", "rope_scaling"),
        ("qwen2", "rope_parameters"),
        ("qwen3", "top"),
        ("mistral", "rope_parameters"),
        ("granite", "top"),
        ("olmo3", "by kind"),
        ("gemma3_text", "by kind"),
    ] {
        let of = |share: &Value| {
            let mut config = of(kind);
            match place {
                "top" => config["partial_rotary_factor"] = share.clone(),
                "by kind" => config["rope_parameters"] = by_kind(share),
                key => {
                    config[key] = json!({"rope_type": "default", "partial_rotary_factor": share});
                }
            }
            TargetConfig::from_json(&config)
        };
        for whole in [json!(1), json!(1.0), Value::Null] {
            assert!(of(&whole).is_ok(), "{kind} {place}: {whole}");
        }
        for part in [json!(0.5), json!("half")] {
            let text = of(&part).expect_err("refused").to_string();
            assert!(text.contains("`partial_rotary_factor`"), "{kind} {place}: {text}");
        }
    }
}

#[test]
fn a_glm_has_norms_before_its_parts_and_turns_neighbours() {
    let config = read("glm", |_| {});
    let of_glm4 = read("glm4", |_| {});
    assert_eq!(config.parts.norms, NormPlaces::Before);
    assert_eq!(config.parts.rotary, of_glm4.parts.rotary);
    assert!(config.parts.rotary.neighbours && config.qkv_bias && !config.attention_output_bias);
    let without = read("glm", |config| config["attention_bias"] = false.into());
    assert!(!without.qkv_bias);
}

#[test]
fn experts_and_routers_are_those_of_their_families() {
    let glm = read("glm4_moe", |config| config["first_k_dense_replace"] = 3.into());
    let dense: Vec<_> = (0..8).filter(|i| glm.experts_in(*i).is_none()).collect();
    assert_eq!(dense, [0, 1, 2]);
    let experts = glm.experts.as_ref().expect("experts");
    assert_eq!(experts.shared_expert_intermediate_size, Some(24));
    assert_eq!(glm.parts.router, Router::Sigmoid { groups: 4, kept_groups: 2, scale: 1.0 });
    assert_eq!((glm.qk_norm(), glm.parts.turning(16)), (QkNorm::None, 8));
    let llama = read("llama4_text", |_| {});
    let sparse: Vec<_> = (0..8).filter(|i| llama.experts_in(*i).is_some()).collect();
    assert_eq!((sparse, llama.intermediate_size), (vec![1, 3, 5, 7], 128));
    let listed = read("llama4_text", |config| config["moe_layers"] = json!([0, 5]));
    let sparse: Vec<_> = (0..8).filter(|i| listed.experts_in(*i).is_some()).collect();
    assert_eq!(sparse, [0, 5]);
    let plain = read("llama4_text", |config| {
        config["moe_layers"] = json!([]);
        config["num_local_experts"] = 0.into();
        config["interleave_moe_layer_step"] = 0.into();
    });
    assert_eq!((plain.experts, plain.intermediate_size), (None, 128));
    let oss = read("gpt_oss", |_| {});
    assert_eq!((oss.window_of(0), oss.window_of(1)), (Some(128), None));
    assert!(oss.attention_output_bias && oss.parts.sinks && oss.parts.expert_biases);
}

#[test]
fn long_sequences_have_their_frequencies_and_both_a_common_factor() {
    let by_length = parts("phi3").rotary.by_length.expect("frequencies by length");
    assert_eq!((by_length.original_context, by_length.long[3]), (64, 4.0));
    let stretch: f64 = 512.0 / 64.0;
    let want = (1.0 + stretch.ln() / 64.0_f64.ln()).sqrt();
    assert!((by_length.attention_factor - want).abs() < 1e-12);
    // What stands at top level wins.
    let original = |outer: Value| {
        let both = read("phi3", |config| {
            config["original_max_position_embeddings"] = outer.clone();
            config["rope_scaling"]["original_max_position_embeddings"] = 32.into();
        });
        both.parts.rotary.by_length.expect("frequencies by length").original_context
    };
    assert_eq!((original(64.into()), original(Value::Null)), (64, 32));
    let given = read("phi3", |config| config["rope_scaling"]["attention_factor"] = 1.25.into());
    let by_length = given.parts.rotary.by_length.expect("frequencies by length");
    assert!((by_length.attention_factor - 1.25).abs() < 1e-12);
}

#[test]
fn any_family_with_one_rotary_embedding_has_frequencies_by_length() {
    let ones = |count: usize| vec![1.5; count];
    let stated = |count: usize| {
        json!({
            "rope_type": "longrope", "rope_theta": 3e4, "short_factor": ones(count),
            "long_factor": ones(count), "original_max_position_embeddings": 64
        })
    };
    let longrope = |kind: &str, key: &str, count: usize| {
        let mut config = of(kind);
        config[key] = stated(count);
        TargetConfig::from_json(&config)
    };
    for (kind, turning) in
        [("llama", 16), ("qwen3", 16), ("granite", 16), ("glm4", 8), ("smollm3", 16)]
    {
        for key in ["rope_scaling", "rope_parameters"] {
            let config = longrope(kind, key, turning / 2).expect("valid");
            assert_eq!(config.rope, RopeParameters::plain(3e4), "{kind}");
            let by_length = config.parts.rotary.by_length.expect("frequencies by length");
            assert_eq!((by_length.original_context, by_length.long.len()), (64, turning / 2));
            assert!((by_length.attention_factor - 1.5_f64.sqrt()).abs() < 1e-12);
        }
        let text = longrope(kind, "rope_scaling", 3).expect_err("three divisors").to_string();
        assert!(text.contains("numbers in `short_factor`"), "{kind}: {text}");
    }
    // A sequence that the file calls short may fill the context.
    let whole = read("llama", |config| {
        config["rope_scaling"] = stated(8);
        config["rope_scaling"]["original_max_position_embeddings"] = Value::Null;
    });
    let by_length = whole.parts.rotary.by_length.expect("frequencies by length");
    assert_eq!((by_length.original_context, by_length.attention_factor), (512, 1.0));
    for (kind, key) in [("gemma3_text", "rope_scaling"), ("olmo3", "rope_parameters")] {
        let text = longrope(kind, key, 8).expect_err("two embeddings").to_string();
        assert!(text.contains("`longrope` is not supported where layers with windows"), "{text}");
    }
}

#[test]
fn full_layers_of_an_olmo_3_have_the_older_keys_beside_the_newer_ones() {
    let ropes = |change: &dyn Fn(&mut Value)| {
        let config = read("olmo3", |config| {
            config["rope_theta"] = 1e6.into();
            change(config);
        });
        (config.rope, config.parts.sliding_rope.expect("one of its own"))
    };
    let plain = RopeParameters::plain;
    assert_eq!(ropes(&|_| {}), (plain(1e6), plain(5e5)));
    let by_kind = json!({
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}
    });
    let newer = |config: &mut Value| config["rope_parameters"] = by_kind.clone();
    assert_eq!(ropes(&newer), (plain(1e6), plain(2e4)));
    let scaling = RopeScaling::Linear { factor: 4.0 };
    let both = ropes(&|config| {
        newer(config);
        config["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
    });
    assert_eq!(both, (RopeParameters { scaling, ..plain(1e6) }, plain(2e4)));
    let flat = ropes(&|config| {
        config["rope_parameters"] =
            json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4});
    });
    assert_eq!(flat, (RopeParameters { scaling, ..plain(3e4) }, plain(3e4)));
}

#[test]
fn keys_layer_by_layer_are_refused_where_layers_do_not_differ() {
    for kind in ["llama", "qwen3", "mistral"] {
        let mut config = of(kind);
        for nothing in [json!({}), Value::Null] {
            config["per_layer_config"] = nothing;
            assert!(TargetConfig::from_json(&config).is_ok(), "{kind}");
        }
        config["per_layer_config"] = json!({"1": {"intermediate_size": 80}});
        let text = TargetConfig::from_json(&config).expect_err("invalid").to_string();
        assert!(text.contains("`per_layer_config`"), "{kind}: {text}");
    }
}

#[test]
fn flags_may_be_numbers_and_numbers_may_not_be_text() {
    let grows = |flag: Value| {
        let set = |config: &mut Value| config["attn_temperature_tuning"] = flag.clone();
        read("llama4_text", set).parts.query_growth.is_some()
    };
    assert!(grows(json!(4)) && grows(json!(true)) && grows(Value::Null));
    assert!(!grows(json!(0)) && !grows(json!(false)));
    let mut config = of("llama");
    config["rms_norm_eps"] = json!("1e-5");
    let text = TargetConfig::from_json(&config).expect_err("invalid").to_string();
    assert!(text.contains("`rms_norm_eps` = \"1e-5\" is not a number"), "{text}");
}

#[test]
fn qwens_have_the_key_heads_and_the_context_of_their_classes() {
    for (kind, heads) in [("qwen2", 32), ("qwen3", 32), ("qwen2_moe", 16), ("qwen3_moe", 4)] {
        let mut config = of(kind);
        config["num_attention_heads"] = 32.into();
        for key in ["num_experts", "num_experts_per_tok"] {
            config[key] = 2.into();
        }
        for key in ["moe_intermediate_size", "shared_expert_intermediate_size"] {
            config[key] = 24.into();
        }
        let keys = config.as_object_mut().expect("an object");
        keys.remove("max_position_embeddings");
        keys.remove("num_key_value_heads");
        let read = TargetConfig::from_json(&config).expect("valid");
        let sizes = (read.num_key_value_heads, read.max_position_embeddings);
        assert_eq!(sizes, (heads, 32_768), "{kind}");
        config["num_key_value_heads"] = Value::Null;
        let read = TargetConfig::from_json(&config).expect("valid");
        assert_eq!(read.num_key_value_heads, 32, "{kind}");
    }
}

/// Values that files may hold and that no layer can be made of.
#[test]
fn hostile_values_are_named() {
    let huge = 1e300;
    for (kind, key, value) in [
        ("gemma2", "query_pre_attn_scalar", json!(1e-300)),
        ("gemma2", "final_logit_softcapping", json!(huge)),
        ("granite", "attention_multiplier", json!(1e-30)),
        ("granite", "embedding_multiplier", json!(huge)),
        ("granite", "residual_multiplier", json!("half")),
        ("granite", "logits_scaling", json!(0)),
        ("smollm3", "no_rope_layers", json!([1])),
        ("smollm3", "no_rope_layers", json!("none")),
        ("smollm3", "no_rope_layer_interval", json!(0)),
        ("smollm3", "rope_theta", json!(0.5)),
        ("olmo3", "sliding_window", json!(0)),
        ("olmo3", "layer_types", json!(["linear_attention"])),
        ("olmo3", "rope_theta", json!(1e-300)),
        ("phi3", "partial_rotary_factor", json!(0)),
        ("phi3", "partial_rotary_factor", json!(1e-3)),
        ("phi3", "partial_rotary_factor", json!(huge)),
        ("phi3", "original_max_position_embeddings", json!(0)),
        ("glm4", "partial_rotary_factor", json!(1.5)),
        ("glm4_moe", "n_group", json!(0)),
        ("glm4_moe", "n_group", json!(3)),
        ("glm4_moe", "topk_group", json!(5)),
        ("glm4_moe", "num_experts_per_tok", json!(7)),
        ("glm4_moe", "routed_scaling_factor", json!(huge)),
        ("glm4_moe", "shared_expert_intermediate_size", Value::Null),
        ("gpt_oss", "swiglu_limit", json!(-1)),
        ("gpt_oss", "swiglu_alpha", json!(huge)),
        ("gpt_oss", "quantization_config", json!({"quant_method": "fp8"})),
        ("llama", "quantization_config", json!({"quant_method": "mxfp4"})),
        ("llama4_text", "attention_chunk_size", json!(0)),
        ("llama4_text", "attn_scale", json!(huge)),
        ("llama4_text", "floor_scale", json!(0)),
        ("llama4_text", "moe_layers", json!([8])),
        ("llama4_text", "decoder_sparse_step", Value::Null),
        ("llama4_text", "layer_types", json!(["chunked_attention", 3])),
    ] {
        let mut config = of(kind);
        match key {
            // Derived from these keys.
            "shared_expert_intermediate_size" => config["n_shared_experts"] = json!(1_u64 << 60),
            "decoder_sparse_step" => config["interleave_moe_layer_step"] = json!(0),
            _ => config[key] = value.clone(),
        }
        let text = TargetConfig::from_json(&config).expect_err("invalid").to_string();
        assert!(text.contains(key), "{kind}: {key} = {value} not in {text}");
    }
}

/// The same of rotary parameters, which are named by keys within them.
#[test]
fn hostile_rotary_parameters_are_named() {
    let by_length = |short: Value, long: Value| json!({"type": "longrope", "short_factor": short, "long_factor": long});
    let (ones, huge) = (json!([1, 1, 1, 1]), 1e300);
    let growing = json!({
        "rope_type": "default", "llama_4_scaling_beta": huge, "original_max_position_embeddings": 16
    });
    for (kind, key, value, named) in [
        ("phi3", "rope_scaling", by_length(json!([1]), ones.clone()), "short_factor"),
        ("phi3", "rope_scaling", by_length(json!([1, 1, 1, 0]), ones.clone()), "short_factor"),
        ("phi3", "rope_scaling", by_length(ones.clone(), json!([1, 1, 1, huge])), "long_factor"),
        ("phi3", "rope_scaling", by_length(json!("x"), ones), "short_factor"),
        ("gemma3_text", "rope_local_base_freq", json!(1e-300), "`rope_theta` = 1e-300"),
        ("ministral3", "rope_parameters", growing, "llama_4_scaling_beta"),
        ("llama", "rope_scaling", json!({"rope_type": "linear", "factor": 1e-300}), "factor"),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": huge}),
            "factor",
        ),
        ("llama", "rope_scaling", json!({"rope_type": "yarn", "factor": huge}), "factor"),
    ] {
        let mut config = of(kind);
        config[key] = value;
        let text = TargetConfig::from_json(&config).expect_err("invalid").to_string();
        assert!(text.contains(named), "{kind}: {named} not in {text}");
    }
}
