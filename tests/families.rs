//! Targets whose layers do otherwise than a Llama's: windows, norms on both sides, soft-caps, recurrent states,
//! latent rows, shared keys.

use std::path::Path;

use crate::support::files::{change_json, change_tensors, copy_files, read_json};
use crate::support::gguf::{RECURRENT_SIZES, gguf_keys, numbers, write_gguf};
use crate::support::runs::{decodes_as_plain, metrics, trained_alike_from_a_store};
use crate::support::{
    VOCABULARY, Workshop, fail, fail_with, logits, relative_error, shared, succeed, tiny_config,
    tiny_mixture, with, write_target,
};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value as Gguf;
use candle_core::{DType, Device, Tensor};
use longdraft_models::target_model::{Target, TargetOptions};
use serde_json::{Value, json};

/// A tiny target of a family with windows of 6 tokens in some of its four layers.
fn windowed(family: &str) -> Value {
    let windows = json!({
        "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 3,
        "use_sliding_window": true, "max_window_layers": 2
    });
    with(tiny_config(family), windows)
}

/// A tiny target of a family whose layers carry states, four of them; the last one attends or does not.
pub(crate) fn recurrent(family: &str, last_attends: bool) -> Value {
    let layers = json!({
        "full_attention_interval": if last_attends { 2 } else { 3 },
        "full_attn_idxs": [1, if last_attends { 3 } else { 2 }],
        "block_auto_adjust_ff_dim": false, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6, "mlp_only_layers": [1]
    });
    with(tiny_mixture(family), layers)
}

/// A tiny DeepSeek-V3.
pub(crate) fn latent() -> Value {
    let layers = json!({
        "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1
    });
    with(tiny_mixture("deepseek_v3"), layers)
}

/// A tiny Gemma 4: six layers, of which the last three share keys, with experts or inputs by layer.
pub(crate) fn gemma4(experts: bool) -> Value {
    let (full, sliding) = ("full_attention", "sliding_attention");
    let layers = json!({
        "num_hidden_layers": 6, "layer_types": [sliding, full, sliding, full, sliding, full],
        "num_kv_shared_layers": if experts { 0 } else { 3 }, "use_double_wide_mlp": !experts,
        "global_head_dim": 16, "attention_k_eq_v": experts, "num_global_key_value_heads": 1,
        "sliding_window": 6, "enable_moe_block": experts, "top_k_experts": 2,
        "hidden_size_per_layer_input": if experts { 0 } else { 4 },
        "vocab_size_per_layer_input": VOCABULARY
    });
    with(tiny_mixture("gemma4_text"), layers)
}

#[test]
fn a_window_changes_what_tokens_beyond_it_see_and_nothing_before() {
    let dir = tempfile::tempdir().expect("tempdir");
    let published = ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"];
    for family in published.into_iter().chain(["olmo3", "phi3", "gpt_oss", "smollm3"]) {
        write_target(dir.path(), &of_family(family));
        let some = logits(dir.path(), &TargetOptions::default());
        change_json(dir.path().join("config.json"), |config| config["sliding_window"] = json!(64));
        let all = logits(dir.path(), &TargetOptions::default());
        let vocabulary = some.len() / 40;
        assert_eq!(some[..6 * vocabulary], all[..6 * vocabulary], "{family}");
        let last = |values: &[f32]| values[39 * vocabulary..].to_vec();
        assert!(relative_error(&last(&some), &last(&all)) > 1e-3, "{family}");
    }
}

/// The weights of a folder under the names that they have beside those of a vision part, with what the outer
/// configuration says.
fn nest(from: &Path, to: &Path, prefix: &str, outer: &Value) {
    copy_files(from, to);
    change_tensors(to.join("model.safetensors"), |tensors| {
        for (name, _) in tensors {
            if let Some(rest) = name.strip_prefix("model.") {
                *name = format!("{prefix}{rest}");
            }
        }
    });
    let mut nested = outer.clone();
    nested["text_config"] = read_json(from.join("config.json"));
    nested["vision_config"] = json!({});
    std::fs::write(to.join("config.json"), nested.to_string()).expect("config");
}

