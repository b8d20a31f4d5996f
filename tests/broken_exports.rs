//! Deliberately broken exports: each is caught by `verify`, under the right code and with words that
//! say what an engine does with it.

mod support;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Device, Tensor};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::AnyDraft;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, VocabularyMap};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft, Init};
use longdraft_models::weights::gguf;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use longdraft_serving::verify::{Effect, Report, Severity, VerifyOptions, verify};
use longdraft_serving::{ExportOptions, Profile, Provenance, TargetFacts, WeightType, export};
use serde_json::{Value, json};

const IDS: &str = "eagle_aux_hidden_state_layer_ids";
const VOCABULARY: usize = support::VOCABULARY;

/// A tiny target and folders beside it.
struct Bench {
    folder: tempfile::TempDir,
    target: TargetFacts,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("target");
        let mut config = support::tiny_config("llama");
        config["num_hidden_layers"] = 8.into();
        support::write_target(&path, &config);
        let target = TargetFacts::open(&path.to_string_lossy()).expect("target");
        Self { folder, target }
    }

    fn eagle3(&self) -> AnyDraft {
        let config = Eagle3Config::for_target(self.target.config(), 60).expect("config");
        // Every fourth token, and the one that ends a text.
        let mut kept: Vec<TargetTokenId> = (0..59).map(|i| TargetTokenId(4 * i + 1)).collect();
        kept.push(TargetTokenId(257));
        let map = VocabularyMap::new(kept, VOCABULARY).expect("map");
        let embedding = self.target.target.embedding().expect("embedding");
        let draft = Eagle3Draft::initialise(&config, map, embedding, 3).expect("draft");
        AnyDraft::Eagle3(Box::new(draft))
    }

    fn export(&self, profile: Profile) -> PathBuf {
        let draft = match profile {
            Profile::Longspec => {
                let config = GlideConfig::for_target(self.target.config(), None);
                let draft = GlideDraft::initialise(&config, &self.target.target, Init::Random, 3);
                AnyDraft::Glide(draft.expect("draft"))
            }
            _ => self.eagle3(),
        };
        let place = self.folder.path().join(profile.name());
        let options = ExportOptions {
            profile,
            dtype: Some(WeightType::F32),
            embedding: true,
            draft_len: 3,
            provenance: Provenance::default(),
        };
        export(&draft, &self.target, &options, &place).expect("export");
        place
    }

    fn check(&self, folder: &Path) -> Report {
        let options = VerifyOptions { target: Some(&self.target), ..VerifyOptions::default() };
        verify(folder, &options).expect("a report")
    }
}

type Break = Box<dyn Fn(&Path)>;

/// A fault, the code that names it, and words of the finding.
struct Fault {
    code: &'static str,
    says: &'static str,
    severity: Severity,
    make: Break,
}

fn fault(code: &'static str, says: &'static str, make: impl Fn(&Path) + 'static) -> Fault {
    Fault { code, says, severity: Severity::Error, make: Box::new(make) }
}

fn warning(code: &'static str, says: &'static str, make: impl Fn(&Path) + 'static) -> Fault {
    Fault { severity: Severity::Warning, ..fault(code, says, make) }
}

fn config(change: impl Fn(&mut Value) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).expect("config");
        let mut value: Value = serde_json::from_str(&text).expect("JSON");
        change(&mut value);
        std::fs::write(&path, value.to_string()).expect("write");
    }
}

fn without(key: &'static str) -> impl Fn(&Path) {
    config(move |value| {
        value.as_object_mut().expect("table").remove(key);
    })
}

fn raw_config(change: impl Fn(String) -> String + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).expect("config");
        std::fs::write(&path, change(text)).expect("write");
    }
}

type Tensors = Vec<(String, Tensor)>;

fn read_tensors(path: &Path) -> Tensors {
    let source = SafetensorsSource::open_file(path).expect("weights");
    let all = longdraft_models::weights::WeightSource::names(&source);
    all.into_iter()
        .map(|name| {
            let tensor = source.load_as_stored(&name).expect("tensor");
            (name, tensor)
        })
        .collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    save(path, tensors, HashMap::from([("format".into(), "pt".into())])).expect("save");
}

fn tensors(change: impl Fn(&mut Tensors) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("model.safetensors");
        let mut all = read_tensors(&path);
        change(&mut all);
        write_tensors(&path, &all);
    }
}

