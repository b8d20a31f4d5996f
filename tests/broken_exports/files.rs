//! Files that are missing, cut off, doubled, or reach out of the folder.

use super::*;

#[test]
fn broken_files_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("no-config", "rejects", |f| {
            std::fs::remove_file(f.join("config.json")).expect("remove");
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
            std::fs::remove_file(f.join("model.safetensors")).expect("remove");
        }),
        fault("weights-file", "cut off", bytes(|all| all.truncate(all.len() - 5))),
        fault("weights-file", "too short", bytes(|all| all.truncate(5))),
        fault(
            "weights-file",
            "a header of",
            bytes(|all| all[..8].copy_from_slice(&u64::MAX.to_le_bytes())),
        ),
        fault("weights-file", "no JSON", bytes(|all| all[9] = b'}')),
        fault("weights-file", "after the last tensor", bytes(|all| all.extend([0; 16]))),
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
            std::fs::write(f.join("pytorch_model.bin"), b"x").expect("write");
        }),
        fault("executable", "sample.ckpt", |f| {
            std::fs::write(f.join("sample.ckpt"), b"x").expect("write");
        }),
        fault("executable", "modeling.py", |f| {
            std::fs::write(f.join("modeling.py"), b"x").expect("write");
        }),
        fault("executable", "modeling.PY", |f| {
            std::fs::write(f.join("modeling.PY"), b"x").expect("write");
        }),
        fault("executable", "sample.Pkl", |f| {
            std::fs::write(f.join("sample.Pkl"), b"x").expect("write");
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
    expect_caught(&bench, Profile::Vllm, &faults);
}
