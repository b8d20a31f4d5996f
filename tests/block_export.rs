//! Exports of block drafts: written, read back, and broken in every way that engines do not tell.

use std::path::Path;

use crate::support::files::{
    Tensors, change_json, change_tensors, copy_files, read_json as read, read_tensors,
};
use crate::support::runs::{drafted, written_plainly};
use crate::support::{
    GgufChange, Workshop, byte_tokenizer, change_gguf, fail, last_json, run, stdout, succeed,
    tiny_config, with, write_target,
};
use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Device, Tensor};
use longdraft_models::weights::gguf::header::Header;
use serde_json::{Value, json};

/// A workshop with a trained draft of a method.
pub(crate) fn trained(more: &[&str]) -> Workshop {
    trained_in(Workshop::with_four_layers(), more)
}

fn trained_in(shop: Workshop, more: &[&str]) -> Workshop {
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

pub(crate) const METHODS: [(&str, &[&str]); 3] = [
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
    ("dspark", &["draft.method=dspark", "draft.markov_rank=6", "draft.num_key_value_heads=4"]),
];

pub(crate) fn export(shop: &Workshop, profile: &str, dtype: &str) -> String {
    let output = shop.path(&format!("export-{profile}"));
    let all = ["export", &shop.path("run"), "--to", profile, "--output", &output, "--dtype", dtype];
    succeed(&all);
    output
}

pub(crate) const GGUF: &str = "draft-f32.gguf";

/// The target's table of embeddings.
pub(crate) fn table_of(shop: &Workshop) -> Tensor {
    let mut tensors = read_tensors(shop.target.join("model.safetensors")).into_iter();
    tensors.find(|(name, _)| name == "model.embed_tokens.weight").expect("the target's table").1
}

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
        assert_eq!(own.0, written_plainly(&shop), "{method}: drafts lose nothing");
        for profile in ["vllm", "sglang", "hf", "llamacpp-hf", "speculators", "llamacpp"] {
            let folder = export(&shop, profile, "f32");
            assert_eq!(drafted(&shop, &folder), own, "{method} {profile}");
            verified(&shop, &folder);
            if profile == "llamacpp" {
                assert_eq!(drafted(&shop, &format!("{folder}/{GGUF}")), own, "{method}: the file");
                continue;
            }
            let config = read(format!("{folder}/config.json"));
            assert!(!config.to_string().contains("null"), "strict readers refuse null");
            assert_eq!(config["torch_dtype"], "float32");
            if profile != "speculators" {
                assert_eq!(config["is_causal"], false, "{method}");
                for key in ["block_size", "sample_from_anchor"] {
                    assert_eq!(config[key], config["dflash_config"][key], "{method}: {key}");
                }
                assert_eq!(config["sample_from_anchor"], method == "dspark");
            }
        }
        let proposals = if method == "dspark" { 4 } else { 3 };
        let manifest = read(shop.path("export-hf/longdraft-manifest.json"));
        let (vllm, sglang) =
            (manifest["serve"]["vllm"].clone(), manifest["serve"]["sglang"].clone());
        let wanted = format!("\"num_speculative_tokens\": {proposals}");
        assert!(vllm.as_str().is_some_and(|line| line.contains(&wanted)), "{vllm}");
        let wanted = format!("draft-tokens {}", proposals + 1);
        assert!(sglang.as_str().is_some_and(|line| line.ends_with(&wanted)), "{sglang}");
        let manifest = read(shop.path("export-llamacpp/longdraft-manifest.json"));
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
        let config = read(format!("{}/config.json", export(&shop, "speculators", "bf16")));
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
        &[("llamacpp", "reads the token before"), ("llamacpp-hf", "reads the token before")],
    );
    refused(
        &["draft.method=dspark", "draft.markov_rank=0", "draft.confidence=false"],
        &[("llamacpp", "rank 0 has none"), ("llamacpp-hf", "rank 0 has none")],
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

/// A workshop whose target divides its logits and multiplies its embeddings.
fn scaling_shop() -> Workshop {
    let shop = Workshop::with_four_layers();
    let scales = json!({
        "num_hidden_layers": 4, "attention_multiplier": 0.3, "logits_scaling": 0.7,
        "embedding_multiplier": 3.0
    });
    write_target(&shop.target, &with(tiny_config("granite"), scales));
    shop
}

#[test]
fn files_say_how_the_target_scales_logits_or_are_not_written() {
    let shop = trained_in(scaling_shop(), METHODS[0].1);
    let own = drafted(&shop, &shop.path("run"));
    let folder = export(&shop, "hf", "f32");
    let config = read(format!("{folder}/config.json"));
    let multiplier = config["dflash_config"]["output_multiplier"].as_f64().expect("a number");
    assert!((multiplier * 0.7 - 1.0).abs() < 1e-9, "{multiplier}");
    assert!(config["dflash_config"].get("final_logit_softcapping").is_none(), "there is none");
    assert_eq!(config["dflash_config"]["input_embedding_scale"], 1.0, "tables are read as stored");
    let file = export(&shop, "llamacpp", "f32");
    let header = Header::read(&std::fs::read(format!("{file}/{GGUF}")).expect("file"));
    let scale = header.expect("header").number("dflash.logit_scale").expect("a number");
    assert!((scale * 0.7 - 1.0).abs() < 1e-6, "{scale}");
    for place in [&folder, &file] {
        assert_eq!(drafted(&shop, place), own, "{place}");
        succeed(&["verify", place, "--target", &shop.target(), "--checkpoint", &shop.path("run")]);
    }
    let found = broken(&shop, &folder, &|config| {
        config["dflash_config"]["output_multiplier"] = 0.7.into();
    });
    assert_eq!(found, ["not-the-target"]);
    let nested = read(format!("{}/config.json", export(&shop, "speculators", "f32")));
    assert!(!nested.to_string().contains("output_multiplier"), "it would be dropped");

    // Nothing said: the likeliest tokens stay, and probabilities do not.
    edited(&shop, &folder, &|config| remove(&mut config["dflash_config"], "output_multiplier"));
    assert!(findings(&shop, "warning").contains(&"not-bent".to_owned()));
    copied(&shop, &shop.path("export-speculators"));
    assert!(findings(&shop, "warning").contains(&"not-bent".to_owned()));

    for (method, profile, reason) in [
        (1, "speculators", "a selector adds to the draft's"),
        (2, "vllm", "a Markov head adds to the draft's"),
        (2, "llamacpp", "a Markov head adds to the draft's"),
    ] {
        let shop = trained_in(scaling_shop(), METHODS[method].1);
        let (run, output) = (shop.path("run"), shop.path("out"));
        let text = fail(&["export", &run, "--to", profile, "--output", &output], 1);
        assert!(text.contains(reason), "{reason} not in {text}");
    }
}

#[test]
fn a_draft_that_multiplies_embeddings_goes_on_and_is_written_where_a_key_says_so() {
    let shop = trained_in(scaling_shop(), METHODS[0].1);
    let folder = export(&shop, "hf", "f32");
    edited(&shop, &folder, &|config| {
        config["dflash_config"]["input_embedding_scale"] = 3.0.into();
    });
    let (from, next) = (shop.path("broken"), shop.path("next"));
    assert_eq!(drafted(&shop, &from).0, drafted(&shop, &folder).0, "no answer changes");
    let (config, started, output) =
        (shop.config(), format!("draft.from={from}"), format!("output={next}"));
    let train = ["train", &config, "data.anchor.enabled=false", &started, &output, "train.steps=2"];
    let sizes = ["draft.layers=2", "draft.target_layers=[0,2]", "draft.block_size=4"];
    succeed(&[&train[..], &sizes, METHODS[0].1].concat());
    let to = |profile: &str| {
        let output = shop.path(&format!("next-{profile}"));
        let all = ["export", &next, "--to", profile, "--output", &output, "--dtype", "f32"];
        all.map(str::to_owned)
    };
    let written = to("hf");
    succeed(&written.each_ref().map(String::as_str));
    let place = &written[5];
    let config = read(format!("{place}/config.json"));
    assert_eq!(config["dflash_config"]["input_embedding_scale"], 3.0);
    assert_eq!(drafted(&shop, place), drafted(&shop, &next));
    succeed(&["verify", place, "--target", &shop.target(), "--checkpoint", &next]);
    for profile in ["llamacpp", "speculators"] {
        let text = fail(&to(profile).each_ref().map(String::as_str), 1);
        assert!(text.contains("the draft multiplies embeddings"), "{text}");
    }
}

#[test]
fn a_selector_beside_logits_that_nobody_scales_is_told() {
    let shop = trained_in(scaling_shop(), METHODS[1].1);
    let folder = export(&shop, "hf", "f32");
    let silent = |config: &mut Value| remove(&mut config["dflash_config"], "output_multiplier");
    let found = broken(&shop, &folder, &silent);
    assert!(found.contains(&"not-bent".to_owned()), "{found:?}");
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

/// Changes the `config.json` of a copy of a folder.
fn edited(shop: &Workshop, folder: &str, edit: Edit) {
    change_json(format!("{}/config.json", copied(shop, folder)), edit);
}

/// Which errors `verify` finds in a folder that was changed.
fn broken(shop: &Workshop, folder: &str, edit: Edit) -> Vec<String> {
    edited(shop, folder, edit);
    errors(shop)
}

fn remove(config: &mut Value, key: &str) {
    config.as_object_mut().expect("keys").remove(key);
}

/// Takes a key away, at the top and among the draft's own.
fn remove_both(config: &mut Value, key: &str) {
    remove(config, key);
    remove(&mut config["dflash_config"], key);
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
    copy_files(folder, &copy);
    copy
}

/// Codes of the errors in the copy, of which there are some.
fn errors(shop: &Workshop) -> Vec<String> {
    let errors = findings(shop, "error");
    assert!(!errors.is_empty(), "nothing is wrong");
    errors
}

/// Codes of the findings of a severity in the copy.
pub(crate) fn findings(shop: &Workshop, severity: &str) -> Vec<String> {
    let output = run(&["verify", &shop.path("broken"), "--target", &shop.target(), "--json"]);
    let report = last_json(&stdout(&output));
    let problems = report["problems"].as_array().expect("problems").iter();
    assert_eq!(
        output.status.code(),
        Some(i32::from(problems.clone().any(|problem| problem["severity"] == "error"))),
        "{report}"
    );
    let found = problems.filter(|problem| problem["severity"] == severity);
    found.map(|problem| problem["code"].as_str().expect("a code").to_owned()).collect()
}

#[test]
fn a_folder_that_engines_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "hf", "bf16");
    let own = "dflash_config";
    let cases: [(&str, Edit); 19] = [
        ("layers", &|config| config[own]["target_layer_ids"] = json!([1, 3])),
        ("sizes", &|config| config[own]["target_layer_ids"] = json!([2, 0])),
        ("sizes", &|config| config[own]["target_layer_ids"] = json!([0, 9])),
        ("causality", &|config| {
            remove(config, "is_causal");
            remove(&mut config[own], "causal");
        }),
        ("not-the-target", &|config| config[own]["final_logit_softcapping"] = 30.0.into()),
        ("not-the-target", &|config| config[own]["input_embedding_scale"] = 30.0.into()),
        ("sizes", &|config| config[own]["mask_token_id"] = 258.into()),
        ("sizes", &|config| config[own]["block_size"] = 8.into()),
        ("missing-key", &|config| remove(config, "block_size")),
        ("missing-key", &|config| remove(config, "rope_theta")),
        ("layout", &|config| {
            remove_both(config, "sample_from_anchor");
            config["sample_from_anchor"] = true.into();
        }),
        ("layers", &|config| config["num_target_layers"] = 5.into()),
        ("shape", &|config| config["intermediate_size"] = 7.into()),
        ("missing-key", &|config| remove(config, "model_type")),
        ("tied", &|config| config["tie_word_embeddings"] = true.into()),
        ("rope-spellings", &|config| config["rope_theta"] = 1e6.into()),
        ("rope-spellings", &|config| {
            config["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
        }),
        ("dtype", &|config| config["torch_dtype"] = "float16".into()),
        ("special-token", &|config| config["eos_token_id"] = 3.into()),
    ];
    for (code, edit) in cases {
        let found = broken(&shop, &folder, edit);
        assert!(found.contains(&code.to_owned()), "{code} not in {found:?}");
    }
    let doubts: [(&str, Edit); 7] = [
        ("causality", &|config| remove(&mut config[own], "causal")),
        ("mask-token", &|config| config[own]["mask_token_id"] = 257.into()),
        ("layout", &|config| remove_both(config, "sample_from_anchor")),
        ("model-type", &|config| config["model_type"] = "llama".into()),
        ("eps", &|config| config["rms_norm_eps"] = 1e-3.into()),
        ("context", &|config| config["max_position_embeddings"] = 4096.into()),
        ("rope-target", &|config| {
            config["rope_theta"] = 1e6.into();
            config["rope_parameters"]["rope_theta"] = 1e6.into();
        }),
    ];
    for (code, edit) in doubts {
        edited(&shop, &folder, edit);
        let found = findings(&shop, "warning");
        assert!(found.contains(&code.to_owned()), "{code} not in {found:?}");
    }
}

#[test]
fn a_list_that_is_one_off_the_usual_one_is_told_without_a_manifest() {
    let shop = Workshop::new();
    let mut config = tiny_config("llama");
    config["num_hidden_layers"] = 8.into();
    write_target(&shop.target, &config);
    let shop = trained_in(shop, &["draft.method=dflash", "draft.target_layers=[1,5]"]);
    let folder = export(&shop, "hf", "f32");
    for (ids, wanted) in [([1, 5], 0), ([2, 6], 1), ([0, 4], 1), ([2, 5], 0)] {
        edited(&shop, &folder, &|config| config["dflash_config"]["target_layer_ids"] = json!(ids));
        std::fs::remove_file(shop.path("broken/longdraft-manifest.json")).expect("removed");
        assert_eq!(findings(&shop, "warning"), vec!["layers"; wanted], "{ids:?}");
    }
}

#[test]
fn tensors_of_a_folder_that_are_not_trained_are_looked_at() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "hf", "f32");
    let table = table_of(&shop);
    let with = |change: &dyn Fn(&mut Tensors)| {
        change_tensors(format!("{}/model.safetensors", copied(&shop, &folder)), change);
        [findings(&shop, "error"), findings(&shop, "warning")]
    };
    let add = |name: &'static str, tensor: Tensor| {
        move |all: &mut Tensors| all.push((name.to_owned(), tensor.clone()))
    };
    let none: [Vec<String>; 2] = [vec![], vec![]];
    // The target's own, which its head is tied to.
    let both = |all: &mut Tensors| {
        for name in ["embed_tokens.weight", "lm_head.weight"] {
            all.push((name.to_owned(), table.clone()));
        }
    };
    assert_eq!(with(&both), none);
    let other = (&table * 1.5).expect("scaled");
    let small = table.narrow(0, 0, 200).and_then(|part| part.contiguous()).expect("a part");
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        assert_eq!(with(&add(name, other.clone())), [vec![], vec!["frozen-tensor".to_owned()]]);
        let [errors, _] = with(&add(name, small.clone()));
        assert!(errors.contains(&"shape".to_owned()), "{name}: {errors:?}");
    }
    // A map to a smaller vocabulary, without a head for it.
    let map = Tensor::zeros(200, DType::I64, &Device::Cpu).expect("a map");
    let [errors, _] = with(&add("d2t", map));
    assert!(errors.contains(&"foreign-tensor".to_owned()), "{errors:?}");
    let [errors, _] = with(&|all| {
        let norm = all.iter_mut().find(|(name, _)| name == "norm.weight").expect("a norm");
        norm.1 = Tensor::ones(norm.1.dims(), DType::I64, &Device::Cpu).expect("whole numbers");
    });
    assert!(errors.contains(&"weight-type".to_owned()), "{errors:?}");
    let [_, warnings] = with(&|all| {
        let fc = all.iter_mut().find(|(name, _)| name == "fc.weight").expect("a matrix");
        fc.1 = (&fc.1 * 1.01).expect("scaled");
    });
    assert!(warnings.contains(&"changed".to_owned()), "{warnings:?}");
}

