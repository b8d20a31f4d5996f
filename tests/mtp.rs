//! `--mtp`: the target's own block for prediction of several tokens drafts, from folders and GGUF files.

use std::path::Path;

use candle_core::quantized::GgmlDType;
use longdraft_models::target_model::{MtpBlock, Target, TargetOptions};
use serde_json::{Value, json};

use crate::families::{latent, recurrent};
use crate::support::gguf::{RECURRENT_SIZES, gguf_keys, numbers, write_gguf};
use crate::support::{
    add_block, change_gguf, fail, last_json, require_words, succeed, tiny_mixture, with,
    write_target,
};

/// A tiny GLM-4.5.
fn glm() -> Value {
    let layers = json!({
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "use_qk_norm": true
    });
    with(tiny_mixture("glm4_moe"), layers)
}

fn generate(target: &str, extra: &[&str]) -> Value {
    let common = ["generate", "--target", target, "--max-tokens", "24", "--json"];
    let more = ["--prompt", "the cat and the cat", "--ignore-eos"];
    last_json(&succeed(&[&common[..], &more, extra].concat()))
}

#[test]
fn blocks_of_every_family_draft_losslessly_alone_and_with_lookup() {
    let dir = tempfile::tempdir().expect("tempdir");
    for (name, config, apart) in [
        ("dense", recurrent("qwen3_5_text", true), true),
        ("mixture", recurrent("qwen3_5_moe_text", true), true),
        ("next", recurrent("qwen3_next", false), true),
        ("glm", glm(), false),
        ("latent", latent(), false),
    ] {
        let folder = dir.path().join(name);
        write_target(&folder, &config);
        add_block(&folder, apart, &|_, _| ());
        let target = folder.display().to_string();
        let plain = generate(&target, &["--no-draft"]);
        for way in [
            &["--mtp", "--pace", "fixed"][..],
            &["--mtp", "--draft-len", "1"],
            &["--mtp", "--lookup", "--pace", "fixed"],
            &["--mtp", "--tree", "static:2,3", "--pace", "fixed"],
        ] {
            let drafted = generate(&target, way);
            assert_eq!(drafted["text"], plain["text"], "{name} {way:?}");
            assert!(drafted["rounds"].as_u64() > Some(0), "{drafted}");
        }
        let warm = ["--temperature", "0.9", "--verify", "match", "--seed", "5"];
        let plain = generate(&target, &[&warm[..], &["--no-draft"]].concat());
        let drafted = generate(&target, &[&warm[..], &["--mtp", "--pace", "fixed"]].concat());
        assert_eq!(drafted["text"], plain["text"], "{name}");
    }
}

#[test]
fn a_block_is_measured_as_drafts_are() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = dir.path().join("target");
    write_target(&folder, &glm());
    add_block(&folder, false, &|_, _| ());
    let prompts = dir.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"the cat\"}\n{\"prompt\": \"a dog\"}\n").expect("file");
    let (target, prompts) = (folder.display().to_string(), prompts.display().to_string());
    let common = ["eval", "decode", "--target", &target, "--prompts", &prompts, "--json"];
    for temperature in ["0", "1"] {
        let more = ["--max-tokens", "12", "--mtp", "--temperature", temperature];
        let told = last_json(&succeed(&[&common[..], &more].concat()));
        let cell = &told["record"]["cells"][0];
        assert_eq!(cell["drafter"], "mtp", "{told}");
        assert_eq!(cell["verifier"], if temperature == "0" { "greedy" } else { "ratio" });
        assert!(told["tau"].as_f64() >= Some(1.0), "{told}");
    }
}

/// A file as converters write them: the block follows the layers, what it has beside a layer under `nextn`.
#[test]
fn a_gguf_file_gives_the_block_of_its_folder() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut config = recurrent("qwen3_5_text", true);
    config["linear_num_value_heads"] = json!(2);
    let folder = dir.path().join("folder");
    write_target(&folder, &config);
    add_block(&folder, false, &|_, _| ());
    let more = [("block_count", 5), ("nextn_predict_layers", 1), ("full_attention_interval", 2)];
    let keys = gguf_keys("qwen35", &config, &numbers(&[&more[..], &RECURRENT_SIZES].concat()));
    let file = dir.path().join("model.gguf");
    write_gguf(&folder, &file, &keys, GgmlDType::F32);
    change_gguf(&file, &|_, tensors| {
        for (name, _) in tensors {
            for (ours, theirs) in [
                ("blk.4.eh_proj", "blk.4.nextn.eh_proj"),
                ("blk.4.enorm", "blk.4.nextn.enorm"),
                ("blk.4.hnorm", "blk.4.nextn.hnorm"),
                ("blk.4.shared_head.norm", "blk.4.nextn.shared_head_norm"),
            ] {
                *name = name.replace(ours, theirs);
            }
        }
    });
    let options = TargetOptions::default();
    let open = |path: &Path| -> (Target, MtpBlock) {
        let path = path.display().to_string();
        let target = Target::open(&path, &options).expect("target");
        (target, Target::open_mtp(&path, &options).expect("block"))
    };
    let rows = [&folder, &file].map(|path| {
        let (target, block) = open(path);
        let ids: Vec<u32> = (0..20).map(|i| i * 11 % 250).collect();
        let states = target.hold_ends().and_then(|ends| ends.embed(&ids)).expect("states");
        let position_ids: Vec<u32> = (0..20).collect();
        let pairs = longdraft_models::target_model::Pairs {
            ids: &ids,
            states: &states,
            position_ids: &position_ids,
        };
        let mut cache = block.new_cache(&target).expect("cache");
        let ranges = longdraft_kernels::attention::KeyRanges::appended(0, 20);
        let stepped = block.step_each(&target, pairs, &mut [(ranges, &mut cache)]).expect("a step");
        stepped.head_input.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values")
    });
    assert!(crate::support::relative_error(&rows[1], &rows[0]) < 1e-5);
}

#[test]
fn a_target_without_a_block_and_blocks_of_wrong_shapes_are_told() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = dir.path().join("target");
    let target = folder.display().to_string();
    let say = ["generate", "--target", &target, "--prompt", "a", "--max-tokens", "4"];
    let refused = |extra: &[&str], code| fail(&[&say[..], extra].concat(), code);
    write_target(&folder, &recurrent("qwen3_5_text", true));
    let told = refused(&["--mtp"], 2);
    assert!(told.contains("no block for prediction of several tokens is there"), "{told}");
    assert!(told.contains("leave out --mtp"), "{told}");
    add_block(&folder, true, &|name, tensor| {
        if name == "mtp.fc.weight" {
            *tensor = tensor.t().and_then(|t| t.contiguous()).expect("turned");
        }
        if name == "mtp.layers.0.mlp.up_proj.weight" {
            name.clear();
        }
    });
    let told = refused(&["--mtp"], 1);
    require_words(&told, &["tensor `mtp.fc.weight` has shape [64, 32], [32, 64] expected"]);
    require_words(&told, &["tensor `mtp.layers.0.mlp.up_proj.weight` [64, 32] is missing"]);
    // Without the option nothing is asked of it.
    succeed(&[&say[..], &["--no-draft"]].concat());
    assert!(refused(&["--mtp", "--draft", &target], 2).contains("cannot be used with"));
    assert!(refused(&["--mtp", "--draft-vocab-size", "9"], 2).contains("--draft-vocab FILE"));
}
