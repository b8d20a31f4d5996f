//! `longdraft-manifest.json`: where an export comes from and how to check it. Engines ignore it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Profile;
use crate::parity::ParityVector;
use crate::shell::{in_json, in_quotes, quoted};

/// Name of the file.
pub const MANIFEST_FILE: &str = "longdraft-manifest.json";

/// A command of a manifest for a folder, as a shell reads it: `DIR` stands for the folder, where it is no part of
/// another name.
pub fn in_folder(command: &str, folder: &str) -> String {
    const DIR: &str = "DIR";
    let of_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    let (mut written, mut rest) = (String::new(), command);
    while let Some(at) = rest.find(DIR) {
        let (before, after) = (&rest[..at], &rest[at + DIR.len()..]);
        let ends = before.chars().next_back().or_else(|| written.chars().next_back());
        let follows = ends.is_some_and(|c| of_name(c) || matches!(c, '/' | '.'));
        let is_alone = !follows && !after.starts_with(of_name);
        written.push_str(before);
        let place = if !is_alone {
            DIR.to_owned()
        } else if in_quotes(&written) {
            // vLLM's are in JSON.
            in_json(folder)
        } else {
            quoted(folder)
        };
        written.push_str(&place);
        rest = after;
    }
    written + rest
}

/// What is recorded of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of longdraft that wrote it.
    pub tool_version: String,
    /// What it was written for.
    pub profile: Profile,
    /// Engine versions that the profile's rules describe.
    pub compat: String,
    /// Name of the draft's method.
    pub method: String,
    /// PyTorch's name of the weights' type.
    pub dtype: String,
    /// Outputs of layers that the draft reads, counted from 0.
    pub target_layers: Vec<usize>,
    /// The same in words.
    pub target_layers_in_words: Vec<String>,
    /// The target that it drafts for.
    pub target: TargetRecord,
    /// Where the draft comes from.
    pub provenance: Provenance,
    /// SHA-256 of every tensor's bytes in the file, by the name there.
    pub tensors: BTreeMap<String, String>,
    /// SHA-256 of every other file.
    pub files: BTreeMap<String, String>,
    /// SHA-256 of the kept target ids, if the draft has a vocabulary of its own.
    pub vocabulary_map: Option<String>,
    /// What the written network computes on a fixed input.
    pub parity: Option<ParityVector>,
    /// What the engines of some version do not compute.
    pub warnings: Vec<String>,
    /// How to serve it, by engine.
    pub serve: BTreeMap<String, String>,
}

impl Manifest {
    /// The file's content.
    pub(crate) fn text(&self) -> std::io::Result<String> {
        Ok(serde_json::to_string_pretty(self).map_err(std::io::Error::other)? + "\n")
    }
}

/// The target as it was at export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// As the user named it.
    pub name: String,
    /// Hash of its configuration and a sample of its weights.
    pub fingerprint: String,
    /// Hash of its tokenizer.
    pub tokenizer: String,
    /// `V`
    pub vocab_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
}

/// What is known of the draft's training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Run, checkpoint or folder, its last name only.
    pub source: String,
    /// SHA-256 of the source's weight file.
    pub source_sha256: String,
    /// Optimizer steps.
    pub steps: Option<u64>,
    /// Tokens seen.
    pub tokens: Option<u64>,
    /// Seconds of training.
    pub seconds: Option<f64>,
    /// Names of the training sources.
    pub data: Vec<String>,
    /// What `eval decode` measured, as in `decode.json`.
    pub evaluation: Option<serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_takes_its_place_and_no_part_of_a_name() {
        let command = "serve /mnt/DIRECT/DIR -m 'DIR' -md DIR/draft.gguf --x MYDIR DIR";
        let expected = "serve /mnt/DIRECT/DIR -m '/e' -md /e/draft.gguf --x MYDIR /e";
        assert_eq!(in_folder(command, "/e"), expected);
    }

    #[test]
    fn a_folder_is_written_as_a_shell_reads_it() {
        let command = r#"serve 'it'\''s' --draft '{"model": "DIR"}' -md DIR/draft.gguf"#;
        let expected = r#"serve 'it'\''s' --draft '{"model": "a '\''b'\'' \"c"}' -md 'a '\''b'\'' "c'/draft.gguf"#;
        assert_eq!(in_folder(command, "a 'b' \"c"), expected);
    }
}