/// Rewrites the target's table as a file of fewer bits has it.
fn round_table(shop: &Workshop) {
    let coarse = |tensor: &Tensor| (tensor * 4.0)?.round()? / 4.0;
    change_tensors(shop.target.join("model.safetensors"), |tensors| {
        for (_, table) in tensors.iter_mut().filter(|(name, _)| name.contains("embed_tokens")) {
            *table = coarse(table).expect("rounded");
        }
    });
}

#[test]
fn a_target_that_is_not_that_of_the_export_is_told() {
    let shop = trained(METHODS[0].1);
    let write = |name: &str, value: &Value| {
        std::fs::write(shop.target.join(name), value.to_string()).expect("written");
    };
    let template = |text: &str| write("tokenizer_config.json", &json!({ "chat_template": text }));
    template("{{ messages[0].content }}");
    let folders = ["hf", "speculators", "llamacpp"].map(|to| (to, export(&shop, to, "f32")));
    let expect = |wanted: &[&str]| {
        for (profile, folder) in &folders {
            copied(&shop, folder);
            assert_eq!(findings(&shop, "warning"), wanted, "{profile}");
        }
    };
    expect(&[]);
    // As a mode of thinking that is switched on begins answers.
    template("{{ messages[0].content }}<think>");
    expect(&["chat-template"]);
    template("{{ messages[0].content }}");
    let mut tokenizer = byte_tokenizer();
    tokenizer["added_tokens"][1]["lstrip"] = true.into();
    write("tokenizer.json", &tokenizer);
    expect(&["other-tokenizer"]);
    write("tokenizer.json", &byte_tokenizer());
    round_table(&shop);
    expect(&["other-target"]);
}

