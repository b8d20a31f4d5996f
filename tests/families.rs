//! Targets whose layers do otherwise than a Llama's: windows, norms on both sides, soft-caps.

use std::path::Path;

use crate::support::runs::trained_alike_from_a_store;
use crate::support::{
    Workshop, relative_error, shared, succeed, tiny_config, tiny_mixture, write_target,
};
use longdraft_models::target::{PackedSequence, Tap, Taps, Target, TargetOptions};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use serde_json::{Value, json};

/// A tiny target of a family with windows of 6 tokens in some of its four layers.
fn windowed(family: &str) -> Value {
    let mut config = tiny_config(family);
    for (key, value) in [
        ("num_hidden_layers", json!(4)),
        ("sliding_window", json!(6)),
        ("sliding_window_pattern", json!(3)),
        ("use_sliding_window", json!(true)),
        ("max_window_layers", json!(2)),
    ] {
        config[key] = value;
    }
    config
}

fn logits(path: &Path, options: &TargetOptions) -> Vec<f32> {
    let target = Target::open_path(path, options).expect("target");
    let ids: Vec<u32> = (0..40).map(|i| i * 5 % 250).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.forward(&PackedSequence::single(&ids), &taps).expect("forward");
    let logits = target.logits(features.final_hidden().expect("tapped")).expect("logits");
    logits.flatten_all().and_then(|l| l.to_vec1()).expect("values")
}

#[test]
fn a_window_changes_what_tokens_beyond_it_see_and_nothing_before() {
    let dir = tempfile::tempdir().expect("tempdir");
    for family in [
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "olmo3",
        "phi3",
        "gpt_oss",
        "smollm3",
    ] {
        let mut config = of_family(family);
        write_target(dir.path(), &config);
        let some = logits(dir.path(), &TargetOptions::default());
        config["sliding_window"] = json!(64);
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config");
        let all = logits(dir.path(), &TargetOptions::default());
        let vocabulary = some.len() / 40;
        assert_eq!(some[..6 * vocabulary], all[..6 * vocabulary], "{family}");
        let last = |values: &[f32]| values[39 * vocabulary..].to_vec();
        assert!(relative_error(&last(&some), &last(&all)) > 1e-3, "{family}");
    }
}

/// The weights of a folder under the names that they have beside those of a vision part.
fn nest(from: &Path, to: &Path, prefix: &str) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("folder") {
        let path = entry.expect("entry").path();
        std::fs::copy(&path, to.join(path.file_name().expect("name"))).expect("copy");
    }
    let source = SafetensorsSource::open_folder(from).expect("weights");
    let tensors: Vec<_> = source
        .names()
        .into_iter()
        .map(|name| {
            let tensor = source.load(&name, candle_core::DType::F32).expect("tensor");
            let rest = name.strip_prefix("model.").expect("a tensor of the text part");
            (format!("{prefix}{rest}"), tensor)
        })
        .collect();
    save(&to.join("model.safetensors"), &tensors, std::collections::HashMap::new()).expect("save");
    let text = std::fs::read_to_string(from.join("config.json")).expect("config");
    let text: Value = serde_json::from_str(&text).expect("JSON");
    let nested = json!({ "model_type": "gemma3", "text_config": text, "vision_config": {} });
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
        nest(&alone, &nested, prefix);
        assert_eq!(logits(&nested, &TargetOptions::default()), want, "{prefix}");
        let target = nested.display().to_string();
        let say = ["generate", "--target", &target, "--prompt", "the cat", "--max-tokens", "8"];
        succeed(&[&say[..], &["--no-draft", "--ignore-eos"]].concat());
    }
}

