//! Files that are missing, cut off, doubled, or reach out of the folder.

use super::*;

#[test]
fn broken_files_are_caught() {
    let bench = Bench::new();
    let faults = vec![
        fault("no-config", "rejects").by(removed("config.json")),
        fault("config-json", "no JSON").by(raw_config(|text| text[..text.len() / 2].to_owned())),
        fault("config-json", "no JSON").by(raw_config(|text| {
            text.replace("1e-5", "NaN").replace("1.0e-5", "NaN").replace("0.00001", "NaN")
        })),
        fault("duplicate-key", "`vocab_size` is there twice")
            .by(raw_config(|text| text.replacen('{', "{\"vocab_size\": 7,", 1))),
        fault("no-weights", "missing").by(removed("model.safetensors")),
        fault("weights-file", "cut off").by(bytes(|all| all.truncate(all.len() - 5))),
        fault("weights-file", "too short").by(bytes(|all| all.truncate(5))),
        fault("weights-file", "a header of")
            .by(bytes(|all| all[..8].copy_from_slice(&u64::MAX.to_le_bytes()))),
        fault("weights-file", "no JSON").by(bytes(|all| all[9] = b'}')),
        fault("weights-file", "after the last tensor").by(bytes(|all| all.extend([0; 16]))),
        fault("weights-file", "unknown type")
            .by(header(|text| text.replacen("\"F32\"", "\"Q77\"", 1))),
        fault("weights-file", "not 1").by(header(|text| {
            text.replacen("[32,96]", "[32,95]", 1).replacen("\"shape\":[32]", "\"shape\":[31]", 1)
        })),
        fault("weights-file", "there twice in the header").by(header(|text| {
            text.replacen(
                "{\"",
                "{\"norm.weight\":{\"dtype\":\"F32\",\"shape\":[32],\"data_offsets\":[0,128]},\"",
                1,
            )
        })),
        fault("executable", "runs code").by(written("pytorch_model.bin", "x")),
        fault("executable", "sample.ckpt").by(written("sample.ckpt", "x")),
        fault("executable", "modeling.py").by(written("modeling.py", "x")),
        fault("executable", "modeling.PY").by(written("modeling.PY", "x")),
        fault("executable", "sample.Pkl").by(written("sample.Pkl", "x")),
        fault("path-traversal", "points out of it")
            .by(listed("fc.weight", "../target/model.safetensors")),
        fault("path-traversal", "`/etc/passwd`").by(listed("fc.weight", "/etc/passwd")),
        fault("missing-shard", "model-3.safetensors")
            .by(listed("fc.weight", "model-3.safetensors")),
        fault("stale-index", "is not in `model-1.safetensors`")
            .by(listed("norm.weight", "model-1.safetensors")),
        fault("stale-index", "is not listed").by(sharded(|_, index| {
            index["weight_map"].as_object_mut().expect("table").remove("norm.weight");
        })),
        fault("duplicate-tensor", "in another shard").by(sharded(|folder, _| {
            let other = read_tensors(folder.join("model-1.safetensors")).swap_remove(0);
            change_tensors(folder.join("model-2.safetensors"), |all| all.push(other));
        })),
        fault("orphan-file", "does not list it").by(sharded(|folder, _| {
            std::fs::copy(folder.join("model-1.safetensors"), folder.join("model.safetensors"))
                .expect("copy");
        })),
        fault("index", "no JSON").by(written("model.safetensors.index.json", "{")),
        warning("manifest", "manifest").by(written("longdraft-manifest.json", "{}")),
    ];
    expect_caught(&bench, Profile::Vllm, &faults);
}
