//! Files that are missing, cut off, doubled, or reach out of the folder.

use super::*;

#[test]
fn broken_files_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("no-config", "rejects", removed("config.json")),
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
        fault("no-weights", "missing", removed("model.safetensors")),
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
        fault("executable", "runs code", written("pytorch_model.bin", "x")),
        fault("executable", "sample.ckpt", written("sample.ckpt", "x")),
        fault("executable", "modeling.py", written("modeling.py", "x")),
        fault("executable", "modeling.PY", written("modeling.PY", "x")),
        fault("executable", "sample.Pkl", written("sample.Pkl", "x")),
        fault(
            "path-traversal",
            "points out of it",
            listed("fc.weight", "../target/model.safetensors"),
        ),
        fault("path-traversal", "`/etc/passwd`", listed("fc.weight", "/etc/passwd")),
        fault("missing-shard", "model-3.safetensors", listed("fc.weight", "model-3.safetensors")),
        fault(
            "stale-index",
            "is not in `model-1.safetensors`",
            listed("norm.weight", "model-1.safetensors"),
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
                let other = read_tensors(folder.join("model-1.safetensors")).swap_remove(0);
                change_tensors(folder.join("model-2.safetensors"), |all| all.push(other));
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
        fault("index", "no JSON", written("model.safetensors.index.json", "{")),
        warning("manifest", "manifest", written("longdraft-manifest.json", "{}")),
    ];
    expect_caught(&bench, Profile::Vllm, &faults);
}
