//! GGUF files: found, read whole, and their values.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use longdraft_models::sha256;
use longdraft_models::weights::gguf::gguf_files;
use longdraft_models::weights::gguf::header::{ElementType, Header};

use super::rules::{Rule, tensor_place};
use super::{Checks, values};

const ONE_FILE: Rule =
    Rule::rejects("gguf", "one", "there is no draft to load, or no telling which");
const WHOLE_FILE: Rule = Rule::rejects("gguf", "a whole GGUF file", "it cannot be read");
const ARCHITECTURE: Rule = Rule::rejects("architecture", "", "it is loaded as another model");
const MISSING_KEY: Rule =
    Rule::rejects("missing-key", "the draft's value", "loading ends: key not found");
const NO_TOKENIZER: Rule = Rule::rejects(
    "missing-key",
    "the draft's value",
    "the draft's vocabulary cannot be compared with the target's",
);
const WEIGHT_TYPE: Rule =
    Rule::rejects("weight-type", "floats or blocks", "no weight of this type is loaded");
const NORM_TYPE: Rule = Rule::rejects(
    "weight-type",
    "F32: norms are not rounded",
    "the operation is not defined on this type",
);

/// Keys of every draft's architecture without which loading ends, or heads turn by another base.
const OF_DRAFTS: [&str; 8] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "target_layers",
];

/// The same of the tokenizer.
const OF_TOKENIZER: [&str; 3] =
    ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"];

/// The key that says what a file holds.
const ARCHITECTURE_KEY: &str = "general.architecture";

pub(crate) struct GgufFile {
    /// Its last name, for findings.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) header: Header,
}

/// What a file, or the only one in a folder, is said to hold.
pub(crate) fn architecture(path: &Path) -> Option<String> {
    header(path)?.text(ARCHITECTURE_KEY).map(str::to_owned)
}

/// The header of a file, or of the only one in a folder.
pub(crate) fn header(path: &Path) -> Option<Header> {
    let [file] = <[PathBuf; 1]>::try_from(files(path)).ok()?;
    let length = file.metadata().ok()?.len();
    let reader = BufReader::new(std::fs::File::open(&file).ok()?);
    Header::read_from(reader, usize::try_from(length).ok()?).ok()
}

/// A path that is a file, or the GGUF files of a folder.
fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() { vec![path.to_path_buf()] } else { gguf_files(path) }
}

/// Reads a file, or the one in a folder, which is checked from now on; nothing if it cannot be read or
/// is of another architecture.
pub(crate) fn open(checks: &mut Checks<'_>, path: &Path, architecture: &str) -> Option<GgufFile> {
    let path = match <[PathBuf; 1]>::try_from(files(path)) {
        Ok([one]) => one,
        Err(others) => {
            checks.broken(&ONE_FILE, "folder", format!("{} GGUF files", others.len()));
            return None;
        }
    };
    checks.folder.clone_from(&path);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = std::fs::read(&path).map_err(|error| vec![error.to_string()]);
    let whole = bytes.and_then(|bytes| match Header::read(&bytes) {
        Ok(header) => Ok((bytes, header)),
        Err(problems) => Err(problems.0),
    });
    match whole {
        Ok((bytes, header)) => {
            let file = GgufFile { name, path, bytes, header };
            file.check_architecture(checks, architecture).then_some(file)
        }
        Err(problems) => {
            checks.each(&WHOLE_FILE, &name, problems);
            None
        }
    }
}

impl GgufFile {
    fn check_architecture(&self, checks: &mut Checks<'_>, wanted: &str) -> bool {
        let found = self.header.text(ARCHITECTURE_KEY);
        if found != Some(wanted) {
            let place = self.place(ARCHITECTURE_KEY);
            checks.differs(&ARCHITECTURE, place, format!("{found:?}"), wanted);
        }
        found == Some(wanted)
    }

    /// A key of the architecture in full; those that are whole stay.
    pub(crate) fn key(&self, name: &str) -> String {
        let architecture = self.header.text(ARCHITECTURE_KEY).unwrap_or_default();
        let first = name.split('.').next().unwrap_or_default();
        if ["general", "tokenizer", architecture].contains(&first) {
            return name.to_owned();
        }
        format!("{architecture}.{name}")
    }

    /// A switch under a key of the architecture.
    pub(crate) fn flag(&self, name: &str) -> Option<bool> {
        self.header.flag(&self.key(name))
    }

    /// The place of a key in findings.
    pub(crate) fn place(&self, name: &str) -> String {
        format!("{}: `{}`", self.name, self.key(name))
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
        self.key(name)
    }

    /// The place of a folder's key in findings.
    pub(crate) fn place_of(&self, key: &str) -> String {
        self.place(&self.key_of(key))
    }

    /// Reports keys without which loading ends: those of every draft, `own` ones, and those of a tokenizer.
    pub(crate) fn require(&self, checks: &mut Checks<'_>, own: &[&str]) {
        for key in OF_DRAFTS.iter().chain(own).chain(&OF_TOKENIZER) {
            let is_missing = !self.header.metadata.contains_key(&self.key(key));
            let rule = if key.starts_with("tokenizer") { &NO_TOKENIZER } else { &MISSING_KEY };
            if is_missing {
                checks.broken(rule, self.place(key), "missing");
            }
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
            other => return checks.broken(&WEIGHT_TYPE, tensor_place(name), format!("{other:?}")),
        };
        if tensor.shape.len() == 1 && dtype != "F32" {
            checks.broken(&NORM_TYPE, tensor_place(name), dtype);
        }
        values::check(checks, name, &tensor.shape, dtype, data);
    }
}