/// Trains, captures, trains on what was captured, extracts and decodes.
#[test]
fn drafts_train_and_decode_on_targets_with_windows() {
    let kept = "data.anchor.redraw=false";
    let glide = ["draft.init=last_layer", kept];
    let eagle3 = ["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3", kept];
    let dflash = [
        "draft.method=dflash",
        "draft.layers=2",
        "draft.target_layers=[0,2]",
        "draft.block_size=4",
        "draft.blocks_per_row=24",
        "data.anchor.enabled=false",
    ];
    let mut mixtral = tiny_mixture("mixtral");
    mixtral["sliding_window"] = json!(6);
    for (config, options) in [
        (windowed("gemma3_text"), &glide[..]),
        (windowed("gemma3_text"), &eagle3),
        (windowed("mistral"), &dflash),
        (mixtral, &eagle3),
    ] {
        let family = config["model_type"].to_string();
        let shop = Workshop::new();
        write_target(&shop.target, &config);
        let drafted = trained_alike_from_a_store(&shop, options);
        let target = shop.target();
        let prompt = ["generate", "--target", &target, "--prompt", "the cat", "--ignore-eos"];
        let say = |more: &[&str]| {
            succeed(&[&prompt[..], &["--max-tokens", "40", "--pace", "fixed"], more].concat())
        };
        for cache in ["f32", "f16"] {
            let plain = say(&["--no-draft", "--cache", cache]);
            let of_draft = ["--draft", &drafted, "--cache", cache];
            assert_eq!(plain, say(&of_draft), "{family} {cache}");
            let tree = [&of_draft[..], &["--tree", "static:3,4"]].concat();
            assert_eq!(plain, say(&tree), "{family} {cache}");
        }
    }
}

/// Options of every method.
fn methods() -> [Vec<&'static str>; 5] {
    let kept = "data.anchor.redraw=false";
    let blocks = |method, more: &[&'static str]| {
        let common = [
            method,
            "draft.layers=2",
            "draft.target_layers=[0,2]",
            "draft.block_size=4",
            "draft.blocks_per_row=24",
            "data.anchor.enabled=false",
        ];
        [&common[..], more].concat()
    };
    [
        vec!["draft.init=last_layer", kept],
        vec!["draft.method=eagle3", "draft.target_layers=[2,0,1]", "draft.ttt_steps=3", kept],
        blocks("draft.method=dflash", &[]),
        blocks("draft.method=dspark", &[]),
        blocks("draft.method=dflash2", &[]),
    ]
}

/// A tiny target of a family with parts of its own.
fn of_family(kind: &str) -> Value {
    let mut config = windowed(kind);
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
    for (key, value) in keys.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
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
    let target = shop.target();
    let prompt = ["generate", "--target", &target, "--prompt", "the cat", "--ignore-eos"];
    let say = |more: &[&str]| {
        succeed(&[&prompt[..], &["--max-tokens", "40", "--pace", "fixed"], more].concat())
    };
    for cache in ["f32", "f16"] {
        let plain = say(&["--no-draft", "--cache", cache]);
        let of_draft = ["--draft", &drafted, "--cache", cache];
        assert_eq!(plain, say(&of_draft), "{family} {cache} {options:?}");
        let tree = [&of_draft[..], &["--tree", "static:3,4"]].concat();
        assert_eq!(plain, say(&tree), "{family} {cache} {options:?}");
    }
}

const FAMILIES: [&str; 9] =
    ["smollm3", "granite", "olmo2", "olmo3", "phi3", "glm4", "glm4_moe", "gpt_oss", "llama4_text"];

#[test]
fn drafts_of_every_method_train_and_decode_on_every_family() {
    for family in FAMILIES {
        for options in methods() {
            check_method(&of_family(family), &options, false);
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
        ("glm4", "model.layers.0.mlp.gate_up_proj.weight", vec![96, 31]),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj", vec![4, 32, 96]),
        ("gpt_oss", "model.layers.2.mlp.experts.down_proj_bias", vec![5, 31]),
        ("llama4_text", "model.layers.1.feed_forward.experts.down_proj", vec![5, 32, 48]),
    ] {
        write_target(dir.path(), &of_family(family));
        let path = dir.path().join("model.safetensors");
        let source = SafetensorsSource::open_file(&path).expect("weights");
        let load = |name: String| {
            let tensor = source.load(&name, candle_core::DType::F32).expect("tensor");
            (name, tensor)
        };
        let mut tensors: Vec<_> = source.names().into_iter().map(load).collect();
        let wrong =
            candle_core::Tensor::zeros(shape, candle_core::DType::F32, &candle_core::Device::Cpu);
        tensors.push((stored.to_owned(), wrong.expect("zeros")));
        save(&path, &tensors, std::collections::HashMap::new()).expect("save");
        let error =
            Target::open_path(dir.path(), &TargetOptions::default()).err().expect("refused");
        assert!(error.to_string().contains(stored), "{family}: {error}");
    }
}
