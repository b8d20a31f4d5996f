//! What is said of steps at the end.

use std::process::{Command, Output};

use serde_json::{Value, json};

use super::machine::{Machine, python, text};
use crate::support::files::{read_json, repository};

/// What a lent machine shows of all that was printed.
const SHOWN: usize = 12_000;

/// A folder of results as a plan leaves it, read again.
fn summarise(reader: &str, code: i32, out: &str) -> (Output, Value) {
    let folder = tempfile::tempdir().expect("tempdir");
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).expect("a file");
    };
    write("one.out", out);
    write("one.err", "some words\n");
    let step = json!({"name": "one", "reader": reader, "code": code, "decisive": true});
    write("steps.json", &json!({ "steps": [step] }).to_string());
    let mut command = Command::new("python3");
    command.arg(repository("scripts/gpu-check")).arg("--summarise").arg(folder.path());
    let output = command.output().expect("python");
    (output, read_json(folder.path().join("gpu-check.json")))
}

#[track_caller]
fn assert_says(output: &Output, lines: &[&str]) {
    let told = String::from_utf8_lossy(&output.stdout);
    for line in lines {
        assert!(told.lines().any(|one| one == *line), "{line} not in {told}");
    }
}

#[test]
fn reference_cases_are_judged_by_their_worst_error() {
    let Some(()) = python() else { return };
    let case = |name: &str, error: Option<f64>| {
        let pass = error.is_some_and(|error| error <= 1e-4);
        let check = json!({"name": "loss", "error": error, "tolerance": 1e-4, "pass": pass});
        json!({"case": name, "kind": "glide", "pass": pass, "checks": [check]}).to_string()
    };
    let lines = [case("a", Some(5e-5)), case("b", Some(2e-5))].join("\n");
    let (output, report) = summarise("parity", 0, &format!("{lines}\n{{\"cases\":2}}\n"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let share = &report["steps"]["one"]["largest_share_of_tolerance"]["glide"];
    assert!((share.as_f64().expect("a number") - 0.5).abs() < 1e-9);
    assert_says(&output, &["one: glide: largest error 0.5 of its tolerance"]);
    // An error that is no number, and a case that could not be run.
    let broken = json!({"case": "c", "pass": false, "error": {"message": "no file"}}).to_string();
    let lines = [case("a", Some(1e-5)), case("b", None), broken].join("\n");
    let (output, report) = summarise("parity", 1, &lines);
    assert_eq!(output.status.code(), Some(1));
    let part = &report["steps"]["one"];
    let check = json!({"name": "loss", "error": null, "tolerance": 1e-4, "pass": false});
    assert_eq!(part["failed"], json!({"b": [check], "c": "no file"}));
    assert_eq!(part["largest_share_of_tolerance"]["glide"], Value::Null);
    assert_says(
        &output,
        &["FAIL one: b loss: error not finite of 1.0e-04", "FAIL one: c: no file"],
    );
    // Nothing was computed; and what is read is not what was meant.
    assert_eq!(summarise("parity", 0, "").0.status.code(), Some(1));
    let (_, report) = summarise("parity", 0, "{\"case\":\"a\",\"checks\":[{}]}");
    assert!(report["steps"]["one"]["unreadable"].is_string(), "{report}");
}

fn wrong(op: &str, error: f64) -> String {
    let line = json!({
        "name": op, "shape": "8x4", "products": "f32", "passed": false, "max_error": error,
        "worst": "grad of x", "tolerance": 1e-5, "equal_bits": false, "ms": 1.0,
    });
    line.to_string()
}

#[test]
fn a_failing_check_says_op_case_error_and_tolerance() {
    let Some(()) = python() else { return };
    // A kernel that is wrong, though the program ended well.
    let (output, report) = summarise("checks", 0, &wrong("rope", 2e-3));
    assert_eq!((output.status.code(), &report["steps"]["one"]["pass"]), (Some(1), &false.into()));
    let line = "rope 8x4 f32: error 2.0e-03 of 1.0e-05 (grad of x), bits differ between runs";
    assert_says(&output, &[&format!("FAIL one: {line}")]);
    // One that cannot run, and a program that does not come back.
    let lost = json!({"name": "rope", "shape": "9", "passed": false, "error": "no such kernel"});
    let (output, _) = summarise("checks", 139, &lost.to_string());
    assert_says(
        &output,
        &["FAIL one: rope 9: no such kernel", "FAIL one: exit 139 after rope 9: some words"],
    );
    let found = "========= COMPUTE-SANITIZER\n\
                 ========= Invalid __global__ read of size 4 bytes\n\
                 =========     at rope+0x1a0\n\
                 =========     by thread (0,0,0) in block (0,0,0)\n\
                 ========= ERROR SUMMARY: 1 error\n";
    let (output, _) = summarise("checks", 86, found);
    let line = "Invalid __global__ read of size 4 bytes at rope+0x1a0 (1 times)";
    assert_says(&output, &[&format!("FAIL one: {line}")]);
}

#[test]
fn many_failing_checks_hide_no_op_in_what_a_machine_shows() {
    let Some(()) = python() else { return };
    // The first op alone fails more often than there is room for.
    let many = (0..300).map(|_| wrong("op_0", 1.0));
    let others = (1..30).flat_map(|op| [2e-5, 3e-5].map(|error| wrong(&format!("op_{op}"), error)));
    let lines: Vec<String> = many.chain(others).collect();
    let (output, _) = summarise("checks", 1, &lines.join("\n"));
    let told = String::from_utf8_lossy(&output.stdout);
    let shown = &told[told.len().saturating_sub(SHOWN)..];
    assert!(shown.contains("one: FAIL, 358 checks, 358 failed, exit 1"), "{shown}");
    for op in 1..30 {
        let line = format!("FAIL one: op_{op} 8x4 f32: error 3.0e-05 of 1.0e-05");
        assert!(shown.contains(&line), "{line} not in {shown}");
    }
    assert!(shown.contains("more: gpu-check.json names what else fails in one"), "{shown}");
}

#[test]
fn figures_stand_at_the_end_with_their_units() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let names = "kernels_speed,dflash,pytorch_attention,train_dflash,train_dflash_cpu,trace_glide";
    let output = machine.command_of(["--only", names], &[]).output().expect("python");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert_says(
        &output,
        &[
            "attention T 9 bf16: 99.5 TFLOP/s",
            "dflash 8b 4096 tokens soft: 300 tok/s, 7 MiB at most, every token of the row is useful: supervised, no padding",
            "PyTorch flash attention T 4096 bf16: 300 TFLOP/s, 0.5 ms",
            "train_dflash: 9 tok/s, 5.5 held-out loss, loss 0.5 from the CPU's over 2 steps",
            "trace of glide 8b 4096 tokens soft: attention_forward 70 %, other 30 %",
        ],
    );
}

#[test]
fn work_in_another_precision_is_other_work() {
    let Some(()) = python() else { return };
    let line = |maker: &str, dtype: &str, speed: f64| {
        let line = json!({"impl": maker, "case": "decode", "shape": "8b", "tokens": 1, "dtype": dtype, "tokens_per_s": speed});
        line.to_string()
    };
    let lines = [
        line("longdraft", "bf16", 150.0),
        line("longdraft", "f32", 70.0),
        line("pytorch-2", "bfloat16", 100.0),
    ];
    let (output, _) = summarise("figures", 0, &lines.join("\n"));
    assert_says(
        &output,
        &[
            "| decode 8b 1 tokens bf16 | 150 | 100 | 1.5 | - | - | - |",
            "| decode 8b 1 tokens f32 | 70 | - | - | - | - | - |",
            "PyTorch decode 8b 1 tokens bf16: 100 tok/s",
        ],
    );
}
