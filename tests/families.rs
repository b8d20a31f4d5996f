//! Targets whose layers do otherwise than a Llama's: windows, norms on both sides, soft-caps.

use std::path::Path;

use crate::support::runs::trained_alike_from_a_store;
use crate::support::{
    Workshop, fail, relative_error, succeed, tiny_config, tiny_mixture, write_target,
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
    for family in ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"] {
        let mut config = windowed(family);
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

#[test]
fn a_target_with_soft_capped_logits_decodes_and_refuses_the_rest() {
    let shop = Workshop::new();
    write_target(&shop.target, &windowed("gemma2"));
    let told = "soft-capped at 30 (`final_logit_softcapping`)";
    let features = format!("train.features={}", shop.path("features"));
    for (verb, more) in [("train", &[][..]), ("capture", &[features.as_str()])] {
        let text = fail(&[&[verb, &shop.config()], more].concat(), 2);
        assert!(text.contains(told), "{verb}: {text}");
    }
    let target = shop.target();
    let prompt = ["generate", "--target", &target, "--prompt", "the cat sat", "--ignore-eos"];
    let say = |more: &[&str]| succeed(&[&prompt[..], &["--max-tokens", "40"], more].concat());
    assert_eq!(say(&["--no-draft"]), say(&[]));
}