/// Replaces one tensor.
fn tensor(name: &'static str, change: impl Fn(&Tensor) -> Tensor + 'static) -> impl Fn(&Path) {
    tensors(move |all| {
        let entry = all.iter_mut().find(|(known, _)| known == name).expect("tensor");
        entry.1 = change(&entry.1).contiguous().expect("contiguous");
    })
}

fn rename(from: &'static str, to: &'static str) -> impl Fn(&Path) {
    tensors(move |all| {
        for (name, _) in all.iter_mut() {
            *name = name.replace(from, to);
        }
    })
}

fn map(change: impl Fn(&mut Vec<i64>) + 'static) -> impl Fn(&Path) {
    tensor("d2t", move |old| {
        let mut values: Vec<i64> = old.to_vec1().expect("values");
        change(&mut values);
        Tensor::from_vec(values.clone(), values.len(), &Device::Cpu).expect("tensor")
    })
}

fn bytes(change: impl Fn(&mut Vec<u8>) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("model.safetensors");
        let mut all = std::fs::read(&path).expect("read");
        change(&mut all);
        std::fs::write(&path, all).expect("write");
    }
}

/// Replaces the safetensors header, keeping the data.
fn header(change: impl Fn(String) -> String + 'static) -> impl Fn(&Path) {
    bytes(move |all| {
        let length = u64::from_le_bytes(all[..8].try_into().expect("8")) as usize;
        let text = String::from_utf8(all[8..8 + length].to_vec()).expect("UTF-8");
        let text = change(text);
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend(text.bytes());
        out.extend(&all[8 + length..]);
        *all = out;
    })
}

/// Two shards with an index; `change` spoils the table.
fn sharded(change: impl Fn(&Path, &mut Value) + 'static) -> impl Fn(&Path) {
    move |folder| {
        let single = folder.join("model.safetensors");
        let all = read_tensors(&single);
        std::fs::remove_file(&single).expect("remove");
        let (a, b) = all.split_at(all.len() / 2);
        write_tensors(&folder.join("model-1.safetensors"), &a.to_vec());
        write_tensors(&folder.join("model-2.safetensors"), &b.to_vec());
        let entry = |name: &String, file: &str| (name.clone(), json!(file));
        let map: serde_json::Map<String, Value> = a
            .iter()
            .map(|(name, _)| entry(name, "model-1.safetensors"))
            .chain(b.iter().map(|(name, _)| entry(name, "model-2.safetensors")))
            .collect();
        let mut index = json!({ "weight_map": map });
        change(folder, &mut index);
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())
            .expect("index");
    }
}

fn transposed(tensor: &Tensor) -> Tensor {
    tensor.t().expect("transposed")
}

fn scaled(tensor: &Tensor, by: f64) -> Tensor {
    (tensor * by).expect("scaled")
}

fn swap(a: &'static str, b: &'static str) -> impl Fn(&Path) {
    tensors(move |all| {
        for (name, _) in all.iter_mut() {
            if name == a {
                *name = b.to_owned();
            } else if name == b {
                *name = a.to_owned();
            }
        }
    })
}

/// Makes norms differ from 1, so that exchanging them is seen; the parity vector is exported anew.
fn expect_caught(bench: &Bench, profile: Profile, faults: Vec<Fault>) {
    let clean = bench.export(profile);
    let report = bench.check(&clean);
    assert!(report.is_clean(true), "{} before any fault:\n{report}", profile.name());
    assert!(report.parity.is_some(), "{}: the network was not run", profile.name());
    for (number, fault) in faults.iter().enumerate() {
        let folder = bench.export(profile);
        (fault.make)(&folder);
        let report = bench.check(&folder);
        let place = format!("{} fault {number} `{}`:\n{report}", profile.name(), fault.code);
        let found: Vec<_> = report.problems.iter().filter(|p| p.code == fault.code).collect();
        assert!(!found.is_empty(), "{place}");
        assert!(found.iter().any(|p| p.severity == fault.severity), "{place}");
        assert!(
            found.iter().any(|p| p.to_string().contains(fault.says)),
            "`{}` in {place}",
            fault.says
        );
        assert!(found.iter().all(|p| !p.remedy.is_empty()), "{place}");
        if fault.severity == Severity::Error {
            assert!(!report.is_clean(false), "{place}");
            let blamed = report.verdicts.iter().any(|verdict| verdict.effect != Effect::Works);
            assert!(blamed, "no engine is affected: {place}");
        }
    }
}

