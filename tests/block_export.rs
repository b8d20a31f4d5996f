//! Exports of block drafts: written, read back, and broken in every way that engines do not tell.

use std::path::Path;

use crate::support::{GgufChange, Workshop, change_gguf, fail, last_json, run, stdout, succeed};
use candle_core::quantized::gguf_file::Value as GgufValue;
use longdraft_models::weights::gguf::header::Header;
use serde_json::{Value, json};

/// A workshop with a trained draft of a method.
fn trained(more: &[&str]) -> Workshop {
    let shop = Workshop::with_four_layers();
    let block = [
        "draft.layers=2",
        "draft.target_layers=[0,2]",
        "draft.block_size=4",
        "draft.blocks_per_row=24",
        "data.anchor.enabled=false",
        "schedule.learning_rate=0.01",
        "train.steps=30",
    ];
    succeed(&[&["train", &shop.config()][..], &block, more].concat());
    shop
}

const METHODS: [(&str, &[&str]); 3] = [
    ("dflash", &["draft.method=dflash", "draft.sliding_window=6"]),
    (
        "dflash2",
        &[
            "draft.method=dflash2",
            "draft.conv_group_size=8",
            "draft.selector_rank=6",
            "draft.selector_top_k=4",
        ],
    ),
    ("dspark", &["draft.method=dspark", "draft.markov_rank=6"]),
];

fn export(shop: &Workshop, profile: &str, dtype: &str) -> String {
    let output = shop.path(&format!("export-{profile}"));
    let all = ["export", &shop.path("run"), "--to", profile, "--output", &output, "--dtype", dtype];
    succeed(&all);
    output
}

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("file")).expect("JSON")
}

/// Tokens and acceptance of greedy decoding with a draft.
fn drafted(shop: &Workshop, draft: &str) -> (Value, Value) {
    let target = shop.target();
    let arguments = ["generate", "--target", &target, "--draft", draft, "--prompt", "the cat sat"];
    let more = ["--max-tokens", "40", "--ignore-eos", "--pace", "fixed", "--json"];
    let line = last_json(&succeed(&[&arguments[..], &more].concat()));
    (line["tokens"].clone(), line["conditional_acceptance"].clone())
}

const GGUF: &str = "draft-f32.gguf";

/// Checks a folder against its target and checkpoint: not even a warning.
fn verified(shop: &Workshop, folder: &str) {
    let verify = ["verify", folder, "--target", &shop.target(), "--strict", "--json"];
    let output = run(&[&verify[..], &["--checkpoint", &shop.path("run")]].concat());
    assert!(output.status.success(), "{folder}: {}", stdout(&output));
    let report = last_json(&stdout(&output));
    assert_eq!(report["clean"], true);
    assert!(report["parity"].is_object(), "{folder}: the network was not run");
}

#[test]
fn every_method_is_exported_verified_and_drafts_like_its_checkpoint() {
    for (method, arguments) in METHODS {
        let shop = trained(arguments);
        let own = drafted(&shop, &shop.path("run"));
        let plain = last_json(&succeed(&[
            "generate",
            "--target",
            &shop.target(),
            "--no-draft",
            "--prompt",
            "the cat sat",
            "--max-tokens",
            "40",
            "--ignore-eos",
            "--json",
        ]));
        assert_eq!(own.0, plain["tokens"], "{method}: drafts lose nothing");
        for profile in ["vllm", "sglang", "hf", "llamacpp-hf", "speculators", "llamacpp"] {
            let folder = export(&shop, profile, "f32");
            assert_eq!(drafted(&shop, &folder), own, "{method} {profile}");
            verified(&shop, &folder);
            if profile == "llamacpp" {
                assert_eq!(drafted(&shop, &format!("{folder}/{GGUF}")), own, "{method}: the file");
                continue;
            }
            let config = read(&format!("{folder}/config.json"));
            assert!(!config.to_string().contains("null"), "strict readers refuse null");
            assert_eq!(config["torch_dtype"], "float32");
            if profile != "speculators" {
                assert_eq!(config["is_causal"], false, "{method}");
                assert_eq!(config["block_size"], config["dflash_config"]["block_size"]);
            }
        }
        let proposals = if method == "dspark" { 4 } else { 3 };
        let manifest = read(&shop.path("export-hf/longdraft-manifest.json"));
        let (vllm, sglang) =
            (manifest["serve"]["vllm"].clone(), manifest["serve"]["sglang"].clone());
        let wanted = format!("\"num_speculative_tokens\": {proposals}");
        assert!(vllm.as_str().is_some_and(|line| line.contains(&wanted)), "{vllm}");
        assert!(sglang.as_str().is_some_and(|line| line.ends_with("draft-tokens 4")), "{sglang}");
        let manifest = read(&shop.path("export-llamacpp/longdraft-manifest.json"));
        let line = manifest["serve"]["llama.cpp"].as_str().expect("a line");
        let kind = if method == "dspark" { "draft-dspark" } else { "draft-dflash" };
        let wanted = format!("--spec-type {kind} --spec-draft-n-max {proposals}");
        assert!(line.contains(&wanted) && line.contains(GGUF), "{line}");
        let (run, output) = (shop.path("run"), shop.path("longspec"));
        let text = fail(&["export", &run, "--to", "longspec", "--output", &output], 1);
        assert!(text.contains("run no block drafts"), "{text}");
        // What was exported is exported on, between the layouts.
        for (from, to) in [("llamacpp", "speculators"), ("speculators", "llamacpp")] {
            let (folder, output) =
                (shop.path(&format!("export-{from}")), shop.path(&format!("{to}-again")));
            let target = shop.target();
            let all = ["export", &folder, "--to", to, "--target", &target, "--output", &output];
            succeed(&[&all[..], &["--dtype", "f32"]].concat());
            assert_eq!(drafted(&shop, &output), own, "{method}: {from} to {to}");
        }
    }
}

