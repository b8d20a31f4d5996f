//! Exports through the binary: every profile is written, read back, and drafts like its checkpoint.

use std::path::Path;

use crate::support::files::{read_json, read_tensors, write_tensors};
use crate::support::runs::drafted;
use crate::support::{
    self, Workshop, fail, fail_with, last_json, longdraft, require_words, succeed,
};
use serde_json::Value;

/// A workshop with a trained EAGLE-3 draft whose target has eight layers.
fn trained(more: &[&str]) -> Workshop {
    let shop = Workshop::new();
    let mut config = support::tiny_config("llama");
    config["num_hidden_layers"] = 8.into();
    support::write_target(&shop.target, &config);
    let eagle3 = [
        "draft.method=eagle3",
        "draft.draft_vocab_size=120",
        "draft.ttt_steps=3",
        "data.anchor.enabled=false",
        "schedule.learning_rate=0.01",
        "train.steps=12",
    ];
    succeed(&[&["train", &shop.config()][..], &eagle3, more].concat());
    shop
}

fn export(shop: &Workshop, profile: &str, more: &[&str]) -> String {
    let output = shop.path(&format!("export-{profile}"));
    let run = shop.path("run");
    let all = [&["export", &run, "--to", profile, "--output", &output][..], more].concat();
    succeed(&all);
    output
}

#[test]
fn every_profile_is_written_and_drafts_like_its_checkpoint() {
    let shop = trained(&[]);
    succeed(&["extract", &shop.path("run")]);
    let own = drafted(&shop, &shop.path("run/draft"));
    for place in ["run", "run/checkpoints/last", "run/draft/draft_model_weights.safetensors"] {
        assert_eq!(drafted(&shop, &shop.path(place)), own, "{place}");
    }
    for profile in ["vllm", "sglang", "llamacpp", "llamacpp-hf", "hf", "speculators"] {
        let folder = export(&shop, profile, &["--dtype", "f32"]);
        assert_eq!(drafted(&shop, &folder), own, "{profile}");
        let manifest = read_json(format!("{folder}/longdraft-manifest.json"));
        assert_eq!(manifest["target_layers_in_words"][2], "output of layer 4");
        assert_eq!(manifest["provenance"]["steps"], 12);
    }
    // Each reader's own count of the same layers.
    let ids = "eagle_aux_hidden_state_layer_ids";
    let config = |profile: &str| read_json(shop.path(&format!("export-{profile}/config.json")));
    assert_eq!(config("vllm")[ids], serde_json::json!([2, 4, 5]));
    assert!(config("vllm")["eagle_config"][ids].is_null());
    assert_eq!(config("sglang")["eagle_config"][ids], serde_json::json!([1, 3, 4]));
    assert!(config("sglang")[ids].is_null());
    assert_eq!(config("hf")["eagle_config"][ids], serde_json::json!([1, 3, 4]));
    assert_eq!(config("speculators")[ids], serde_json::json!([2, 4, 5]));
    assert!(!config("vllm").to_string().contains("null"), "strict readers refuse null");
    assert_eq!(config("vllm")["torch_dtype"], "float32");
}

/// Engines load the target by its name, this program from where it lies.
#[test]
fn a_name_for_engines_stands_in_their_commands_alone() {
    let shop = trained(&[]);
    let (run, output) = (shop.path("run"), shop.path("named"));
    let command = ["export", &run, "--to", "vllm", "--output", &output];
    let told = succeed(&[&command[..], &["--target-name", "some-org/tiny"]].concat());
    let own = format!("longdraft generate --target {} --draft {output} ", shop.target());
    require_words(&told, &[&own, "vllm serve some-org/tiny "]);
    // What is sent to others names no place of this machine.
    let manifest = read_json(format!("{output}/longdraft-manifest.json"));
    let own = manifest["serve"]["longdraft"].as_str().expect("a command");
    assert!(own.starts_with("longdraft generate --target some-org/tiny "), "{own}");
}

