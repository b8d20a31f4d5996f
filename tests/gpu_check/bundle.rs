//! Packing a bundle, and the libraries that its program needs where it is unpacked.

use std::process::{Command, Output};

use serde_json::{Value, json};

use super::machine::{Machine, program, python, text};
use crate::support::files::repository;

#[test]
fn libraries_are_found_in_toolkits_and_stood_in_for_at_last() {
    let Some(()) = python() else { return };
    let folder = tempfile::tempdir().expect("tempdir");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let cc = |arguments: &[&str]| {
        assert!(
            Command::new("cc").args(arguments).status().expect("cc").success(),
            "{arguments:?}"
        );
    };
    for name in ["toolkit-9", "stand-in", "empty"] {
        std::fs::create_dir(path(name)).expect("a folder");
    }
    std::fs::write(path("f.c"), "int f(void) { return 0; }\nint g(void) { return 0; }\n")
        .expect("f");
    std::fs::write(
        path("main.c"),
        "int f(void);\nint g(void);\nint main(void) { return f() + g(); }\n",
    )
    .expect("main");
    for (folder, name) in [("toolkit-9", "f"), ("stand-in", "g")] {
        let library = path(&format!("{folder}/lib{name}4gpu.so.7"));
        let soname = format!("-Wl,-soname,lib{name}4gpu.so.7");
        cc(&["-shared", "-fPIC", &soname, "-o", &library, &path("f.c")]);
    }
    let (program, f, g) =
        (path("p"), path("toolkit-9/libf4gpu.so.7"), path("stand-in/libg4gpu.so.7"));
    cc(&["-o", &program, &path("main.c"), "-Wl,--no-as-needed", &f, &g]);
    let find = format!(
        "import json, sys; sys.path.insert(0, {:?}); from gpu import libraries\n\
         for last in (None, {:?}):\n\
         \x20   path, report = libraries.find({program:?}, 'python3', last, ({:?}, {:?}))\n\
         \x20   print(json.dumps([path, report]))",
        repository("scripts"),
        path("stand-in"),
        path("empty"),
        path("toolkit-*"),
    );
    let mut command = Command::new("python3");
    let output = command.args(["-c", &find]).env("LD_LIBRARY_PATH", path("empty")).output();
    let output = output.expect("python");
    assert!(output.status.success(), "{}", text(&output));
    let found: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(found[0][1]["missing"], json!(["libg4gpu.so.7"]));
    let whole = &found[1][1];
    assert_eq!((&whole["missing"], &whole["stand_in"]), (&json!([]), &true.into()));
    assert_eq!(whole["added"], json!([path("toolkit-9"), path("stand-in")]));
    let all = found[1][0].as_str().expect("a path");
    assert!(all.starts_with(&path("empty")), "what was set comes first: {all}");
    let run = Command::new(&program).env("LD_LIBRARY_PATH", all).status().expect("it starts");
    assert!(run.success());
}

fn bundle(machine: &Machine, arguments: &[&str]) -> Output {
    let mut command = Command::new("python3");
    command.arg(repository("scripts/gpu-bundle"));
    command.arg("--longdraft").arg(machine.path("longdraft"));
    command.arg("--archive").arg(machine.path("bundle.tar.xz")).args(["--golden"]);
    command.args(arguments);
    command.output().expect("python")
}

#[test]
fn a_bundle_holds_all_that_a_call_needs() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let output = bundle(&machine, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "tarfile", "-e"]).arg(machine.path("bundle.tar.xz")).arg(machine.path("to"));
    assert!(unpack.status().expect("python").success());
    let unpacked = machine.path("to/bundle");
    for name in [
        "longdraft",
        "baselines/pytorch_glide.py",
        "baselines/pytorch_attention.py",
        "cases/tests/mixtral/meta.json",
        "training/glide.yaml",
        "training/demonstration.gguf",
        "training/eagle3-store/index.json",
        "training/dflash-store/index.json",
        "bundle.json",
    ] {
        assert!(unpacked.join(name).is_file(), "{name}");
    }
    assert!(!unpacked.join("training/eagle3-store/claims").exists());
    // From there, with nothing of the checkout.
    let mut call = Command::new(unpacked.join("gpu-check"));
    call.args(["--plan", "call4", "--archive"]).arg(machine.path("gpu.tar.gz"));
    call.arg("--python").arg(machine.path("python")).current_dir(machine.folder.path());
    let called = call.output().expect("gpu-check");
    assert_eq!(called.status.code(), Some(0), "{}", text(&called));
    let (_, steps) = machine.archived("steps.json");
    assert!(
        !steps.contains(&repository("").canonicalize().expect("root").display().to_string()),
        "{steps}"
    );
}

#[test]
fn a_bundle_that_is_too_large_or_lacks_a_command_fails() {
    let Some(()) = python() else { return };
    let machine = Machine::new();
    let lacks = "#!/bin/sh\ncase $1 in kernel-check) ;; *) exit 0;; esac\n\
                 echo \"error: unrecognized subcommand '$1'\" >&2; exit 2\n";
    program(&machine.path("longdraft"), lacks);
    let output = bundle(&machine, &["--limit-mib", "0.5"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let told = String::from_utf8_lossy(&output.stdout);
    for problem in ["MiB, at most 0.5 are allowed", "this build has no command kernel-check"] {
        assert!(told.contains(problem), "{problem} not in {told}");
    }
}