#[test]
fn broken_files_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("no-config", "rejects", |f| {
            std::fs::remove_file(f.join("config.json")).expect("remove")
        }),
        fault("config-json", "no JSON", raw_config(|text| text[..text.len() / 2].to_owned())),
        fault(
            "config-json",
            "no JSON",
            raw_config(|text| {
                text.replace("1e-5", "NaN").replace("1.0e-5", "NaN").replace("0.00001", "NaN")
            }),
        ),
        fault(
            "duplicate-key",
            "`vocab_size` is there twice",
            raw_config(|text| text.replacen('{', "{\"vocab_size\": 7,", 1)),
        ),
        fault("no-weights", "missing", |f| {
            std::fs::remove_file(f.join("model.safetensors")).expect("remove")
        }),
        fault("weights-file", "cut off", bytes(|all| all.truncate(all.len() - 5))),
        fault("weights-file", "too short", bytes(|all| all.truncate(5))),
        fault(
            "weights-file",
            "a header of",
            bytes(|all| all[..8].copy_from_slice(&u64::MAX.to_le_bytes())),
        ),
        fault("weights-file", "no JSON", bytes(|all| all[9] = b'}')),
        fault("weights-file", "behind the last tensor", bytes(|all| all.extend([0; 16]))),
        fault(
            "weights-file",
            "unknown type",
            header(|text| text.replacen("\"F32\"", "\"Q77\"", 1)),
        ),
        fault(
            "weights-file",
            "not 1",
            header(|text| {
                text.replacen("[32,96]", "[32,95]", 1).replacen(
                    "\"shape\":[32]",
                    "\"shape\":[31]",
                    1,
                )
            }),
        ),
        fault(
            "weights-file",
            "there twice in the header",
            header(|text| {
                text.replacen("{\"", "{\"norm.weight\":{\"dtype\":\"F32\",\"shape\":[32],\"data_offsets\":[0,128]},\"", 1)
            }),
        ),
        fault("executable", "runs code", |f| {
            std::fs::write(f.join("pytorch_model.bin"), b"x").expect("write")
        }),
        fault("executable", "modeling.py", |f| {
            std::fs::write(f.join("modeling.py"), b"x").expect("write")
        }),
        fault(
            "path-traversal",
            "points out of it",
            sharded(|_, index| {
                index["weight_map"]["fc.weight"] = json!("../target/model.safetensors");
            }),
        ),
        fault(
            "path-traversal",
            "`/etc/passwd`",
            sharded(|_, index| {
                index["weight_map"]["fc.weight"] = json!("/etc/passwd");
            }),
        ),
        fault(
            "missing-shard",
            "model-3.safetensors",
            sharded(|_, index| {
                index["weight_map"]["fc.weight"] = json!("model-3.safetensors");
            }),
        ),
        fault(
            "stale-index",
            "is not in `model-1.safetensors`",
            sharded(|_, index| {
                index["weight_map"]["norm.weight"] = json!("model-1.safetensors");
            }),
        ),
        fault(
            "stale-index",
            "is not listed",
            sharded(|_, index| {
                index["weight_map"].as_object_mut().expect("table").remove("norm.weight");
            }),
        ),
        fault(
            "duplicate-tensor",
            "in another shard",
            sharded(|folder, _| {
                let all = read_tensors(&folder.join("model-1.safetensors"));
                let mut twice = read_tensors(&folder.join("model-2.safetensors"));
                twice.push(all[0].clone());
                write_tensors(&folder.join("model-2.safetensors"), &twice);
            }),
        ),
        fault(
            "orphan-file",
            "does not list it",
            sharded(|folder, _| {
                std::fs::copy(folder.join("model-1.safetensors"), folder.join("model.safetensors"))
                    .expect("copy");
            }),
        ),
        fault("index", "no JSON", |f| {
            std::fs::write(f.join("model.safetensors.index.json"), "{").expect("write");
        }),
        warning("manifest", "manifest", |f| {
            std::fs::write(f.join("longdraft-manifest.json"), "{}").expect("write");
        }),
    ];
    expect_caught(&bench, Profile::Vllm, faults);
}

