//! Block drafts with a head of their own over some of the target's tokens, as the speculators library trains them:
//! read, decoded, exported on, and broken.

use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::header::Header;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::Value;

use crate::block_export::{GGUF, METHODS, export, findings, table_of, trained};
use crate::support::files::{Tensors, change_json, change_tensors, read_json as read};
use crate::support::runs::{drafted, killed_alike};
use crate::support::{
    VOCABULARY, Workshop, change_gguf, fail, fail_with, last_json, run, stdout, succeed,
};

/// The tokens that the draft proposes: two of three.
fn kept() -> Vec<u32> {
    (0..VOCABULARY as u32).filter(|id| id % 3 != 1).collect()
}

/// A copy of a folder without what says where it comes from.
fn only_draft(folder: &str, copy: &str) {
    std::fs::create_dir(copy).expect("folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(format!("{folder}/{name}"), format!("{copy}/{name}")).expect("copied");
    }
}

/// A folder of speculators whose head is the target's rows of the kept tokens.
fn with_own_head(shop: &Workshop) -> String {
    let (folder, own) = (export(shop, "speculators", "f32"), shop.path("own"));
    only_draft(&folder, &own);
    change_json(format!("{own}/config.json"), |config| {
        config["draft_vocab_size"] = kept().len().into();
    });
    let rows = |tensor: &Tensor| select_rows(tensor, &kept()).expect("rows");
    let head = rows(&table_of(shop));
    let tokens = kept().into_iter().map(TargetTokenId).collect();
    let map = VocabularyMap::new(tokens, VOCABULARY).and_then(|map| map.tensors());
    let map = map.expect("a map");
    change_tensors(format!("{own}/model.safetensors"), |tensors| {
        for (_, output) in tensors.iter_mut().filter(|(name, _)| name.contains("markov_w2")) {
            *output = rows(output);
        }
        tensors.push(("lm_head.weight".to_owned(), head));
        tensors.extend(map);
    });
    own
}

/// Tokens and acceptance of greedy decoding through the target's head with proposals among the kept tokens.
fn reduced(shop: &Workshop) -> (Value, Value) {
    let lines: Vec<String> = kept().iter().map(u32::to_string).collect();
    let list = shop.write("kept.txt", lines.join("\n"));
    let (target, draft) = (shop.target(), shop.path("run"));
    let arguments = ["generate", "--target", &target, "--draft", &draft, "--draft-vocab", &list];
    let more = ["--prompt", "the cat sat", "--max-tokens", "40", "--ignore-eos", "--pace", "fixed"];
    let line = last_json(&succeed(&[&arguments[..], &more, &["--json"]].concat()));
    (line["tokens"].clone(), line["conditional_acceptance"].clone())
}

/// Exports a draft's folder on.
fn exported(shop: &Workshop, folder: &str, profile: &str) -> String {
    let (output, target) = (shop.path(&format!("own-{profile}")), shop.target());
    let all = ["export", folder, "--to", profile, "--target", &target, "--output", &output];
    succeed(&[&all[..], &["--dtype", "f32"]].concat());
    output
}