#[test]
fn the_text_part_of_a_model_that_sees_has_the_bits_of_the_model_alone() {
    let dir = tempfile::tempdir().expect("tempdir");
    let alone = dir.path().join("alone");
    write_target(&alone, &windowed("gemma3_text"));
    let want = logits(&alone, &TargetOptions::default());
    for (name, prefix) in [("old", "language_model.model."), ("new", "model.language_model.")] {
        let nested = dir.path().join(name);
        nest(&alone, &nested, prefix, &json!({ "model_type": "gemma3" }));
        assert_eq!(logits(&nested, &TargetOptions::default()), want, "{prefix}");
        let target = nested.display().to_string();
        let say = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "8"];
        succeed(&[&say[..], &["--no-draft", "--ignore-eos"]].concat());
    }
}

/// The head is the outer model's, and so is the word on it. Text parts often say the opposite.
#[test]
fn the_head_of_a_model_that_sees_is_tied_as_its_outer_configuration_says() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (alone, nested) = (dir.path().join("alone"), dir.path().join("nested"));
    for (outer, ties) in [
        (json!({ "model_type": "mistral3" }), true),
        (json!({ "model_type": "mistral3", "tie_word_embeddings": true }), true),
        (json!({ "model_type": "mistral3", "tie_word_embeddings": false }), false),
    ] {
        let mut config = windowed("mistral");
        config["tie_word_embeddings"] = json!(ties);
        write_target(&alone, &config);
        let want = logits(&alone, &TargetOptions::default());
        change_json(alone.join("config.json"), |config| {
            config["tie_word_embeddings"] = json!(!ties);
        });
        nest(&alone, &nested, "model.language_model.", &outer);
        assert_eq!(logits(&nested, &TargetOptions::default()), want, "{outer}");
    }
}

