//! GGUF files: found, read whole, and their values.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use longdraft_models::sha256;
use longdraft_models::weights::gguf::header::{ElementType, Header};

use super::{Checks, Effect, Rule, values};

const WEIGHT_TYPE: Rule =
    Rule::rejects("weight-type", "floats or blocks", "no weight of this type is loaded");
const NORM_TYPE: Rule = Rule::rejects(
    "weight-type",
    "F32: norms are not rounded",
    "the operation is not defined on this type",
);

/// A file with its header.
pub(crate) struct GgufFile {
    /// Its last name, for findings.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) header: Header,
}

/// What a file, or the only one in a folder, is said to hold.
pub(crate) fn architecture(path: &Path) -> Option<String> {
    let [file] = <[PathBuf; 1]>::try_from(files(path)).ok()?;
    let length = file.metadata().ok()?.len();
    let reader = BufReader::new(std::fs::File::open(&file).ok()?);
    let header = Header::read_from(reader, usize::try_from(length).ok()?).ok()?;
    header.text("general.architecture").map(str::to_owned)
}

/// A path that is a file, or the GGUF files of a folder.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_path_buf()];
    }
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .collect();
    found.sort();
    found
}

/// Reads a file, or the one in a folder, which is checked from now on; nothing if it cannot be read or
/// is of another architecture.
pub(crate) fn open(checks: &mut Checks<'_>, path: &Path, architecture: &str) -> Option<GgufFile> {
    let path = match files(path).as_slice() {
        [one] => one.clone(),
        others => {
            let found = format!("{} GGUF files", others.len());
            let words = "there is no draft to load, or no telling which";
            checks.error("gguf", "folder", found, "one", Effect::Rejects, words);
            return None;
        }
    };
    checks.folder.clone_from(&path);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut unreadable = |found: String, wanted: &str| {
        checks.error("gguf", name.clone(), found, wanted, Effect::Rejects, "it cannot be read");
    };
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) => {
            unreadable(error.to_string(), "a GGUF file");
            return None;
        }
    };
    let header = match Header::read(&bytes) {
        Ok(header) => header,
        Err(problems) => {
            problems.0.into_iter().for_each(|problem| unreadable(problem, "a whole GGUF file"));
            return None;
        }
    };
    if header.text("general.architecture") != Some(architecture) {
        let found = format!("{:?}", header.text("general.architecture"));
        let place = format!("{name}: `general.architecture`");
        let words = "it is loaded as another model";
        checks.error("architecture", place, found, architecture, Effect::Rejects, words);
        return None;
    }
    Some(GgufFile { name, path, bytes, header })
}

impl GgufFile {
    /// The place of a key in findings.
    pub(crate) fn place(&self, key: &str) -> String {
        format!("{}: `{key}`", self.name)
    }

    /// What the file calls a key of folders.
    pub(crate) fn key_of(&self, key: &str) -> String {
        let name = match key {
            "mask_token_id" | "bos_token_id" | "eos_token_id" => {
                return format!("tokenizer.ggml.{key}");
            }
            "pad_token_id" => return "tokenizer.ggml.padding_token_id".to_owned(),
            "hidden_size" => "embedding_length",
            "max_position_embeddings" => "context_length",
            "output_multiplier" => "logit_scale",
            "rms_norm_eps" => "attention.layer_norm_rms_epsilon",
            "rope_theta" => "rope.freq_base",
            other => other,
        };
        let architecture = self.header.text("general.architecture").unwrap_or_default();
        format!("{architecture}.{name}")
    }

    /// The place of a folder's key in findings.
    pub(crate) fn place_of(&self, key: &str) -> String {
        self.place(&self.key_of(key))
    }

    /// Reports keys without which loading ends, and those of a tokenizer.
    pub(crate) fn require<'k>(
        &self,
        checks: &mut Checks<'_>,
        keys: impl IntoIterator<Item = &'k str>,
    ) {
        for key in keys {
            if self.header.metadata.contains_key(key) {
                continue;
            }
            let words = if key.starts_with("tokenizer") {
                "the draft's vocabulary cannot be compared with the target's"
            } else {
                "loading ends: key not found"
            };
            let place = self.place(key);
            checks.error(
                "missing-key",
                place,
                "missing",
                "the draft's value",
                Effect::Rejects,
                words,
            );
        }
    }

    /// Checks a tensor's type and values, and whether they are those that were exported.
    pub(crate) fn check_values(&self, checks: &mut Checks<'_>, name: &str) {
        let Some(tensor) = self.header.tensors.get(name) else { return };
        let data = &self.bytes[tensor.bytes.clone()];
        checks.compare(name, &sha256::of_bytes(data));
        let dtype = match tensor.element {
            ElementType::F32 => "F32",
            ElementType::F16 => "F16",
            ElementType::Bf16 => "BF16",
            ElementType::Blocks(_) => return,
            ElementType::I64 | ElementType::I32 if name == "d2t" => return,
            other => {
                return checks.broken(
                    &WEIGHT_TYPE,
                    format!("tensor `{name}`"),
                    format!("{other:?}"),
                );
            }
        };
        if tensor.shape.len() == 1 && dtype != "F32" {
            checks.broken(&NORM_TYPE, format!("tensor `{name}`"), dtype);
        }
        values::check(checks, name, &tensor.shape, dtype, data);
    }
}