#[test]
fn broken_keys_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault(
            "architecture",
            "no model class",
            config(|v| v["architectures"] = json!(["LlamaForCausalLM"])),
        ),
        fault("missing-key", "default", without("draft_vocab_size")),
        fault("missing-key", "rope_theta", without("rope_theta")),
        fault("null", "null", config(|v| v["hidden_act"] = Value::Null)),
        fault("sizes", "does not divide", config(|v| v["num_key_value_heads"] = json!(3))),
        fault("sizes", "odd", config(|v| v["head_dim"] = json!(7))),
        fault("sizes", "more than one layer", config(|v| v["num_hidden_layers"] = json!(2))),
        fault("sizes", "not a whole number", config(|v| v["hidden_size"] = json!("32"))),
        fault("sizes", "exceeds", config(|v| v["draft_vocab_size"] = json!(1000))),
        fault("missing-flag", "disagree on the default", without("norm_before_residual")),
        fault("flag", "\"yes\"", config(|v| v["norm_output"] = json!("yes"))),
        fault(
            "both-norms",
            "exclude each other",
            config(|v| {
                v["norm_before_fc"] = true.into();
                v["fc_norm"] = true.into();
            }),
        ),
        fault("missing-tensor", "fc_norm.0.weight", config(|v| v["fc_norm"] = true.into())),
        warning("flag-unsupported", "only new versions", config(|v| v["fc_norm"] = true.into())),
        fault(
            "other-outputs",
            "computes another network",
            config(|v| v["norm_output"] = true.into()),
        ),
        fault(
            "other-outputs",
            "computes another network",
            config(|v| v["norm_before_residual"] = true.into()),
        ),
        fault(
            "tied",
            "replaced by the embeddings",
            config(|v| v["tie_word_embeddings"] = true.into()),
        ),
        fault("no-layers", "default layers", without(IDS)),
        fault("layer-shift", "one too high (+1)", config(|v| v[IDS] = json!([3, 5, 6]))),
        fault("layer-shift", "one too low (-1)", config(|v| v[IDS] = json!([1, 3, 4]))),
        fault("other-layers", "other layers", config(|v| v[IDS] = json!([2, 3, 5]))),
        fault("layer-order", "ascending", config(|v| v[IDS] = json!([5, 4, 2]))),
        fault("layer-order", "different", config(|v| v[IDS] = json!([2, 2, 5]))),
        fault("layer-range", "no such layer", config(|v| v[IDS] = json!([2, 4, 9]))),
        fault("last-layer", "after the final norm", config(|v| v[IDS] = json!([2, 4, 8]))),
        fault("layer-count", "4 layers", config(|v| v[IDS] = json!([2, 4, 5, 6]))),
        fault(
            "misplaced-layers",
            "this profile does not hold",
            config(|v| {
                v["eagle_config"][IDS] = json!([1, 3, 4]);
            }),
        ),
        fault("layers-contradict", "SGLang", config(|v| v["eagle_config"][IDS] = json!([2, 4, 5]))),
        fault(
            "rope-spellings",
            "old readers",
            config(|v| {
                v["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
            }),
        ),
        fault("rope-spellings", "rope_theta", config(|v| v["rope_theta"] = json!(5e5))),
        warning(
            "rope-target",
            "the target's",
            config(|v| {
                v["rope_theta"] = json!(5e5);
                v["rope_parameters"]["rope_theta"] = json!(5e5);
            }),
        ),
        warning(
            "context",
            "at most the target's",
            config(|v| v["max_position_embeddings"] = json!(4096)),
        ),
        warning("eps", "rms_norm_eps", config(|v| v["rms_norm_eps"] = json!(1e-3))),
        fault("dtype", "bfloat16", config(|v| v["torch_dtype"] = json!("bfloat16"))),
        fault("special-token", "eos_token_id", config(|v| v["eos_token_id"] = json!(3))),
        fault("not-the-target", "vocab_size", config(|v| v["vocab_size"] = json!(300))),
    ];
    expect_caught(&bench, Profile::Vllm, faults);
}