#[test]
fn gguf_files_of_recurrent_families_are_read_as_their_folders() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut hybrid = recurrent("qwen3_5_moe_text", true);
    hybrid["linear_num_value_heads"] = json!(2);
    let expert =
        [("expert_count", 5), ("expert_used_count", 2), ("expert_feed_forward_length", 32)];
    let mut of_hybrid = numbers(&[&RECURRENT_SIZES[..], &expert].concat());
    let layers = [true, false, true, false].map(Gguf::Bool).to_vec();
    of_hybrid.push(("attention.recurrent_layers", Gguf::Array(layers)));
    let heads = Gguf::Array([0, 2, 2, 0].map(Gguf::U32).to_vec());
    let of_lfm = vec![("attention.head_count_kv", heads), ("shortconv.l_cache", Gguf::U32(3))];
    let mut dense = recurrent("qwen3_5_text", true);
    dense["linear_num_value_heads"] = json!(2);
    let of_dense =
        of_hybrid.iter().filter(|(key, _)| !key.starts_with("expert")).cloned().collect();
    for (name, config, more) in [
        ("qwen35moe", hybrid, of_hybrid),
        ("qwen35", dense, of_dense),
        ("lfm2", recurrent("lfm2", false), of_lfm),
    ] {
        let folder = dir.path().join(name);
        write_target(&folder, &config);
        let want = logits(&folder, &TargetOptions::default());
        let keys = gguf_keys(name, &config, &more);
        let file = dir.path().join(format!("{name}.gguf"));
        let with = |changed: &[(&str, Gguf)]| {
            let keys: Vec<(&str, Gguf)> = keys
                .iter()
                .map(|(key, value)| {
                    let change = changed.iter().find(|(other, _)| key.ends_with(other));
                    (key.as_str(), change.map_or(value, |(_, change)| change).clone())
                })
                .collect();
            write_gguf(&folder, &file, &keys, GgmlDType::F32);
        };
        write_gguf(&folder, &file, &keys, GgmlDType::Q8_0);
        let held = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let error = relative_error(&logits(&file, &held), &want);
        // Weights and activations of 8 bits, and random experts that rounding swaps; rows in another order
        // would leave nothing alike.
        assert!(error > 1e-5 && error < 0.4, "{name}: {error}");
        with(&[]);
        assert!(relative_error(&logits(&file, &TargetOptions::default()), &want) < 1e-5, "{name}");
        let wrong: &[(&str, Gguf)] = if name == "lfm2" {
            &[
                ("head_count_kv", Gguf::Array(vec![Gguf::U32(0); 3])),
                ("head_count_kv", Gguf::Array(vec![Gguf::U32(0); 4])),
                ("l_cache", Gguf::U32(u32::MAX)),
            ]
        } else {
            &[
                ("ssm.inner_size", Gguf::U32(13)),
                ("ssm.inner_size", Gguf::U32(0)),
                ("ssm.time_step_rank", Gguf::U32(u32::MAX)),
                ("ssm.group_count", Gguf::F32(f32::NAN)),
                ("ssm.state_size", Gguf::U32(1 << 30)),
                ("ssm.conv_kernel", Gguf::U32(0)),
                ("ssm.conv_kernel", Gguf::String("wide".into())),
                ("recurrent_layers", Gguf::Array(vec![Gguf::Bool(true)])),
                ("recurrent_layers", Gguf::Array(vec![Gguf::Bool(true); 4])),
                ("rope.dimension_count", Gguf::U32(9)),
            ]
        };
        for change in wrong {
            with(std::slice::from_ref(change));
            let target = file.display().to_string();
            let text = fail(&["generate", "--target", &target, "--prompt", "x", "--no-draft"], 1);
            assert!(text.len() < 20_000, "{change:?}: {text}");
        }
    }
}

const KEPT: &str = "data.anchor.redraw=false";
const GLIDE: [&str; 2] = ["draft.init=last_layer", KEPT];
const EAGLE3: [&str; 4] =
    ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3", KEPT];
const DFLASH: [&str; 6] = [
    "draft.method=dflash",
    "draft.layers=2",
    "draft.target_layers=[0,2]",
    "draft.block_size=4",
    "draft.blocks_per_row=24",
    "data.anchor.enabled=false",
];

/// Trains, captures, trains on what was captured, extracts and decodes.
fn check_drafts(config: &Value, options: &[&str]) {
    let family = config["model_type"].to_string();
    let shop = Workshop::new();
    write_target(&shop.target, config);
    let drafted = trained_alike_from_a_store(&shop, options);
    let losses: Vec<f64> =
        metrics(&shop.path("run")).iter().filter_map(|record| record["loss"].as_f64()).collect();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(losses.len() > 1 && last < first, "{family} {options:?}: {losses:?}");
    decodes_as_plain(&shop, &drafted, &family);
}

#[test]
fn drafts_train_and_decode_on_targets_with_windows() {
    let mut mixtral = tiny_mixture("mixtral");
    mixtral["sliding_window"] = json!(6);
    for (config, options) in [
        (windowed("gemma3_text"), &GLIDE[..]),
        (windowed("gemma3_text"), &EAGLE3),
        (windowed("mistral"), &DFLASH),
        (mixtral, &EAGLE3),
    ] {
        check_drafts(&config, options);
    }
}

#[test]
fn drafts_train_and_decode_on_targets_with_recurrent_layers() {
    for (config, options) in [
        (recurrent("qwen3_5_text", true), &GLIDE[..]),
        // The last layer has no keys: those of the last one that attends are read.
        (recurrent("qwen3_5_text", false), &GLIDE),
        (recurrent("qwen3_next", false), &EAGLE3),
        (recurrent("lfm2", false), &DFLASH),
        (recurrent("lfm2", true), &GLIDE),
        (recurrent("qwen3_5_moe_text", true), &EAGLE3),
    ] {
        check_drafts(&config, options);
    }
}

