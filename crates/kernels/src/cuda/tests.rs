//! What NVRTC says to the kernels; needs no GPU.

use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};

use super::Program;

fn attention(head_dim: usize, terms: usize, forward_keys: usize, inner: usize) -> Program {
    let numbers = [
        ("HEAD_DIM", head_dim),
        ("TERMS", terms),
        ("FORWARD_KEYS", forward_keys),
        ("BACKWARD_INNER", inner),
    ];
    Program::new("attention", include_str!("../attention/gpu.cu"), &numbers)
}

#[test]
fn every_program_compiles_for_every_supported_gpu() {
    let programs = [
        Program::new("rows", include_str!("rows.cu"), &[]),
        Program::new("linear", include_str!("linear.cu"), &[]),
        Program::new("adamw", include_str!("../adamw/gpu.cu"), &[]),
        Program::new("cross_entropy", include_str!("../linear_cross_entropy/gpu.cu"), &[]),
        attention(64, 1, 64, 64),
        attention(64, 3, 64, 64),
        attention(80, 3, 64, 32),
        attention(128, 1, 64, 32),
        attention(128, 3, 64, 16),
        attention(256, 1, 32, 16),
    ];
    for program in programs {
        for architecture in ["compute_80", "compute_90", "compute_100"] {
            let options = CompileOptions {
                options: vec![format!("--gpu-architecture={architecture}")],
                ..CompileOptions::default()
            };
            let ptx = compile_ptx_with_opts(&program.text, options);
            let ptx = ptx.unwrap_or_else(|e| panic!("{} for {architecture}: {e}", program.name));
            assert!(ptx.to_src().contains(".entry"), "{}", program.name);
        }
    }
}