#[test]
fn the_same_draft_gives_the_same_bytes_and_folders_of_others_stay() {
    let shop = trained(&[]);
    let bytes =
        |folder: &str, file: &str| std::fs::read(Path::new(folder).join(file)).expect("file");
    let folder = export(&shop, "vllm", &[]);
    let first: Vec<Vec<u8>> = ["model.safetensors", "config.json", "longdraft-manifest.json"]
        .map(|f| bytes(&folder, f))
        .into();
    export(&shop, "vllm", &[]);
    let again: Vec<Vec<u8>> = ["model.safetensors", "config.json", "longdraft-manifest.json"]
        .map(|f| bytes(&folder, f))
        .into();
    assert!(first == again, "an export is a function of the draft");
    succeed(&["extract", &shop.path("run")]);
    let first = support::files(&shop.path("run/draft"));
    succeed(&["extract", &shop.path("run")]);
    assert!(first == support::files(&shop.path("run/draft")), "and so is what is extracted");
    let text = fail(&["export", &shop.path("run"), "--to", "vllm", "-o", &shop.target()], 1);
    assert!(text.contains("was not written by an export"), "{text}");
    assert!(shop.target.join("model.safetensors").is_file());
    let text = fail(&["export", &shop.path("run"), "--to", "tensorrt", "-o", &folder], 2);
    assert!(text.contains("`tensorrt` is not a profile") && text.contains("llamacpp-hf"), "{text}");
}