#[test]
fn a_chain_is_looked_for_at_the_top_and_its_layout_is_told() {
    let shop = trained(METHODS[2].1);
    let folder = export(&shop, "hf", "bf16");
    for key in ["markov_rank", "markov_head_type", "enable_confidence_head", "target_layer_ids"] {
        assert_eq!(broken(&shop, &folder, &|config| remove(config, key)), ["missing-key"], "{key}");
    }
    // As its first trainer writes it: at the top alone, and nothing of slot 0.
    edited(&shop, &folder, &|config| {
        remove(config, "dflash_config");
        remove(config, "sample_from_anchor");
    });
    assert_eq!(findings(&shop, "error"), Vec::<String>::new());
    let found = findings(&shop, "warning");
    assert_eq!(found, ["missing-key", "missing-key", "missing-key", "layout"]);
    // What is said must hold, in the older spelling too.
    for (key, said) in [("sample_from_anchor", false), ("dspark_bonus_anchor", true)] {
        let found = broken(&shop, &folder, &|config| {
            remove_both(config, "sample_from_anchor");
            config[key] = said.into();
        });
        assert_eq!(found, ["layout", "sizes"], "{key}");
    }
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
    let layer = "transformer_layer_config";
    let layers = "aux_hidden_state_layer_ids";
    let causal = "sliding_window_non_causal";
    let cases: [(&str, Edit); 17] = [
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
        ("no-map", &|config| config["draft_vocab_size"] = 200.into()),
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
        assert!(found.contains(&code.to_owned()), "{number}: {code} not in {found:?}");
    }
    // The library's own choice where the tokenizer has no mask token and no row of the table is spare.
    edited(&shop, &folder, &|config| config["mask_token_id"] = 257.into());
    assert!(!findings(&shop, "error").contains(&"not-the-target".to_owned()));
    assert!(findings(&shop, "warning").contains(&"mask-token".to_owned()));
}