#[test]
fn a_head_of_its_own_drafts_like_the_same_rows_of_the_target_s_and_is_exported_on() {
    for (method, arguments) in [METHODS[0], METHODS[2]] {
        let shop = trained(arguments);
        let own = with_own_head(&shop);
        let wanted = reduced(&shop);
        assert_eq!(drafted(&shop, &own), wanted, "{method}");
        assert_eq!(wanted.0, drafted(&shop, &shop.path("run")).0, "{method}: drafts lose nothing");
        for profile in ["vllm", "hf", "speculators", "llamacpp"] {
            let folder = exported(&shop, &own, profile);
            assert_eq!(drafted(&shop, &folder), wanted, "{method} {profile}");
            let output =
                run(&["verify", &folder, "--target", &shop.target(), "--strict", "--json"]);
            let report = last_json(&stdout(&output));
            assert_eq!(report["clean"], true, "{method} {profile}: {report}");
            assert!(report["parity"].is_object(), "{method} {profile}: the network was not run");
            if profile == "vllm" {
                let other = ["verify", &folder, "--profile", "sglang", "--json"];
                let report = last_json(&stdout(&run(&other)));
                let problems = report["problems"].as_array().expect("problems");
                let told = problems.iter().any(|problem| problem["code"] == "flag-unsupported");
                assert!(told, "SGLang leaves the head out: {report}");
            }
            if profile == "llamacpp" {
                let header =
                    Header::read(&std::fs::read(format!("{folder}/{GGUF}")).expect("file"));
                let map = &header.expect("header").tensors["d2t"];
                assert_eq!(map.shape, [kept().len()]);
                continue;
            }
            let config = read(format!("{folder}/config.json"));
            assert_eq!(config["draft_vocab_size"], kept().len(), "{method} {profile}");
            let serve = &read(format!("{folder}/longdraft-manifest.json"))["serve"];
            assert!(serve["sglang"].is_null() && serve["vllm"].is_string(), "{profile}: {serve}");
        }
        let (target, output) = (shop.target(), shop.path("out"));
        for (profile, reason) in [
            ("sglang", "drafts through the target's head alone"),
            ("llamacpp-hf", "`draft_vocab_size` for EAGLE-3"),
        ] {
            let all = ["export", &own, "--to", profile, "--target", &target, "--output", &output];
            fail_with(&all, 1, &[reason]);
        }
        goes_on_with_its_head(&shop, &own, arguments);
        let list = shop.path("kept.txt");
        let more = ["--draft", &own, "--draft-vocab", &list, "--prompt", "a"];
        let text = fail(&[&["generate", "--target", &target][..], &more].concat(), 2);
        assert!(text.contains("a vocabulary of its own"), "{text}");
    }
}

/// Training goes on with the tokens that the draft proposes, and with no others.
fn goes_on_with_its_head(shop: &Workshop, own: &str, arguments: &[&str]) {
    let (config, from) = (shop.config(), format!("draft.from={own}"));
    let output = format!("output={}", shop.path("next"));
    let sizes = ["draft.layers=2", "draft.target_layers=[0,2]", "draft.block_size=4"];
    let train = ["train", &config, "data.anchor.enabled=false", "train.steps=2", &from, &output];
    let train = [&train[..], arguments, &sizes].concat();
    let text = fail(&[&train[..], &["draft.draft_vocab_size=9"]].concat(), 2);
    assert!(text.contains("a head of its own over") && text.contains("leave it out"), "{text}");
    let whole: &[&str] = match arguments[0] {
        "draft.method=dspark" => &["draft.distance=renyi"],
        _ => &["draft.loss=renyi", "draft.soft_weight=0.5"],
    };
    fail_with(&[&train[..], whole].concat(), 2, &["compares distributions over all"]);
    succeed(&train);
    succeed(&["extract", &shop.path("next")]);
    let tensors = |file: String| SafetensorsSource::open_file(Path::new(&file)).expect("weights");
    let before = tensors(format!("{own}/model.safetensors"));
    let after = tensors(format!("{}/draft/draft_model_weights.safetensors", shop.path("next")));
    let values = |source: &SafetensorsSource, name: &str| -> Vec<f32> {
        let tensor = source.load(name, DType::F32).expect("a tensor");
        tensor.flatten_all().and_then(|all| all.to_vec1()).expect("values")
    };
    assert_eq!(values(&before, "lm_head.weight"), values(&after, "lm_head.weight"));
    assert_ne!(values(&before, "fc.weight"), values(&after, "fc.weight"), "nothing was learned");
    assert_eq!(before.load_integers("d2t").ok(), after.load_integers("d2t").ok());
}