#[test]
fn drafts_train_and_decode_on_targets_with_latent_rows_and_shared_keys() {
    for (config, options) in [
        (latent(), &EAGLE3[..]),
        (latent(), &DFLASH),
        (gemma4(false), &GLIDE),
        (gemma4(true), &GLIDE),
        (gemma4(false), &EAGLE3),
    ] {
        check_drafts(&config, options);
    }
}

#[test]
fn a_glide_layer_for_latent_rows_is_refused_with_a_sentence() {
    let shop = Workshop::new();
    write_target(&shop.target, &latent());
    fail_with(&["train", &shop.config()], 2, &["latent attention"]);
    let mut blind = recurrent("lfm2", false);
    blind["layer_types"] = json!(["conv", "conv", "conv", "conv"]);
    write_target(&shop.target, &blind);
    fail_with(&["train", &shop.config()], 2, &["no layer has any"]);
}

#[test]
fn missing_and_misshapen_tensors_of_recurrent_layers_are_listed() {
    for family in ["qwen3_5_text", "lfm2", "qwen3_next"] {
        let dir = tempfile::tempdir().expect("tempdir");
        write_target(dir.path(), &recurrent(family, true));
        let taps = if family == "lfm2" { ".conv.conv.weight" } else { ".conv1d.weight" };
        change_tensors(dir.path().join("model.safetensors"), |tensors| {
            tensors.retain(|(name, _)| name != "model.layers.2.input_layernorm.weight");
            for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with(taps)) {
                let one = tensor.narrow(2, 0, 1).and_then(|t| t.force_contiguous());
                *tensor = one.expect("a tap");
            }
        });
        let target = dir.path().display().to_string();
        let text = fail(&["generate", "--target", &target, "--prompt", "x", "--no-draft"], 1);
        for part in ["model.layers.2.input_layernorm.weight` [32] is missing", taps, "1, 1]"] {
            assert!(text.contains(part), "{family}: {part} not in {text}");
        }
    }
}

/// Options of every method.
fn methods() -> [Vec<&'static str>; 5] {
    let blocks = |method| [&[method], &DFLASH[1..]].concat();
    let [dspark, dflash2] = ["draft.method=dspark", "draft.method=dflash2"].map(blocks);
    [GLIDE.to_vec(), EAGLE3.to_vec(), DFLASH.to_vec(), dspark, dflash2]
}

/// A tiny target of a family with parts of its own.
fn of_family(kind: &str) -> Value {
    let keys = match kind {
        "smollm3" => json!({"no_rope_layer_interval": 2}),
        "granite" => json!({
            "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
            "logits_scaling": 0.7
        }),
        "phi3" => json!({
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 40,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [1.1, 4.0]}
        }),
        "glm4_moe" => json!({
            "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "use_qk_norm": true, "routed_scaling_factor": 1.5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24
        }),
        "gpt_oss" => json!({"swiglu_limit": 1.0, "num_local_experts": 5, "num_experts_per_tok": 2}),
        "llama4_text" => json!({
            "attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.4, "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2, "num_local_experts": 5, "num_experts_per_tok": 1
        }),
        _ => json!({}),
    };
    with(windowed(kind), keys)
}

/// Trains a step, extracts, and decodes as without a draft: chains, trees, f16 caches.
fn check_method(config: &Value, options: &[&str], stored: bool) {
    let family = config["model_type"].to_string();
    let shop = Workshop::new();
    write_target(&shop.target, config);
    let drafted = if stored {
        trained_alike_from_a_store(&shop, options)
    } else {
        let config = shop.config();
        let run = [&["train", &config, "train.steps=1"], options].concat();
        succeed(&run);
        succeed(&["extract", &shop.path("run")]);
        shop.path("run/draft")
    };
    decodes_as_plain(&shop, &drafted, &format!("{family} {options:?}"));
}

