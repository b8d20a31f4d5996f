//! What a path holds: a folder or a GGUF file with its configuration, tensors and tokenizer.

use std::io::Read;
use std::path::Path;

use longdraft_kernels::memory::release_freed;

use super::gguf::GgufSource;
use super::nested::TextPart;
use super::views::Views;
use super::{renamed, tied};
use crate::config::TargetConfig;
use crate::error::{ModelError, Result};
use crate::paths::{folder_of, parent_of};
use crate::tokenizer::TextTokenizer;
use crate::weights::WeightSource;
use crate::weights::gguf::gguf_files;
use crate::weights::safetensors::SafetensorsSource;

/// What a path turned out to be.
pub(super) enum Files {
    Folder(Box<TargetConfig>, Box<dyn WeightSource>),
    Gguf(Box<GgufSource>),
}

impl Files {
    /// Configuration, and tensors under their published names.
    pub(super) fn parts(&self) -> (&TargetConfig, &dyn WeightSource) {
        match self {
            Self::Folder(config, source) => (config, source.as_ref()),
            Self::Gguf(source) => (source.config(), source.as_ref()),
        }
    }
}

/// Opens what a path means.
pub(super) fn files(path: &Path) -> Result<Files> {
    if path.is_file() {
        return match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => files(parent_of(path)),
            _ if is_gguf(path)? => Ok(Files::Gguf(Box::new(GgufSource::open(path)?))),
            _ => Err(no_target(path)),
        };
    }
    if is_folder_of_weights(path) {
        let mut config = TargetConfig::from_file(&path.join("config.json"))?;
        let source = TextPart::of(SafetensorsSource::open_folder(path)?);
        config.tie_word_embeddings = tied::is_tied(&config, source.as_ref())?;
        let source = Views::of(&config, source)?;
        let source = renamed::of(source, config.architecture);
        return Ok(Files::Folder(Box::new(config), source));
    }
    match gguf_files(path).as_slice() {
        [one] => Ok(Files::Gguf(Box::new(GgufSource::open(one)?))),
        [] => Err(no_target(path)),
        several => Err(ModelError::invalid(
            path,
            format!("{} .gguf files: name the one to load", several.len()),
        )),
    }
}

/// Whether a folder is Hugging Face's, with or without its weights: folders of GGUF files often have a `config.json`, too.
fn is_folder_of_weights(path: &Path) -> bool {
    path.join("config.json").is_file()
        && (SafetensorsSource::is_in(path) || gguf_files(path).is_empty())
}

/// Whether a file is named as GGUF files are, or begins as they do: caches have names of their own.
fn is_gguf(path: &Path) -> Result<bool> {
    if path.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(true);
    }
    let mut magic = [0; 4];
    let mut file = std::fs::File::open(path).map_err(ModelError::io(path))?;
    Ok(file.read_exact(&mut magic).is_ok() && &magic == b"GGUF")
}

/// What a path without any model is told.
fn no_target(path: &Path) -> ModelError {
    if !path.exists() {
        return ModelError::unrecognised(path, "no such file or folder");
    }
    ModelError::unrecognised(
        path,
        "neither config.json nor a .gguf file is there: a target is a Hugging Face folder, \
         a GGUF file, or a hub model `org/name` or `org/name:Q4_K_M`",
    )
}

pub(super) fn open_tokenizer(path: &Path) -> Result<TextTokenizer> {
    let gguf = if path.is_file() && path.extension().is_none_or(|e| e != "safetensors") {
        Some(path.to_path_buf())
    } else if path.join("tokenizer.json").is_file() {
        None
    } else {
        gguf_files(path).into_iter().next()
    };
    match gguf {
        None if path.is_dir()
            && !path.join("config.json").is_file()
            && !path.join("tokenizer.json").is_file() =>
        {
            Err(no_target(path))
        }
        Some(file) if !is_gguf(&file)? => Err(no_target(path)),
        Some(gguf) => {
            let tokenizer = TextTokenizer::from_gguf(GgufSource::open(&gguf)?.header(), &gguf)?;
            // The header's texts lay between what stays.
            release_freed();
            Ok(tokenizer)
        }
        None => TextTokenizer::from_folder(folder_of(path)),
    }
}

/// The configuration alone; a folder needs no weights for it.
pub(super) fn open_config(path: &Path) -> Result<TargetConfig> {
    if is_folder_of_weights(path) {
        return TargetConfig::from_file(&path.join("config.json"));
    }
    Ok(files(path)?.parts().0.clone())
}