#[test]
fn a_gguf_file_that_readers_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let folder = export(&shop, "llamacpp", "f32");
    let key = |name: &str, value: Option<GgufValue>| {
        let name = if name.contains('.') { name.to_owned() } else { format!("dflash.{name}") };
        move |keys: &mut Vec<(String, GgufValue)>, _: &mut Tensors| {
            keys.retain(|(known, _)| *known != name);
            keys.extend(value.clone().map(|value| (name.clone(), value)));
        }
    };
    let ids =
        |ids: &[i32]| Some(GgufValue::Array(ids.iter().copied().map(GgufValue::I32).collect()));
    let number = |number| Some(GgufValue::U32(number));
    let window = "dflash.attention.sliding_window_pattern";
    let cases: [(&str, GgufChange); 17] = [
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
        ("not-the-target", &key("logit_scale", Some(GgufValue::F32(0.2)))),
        ("not-the-target", &key("final_logit_softcapping", Some(GgufValue::F32(30.0)))),
        ("special-token", &key("tokenizer.ggml.eos_token_id", number(3))),
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
            let order = Tensor::new(order, q.device()).expect("an order");
            *q = q.index_select(&order, 0).expect("rows");
        }),
    ];
    for (number, (code, edit)) in cases.into_iter().enumerate() {
        let found = broken_file(&shop, &folder, edit);
        assert!(found.contains(&code.to_owned()), "{number}: {code} not in {found:?}");
    }
    let base = key("dflash.rope.freq_base", Some(GgufValue::F32(1e6)));
    change_gguf(&Path::new(&copied(&shop, &folder)).join(GGUF), &base);
    let found = findings(&shop, "warning");
    assert!(found.iter().any(|found| found == "rope-target"), "{found:?}");
}

