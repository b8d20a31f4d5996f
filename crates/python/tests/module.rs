//! The tests of `python/tests`, with the module as it was built beside this program.
//!
//! Without `python3` they are left out. `LONGDRAFT_PYTHON` names another one.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder from which Python imports the module: the interface, and the library beside it.
fn package(root: &Path, folder: &Path) -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    let names = ["lib_longdraft.so", "lib_longdraft.dylib"];
    let library = names.map(|name| program.with_file_name(name)).into_iter().find(|at| at.exists());
    let library = library.expect("the library was built beside this program");
    let package = folder.join("longdraft");
    std::fs::create_dir_all(&package).expect("folder");
    for entry in std::fs::read_dir(root.join("python/longdraft")).expect("interface").flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), package.join(entry.file_name())).expect("copied");
        }
    }
    let place = package.join("_longdraft.abi3.so");
    if std::fs::hard_link(&library, &place).is_err() {
        std::fs::copy(&library, &place).expect("copied");
    }
    folder.to_path_buf()
}

/// Runs a file of tests.
fn run(file: &str) {
    let python = std::env::var("LONGDRAFT_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let version = Command::new(&python).arg("--version").output();
    if !version.is_ok_and(|version| version.status.success()) {
        eprintln!("skipped: there is no {python}");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().expect("folder");
    let modules = package(&root, folder.path());
    let output = Command::new(&python)
        .args(["-X", "faulthandler", "-m", "unittest", "-v", file])
        .current_dir(root.join("python/tests"))
        .env("PYTHONPATH", &modules)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .expect("Python starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{file}: {told}{}", String::from_utf8_lossy(&output.stdout));
    assert!(told.contains("\nOK"), "{file}: {told}");
}

#[test]
fn decoding() {
    run("test_decoding");
}

#[test]
fn training() {
    run("test_training");
}

#[test]
fn interface() {
    run("test_interface");
}
