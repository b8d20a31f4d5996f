//! Folders and files that engines would misread, and what is told of them.

use std::path::Path;

use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Device};

use super::*;
use crate::support::files::{Tensors, change_tensors};
use crate::support::{GgufChange, byte_tokenizer, change_gguf};

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
    // vLLM refuses it in this place.
    edited(&shop, &folder, &|config| config["dflash_config"]["sample_from_anchor"] = true.into());
    assert_eq!(findings(&shop, "error"), Vec::<String>::new());
    assert!(findings(&shop, "warning").contains(&"layout".to_owned()));
    edited(&shop, &folder, &|_| {});
    assert!(!findings(&shop, "warning").contains(&"layout".to_owned()));
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