#[test]
fn a_draft_learns_to_propose_the_most_frequent_tokens_alone() {
    let size = 24;
    let vocabulary = format!("draft.draft_vocab_size={size}");
    let soft = ["draft.soft_weight=0.5", "teacher.soft_targets=top_k", "teacher.top_k=8"];
    for (method, more) in [(METHODS[0], &[][..]), (METHODS[0], &soft[..]), (METHODS[2], &[])] {
        let (shop, config) = trained(method.1).with_config();
        let sizes = ["draft.layers=2", "draft.target_layers=[0,2]", "draft.block_size=4"];
        let train = ["train", &config, "data.anchor.enabled=false", "train.steps=12", &vocabulary];
        let train = [&train[..], &sizes, method.1, more].concat();
        let [run_of, _] = killed_alike(&shop, method.0, &train);
        let (_, acceptance) = drafted(&shop, &run_of);
        assert!(acceptance.is_array(), "{acceptance}");
        assert_eq!(drafted(&shop, &run_of).0, drafted(&shop, &shop.path("run")).0, "{method:?}");
        succeed(&["extract", &run_of]);
        let folder = format!("{run_of}/draft");
        assert_eq!(read(format!("{folder}/config.json"))["draft_vocab_size"], size, "{method:?}");
        let (halved, target) = (shop.path("halved"), shop.target());
        succeed(&["export", &folder, "--to", "vllm", "--target", &target, "--output", &halved]);
        let output = run(&["verify", &halved, "--target", &target, "--strict", "--json"]);
        assert_eq!(last_json(&stdout(&output))["clean"], true, "{method:?}: in bf16");
        let exported = exported(&shop, &folder, "vllm");
        assert_eq!(drafted(&shop, &exported), drafted(&shop, &folder), "{method:?}");
        let output = run(&["verify", &exported, "--target", &shop.target(), "--strict", "--json"]);
        assert_eq!(last_json(&stdout(&output))["clean"], true, "{method:?}");

        // A draft that proposed every token goes on with these.
        let from = format!("draft.from={}", shop.path("run"));
        let output = format!("output={}", shop.path("narrowed"));
        succeed(&[&train[..], &[&from, &output]].concat());
        succeed(&["extract", &shop.path("narrowed")]);
        let narrowed = read(shop.path("narrowed/draft/config.json"));
        assert_eq!(narrowed["draft_vocab_size"], size, "{method:?}");
    }
    let (_shop, config) = trained(METHODS[1].1).with_config();
    let train = ["train", &config, "data.anchor.enabled=false", &vocabulary];
    fail_with(&[&train[..], METHODS[1].1].concat(), 2, &["beside a selector, which knows all"]);
}

#[test]
fn a_map_that_readers_would_misread_is_told() {
    let shop = trained(METHODS[0].1);
    let own = with_own_head(&shop);
    let folder = exported(&shop, &own, "speculators");
    let found = |edit: &dyn Fn(&mut Tensors)| {
        let broken = shop.path("broken");
        let _ = std::fs::remove_dir_all(&broken);
        only_draft(&folder, &broken);
        change_tensors(format!("{broken}/model.safetensors"), edit);
        findings(&shop, "error")
    };
    let absolute = |tensors: &mut Tensors| {
        let (_, map) = tensors.iter_mut().find(|(name, _)| name == "d2t").expect("a map");
        let ids: Vec<i64> = kept().into_iter().map(i64::from).collect();
        *map = Tensor::new(ids, map.device()).expect("ids");
    };
    let without =
        |gone: &'static str| move |tensors: &mut Tensors| tensors.retain(|(name, _)| name != gone);
    assert_eq!(found(&|_| {}), Vec::<String>::new());
    for (code, edit) in [
        ("absolute-d2t", &absolute as &dyn Fn(&mut Tensors)),
        ("no-map", &without("d2t")),
        ("no-map", &without("t2d")),
        ("missing-tensor", &without("lm_head.weight")),
    ] {
        let found = found(edit);
        assert!(found.iter().any(|found| found == code), "{code} not in {found:?}");
    }
    let file = exported(&shop, &own, "llamacpp");
    let broken = shop.path("broken");
    std::fs::remove_dir_all(&broken).expect("removed");
    std::fs::create_dir(&broken).expect("folder");
    let copy = format!("{broken}/{GGUF}");
    std::fs::copy(format!("{file}/{GGUF}"), &copy).expect("copied");
    change_gguf(Path::new(&copy), &|_, tensors| {
        let (_, map) = tensors.iter_mut().find(|(name, _)| name == "d2t").expect("a map");
        let offsets: Vec<i64> =
            kept().into_iter().zip(0..).map(|(id, i)| i64::from(id) - i).collect();
        *map = Tensor::new(offsets, map.device()).expect("offsets");
    });
    let found = findings(&shop, "error");
    assert!(found.iter().any(|found| found == "offset-d2t"), "{found:?}");
}