#[test]
fn files_say_what_readers_default_differently() {
    for (method, arguments) in METHODS {
        let shop = trained(arguments);
        let chained = method == "dspark";
        let config = read(&format!("{}/config.json", export(&shop, "speculators", "bf16")));
        assert_eq!(config["speculators_model_type"], method);
        assert_eq!(config["aux_hidden_state_layer_ids"], json!([1, 3]), "one more than outputs");
        assert_eq!(config["sample_from_anchor"], chained);
        assert_eq!(config["sliding_window_non_causal"], true, "no layer is causal");
        assert_eq!((&config["block_size"], &config["draft_vocab_size"]), (&json!(4), &json!(258)));
        assert!(config["mask_token_id"].is_u64(), "{config}");
        let layer = &config["transformer_layer_config"];
        assert_eq!(layer["model_type"], "qwen3");
        for outer in ["dflash_config", "num_target_layers", "architectures", "block_size"] {
            assert!(layer.get(outer).is_none(), "{outer} is no key of a layer");
        }
        let own = &config["speculators_config"];
        assert_eq!(own["algorithm"], method);
        let tokens = own["proposal_methods"][0]["speculative_tokens"].clone();
        assert_eq!(tokens, if chained { 4 } else { 3 });
        assert_eq!(own["verifier"]["architectures"][0], "LlamaForCausalLM");

        let file = format!("{}/draft-bf16.gguf", export(&shop, "llamacpp", "bf16"));
        let header = Header::read(&std::fs::read(file).expect("file")).expect("header");
        assert_eq!(header.text("general.architecture"), Some("dflash"));
        assert_eq!(header.integers("dflash.target_layers"), Some(vec![1, 3]));
        assert_eq!(header.flag("dflash.sample_from_anchor"), Some(chained));
        assert_eq!(header.flag("dflash.attention.causal"), Some(false));
        assert_eq!(header.number("dflash.block_size"), Some(4.0));
        assert!(header.number("tokenizer.ggml.mask_token_id").is_some());
        assert_eq!(header.number("dflash.attention.sliding_window").is_some(), method == "dflash");
        let pattern = header.metadata.get("dflash.attention.sliding_window_pattern");
        assert_eq!(pattern.is_some(), method == "dflash");
        for (name, tensor) in &header.tensors {
            let exact = tensor.shape.len() == 1 || name.ends_with("conv_base");
            let type_name = tensor.element.weight_name();
            assert_eq!(type_name, Some(if exact { "F32" } else { "BF16" }), "{name}");
        }
        let has = |name: &str| header.tensors.contains_key(name);
        assert!(
            has("fc.weight") && has("enc.output_norm.weight") && has("blk.1.attn_q_norm.weight")
        );
        assert_eq!(has("selector_successor.weight"), method == "dflash2");
        assert_eq!(has("blk.0.ffn_conv_base"), method == "dflash2");
        assert_eq!((has("markov_w2.weight"), has("conf_proj.bias")), (chained, chained));
        assert!(!has("token_embd.weight") && !has("output.weight"), "they are the target's");
    }
}

