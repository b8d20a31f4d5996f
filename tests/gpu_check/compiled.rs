//! `scripts/gpu/compiled.py`: what it reads in a disassembly, and what it refuses.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use super::machine::{python, text};
use crate::support::files::{read_json, repository};

/// A kernel as nvdisasm shows one: a loop of two products with a smaller loop inside, a way that only waiting lanes take, and copies
/// to and from memory of several widths.
const LOOPING: &str = r#"
	.target	sm_80
//--------------------- .text.multiply --------------------------
	.section	.text.multiply,"ax",@progbits
	.align	128
multiply:
.text.multiply:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/               @P0 EXIT ;
.L_x_0:
        /*0030*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*0040*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;
        /*0050*/                   LDSM.16.MT88.4 R4, [R9] ;
        /*0060*/                   BRA.DIV UR6, `(.L_x_3) ;
.L_x_1:
        /*0070*/                   SHFL.BFLY PT, R5, R6, 0x1, 0x1f ;
        /*0080*/              @!P1 BRA P2, `(.L_x_1) ;
.L_x_4:
        /*0090*/               @P3 LDL.LU R20, [R1+0x8] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*00b0*/               @P1 BRA `(.L_x_2) ;
        /*00c0*/                   FFMA R5, R5, R6, R7 ;
        /*00d0*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*00e0*/                   LDS.U.128 R4, [R9] ;
        /*00f0*/                   STG.E.U16 desc[UR4][R2.64], R5 ;
        /*0100*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0120*/                   EXIT ;
.L_x_3:
        /*0130*/                   MUFU.EX2 R5, R5 ;
        /*0140*/                   BRA `(.L_x_4) ;
