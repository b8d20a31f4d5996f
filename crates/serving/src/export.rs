//! Writing a draft for an engine: a folder that is complete or absent, the same bytes each time.

use std::collections::BTreeMap;
use std::path::Path;

use longdraft_models::draft::Draft;
use longdraft_models::sha256;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_models::weights::safetensors::tensor_bytes;

use crate::Profile;
use crate::error::{Result, ServingError};
use crate::folder::NewFolder;
use crate::formats::files::{gguf_name, torch_dtype};
use crate::formats::{ExportOptions, Format, Rendered, Served, format_of};
use crate::manifest::{MANIFEST_FILE, Manifest, TargetRecord};
use crate::shell::quoted;
use crate::target::TargetFacts;

/// What was written.
#[derive(Debug)]
pub struct Exported {
    /// File names.
    pub files: Vec<String>,
    /// Tensors in the weight file.
    pub tensors: usize,
    /// What the engines of some version do not compute.
    pub warnings: Vec<String>,
    /// The manifest beside it.
    pub manifest: Manifest,
}

/// This program and its command for an export, as a manifest lists them; `DIR` stands for the export.
pub fn own_command(target: &str) -> (String, String) {
    let target = quoted(target);
    let command = format!("longdraft generate --target {target} --draft DIR --prompt TEXT");
    ("longdraft".to_owned(), command)
}

/// Writes a draft for a profile into `folder`, which must be new, empty or an earlier export.
///
/// # Errors
/// - the profile's engines do not compute this draft: every reason
/// - the folder holds something else or cannot be written
pub fn export(
    draft: &dyn Draft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
) -> Result<Exported> {
    let profile = options.profile;
    let format = format_of(draft)?;
    let warnings = require_fit(draft, target, profile)?;
    let new = NewFolder::at(folder, |place| place.join(MANIFEST_FILE).is_file())?;
    let rendered = format.write(draft, target, options, new.path())?;
    if profile != Profile::Llamacpp {
        target.tokenizer.save(new.path())?;
    }
    let manifest =
        manifest((format, draft), rendered, (target, options), new.path(), warnings.clone())?;
    let text = manifest.text().map_err(ServingError::io(folder))?;
    write_atomically(&new.path().join(MANIFEST_FILE), text.as_bytes())?;
    new.finish()?;
    let mut files: Vec<String> = manifest.files.keys().cloned().collect();
    files.push(MANIFEST_FILE.into());
    Ok(Exported { files, tensors: manifest.tensors.len(), warnings, manifest })
}

/// Refuses a draft that a profile's engines do not compute; returns what only some of their versions do.
///
/// # Errors
/// - they do not compute it: every reason
pub fn require_fit(
    draft: &dyn Draft,
    target: &TargetFacts,
    profile: Profile,
) -> Result<Vec<String>> {
    let fit = format_of(draft)?.fit(profile, draft, target)?;
    if fit.refusals.0.is_empty() {
        return Ok(fit.warnings);
    }
    Err(ServingError::NotRepresentable { profile, problems: fit.refusals })
}

fn manifest(
    (format, draft): (&dyn Format, &dyn Draft),
    rendered: Rendered,
    (target, options): (&TargetFacts, &ExportOptions),
    folder: &Path,
    warnings: Vec<String>,
) -> Result<Manifest> {
    let Rendered { tensors, layers, map, parity, dtype } = rendered;
    let mut hashes = BTreeMap::new();
    for (name, tensor) in &tensors {
        hashes.insert(name.clone(), sha256::of_bytes(&tensor_bytes(tensor)?));
    }
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(ServingError::io(folder))? {
        let path = entry.map_err(ServingError::io(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = std::fs::read(&path).map_err(ServingError::io(&path))?;
        files.insert(name, sha256::of_bytes(&bytes));
    }
    let config = target.config();
    let gguf = gguf_name(dtype);
    let served = Served {
        target: &target.name,
        is_gguf: target.is_gguf,
        draft_len: options.draft_len,
        gguf: &gguf,
    };
    let mut serve = format.commands(options.profile, draft, served)?;
    serve.extend([own_command(&target.name)]);
    Ok(Manifest {
        tool_version: env!("CARGO_PKG_VERSION").into(),
        profile: options.profile,
        compat: options.profile.compat().into(),
        method: format.method().into(),
        dtype: torch_dtype(dtype).into(),
        target_layers_in_words: layers.iter().map(|k| format!("output of layer {k}")).collect(),
        target_layers: layers,
        target: TargetRecord {
            name: target.name.clone(),
            fingerprint: target.target.fingerprint().to_owned(),
            tokenizer: target.tokenizer.fingerprint()?,
            vocab_size: config.vocab_size,
            num_hidden_layers: config.num_hidden_layers,
        },
        provenance: options.provenance.clone(),
        tensors: hashes,
        files,
        vocabulary_map: map,
        parity: Some(parity),
        warnings,
        serve,
    })
}
