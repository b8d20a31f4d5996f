//! What NVRTC and its assembler say to the kernels; needs no GPU.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::PathBuf;

use candle_core::Result;

use super::code::{Architecture, compile, on_large_stack, version};
use super::{Block, Compiled, Program, blocks, halves, linear, rows};
use crate::attention::{Way, programs as attention};
use crate::gemm::BlockFormat;
use crate::{adamw, experts, linear_cross_entropy, top_k};

/// Compute capabilities, with the dynamic memory that a block may have there.
const GPUS: [(i32, usize); 4] =
    [(80, 163 << 10), (89, 99 << 10), (90, 227 << 10), (100, 227 << 10)];

/// Bytes that a kernel may move out of its registers: where a warp sums 16 rows of wide heads, two sums alone fill them.
fn spill_limit(program: &Program, head_dim: usize) -> usize {
    let sums_wide_heads = head_dim > 128 && program.name.starts_with("attention_tiles");
    if sums_wide_heads { 1280 } else { 320 }
}

/// What the assembler says of a kernel.
#[derive(Debug, PartialEq)]
struct Usage {
    kernel: String,
    registers: usize,
    /// Bytes.
    spilled: usize,
    /// Bytes of static memory of a block.
    memory: usize,
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
            let memory = before(line, " bytes smem").unwrap_or(0);
            all.push(Usage { kernel: kernel.clone(), registers, spilled, memory });
        }
    }
    all
}

#[test]
fn the_assemblers_words_are_understood() {
    let log = "ptxas info    : Compiling entry function 'rope' for 'sm_90'\n\
               ptxas info    : Function properties for rope\n\
               ptxas         .     24 bytes stack frame, 36 bytes spill stores, 8 bytes spill loads\n\
               ptxas info    : Used 20 registers, used 1 barriers, 396 bytes smem, 8 bytes cmem[2]\n\
               ptxas info    : Function properties for swiglu\n\
               ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
               ptxas info    : Used 18 registers, used 0 barriers\n";
    let usage = |kernel: &str, [registers, spilled, memory]: [usize; 3]| Usage {
        kernel: kernel.to_owned(),
        registers,
        spilled,
        memory,
    };
    assert_eq!(usages(log), [usage("rope", [20, 36, 396]), usage("swiglu", [18, 0, 0])]);
}

/// Every program that a run may need, with the width of its heads.
fn programs(capability: i32, memory: usize) -> Vec<(Compiled, usize)> {
    let mut all = vec![
        (rows::program(), rows::kernel_blocks()),
        (halves::program(), halves::kernel_blocks()),
        adamw::compiled(),
        linear_cross_entropy::compiled(),
        top_k::compiled(),
        (blocks::fixing(), vec![blocks::fixing_block()]),
        experts::compiled(),
    ];
    let formats = BlockFormat::ALL.into_iter();
    all.extend(formats.map(|format| (blocks::program(format), blocks::kernel_blocks())));
    all.extend((0..linear::KINDS).flat_map(linear::compiled));
    let mut all: Vec<_> = all.into_iter().map(|compiled| (compiled, 0)).collect();
    let groups = (capability == 90).then_some([Way::Groups, Way::OnePass]);
    let ways: Vec<Way> = [Way::Terms(1), Way::Terms(3), Way::Pipelined]
        .into_iter()
        .chain(groups.into_iter().flatten())
        .collect();
    for head_dim in [64, 80, 96, 128, 160, 192, 256] {
        for way in &ways {
            all.extend(attention(*way, head_dim, memory).into_iter().map(|p| (p, head_dim)));
        }
    }
    // What all ways have beside them is there once.
    let mut names = HashSet::new();
    all.retain(|((program, _), _)| names.insert(program.name.clone()));
    all
}

/// What blocks of a kernel have. All of a program's kernels are known, and no others.
fn block_of(blocks: &[Block], usages: &[Usage], kernel: &str) -> Block {
    assert_eq!(blocks.len(), usages.len(), "{blocks:?} {usages:?}");
    let found = blocks.iter().find(|block| block.kernel == kernel);
    *found.unwrap_or_else(|| panic!("{kernel} is not among {blocks:?}"))
}

/// Prints a line a kernel: `scripts/check-cuda-kernels` shows them. Where `LONGDRAFT_KERNEL_CODE` names a folder, the code lies
/// there afterwards, with what is known of every kernel in `kernels.jsonl`: `scripts/gpu/compiled.py` reads it.
#[test]
fn every_program_becomes_code_for_every_supported_gpu() -> Result<()> {
    let folder = std::env::var_os("LONGDRAFT_KERNEL_CODE").map(PathBuf::from);
    let (nvrtc, mut known) = (version()?, String::new());
    let mut too_many = Vec::new();
    for (gpu, most_memory) in GPUS {
        for ((program, blocks), head_dim) in programs(gpu, most_memory) {
            let options = ["--ptxas-options=-v"];
            let compiled = on_large_stack(|| compile(&program, Architecture::Real(gpu), &options))?;
            assert!(compiled.code.starts_with(b"\x7fELF"), "{}", program.name);
            if let Some(folder) = &folder {
                std::fs::write(
                    folder.join(format!("sm_{gpu}-{}.cubin", program.name)),
                    &compiled.code,
                )?;
            }
            let usages = usages(&compiled.log);
            assert!(!usages.is_empty(), "{}: {}", program.name, compiled.log);
            for Usage { kernel, registers, spilled, memory } in &usages {
                let line = format!(
                    "sm_{gpu} {} {kernel}: {registers} registers, {spilled} bytes spilled",
                    program.name
                );
                #[expect(clippy::print_stdout, reason = "the figures are what the check is for")]
                {
                    println!("{line}");
                }
                let block = block_of(&blocks, &usages, kernel);
                assert!(memory + block.memory <= most_memory, "{line}: {block:?}, {memory} bytes");
                let _ = writeln!(
                    known,
                    "{{\"gpu\":{gpu},\"program\":\"{}\",\"kernel\":\"{kernel}\",\"registers\":{registers},\
                     \"spilled\":{spilled},\"static\":{memory},\"dynamic\":{},\"threads\":{},\
                     \"nvrtc\":\"{nvrtc}\"}}",
                    program.name, block.memory, block.threads
                );
                if *spilled > spill_limit(&program, head_dim) {
                    too_many.push(line);
                }
            }
        }
    }
    if let Some(folder) = folder {
        std::fs::write(folder.join("kernels.jsonl"), known)?;
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