#[test]
fn broken_tensors_are_caught() {
    let bench = Bench::new();
    let nan = |t: &Tensor| scaled(t, f64::NAN);
    let faults = vec![
        fault(
            "missing-tensor",
            "keeps its initial value",
            tensors(|all| all.retain(|(n, _)| n != "norm.weight")),
        ),
        fault(
            "missing-tensor",
            "`layers.0.hidden_norm.weight`",
            rename("hidden_norm", "hiden_norm"),
        ),
        fault(
            "unexpected-tensor",
            "is `layers.0.hidden_norm.weight` meant?",
            rename("hidden_norm", "hiden_norm"),
        ),
        fault("unexpected-tensor", "KeyError", rename("fc.weight", "model.fc.weight")),
        fault(
            "unexpected-tensor",
            "verifier_norm",
            tensors(|all| {
                let norm = all.iter().find(|(n, _)| n == "norm.weight").expect("norm").1.clone();
                all.push(("verifier_norm.weight".into(), norm));
            }),
        ),
        fault(
            "two-layers",
            "the same layer",
            tensors(|all| {
                let norm = all.iter().find(|(n, _)| n == "norm.weight").expect("norm").1.clone();
                all.push(("midlayer.hidden_norm.weight".into(), norm));
            }),
        ),
        fault("shape", "transposed", tensor("fc.weight", transposed)),
        fault("shape", "transposed", tensor("layers.0.mlp.down_proj.weight", transposed)),
        fault(
            "shape",
            "[61, 32]",
            tensor("lm_head.weight", |t| {
                Tensor::cat(&[t, &t.narrow(0, 0, 1).expect("row")], 0).expect("cat")
            }),
        ),
        fault(
            "shape",
            "[32, 32]",
            tensor("layers.0.self_attn.q_proj.weight", |t| t.narrow(1, 0, 32).expect("half")),
        ),
        fault(
            "shape",
            "[258, 31]",
            tensor("embed_tokens.weight", |t| t.narrow(1, 0, 31).expect("narrow")),
        ),
        fault("not-finite", "not finite", tensor("fc.weight", nan)),
        fault(
            "all-zero",
            "every value is 0",
            tensor("layers.0.mlp.up_proj.weight", |t| t.zeros_like().expect("zeros")),
        ),
        fault(
            "constant",
            "every value is the same",
            tensor("lm_head.weight", |t| t.ones_like().expect("ones")),
        ),
        fault(
            "duplicate-values",
            "the same values as",
            tensors(|all| {
                let gate =
                    all.iter().find(|(n, _)| n.contains("gate_proj")).expect("gate").1.clone();
                let up = all.iter_mut().find(|(n, _)| n.contains("up_proj")).expect("up");
                up.1 = gate;
            }),
        ),
        warning("matrix-scale", "root mean square", tensor("fc.weight", |t| scaled(t, 1e4))),
        warning("norm-scale", "norm weights of mean", tensor("norm.weight", |t| scaled(t, 100.0))),
        warning(
            "changed",
            "other values than were exported",
            tensor("fc.weight", |t| scaled(t, 1.001)),
        ),
        warning(
            "embedding",
            "differs from the target's",
            tensor("embed_tokens.weight", |t| scaled(t, 1.5)),
        ),
        fault(
            "weight-type",
            "I64",
            tensor("norm.weight", |t| t.to_dtype(DType::I64).expect("integers")),
        ),
        fault("dtype", "float16", tensor("fc.weight", |t| t.to_dtype(DType::F16).expect("half"))),
        fault(
            "other-outputs",
            "transposed",
            tensor("layers.0.self_attn.o_proj.weight", transposed),
        ),
        fault(
            "other-outputs",
            "another network",
            tensor("fc.weight", |t| {
                let block = |i: usize| t.narrow(1, 32 * i, 32).expect("block");
                Tensor::cat(&[block(1), block(0), block(2)], 1).expect("cat")
            }),
        ),
        fault(
            "other-outputs",
            "another network",
            tensor("layers.0.self_attn.q_proj.weight", |t| {
                let halves = [t.narrow(1, 32, 32).expect("b"), t.narrow(1, 0, 32).expect("a")];
                Tensor::cat(&halves, 1).expect("cat")
            }),
        ),
        fault(
            "other-outputs",
            "permuted",
            tensor("layers.0.self_attn.k_proj.weight", |t| {
                let order = Tensor::new(
                    &[0_u32, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15],
                    &Device::Cpu,
                )
                .expect("order");
                t.index_select(&order, 0).expect("rows")
            }),
        ),
        fault(
            "other-outputs",
            "another network",
            swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
        ),
        fault(
            "other-outputs",
            "another network",
            tensor("layers.0.hidden_norm.weight", |t| scaled(t, 1.3)),
        ),
    ];
    expect_caught(&bench, Profile::Vllm, faults);
}

