//! Files that other programs read: bytes fixed once a real reader approved them, and the light
//! readers themselves where `scripts/test` installed them.

mod support;

use std::process::Command;

use candle_core::{DType, Device, Tensor};
use longdraft_models::weights::pth;
use longdraft_models::weights::safetensors::save;

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