const FAMILIES: [&str; 10] = [
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
];

#[test]
fn drafts_of_every_method_train_and_decode_on_every_family() {
    for family in FAMILIES {
        for options in methods() {
            check_method(&of_family(family), &options, false);
        }
    }
}

#[test]
fn drafts_of_every_method_train_and_decode_on_states_latent_rows_and_shared_keys() {
    for config in [
        windowed("gemma3_text"),
        recurrent("qwen3_5_text", false),
        recurrent("qwen3_next", true),
        recurrent("lfm2", false),
        gemma4(false),
        latent(),
    ] {
        // GLIDE, the first method, reads keys, of which latent rows have none.
        let unread = usize::from(config["kv_lora_rank"].is_u64());
        for options in methods().into_iter().skip(unread) {
            check_method(&config, &options, false);
        }
    }
}

#[test]
fn what_a_store_holds_of_families_and_soft_capped_logits_trains_alike() {
    let methods = methods();
    for (family, method) in
        [("gemma2", 0), ("gemma2", 1), ("gemma2", 3), ("granite", 2), ("phi3", 0), ("gpt_oss", 1)]
    {
        let config = if family == "gemma2" { windowed(family) } else { of_family(family) };
        check_method(&config, &methods[method], true);
    }
}

#[test]
fn a_cache_of_8_bits_changes_nothing_with_sinks_or_chunks() {
    let dir = tempfile::tempdir().expect("tempdir");
    for family in ["gpt_oss", "llama4_text"] {
        let mut config = of_family(family);
        config["head_dim"] = json!(32);
        write_target(dir.path(), &config);
        let target = dir.path().display().to_string();
        let prompt = ["generate", "--target", &target, "--prompt", "the cat", "--ignore-eos"];
        let say = |more: &[&str]| {
            succeed(&[&prompt[..], &["--max-tokens", "40", "--cache", "q8"], more].concat())
        };
        assert_eq!(say(&["--no-draft"]), say(&[]), "{family}");
    }
}

#[test]
fn published_blocks_of_4_bits_decode_as_those_of_a_gguf_file() {
    let folders = ["gpt_oss_mxfp4", "gpt_oss_mxfp4_gguf"]
        .map(|case| shared(&format!("golden/targets/{case}/target")));
    let [Some(folder), Some(file)] = folders else { return };
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let held = Target::open_path(&folder, &options).expect("target");
    assert!(held.holds_blocks() && held.held().iter().any(|(name, _)| *name == "MXFP4"));
    let (published, gguf) = (logits(&folder, &options), logits(&file, &options));
    assert!(relative_error(&published, &gguf) < 1e-4);
    let wide = logits(&folder, &TargetOptions::default());
    assert!(relative_error(&published, &wide) < 0.05);
}

#[test]
fn fused_and_stacked_tensors_of_other_shapes_are_named() {
    let dir = tempfile::tempdir().expect("tempdir");
    for (family, stored, shape) in [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", vec![63, 32]),
        ("glm", "model.layers.1.mlp.gate_up_proj.weight", vec![95, 32]),
        ("glm4", "model.layers.0.mlp.gate_up_proj.weight", vec![96, 31]),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj", vec![4, 32, 96]),
        ("gpt_oss", "model.layers.2.mlp.experts.down_proj_bias", vec![5, 31]),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj", vec![5, 32, 48]),
    ] {
        write_target(dir.path(), &of_family(family));
        change_tensors(dir.path().join("model.safetensors"), |tensors| {
            let wrong = Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros");
            tensors.push((stored.to_owned(), wrong));
        });
        let error =
            Target::open_path(dir.path(), &TargetOptions::default()).err().expect("refused");
        assert!(error.to_string().contains(stored), "{family}: {error}");
    }
}