#[test]
fn broken_vocabulary_maps_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault(
            "no-map",
            "scattered to wrong tokens",
            tensors(|all| all.retain(|(n, _)| n != "d2t")),
        ),
        fault("no-map", "`t2d`", tensors(|all| all.retain(|(n, _)| n != "t2d"))),
        fault(
            "absolute-d2t",
            "absolute ids where offsets are expected",
            map(|d| {
                d.iter_mut().zip(0..).for_each(|(value, i)| *value += i);
            }),
        ),
        fault("absolute-d2t", "absolute ids", |folder| {
            map(|d| d.iter_mut().zip(0..).for_each(|(value, i)| *value += i))(folder);
            tensors(|all| all.retain(|(n, _)| n != "t2d"))(folder);
        }),
        fault("map", "does not ascend", map(|d| d[5] = -3)),
        fault("map", "outside the vocabulary", map(|d| *d.last_mut().expect("last") = 500)),
        fault("map", "outside the vocabulary", map(|d| d[0] = -1)),
        fault("map", "flags other tokens", map(|d| d[7] += 1)),
        fault("map-length", "[60]", map(|d| d.truncate(59))),
        fault("map-type", "F32", tensor("d2t", |t| t.to_dtype(DType::F32).expect("floats"))),
        fault("map-type", "I64", tensor("t2d", |t| t.to_dtype(DType::I64).expect("integers"))),
        fault("map-length", "[258]", tensor("t2d", |t| t.narrow(0, 0, 257).expect("narrow"))),
        // Consistent, but another map than the draft was trained with.
        fault("other-map", "another one than in training", |folder| {
            map(|d| d[0] -= 1)(folder);
            tensor("t2d", |t| {
                let mut flags: Vec<u8> = t.to_vec1().expect("flags");
                flags.swap(0, 1);
                Tensor::from_vec(flags.clone(), flags.len(), &Device::Cpu).expect("tensor")
            })(folder);
        }),
        // The end of text gives its place to the token before it.
        warning("no-stop", "never proposes an end", |folder| {
            map(|d| *d.last_mut().expect("last") -= 1)(folder);
            tensor("t2d", |t| {
                let mut flags: Vec<u8> = t.to_vec1().expect("flags");
                flags.swap(256, 257);
                Tensor::from_vec(flags.clone(), flags.len(), &Device::Cpu).expect("tensor")
            })(folder);
        }),
    ];
    expect_caught(&bench, Profile::Vllm, faults);
}

#[test]
fn faults_of_the_other_folders_are_caught() {
    let bench = Bench::new();
    expect_caught(
        &bench,
        Profile::Sglang,
        vec![
            fault(
                "architecture",
                "alone",
                config(|v| v["architectures"] = json!(["Eagle3LlamaForCausalLM"])),
            ),
            fault(
                "layer-shift",
                "SGLang hands out",
                config(|v| v["eagle_config"][IDS] = json!([2, 4, 5])),
            ),
            fault("no-layers", "without a message", config(|v| v["eagle_config"] = json!({}))),
            fault(
                "missing-tensor",
                "random initial value, without a word",
                rename("hidden_norm", "hiden_norm"),
            ),
            fault(
                "unexpected-tensor",
                "ignored without a word",
                rename("hidden_norm", "hiden_norm"),
            ),
            fault(
                "flag-unsupported",
                "another network, without a message",
                config(|v| v["norm_before_residual"] = true.into()),
            ),
            fault("missing-key", "taken from the target", without("draft_vocab_size")),
        ],
    );
    expect_caught(
        &bench,
        Profile::Speculators,
        vec![
            fault(
                "speculators",
                "no such class",
                config(|v| v["speculators_model_type"] = json!("eagle9")),
            ),
            fault(
                "speculators",
                "the default method",
                config(|v| v["speculators_config"]["default_proposal_method"] = json!("tree")),
            ),
            fault(
                "speculators",
                "verifier",
                config(|v| v["speculators_config"]["verifier"]["name_or_path"] = json!("")),
            ),
            fault(
                "speculators",
                "read as Qwen3's",
                config(|v| {
                    v["transformer_layer_config"]
                        .as_object_mut()
                        .expect("table")
                        .remove("model_type");
                }),
            ),
            fault(
                "speculators",
                "own default",
                config(|v| {
                    v["transformer_layer_config"]
                        .as_object_mut()
                        .expect("table")
                        .remove("head_dim");
                }),
            ),
            fault("missing-key", "speculators_version", without("speculators_version")),
            fault("unexpected-tensor", "dropped", rename("layers.0.mlp", "midlayer.mlp")),
        ],
    );
    expect_caught(
        &bench,
        Profile::Hf,
        vec![
            fault("layers-contradict", "vLLM sees", config(|v| v[IDS] = json!([1, 3, 4]))),
            fault("no-layers", "missing", without(IDS)),
        ],
    );
    expect_caught(
        &bench,
        Profile::Longspec,
        vec![
            fault(
                "missing-tensor",
                "strict",
                tensors(|all| all.retain(|(n, _)| n != "cross_attn.k_proj.bias")),
            ),
            fault(
                "unexpected-tensor",
                "final_layernorm",
                tensors(|all| {
                    let norm = all
                        .iter()
                        .find(|(n, _)| n == "input_layernorm.weight")
                        .expect("norm")
                        .1
                        .clone();
                    all.push(("final_layernorm.weight".into(), norm));
                }),
            ),
            fault("missing-key", "model_max_length", without("model_max_length")),
            fault("head-dim", "computes it so", config(|v| v["head_dim"] = json!(16))),
            fault("pth", "weights_only", |f| {
                std::fs::write(f.join("draft_model_weights.pth"), b"PK").expect("write")
            }),
            fault("pth", "another one", tensor("mlp.up_proj.weight", |t| scaled(t, 2.0))),
            fault(
                "other-outputs",
                "another network",
                tensor("self_attn.o_proj.weight", transposed),
            ),
        ],
    );
}

