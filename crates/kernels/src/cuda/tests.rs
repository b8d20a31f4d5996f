//! What NVRTC and its assembler say to the kernels; needs no GPU.

use candle_core::Result;

use super::code::{Architecture, compile, on_large_stack};
use super::{Program, blocks, halves, linear, rows};
use crate::attention::{Way, programs as attention};
use crate::gemm::BlockFormat;

/// Compute capabilities, with the dynamic memory that a block may have there.
const GPUS: [(i32, usize); 4] =
    [(80, 163 << 10), (86, 99 << 10), (90, 227 << 10), (100, 227 << 10)];

/// Bytes that a kernel may move out of its registers: where a warp sums 16 rows of wide heads, two sums alone fill them.
fn spill_limit(program: &Program, head_dim: usize) -> usize {
    let sums_wide_heads = head_dim > 128 && program.name.starts_with("attention_tiles");
    if sums_wide_heads { 1280 } else { 256 }
}

/// What the assembler says of a kernel.
#[derive(Debug, PartialEq)]
struct Usage {
    kernel: String,
    registers: usize,
    /// Bytes.
    spilled: usize,
}

fn usages(log: &str) -> Vec<Usage> {
    let mut all = Vec::new();
    let (mut kernel, mut spilled) = (String::new(), 0);
    let before = |line: &str, words: &str| -> Option<usize> {
        line[..line.find(words)?].rsplit(' ').next()?.parse().ok()
    };
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            name.trim().clone_into(&mut kernel);
        }
        if let Some(bytes) = before(line, " bytes spill stores") {
            spilled = bytes;
        }
        if let Some(registers) = before(line, " registers") {
            all.push(Usage { kernel: kernel.clone(), registers, spilled });
        }
    }
    all
}

#[test]
fn the_assemblers_words_are_understood() {
    let log = "ptxas info    : Compiling entry function 'rope' for 'sm_90'\n\
               ptxas info    : Function properties for rope\n\
               ptxas         .     24 bytes stack frame, 36 bytes spill stores, 8 bytes spill loads\n\
               ptxas info    : Used 20 registers, used 0 barriers\n";
    let usage = Usage { kernel: "rope".to_owned(), registers: 20, spilled: 36 };
    assert_eq!(usages(log), [usage]);
}

/// Every program that a run may need, with the width of its heads.
fn programs(capability: i32, memory: usize) -> Vec<(Program, usize)> {
    let mut all = vec![
        (rows::program(), 0),
        (halves::program(), 0),
        (Program::new("adamw", include_str!("../adamw/gpu.cu"), &[]), 0),
        (Program::new("cross_entropy", include_str!("../linear_cross_entropy/gpu.cu"), &[]), 0),
        (
            Program::new(
                "top_k",
                include_str!("../top_k/gpu.cu"),
                &[("THREADS", 512), ("CANDIDATES", 1024)],
            ),
            0,
        ),
    ];
    all.push((blocks::fixing(), 0));
    all.extend(BlockFormat::ALL.into_iter().map(|format| (blocks::program(format), 0)));
    all.extend((0..linear::KINDS).map(|kind| (linear::program(kind), 0)));
    all.extend((0..linear::KINDS).map(|kind| (linear::program_of_experts(kind), 0)));
    all.push((crate::experts::program(), 0));
    let groups = (capability == 90).then_some(Way::Groups);
    let ways: Vec<Way> =
        [Way::Terms(1), Way::Terms(3), Way::Pipelined].into_iter().chain(groups).collect();
    for head_dim in [64, 80, 96, 128, 160, 192, 256] {
        for way in &ways {
            all.extend(attention(*way, head_dim, memory).into_iter().map(|p| (p, head_dim)));
        }
    }
    all
}

/// Prints a line a kernel: `scripts/check-cuda-kernels` shows them.
#[test]
fn every_program_becomes_code_for_every_supported_gpu() -> Result<()> {
    let mut too_many = Vec::new();
    for (gpu, memory) in GPUS {
        for (program, head_dim) in programs(gpu, memory) {
            let options = ["--ptxas-options=-v"];
            let compiled = on_large_stack(|| compile(&program, Architecture::Real(gpu), &options))?;
            assert!(compiled.code.starts_with(b"\x7fELF"), "{}", program.name);
            let usages = usages(&compiled.log);
            assert!(!usages.is_empty(), "{}: {}", program.name, compiled.log);
            for Usage { kernel, registers, spilled } in usages {
                let line = format!(
                    "sm_{gpu} {} {kernel}: {registers} registers, {spilled} bytes spilled",
                    program.name
                );
                #[expect(clippy::print_stdout, reason = "the figures are what the check is for")]
                {
                    println!("{line}");
                }
                if spilled > spill_limit(&program, head_dim) {
                    too_many.push(line);
                }
            }
        }
    }
    assert!(too_many.is_empty(), "{too_many:#?}");
    Ok(())
}

#[test]
fn text_that_is_no_program_is_refused_with_what_nvrtc_says() {
    let program =
        Program::new("broken", "extern \"C\" __global__ void kernel(int x) { y = x; }", &[]);
    let error = compile(&program, Architecture::Real(90), &[]).map(|_| ()).expect_err("no program");
    let error = error.to_string();
    assert!(error.contains("sm_90") && error.contains("\"y\" is undefined"), "{error}");
}