.L_x_5:
        /*0150*/                   BRA `(.L_x_5);
        /*0160*/                   NOP;
	.section	.nv.info,"",@"SHT_CUDA_INFO"
	.align	4
"#;

/// A folder as the test of the kernels leaves it, with one kernel of so many spilled bytes.
fn folder(spilled: usize, registers: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("tempdir");
    let kernel = json!({
        "gpu": 80, "program": "product_64", "kernel": "multiply", "registers": registers, "spilled": spilled,
        "static": 1000, "dynamic": 20000, "threads": 128, "nvrtc": "13.0",
    });
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("a file");
    };
    write("kernels.jsonl", &format!("{kernel}\n"));
    write("sm_80-product_64.sass", LOOPING);
    write("allowed.json", "{\n  \"product_64 multiply\": {\"80\": [8, 4]}\n}\n");
    folder
}

fn compiled(folder: &Path, options: &[&str]) -> Output {
    let mut command = Command::new("python3");
    command.arg(repository("scripts/gpu/compiled.py")).arg(folder);
    command.arg("--allowed").arg(folder.join("allowed.json")).args(options);
    command.output().expect("python")
}

#[test]
fn a_disassembly_is_counted_whole_and_by_its_busiest_loop() {
    let Some(()) = python() else { return };
    let folder = folder(8, 128);
    let report = folder.path().join("report.md");
    let output = compiled(folder.path(), &["--report", &report.to_string_lossy(), "--page"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let report = std::fs::read_to_string(report).expect("a report");
    let rows: Vec<Vec<&str>> = report
        .lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    let of = |name: &str| {
        let place = rows[0].iter().position(|head| *head == name).expect("a column");
        rows[1][place]
    };
    // 128 registers of 4 warps leave room for 4 blocks, their memory for 7.
    assert_eq!((of("blocks"), of("warps"), of("held back by")), ("4", "16 of 64", "registers"));
    // Padding is no instruction, a move that goes through the unit of products is no product.
    assert_eq!((of("instructions"), of("tensor"), of("MUFU")), ("22", "2", "1"));
    let memory = ["LDG 128", "STG 32", "STG 16", "LDS 128", "LDSM", "local", "barriers"].map(of);
    assert_eq!(memory, ["1"; 7]);
    // The small loop inside counts once, what only waiting lanes do does not.
    let of_loop = ["in the loop", "for each product", "local in the loop"].map(of);
    assert_eq!(of_loop, ["11", "5.5 a tensor", "1"]);
    let page = String::from_utf8_lossy(&output.stdout);
    for row in [
        "| `product_64 multiply` | 128 | 128 / 8 / 4 |",
        "| `product_64 multiply` | 8.0 | 11 | 5.5 |",
    ] {
        assert!(page.contains(row), "{row} not in {page}");
    }
}

#[test]
fn a_kernel_that_spills_more_or_fits_less_often_is_refused() {
    let Some(()) = python() else { return };
    for (spilled, registers, says) in [
        (12, 128, "FAIL product_64 multiply for 8.0 spills 12 bytes, 8 are allowed"),
        (
            0,
            168,
            "FAIL product_64 multiply for 8.0: a multiprocessor holds 3 blocks, it has to hold 4: registers",
        ),
    ] {
        let folder = folder(spilled, registers);
        let output = compiled(folder.path(), &[]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output).contains(says), "{says} not in {}", text(&output));
        // What is there can be allowed.
        assert_eq!(compiled(folder.path(), &["--allow"]).status.code(), Some(0));
        assert_eq!(compiled(folder.path(), &[]).status.code(), Some(0));
    }
    let folder = folder(8, 128);
    std::fs::write(folder.path().join("allowed.json"), "{\"other\": {\"90\": [0, 1]}}")
        .expect("written");
    let output = compiled(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("other for 9.0 is not there any more"), "{}", text(&output));
}

/// A kernel whose sizes follow from a block's memory has another name for every compute capability.
#[test]
fn sizes_that_differ_between_gpus_share_a_line() {
    let Some(()) = python() else { return };
    let folder = folder(8, 128);
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("a file");
    };
    let known = std::fs::read_to_string(folder.path().join("kernels.jsonl")).expect("kernels");
    let of = |gpu: usize, size: usize, threads: usize| {
        write(&format!("sm_{gpu}-product_64_{size}.sass"), LOOPING);
        known
            .replace("\"gpu\":80", &format!("\"gpu\":{gpu}"))
            .replace("product_64", &format!("product_64_{size}"))
            .replace("\"threads\":128", &format!("\"threads\":{threads}"))
    };
    let both = format!("{}{}", of(80, 16, 128), of(90, 32, 256));
    write("kernels.jsonl", &both);
    write("allowed.json", "{\"product_64_* multiply\": {\"80\": [8, 4], \"90\": [8, 2]}}");
    let output = compiled(folder.path(), &["--page"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let row = "| `product_64_* multiply` | 256 or 128 | 128 / 8 / 4 | 128 / 8 / 2 |";
    assert!(text(&output).contains(row), "{}", text(&output));
    // Two of one capability are none.
    write("kernels.jsonl", &format!("{both}{}", of(90, 64, 256)));
    let output = compiled(folder.path(), &[]);
    assert_eq!(output.status.code(), Some(2));
    let says = "for 9.0 is both product_64_32 multiply and product_64_64 multiply";
    assert!(text(&output).contains(says), "{}", text(&output));
}

#[test]
fn what_is_missing_is_said() {
    let Some(()) = python() else { return };
    let own = folder(8, 128);
    std::fs::remove_file(own.path().join("sm_80-product_64.sass")).expect("removed");
    // Python itself is found by its place, and nothing else is.
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let python = String::from_utf8(python.expect("python").stdout).expect("a path");
    let mut command = Command::new(python.trim());
    command.arg(repository("scripts/gpu/compiled.py")).arg(own.path());
    let output = command.env("PATH", own.path()).env_remove("CUDA_HOME").output().expect("python");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("run scripts/cuda-toolchain"), "{}", text(&output));
    let output = compiled(&own.path().join("nowhere"), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("kernels.jsonl is not there"), "{}", text(&output));
}

/// Blocks, warps and what holds back a further block, as the vendor's calculator has them.
#[test]
fn blocks_of_a_multiprocessor_follow_from_the_published_limits() {
    let Some(()) = python() else { return };
    // Capability, threads, registers, static and dynamic bytes.
    let cases = [
        ([80, 256, 32, 0, 0], json!([8, 64, "warps"])),
        ([80, 32, 16, 0, 0], json!([32, 32, "blocks"])),
        ([89, 128, 40, 0, 0], json!([12, 48, "warps"])),
        // A warp of 33 registers a thread takes those of 40, and lies in one of four parts.
        ([89, 1024, 33, 0, 0], json!([1, 32, "warps"])),
        ([90, 128, 255, 0, 0], json!([2, 8, "registers"])),
        ([90, 96, 168, 0, 0], json!([4, 12, "registers"])),
        // A kibibyte of every block is the system's.
        ([90, 128, 32, 0, 113 << 10], json!([2, 8, "memory"])),
        ([90, 128, 32, 1, 113 << 10], json!([1, 4, "memory"])),
        ([80, 512, 255, 0, 0], json!([0, 0, "registers"])),
    ];
    let code = "import json, sys; from gpu.occupancy import resident; \
                print(json.dumps([resident(*case) for case in json.load(sys.stdin)]))";
    let asked: Vec<_> = cases.iter().map(|(case, _)| case).collect();
    let input = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(input.path(), json!(asked).to_string()).expect("written");
    let mut command = Command::new("python3");
    command.args(["-c", code]).env("PYTHONPATH", repository("scripts"));
    let output = command.stdin(input.reopen().expect("a file")).output().expect("python");
    let told: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", text(&output));
    });
    for ((case, want), told) in cases.iter().zip(&told) {
        assert_eq!(told, want, "{case:?}");
    }
}

#[test]
fn the_page_says_what_is_allowed() {
    let allowed = read_json(repository("scripts/gpu/compiled.json"));
    let page = std::fs::read_to_string(repository("docs/results/gpu-compiled.md")).expect("a page");
    let heads =
        page.lines().find(|line| line.starts_with("| kernel | threads |")).expect("a table");
    let heads: Vec<&str> = heads.split('|').map(str::trim).collect();
    for (name, gpus) in allowed.as_object().expect("kernels") {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row: Vec<&str> =
            row.unwrap_or_else(|| panic!("{name}")).split('|').map(str::trim).collect();
        for (gpu, figures) in gpus.as_object().expect("capabilities") {
            let (major, minor) = gpu.split_at(gpu.len() - 1);
            let capability = format!("{major}.{minor}");
            let place = heads.iter().position(|head| *head == capability).expect("a column");
            let want = format!("/ {} / {}", figures[0], figures[1]);
            assert!(row[place].ends_with(&want), "{name} for {capability}: {} {want}", row[place]);
        }
    }
}