/// Rewrites the GGUF file's keys and tensors.
fn gguf_file(
    change: impl Fn(&mut Vec<(String, GgufValue)>, &mut Tensors) + 'static,
) -> impl Fn(&Path) {
    move |folder| {
        let path = folder.join("draft-f32.gguf");
        let all = std::fs::read(&path).expect("read");
        let header = gguf::header::Header::read(&all).expect("header");
        let mut keys: Vec<(String, GgufValue)> = header.metadata.into_iter().collect();
        let mut tensors: Tensors = header
            .tensors
            .iter()
            .map(|(name, stored)| {
                let data = &all[stored.bytes.clone()];
                let shape = stored.shape.as_slice();
                let tensor = if name == "d2t" {
                    let ids: Vec<i64> = data
                        .chunks_exact(8)
                        .map(|b| i64::from_le_bytes(b.try_into().expect("8")))
                        .collect();
                    Tensor::from_vec(ids, shape, &Device::Cpu)
                } else {
                    let values: Vec<f32> = data
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes(b.try_into().expect("4")))
                        .collect();
                    Tensor::from_vec(values, shape, &Device::Cpu)
                };
                (name.clone(), tensor.expect("tensor"))
            })
            .collect();
        change(&mut keys, &mut tensors);
        gguf::write::save(&path, &keys, &tensors).expect("write");
    }
}

fn gguf_key(key: &'static str, value: impl Fn() -> GgufValue + 'static) -> impl Fn(&Path) {
    gguf_file(move |keys, _| {
        keys.retain(|(known, _)| known != key);
        keys.push((key.to_owned(), value()));
    })
}

fn gguf_layers(ids: &'static [i32]) -> impl Fn(&Path) {
    gguf_file(move |keys, _| {
        for (key, value) in keys.iter_mut() {
            if key.ends_with("_layers") {
                *value = GgufValue::Array(ids.iter().copied().map(GgufValue::I32).collect());
            }
        }
    })
}

