//! Files that other programs read: bytes fixed once a real reader approved them, and the light
//! readers themselves where `scripts/test` installed them.

use crate::broken_exports::options;
use crate::support;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::weights::pth;
use longdraft_models::weights::safetensors::save;
use longdraft_serving::{Profile, TargetFacts, export};

/// Three tensors of every type that drafts are written in.
fn tensors() -> Vec<(String, Tensor)> {
    let matrix = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).and_then(|t| t.reshape((2, 3)));
    let narrow =
        |dtype| Tensor::new(&[0.5_f32, -2.0, 1.25], &Device::Cpu).and_then(|t| t.to_dtype(dtype));
    vec![
        ("matrix".into(), matrix.expect("matrix")),
        ("bf16".into(), narrow(DType::BF16).expect("bf16")),
        ("f16".into(), narrow(DType::F16).expect("f16")),
    ]
}

/// `torch.load(..., weights_only=True)` of PyTorch read exactly these bytes with the right
/// values (`scripts/check-readers` repeats that).
#[test]
fn pth_bytes_are_those_that_pytorch_read() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("t.pth");
    pth::save(&path, &tensors()).expect("save");
    let bytes = std::fs::read(&path).expect("read");
    let approved = include_bytes!("fixtures/approved.pth");
    assert!(bytes == approved, "the writer's bytes changed: run scripts/check-readers");
}

/// Runs Python code with the readers of `scripts/test`.
fn python(code: &str, argument: &str) -> Option<String> {
    let Some(python) = std::env::var_os("LONGDRAFT_READERS") else {
        eprintln!("skipped: LONGDRAFT_READERS names no Python (scripts/test sets it)");
        return None;
    };
    let output = Command::new(python).args(["-c", code, argument]).output().expect("python runs");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[test]
fn the_safetensors_package_reads_our_files() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("t.safetensors");
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    save(&path, &[tensors()[0].clone(), tensors()[2].clone()], metadata).expect("save");
    let code = "import sys; from safetensors.numpy import load_file; \
                t = load_file(sys.argv[1]); print(t['matrix'].tolist(), t['f16'].tolist())";
    if let Some(out) = python(code, &path.to_string_lossy()) {
        assert_eq!(out, "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [0.5, -2.0, 1.25]");
    }
}

/// A tiny target and an EAGLE-3 draft for it, the same on every call.
fn tiny_export(folder: &Path, profile: Profile) -> PathBuf {
    let target = folder.join("target");
    let mut config = support::tiny_config("llama");
    config["num_hidden_layers"] = 8.into();
    support::write_target(&target, &config);
    let mut facts = TargetFacts::open(&target.to_string_lossy()).expect("target");
    facts.name = "some-org/tiny".into();
    let config = Eagle3Config::for_target(facts.config(), 60).expect("config");
    let kept = (0..60).map(|i| TargetTokenId(4 * i + 1)).collect();
    let map = VocabularyMap::new(kept, support::VOCABULARY).expect("map");
    let embedding = facts.target.hold_ends().and_then(|ends| ends.embedding());
    let embedding = embedding.expect("embedding");
    let draft = Eagle3Draft::initialise(&config, map, &embedding, 3).expect("draft");
    let place = folder.join(profile.name());
    export(&draft, &facts, &options(profile), &place).expect("export");
    place
}

fn sha256(path: &Path) -> String {
    longdraft_models::sha256::of_file(path).expect("file")
}

/// The speculators library computed our logits from exactly these bytes, and gguf read its file
/// (`scripts/check-readers` repeats that on a trained draft).
#[test]
fn exported_bytes_are_those_that_the_readers_read() {
    let dir = tempfile::tempdir().expect("tempdir");
    for (profile, file, approved) in [
        (
            Profile::Speculators,
            "config.json",
            "a097337fbb72d9cb9c65cfcbd70aca7adf556ea44432f2d6af4e423d861f5134",
        ),
        (
            Profile::Speculators,
            "model.safetensors",
            "eecae0cefd5ed4b7ad59d53a41192f7ff4c5f4d294d16fda5adefa0117a0ef7f",
        ),
        (
            Profile::Llamacpp,
            "draft-f32.gguf",
            "7085c9813d6eed159099a64f0574ba61a5a8610654e6783ace8eff360f3ed25c",
        ),
    ] {
        let folder = tiny_export(dir.path(), profile);
        let found = sha256(&folder.join(file));
        assert_eq!(found, approved, "{file}: bytes changed, run scripts/check-readers");
    }
}

#[test]
fn the_gguf_package_reads_our_drafts() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = tiny_export(dir.path(), Profile::Llamacpp);
    let code = "import sys, gguf; r = gguf.GGUFReader(sys.argv[1]); \
                f = lambda key: r.get_field(key).contents(); t = {x.name: x for x in r.tensors}; \
                print(f('general.architecture'), f('eagle3.target_layers'), f('eagle3.vocab_size'), \
                len(t), t['fc.weight'].data.shape, t['d2t'].data[:3].tolist(), \
                len(f('tokenizer.ggml.tokens')))";
    if let Some(out) = python(code, &folder.join("draft-f32.gguf").to_string_lossy()) {
        assert_eq!(out, "eagle3 [2, 4, 5] 258 15 (32, 96) [1, 5, 9] 258");
    }
}

#[test]
fn the_safetensors_package_reads_our_exports() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = tiny_export(dir.path(), Profile::Vllm);
    let code = "import sys; from safetensors.numpy import load_file; t = load_file(sys.argv[1]); \
                print(len(t), t['d2t'].dtype, t['t2d'].dtype, int(t['t2d'].sum()), \
                t['layers.0.self_attn.q_proj.weight'].shape)";
    if let Some(out) = python(code, &folder.join("model.safetensors").to_string_lossy()) {
        assert_eq!(out, "16 int64 bool 60 (32, 64)");
    }
}