#[test]
fn what_a_layout_cannot_hold_is_refused_with_the_reason() {
    let refused = |arguments: &[&str], cases: &[(&str, &str)]| {
        let shop = trained(arguments);
        let (run, output) = (shop.path("run"), shop.path("out"));
        for (profile, reason) in cases {
            let text = fail(&["export", &run, "--to", profile, "--output", &output], 1);
            assert!(text.contains(reason), "{reason} not in {text}");
        }
    };
    let chain = ["draft.method=dspark", "draft.markov_rank=6"];
    refused(
        &[&chain[..], &["draft.markov_head=gated"]].concat(),
        &[("llamacpp", "serves the vanilla head alone")],
    );
    refused(
        &[&chain[..], &["draft.confidence_reads_token=false"]].concat(),
        &[("llamacpp", "reads the token before")],
    );
    refused(
        &["draft.method=dspark", "draft.markov_rank=0", "draft.confidence=false"],
        &[("llamacpp", "rank 0 is none")],
    );
    // 6 · 7 candidates in a width of 32.
    let wide = ["draft.conv_group_size=8", "draft.selector_rank=6", "draft.selector_top_k=6"];
    refused(
        &[&["draft.method=dflash2"][..], &wide].concat(),
        &[("llamacpp", "K (K + 1)"), ("llamacpp-hf", "K (K + 1)")],
    );
    refused(
        &["draft.method=dflash", "draft.causal=true"],
        &[("speculators", "full layers see the whole block")],
    );
}

#[test]
fn a_chain_of_every_kind_and_a_causal_window_come_back_from_speculators() {
    for arguments in [
        &["draft.method=dspark", "draft.markov_rank=6", "draft.markov_head=rnn"][..],
        &["draft.method=dspark", "draft.markov_rank=0", "draft.confidence=false"],
        &["draft.method=dflash", "draft.sliding_window=6", "draft.causal=true"],
    ] {
        let shop = trained(arguments);
        let folder = export(&shop, "speculators", "f32");
        assert_eq!(drafted(&shop, &folder), drafted(&shop, &shop.path("run")), "{arguments:?}");
        verified(&shop, &folder);
    }
    let shop = trained(&["draft.method=dflash", "draft.sliding_window=6", "draft.causal=true"]);
    let folder = export(&shop, "llamacpp", "f32");
    assert_eq!(drafted(&shop, &folder), drafted(&shop, &shop.path("run")));
    verified(&shop, &folder);
    // A draft goes on from a file, and the file's layers are those of the draft.
    let from = format!("draft.from={folder}/{GGUF}");
    let output = format!("output={}", shop.path("next"));
    let warm = ["train", &shop.config(), "data.anchor.enabled=false", &from, &output];
    let warm = [&warm[..], &["draft.method=dflash", "draft.layers=2", "train.steps=1"]].concat();
    let same = ["draft.block_size=4", "draft.sliding_window=6", "draft.causal=true"];
    let text = fail(&[&warm[..], &["draft.target_layers=[1,2]"], &same].concat(), 2);
    assert!(text.contains("target_layers"), "{text}");
    succeed(&[&warm[..], &["draft.target_layers=[0,2]"], &same].concat());
}

/// Breaks a `config.json`.
type Edit<'a> = &'a dyn Fn(&mut Value);

/// Changes the `config.json` of a copy of a folder, and tells which errors `verify` finds.
fn broken(shop: &Workshop, folder: &str, edit: Edit) -> Vec<String> {
    let file = format!("{}/config.json", copied(shop, folder));
    let mut config = read(&file);
    edit(&mut config);
    std::fs::write(&file, config.to_string()).expect("write");
    errors(shop)
}

/// The same of a GGUF file.
fn broken_file(shop: &Workshop, folder: &str, edit: GgufChange) -> Vec<String> {
    change_gguf(&Path::new(&copied(shop, folder)).join(GGUF), edit);
    errors(shop)
}

/// A copy of a folder to be broken.
fn copied(shop: &Workshop, folder: &str) -> String {
    let copy = shop.path("broken");
    let _ = std::fs::remove_dir_all(&copy);
    std::fs::create_dir_all(&copy).expect("folder");
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        let name = path.file_name().expect("a name").to_owned();
        std::fs::copy(&path, Path::new(&copy).join(name)).expect("copy");
    }
    copy
}

