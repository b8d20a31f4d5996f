//! Exports of block drafts: written, read back, and broken in every way that engines do not tell.

use std::path::Path;

use crate::support::{Workshop, fail, last_json, run, stdout, succeed};
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

#[test]
fn every_method_is_exported_verified_and_drafts_like_its_checkpoint() {
    for (method, arguments) in METHODS {
        let shop = trained(arguments);
        let own = drafted(&shop, &shop.path("run"));
        for profile in ["vllm", "sglang", "hf", "llamacpp-hf"] {
            let folder = export(&shop, profile, "f32");
            assert_eq!(drafted(&shop, &folder), own, "{method} {profile}");
            let checkpoint = shop.path("run");
            let verify = ["verify", &folder, "--target", &shop.target(), "--strict", "--json"];
            let output = run(&[&verify[..], &["--checkpoint", &checkpoint]].concat());
            assert!(output.status.success(), "{method} {profile}: {}", stdout(&output));
            assert_eq!(last_json(&stdout(&output))["clean"], true);
            let config = read(&format!("{folder}/config.json"));
            assert!(!config.to_string().contains("null"), "strict readers refuse null");
            assert_eq!(config["torch_dtype"], "float32");
            assert_eq!(config["is_causal"], false, "{method}");
            assert_eq!(config["block_size"], config["dflash_config"]["block_size"]);
        }
        let manifest = read(&shop.path("export-hf/longdraft-manifest.json"));
        let (vllm, sglang) =
            (manifest["serve"]["vllm"].clone(), manifest["serve"]["sglang"].clone());
        let proposals = if method == "dspark" { 4 } else { 3 };
        let wanted = format!("\"num_speculative_tokens\": {proposals}");
        assert!(vllm.as_str().is_some_and(|line| line.contains(&wanted)), "{vllm}");
        assert!(sglang.as_str().is_some_and(|line| line.ends_with("draft-tokens 4")), "{sglang}");
        for profile in ["speculators", "llamacpp", "longspec"] {
            let output = shop.path(profile);
            let run = shop.path("run");
            let text = fail(&["export", &run, "--to", profile, "--output", &output], 1);
            assert!(
                text.contains("not written yet") || text.contains("run no block drafts"),
                "{text}"
            );
        }
    }
}

/// Breaks a `config.json`.
type Edit<'a> = &'a dyn Fn(&mut Value);

/// Changes the `config.json` of a copy of a folder, and tells which errors `verify` finds.
fn broken(shop: &Workshop, folder: &str, edit: Edit) -> Vec<String> {
    let copy = shop.path("broken");
    let _ = std::fs::remove_dir_all(&copy);
    std::fs::create_dir_all(&copy).expect("folder");
    for entry in std::fs::read_dir(folder).expect("folder") {
        let path = entry.expect("entry").path();
        let name = path.file_name().expect("a name").to_owned();
        std::fs::copy(&path, Path::new(&copy).join(name)).expect("copy");
    }
    let file = format!("{copy}/config.json");
    let mut config = read(&file);
    edit(&mut config);
    std::fs::write(&file, config.to_string()).expect("write");
    let output = run(&["verify", &copy, "--target", &shop.target(), "--json"]);
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