#[test]
fn broken_gguf_files_are_caught() {
    let bench = Bench::new();
    let gguf_bytes = |change: fn(&mut Vec<u8>)| {
        move |folder: &Path| {
            let path = folder.join("draft-f32.gguf");
            let mut all = std::fs::read(&path).expect("read");
            change(&mut all);
            std::fs::write(&path, all).expect("write");
        }
    };
    let change = |name: &'static str, change: fn(&Tensor) -> Tensor| {
        gguf_file(move |_, tensors| {
            let entry = tensors.iter_mut().find(|(known, _)| known == name).expect("tensor");
            entry.1 = change(&entry.1).contiguous().expect("contiguous");
        })
    };
    let faults = vec![
        fault("gguf", "GGUF files", |f: &Path| {
            std::fs::remove_file(f.join("draft-f32.gguf")).expect("remove")
        }),
        fault("gguf", "cut off", gguf_bytes(|all| all.truncate(all.len() - 400))),
        fault("gguf", "not a usable GGUF header", gguf_bytes(|all| all[0] = b'X')),
        fault(
            "gguf",
            "not a usable GGUF header",
            gguf_bytes(|all| all[8..16].copy_from_slice(&u64::MAX.to_le_bytes())),
        ),
        fault(
            "architecture",
            "another model",
            gguf_key("general.architecture", || GgufValue::String("llama".into())),
        ),
        fault(
            "missing-key",
            "key not found",
            gguf_file(|keys, _| keys.retain(|(key, _)| key != "eagle3.feed_forward_length")),
        ),
        fault(
            "missing-key",
            "tokenizer.ggml.tokens",
            gguf_file(|keys, _| keys.retain(|(key, _)| key != "tokenizer.ggml.tokens")),
        ),
        fault("layer-shift", "one too low (-1)", gguf_layers(&[1, 3, 4])),
        fault("layer-shift", "one too high (+1)", gguf_layers(&[3, 5, 6])),
        fault("layer-count", "loading ends", gguf_layers(&[2, 4])),
        fault(
            "layers-contradict",
            "old versions",
            gguf_key("eagle3.extract_layers", || {
                GgufValue::Array([1, 3, 4].map(GgufValue::I32).to_vec())
            }),
        ),
        fault(
            "missing-tensor",
            "tensor not found",
            gguf_file(|_, t| t.retain(|(name, _)| name != "blk.0.attn_norm_2.weight")),
        ),
        fault(
            "unexpected-tensor",
            "loading ends",
            gguf_file(|_, t| {
                let norm =
                    t.iter().find(|(n, _)| n == "output_norm.weight").expect("norm").1.clone();
                t.push(("blk.0.attn_q.bias".into(), norm));
            }),
        ),
        fault(
            "offset-d2t",
            "offsets where absolute ids are expected",
            change("d2t", |t| {
                let ids: Vec<i64> = t.to_vec1().expect("ids");
                let offsets: Vec<i64> = ids.iter().zip(0..).map(|(id, i)| (id - i) / 4).collect();
                Tensor::from_vec(offsets, ids.len(), &Device::Cpu).expect("tensor")
            }),
        ),
        fault(
            "no-map",
            "the head has 60 rows",
            gguf_file(|_, t| t.retain(|(name, _)| name != "d2t")),
        ),
        fault(
            "weight-type",
            "norms are not rounded",
            change("output_norm.weight", |t| t.to_dtype(DType::F16).expect("half")),
        ),
        fault("shape", "[96, 32]", change("fc.weight", transposed)),
        fault(
            "not-finite",
            "not finite",
            change("blk.0.ffn_up.weight", |t| scaled(t, f64::INFINITY)),
        ),
        // q stored half-split, as a folder has it.
        fault(
            "other-outputs",
            "permuted",
            change("blk.0.attn_q.weight", |t| {
                let order: Vec<u32> =
                    (0..32).map(|row| row / 8 * 8 + row % 8 / 4 + row % 4 * 2).collect();
                t.index_select(&Tensor::from_vec(order, 32, &Device::Cpu).expect("order"), 0)
                    .expect("rows")
            }),
        ),
    ];
    expect_caught(&bench, Profile::Llamacpp, faults);
}

#[test]
fn the_command_lists_everything_at_once_and_fails() {
    let bench = Bench::new();
    let folder = bench.export(Profile::Vllm);
    let place = folder.display().to_string();
    let out = support::succeed(&["verify", &place]);
    assert!(out.contains("vLLM: works") && out.contains("0 errors"), "{out}");
    config(|v| v[IDS] = json!([1, 3, 4]))(&folder);
    map(|d| d.iter_mut().zip(0..).for_each(|(value, i)| *value += i))(&folder);
    tensors(|all| all.retain(|(n, _)| n != "norm.weight"))(&folder);
    let output = support::run(&["verify", &place, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = support::last_json(&support::stdout(&output));
    let codes: Vec<&str> = report["problems"]
        .as_array()
        .expect("list")
        .iter()
        .filter_map(|p| p["code"].as_str())
        .collect();
    for code in ["layer-shift", "absolute-d2t", "missing-tensor"] {
        assert!(codes.contains(&code), "{code} not in {codes:?}");
    }
    assert_eq!(report["clean"], false);
    let text =
        support::fail(&["verify", &bench.folder.path().join("absent").display().to_string()], 2);
    assert!(text.contains("no such folder"), "{text}");
    support::fail(&["verify", &place, "--profile", "tensorrt"], 2);
}