/// Codes of the errors in the copy.
fn errors(shop: &Workshop) -> Vec<String> {
    let output = run(&["verify", &shop.path("broken"), "--target", &shop.target(), "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let report = last_json(&stdout(&output));
    let problems = report["problems"].as_array().expect("problems").iter();
    let errors = problems.filter(|problem| problem["severity"] == "error");
    errors.map(|problem| problem["code"].as_str().expect("a code").to_owned()).collect()
}

#[test]
fn a_folder_that_engines_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "hf", "bf16");
    let remove = |config: &mut Value, key: &str| {
        config.as_object_mut().expect("keys").remove(key);
    };
    let own = "dflash_config";
    let cases: [(&str, Edit); 13] = [
        ("layers", &|config| config[own]["target_layer_ids"] = json!([1, 3])),
        ("sizes", &|config| config[own]["target_layer_ids"] = json!([2, 0])),
        ("sizes", &|config| config[own]["target_layer_ids"] = json!([0, 9])),
        ("causality", &|config| remove(config, "is_causal")),
        ("sizes", &|config| config[own]["final_logit_softcapping"] = 30.0.into()),
        ("sizes", &|config| config[own]["mask_token_id"] = 258.into()),
        ("not-the-target", &|config| config[own]["mask_token_id"] = 257.into()),
        ("sizes", &|config| config[own]["block_size"] = 8.into()),
        ("missing-key", &|config| remove(config, "block_size")),
        ("missing-key", &|config| remove(config, "rope_theta")),
        ("layout", &|config| config["sample_from_anchor"] = true.into()),
        ("layers", &|config| config["num_target_layers"] = 5.into()),
        ("shape", &|config| config["intermediate_size"] = 7.into()),
    ];
    for (code, edit) in cases {
        let found = broken(&shop, &folder, edit);
        assert!(found.iter().any(|found| found == code), "{code} not in {found:?}");
    }
}

#[test]
fn a_chain_whose_layout_is_not_said_is_told() {
    let shop = trained(METHODS[2].1);
    let folder = export(&shop, "hf", "bf16");
    let remove = |config: &mut Value| {
        for part in ["", "dflash_config"] {
            let keys = if part.is_empty() { &mut *config } else { &mut config[part] };
            keys.as_object_mut().expect("keys").remove("sample_from_anchor");
        }
    };
    let found = broken(&shop, &folder, &remove);
    assert!(found.iter().any(|found| found == "layout"), "{found:?}");
    let shop = trained(&["draft.method=dspark", "draft.markov_rank=6", "draft.markov_head=rnn"]);
    let (run, output) = (shop.path("run"), shop.path("out"));
    let text = fail(&["export", &run, "--to", "vllm", "--output", &output], 1);
    assert!(text.contains("vLLM serves the vanilla head alone"), "{text}");
    succeed(&["export", &run, "--to", "sglang", "--output", &output]);
}

#[test]
fn a_speculators_folder_that_readers_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "speculators", "f32");
    let remove = |config: &mut Value, key: &str| {
        config.as_object_mut().expect("keys").remove(key);
    };
    let layer = "transformer_layer_config";
    let layers = "aux_hidden_state_layer_ids";
    let causal = "sliding_window_non_causal";
    let cases: [(&str, Edit); 18] = [
        ("layers", &|config| config[layers] = json!([2, 4])),
        ("sizes", &|config| config[layers] = json!([0, 2])),
        ("sizes", &|config| config[layers] = json!([3, 1])),
        ("missing-key", &|config| remove(config, layers)),
        ("causality", &|config| remove(config, causal)),
        ("causality", &|config| {
            config[causal] = false.into();
            config[layer]["layer_types"] = json!(["sliding_attention", "full_attention"]);
        }),
        ("other-outputs", &|config| config[causal] = false.into()),
        ("layout", &|config| remove(config, "sample_from_anchor")),
        ("dropped-key", &|config| config["output_multiplier"] = 0.2.into()),
        ("dropped-key", &|config| config[layer]["final_logit_softcapping"] = 30.0.into()),
        ("sizes", &|config| config["mask_token_id"] = 258.into()),
        ("not-the-target", &|config| config["mask_token_id"] = 257.into()),
        ("sizes", &|config| config["draft_vocab_size"] = 200.into()),
        ("missing-key", &|config| remove(config, "block_size")),
        ("speculators", &|config| remove(&mut config[layer], "model_type")),
        ("missing-key", &|config| remove(&mut config[layer], "layer_types")),
        ("proposals", &|config| {
            let methods = &mut config["speculators_config"]["proposal_methods"];
            methods[0]["speculative_tokens"] = 4.into();
        }),
        ("speculators", &|config| config["speculators_config"]["verifier"] = json!({})),
    ];
    for (number, (code, edit)) in cases.into_iter().enumerate() {
        let found = broken(&shop, &folder, edit);
        assert!(found.iter().any(|found| found == code), "{number}: {code} not in {found:?}");
    }
}