#[test]
fn heads_of_gguf_files_that_readers_would_misread_are_told() {
    let shop = trained(METHODS[2].1);
    let folder = export(&shop, "llamacpp", "f32");
    let flag = |name: &'static str, value: Option<bool>| {
        move |keys: &mut Vec<(String, GgufValue)>, _: &mut Tensors| {
            keys.retain(|(known, _)| known != name);
            keys.extend(value.map(|value| (name.to_owned(), GgufValue::Bool(value))));
        }
    };
    // A chain may leave it to its tensors.
    let silent = flag("dflash.sample_from_anchor", None);
    change_gguf(&Path::new(&copied(&shop, &folder)).join(GGUF), &silent);
    assert_eq!(findings(&shop, "error"), Vec::<String>::new());
    assert_eq!(findings(&shop, "warning"), ["layout"]);
    let cases: [(&str, GgufChange); 3] = [
        ("sizes", &flag("dflash.sample_from_anchor", Some(false))),
        ("confidence", &flag("dflash.has_confidence_head", Some(false))),
        ("missing-tensor", &|_, tensors| tensors.retain(|(name, _)| name != "conf_proj.bias")),
    ];
    for (code, edit) in cases {
        let found = broken_file(&shop, &folder, edit);
        assert!(found.contains(&code.to_owned()), "{code} not in {found:?}");
    }
    let shop = trained(METHODS[1].1);
    let folder = export(&shop, "llamacpp", "f32");
    let found = broken_file(&shop, &folder, &|keys, _| {
        let key = keys.iter_mut().find(|(name, _)| name == "dflash.selector_top_k");
        key.expect("a key").1 = GgufValue::U32(6);
    });
    assert!(found.iter().any(|found| found == "selector"), "{found:?}");
}
