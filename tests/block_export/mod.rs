//! Exports of block drafts: written, read back, and broken in every way that engines do not tell.

mod misread;

use crate::support::files::{change_json, copy_files, read_json as read, read_tensors};
use crate::support::runs::{drafted, written_plainly};
use crate::support::{
    Workshop, fail, fail_with, last_json, run, stdout, succeed, tiny_config, with, write_target,
};
use candle_core::Tensor;
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
                    // vLLM does not start where a chain says it in both places.
                    if (key, method) == ("sample_from_anchor", "dspark") {
                        assert_eq!(config["dflash_config"].get(key), None);
                        continue;
                    }
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
            fail_with(&["export", &run, "--to", profile, "--output", &output], 1, &[reason]);
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
        fail_with(&["export", &run, "--to", profile, "--output", &output], 1, &[reason]);
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
    fail_with(&[&warm[..], &["draft.target_layers=[1,2]"], &same].concat(), 2, &["target_layers"]);
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
