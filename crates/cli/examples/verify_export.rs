//! A draft written as an engine reads it, and checked without that engine.
//!
//! ```sh
//! cargo run --release --example verify_export -- runs/mine exports/mine hf
//! ```

#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::path::PathBuf;

use longdraft::{Draft, ExportOptions, Finding, Result, VerifyOptions, export, verify};

/// Exports a run's draft for an engine and checks the folder against target and run.
pub(crate) fn run(run: &str, output: &str, engine: &str) -> Result<Vec<Finding>> {
    let draft = Draft::open(run)?;
    for folder in export(&draft, &[engine], output, &ExportOptions::default())? {
        println!("{}: {} tensors", folder.output.display(), folder.tensors);
        for (engine, command) in &folder.serve {
            println!("  {engine}: {command}");
        }
    }
    let options = VerifyOptions {
        target: draft.target()?,
        checkpoint: Some(PathBuf::from(run)),
        ..VerifyOptions::default()
    };
    let findings = verify(output, &options)?;
    for finding in &findings {
        print!("{}", finding.report);
    }
    Ok(findings)
}

#[allow(dead_code, reason = "tests call `run`")]
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [draft, output, engine] = &arguments[..] else {
        eprintln!("give a run, a folder to write, and an engine: vllm, sglang, llamacpp, hf, ...");
        return Ok(());
    };
    run(draft, output, engine).map(drop)
}