#[test]
fn a_gguf_file_that_readers_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "llamacpp", "f32");
    let key = |name: &str, value: Option<GgufValue>| {
        let name = if name.contains('.') { name.to_owned() } else { format!("dflash.{name}") };
        move |keys: &mut Vec<(String, GgufValue)>, _: &mut Vec<(String, candle_core::Tensor)>| {
            keys.retain(|(known, _)| *known != name);
            keys.extend(value.clone().map(|value| (name.clone(), value)));
        }
    };
    let ids =
        |ids: &[i32]| Some(GgufValue::Array(ids.iter().copied().map(GgufValue::I32).collect()));
    let number = |number| Some(GgufValue::U32(number));
    let window = "dflash.attention.sliding_window_pattern";
    let cases: [(&str, GgufChange); 16] = [
        ("layers", &key("target_layers", ids(&[2, 4]))),
        ("sizes", &key("target_layers", ids(&[0, 2]))),
        ("missing-key", &key("target_layers", None)),
        ("layout", &key("sample_from_anchor", None)),
        ("layout", &key("sample_from_anchor", Some(GgufValue::Bool(true)))),
        ("causality", &key("dflash.attention.causal", None)),
        ("other-outputs", &key("dflash.attention.causal", Some(GgufValue::Bool(true)))),
        ("sizes", &key(window, None)),
        ("sizes", &key(window, Some(GgufValue::Array(vec![GgufValue::Bool(true)])))),
        ("missing-key", &key("block_size", None)),
        ("missing-key", &key("tokenizer.ggml.mask_token_id", None)),
        ("sizes", &key("tokenizer.ggml.mask_token_id", number(258))),
        ("not-the-target", &key("tokenizer.ggml.mask_token_id", number(257))),
        ("sizes", &key("logit_scale", Some(GgufValue::F32(0.2)))),
        ("foreign-tensor", &|_, tensors| {
            let norm = tensors.iter().find(|(name, _)| name == "output_norm.weight");
            let norm = norm.expect("a norm").1.clone();
            tensors.push(("mask_embedding".into(), norm));
        }),
        // q as a target's file holds it, halves of a head interleaved.
        ("other-outputs", &|_, tensors| {
            let q = tensors.iter_mut().find(|(name, _)| name == "blk.0.attn_q.weight");
            let (_, q) = q.expect("a tensor");
            let order: Vec<u32> =
                (0..32).map(|row| row / 8 * 8 + row % 2 * 4 + row % 8 / 2).collect();
            let order = candle_core::Tensor::new(order, q.device()).expect("an order");
            *q = q.index_select(&order, 0).expect("rows");
        }),
    ];
    for (number, (code, edit)) in cases.into_iter().enumerate() {
        let found = broken_file(&shop, &folder, edit);
        assert!(found.iter().any(|found| found == code), "{number}: {code} not in {found:?}");
    }
}

#[test]
fn heads_of_gguf_files_that_readers_would_misread_are_told() {
    let shop = trained(METHODS[2].1);
    let folder = export(&shop, "llamacpp", "f32");
    let flag = |name: &'static str, value: Option<bool>| {
        move |keys: &mut Vec<(String, GgufValue)>, _: &mut Vec<(String, candle_core::Tensor)>| {
            keys.retain(|(known, _)| known != name);
            keys.extend(value.map(|value| (name.to_owned(), GgufValue::Bool(value))));
        }
    };
    let cases: [(&str, GgufChange); 4] = [
        ("layout", &flag("dflash.sample_from_anchor", None)),
        ("sizes", &flag("dflash.sample_from_anchor", Some(false))),
        ("confidence", &flag("dflash.has_confidence_head", Some(false))),
        ("missing-tensor", &|_, tensors| tensors.retain(|(name, _)| name != "conf_proj.bias")),
    ];
    for (code, edit) in cases {
        let found = broken_file(&shop, &folder, edit);
        assert!(found.iter().any(|found| found == code), "{code} not in {found:?}");
    }
    let shop = trained(METHODS[1].1);
    let folder = export(&shop, "llamacpp", "f32");
    let found = broken_file(&shop, &folder, &|keys, _| {
        let key = keys.iter_mut().find(|(name, _)| name == "dflash.selector_top_k");
        key.expect("a key").1 = GgufValue::U32(6);
    });
    assert!(found.iter().any(|found| found == "selector"), "{found:?}");
}