#[test]
fn a_folder_of_exports_is_verified_whole_and_names_them() {
    let shop = trained(&[]);
    let (run, exports) = (shop.path("run"), shop.path("exports"));
    succeed(&["export", &run, "--to", "vllm,hf", "--output", &exports]);
    let out = succeed(&["verify", &exports, "--target", &shop.target(), "--checkpoint", &run]);
    assert_eq!(out.matches("== ").count(), 2, "{out}");
    assert_eq!(last_json(&succeed(&["verify", &exports, "--json"]))["clean"], true);
    fail_with(&["verify", &exports, "--profile", "hf"], 2, &["holds 2 exports"]);
    fail_with(&["push", &exports, "org/draft", "--dry-run"], 2, &["such as", "exports/hf"]);
    let generate = ["generate", "--target", &shop.target(), "--prompt", "a", "--draft", &exports];
    fail_with(&generate, 2, &["exports/hf", "exports/vllm"]);
    // A bare name lies in the working directory.
    let folder = Path::new(&exports).join("vllm");
    let mut verify = longdraft(&["verify", "model.safetensors"]);
    support::succeeded(support::finished(verify.current_dir(&folder)));
    // A run is no export.
    let words = ["run: is a run, no export", "hint: write one with `longdraft export"];
    fail_with(&["verify", &run], 2, &words);
    // One that is damaged does not hide in the others.
    std::fs::write(format!("{exports}/hf/config.json"), "{}").expect("file");
    fail_with(&["verify", &exports], 1, &["1 of 2 exports may not be served"]);
    let told = last_json(&support::stdout(&support::run(&["verify", &exports, "--json"])));
    assert_eq!(told["clean"], false);
    assert_eq!(told["exports"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_window_comes_back_from_every_folder_that_may_hold_it() {
    let shop = trained(&["draft.attention_window=9"]);
    let (run, target, output) = (shop.path("run"), shop.target(), shop.path("no"));
    for profile in ["vllm", "speculators", "hf"] {
        let folder = export(&shop, profile, &["--dtype", "f32"]);
        let verify = ["verify", &folder, "--target", &target, "--checkpoint", &run, "--json"];
        let report = last_json(&succeed(&verify));
        assert!(report["parity"].is_object(), "{profile}: the network was not run");
        let warned = report["problems"].to_string().contains("flag-unsupported");
        assert!(warned, "{profile}: older versions run full attention");
        assert_eq!(drafted(&shop, &folder), drafted(&shop, &run), "{profile}");
        for (to, reason) in [("sglang", "SGLang runs full"), ("llamacpp", "llama.cpp runs full")] {
            let again = ["export", &folder, "--target", &target, "--to", to, "--output", &output];
            fail_with(&again, 1, &[reason]);
        }
    }
}

#[test]
fn exports_are_warm_starts_and_other_networks_are_refused() {
    let (shop, config) = trained(&["draft.norm_before_residual=true"]).with_config();
    let text = fail(&["export", &shop.path("run"), "--to", "sglang", "-o", &shop.path("no")], 1);
    assert!(text.contains("SGLang computes another network without a message"), "{text}");
    for profile in ["speculators", "llamacpp"] {
        let from = format!("draft.from={}", export(&shop, profile, &[]));
        let output = format!("output={}", shop.path(&format!("next-{profile}")));
        let warm =
            ["train", &config, "draft.method=eagle3", "data.anchor.enabled=false", &from, &output];
        let warm = [&warm[..], &["train.steps=1", "draft.ttt_steps=2"]].concat();
        fail_with(&warm, 2, &["set `draft.norm_before_residual: true`"]);
        succeed(&[&warm[..], &["draft.norm_before_residual=true"]].concat());
    }
}

#[test]
fn a_glide_layer_is_written_for_longspec_and_read_back() {
    let shop = Workshop::new();
    succeed(&["train", &shop.config(), "train.steps=4"]);
    succeed(&["extract", &shop.path("run")]);
    let own = drafted(&shop, &shop.path("run/draft"));
    for profile in ["longspec", "hf"] {
        let folder = export(&shop, profile, &["--dtype", "f32"]);
        assert_eq!(drafted(&shop, &folder), own, "{profile}");
        let config = read_json(format!("{folder}/config.json"));
        assert_eq!(config["architectures"][0], "LlamaGlideDecoderLayer");
        assert_eq!(config["model_max_length"], 512);
        assert_eq!(
            read_json(format!("{folder}/longdraft-manifest.json"))["tensors"]
                .as_object()
                .map(serde_json::Map::len),
            Some(20)
        );
    }
    let pth = shop.path("export-longspec/draft_model_weights.pth");
    assert_eq!(drafted(&shop, &pth), own);
    let text = fail(&["export", &shop.path("run"), "--to", "vllm", "-o", &shop.path("no")], 1);
    assert!(text.contains("no such engine runs a GLIDE layer"), "{text}");
    require_words(&text, &["hint: these profiles hold it: hf, longspec", "longdraft generate"]);
}

/// Folders as the first public drafts, trainers and the speculators library leave them.
#[test]
fn public_layouts_draft_as_they_are() {
    use longdraft_models::weights::pth;
    let shop = trained(&[]);
    succeed(&["extract", &shop.path("run")]);
    let own = drafted(&shop, &shop.path("run/draft"));
    let plain = export(&shop, "hf", &["--dtype", "f32"]);
    let mut tensors = read_tensors(format!("{plain}/model.safetensors"));
    let mut config = read_json(format!("{plain}/config.json"));
    let write = |folder: &str, config: &Value| {
        std::fs::create_dir_all(folder).expect("folder");
        std::fs::write(format!("{folder}/config.json"), config.to_string()).expect("config");
    };

    // The first public drafts: a plain model's name, no layer ids, a pickle.
    for keys in
        ["eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_residual", "head_dim"]
    {
        config.as_object_mut().expect("table").remove(keys);
    }
    config["architectures"] = serde_json::json!(["LlamaForCausalLM"]);
    let first = shop.path("first-public");
    write(&first, &config);
    let pickled: Vec<_> =
        tensors.iter().filter(|(name, _)| name != "embed_tokens.weight").cloned().collect();
    pth::save(&Path::new(&first).join("pytorch_model.bin"), &pickled).expect("save");
    assert_eq!(drafted(&shop, &first), own);

    // A trainer's folder: prefixed names, counted layers, shards.
    let trainer = shop.path("trainer");
    config["architectures"] = serde_json::json!(["LlamaForCausalLMEagle3"]);
    config["eagle_config"] = serde_json::json!({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]});
    write(&trainer, &config);
    for (name, _) in &mut tensors {
        *name = format!("model.{}", name.replace("midlayer.", "layers.0."));
    }
    let (a, b) = tensors.split_at(7);
    let mut map = serde_json::Map::new();
    for (file, part) in [("a.safetensors", a), ("b.safetensors", b)] {
        write_tensors(format!("{trainer}/{file}"), part);
        map.extend(part.iter().map(|(name, _)| (name.clone(), file.into())));
    }
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(format!("{trainer}/model.safetensors.index.json"), index.to_string())
        .expect("index");
    assert_eq!(drafted(&shop, &trainer), own);

    // Any of them becomes any other.
    let (output, target) = (shop.path("converted"), shop.target());
    let convert = ["export", &first, "--target", &target, "--to", "llamacpp", "-o", &output];
    succeed(&[&convert[..], &["--dtype", "f32"]].concat());
    assert_eq!(drafted(&shop, &output), own);

    // What is not computed here is said, not guessed.
    config["num_hidden_layers"] = 2.into();
    config["norm_before_fc"] = true.into();
    write(&trainer, &config);
    let text = fail(&["generate", "--target", &target, "--draft", &trainer, "--prompt", "a"], 1);
    assert!(text.contains("more than one layer") && text.contains("norm_before_fc"), "{text}");
}
