//! How engines read each method's drafts: the one place of this crate that lists them.
//!
//! A format is a folder: names, keys, rules of loaders and what they compute, for every profile that
//! takes such drafts.

mod block;
mod commands;
pub mod eagle3;
pub(crate) mod files;
pub(crate) mod gguf;
mod glide;
mod of_target;
mod speculators;
mod vocabulary;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::config::Parts;
use longdraft_models::draft::Draft;
use longdraft_models::error::Problems;
use longdraft_models::target_model::Target;
use serde_json::Value;

use crate::Profile;
use crate::checks::Checks;
use crate::error::{Result, ServingError};
use crate::manifest::Provenance;
use crate::parity::ParityVector;
use crate::target::TargetFacts;

/// Every format. The first one that recognises a folder checks it.
static FORMATS: [&dyn Format; 5] = [
    &glide::Glide,
    &block::Block {
        method: "dflash",
        architectures: &["DFlashDraftModel"],
        engines: ["dflash", "DFLASH", "draft-dflash"],
        speculators: "DFlashSpeculator",
    },
    &block::Block {
        method: "dflash2",
        architectures: &["DFlash2DraftModel"],
        engines: ["dflash", "DFLASH", "draft-dflash"],
        speculators: "DFlash2DraftModel",
    },
    &block::Block {
        method: "dspark",
        architectures: &["Qwen3DSparkModel", "DSparkDraftModel"],
        engines: ["dspark", "DSPARK", "draft-dspark"],
        speculators: "Qwen3DSparkModel",
    },
    &eagle3::Eagle3,
];

/// Tensors by name, in the order of a file.
pub type Named = Vec<(String, Tensor)>;

/// Command lines by engine.
pub type Lines = BTreeMap<String, String>;

/// A method's drafts as files of engines.
pub trait Format: Sync {
    /// Name of the method.
    fn method(&self) -> &'static str;

    /// Whether any draft of the method can be written for a profile and be served there.
    fn serves(&self, profile: Profile) -> bool {
        profile != Profile::Longspec
    }

    /// What stands in the way of a draft in a profile.
    ///
    /// # Errors
    /// - the draft is another method's
    fn fit(&self, profile: Profile, draft: &dyn Draft, target: &TargetFacts) -> Result<Fit>;

    /// Writes a draft's files into a folder.
    ///
    /// # Errors
    /// - a value does not fit the type, or the folder cannot be written
    fn write(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        options: &ExportOptions,
        folder: &Path,
    ) -> Result<Rendered>;

    /// What a draft computes with its weights rounded as an export rounds them, on the fixed input.
    ///
    /// # Errors
    /// - a value does not fit the type, or sizes do not fit the target
    fn rounded(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        dtype: DType,
    ) -> Result<ParityVector>;

    /// Inputs and outputs of a draft on a text of the target, by name, for a comparison with other
    /// programs; `None` if there is no such comparison.
    ///
    /// # Errors
    /// - the target or the draft cannot run
    fn recording(
        &self,
        _draft: &dyn Draft,
        _target: &Target,
        _ids: &[u32],
    ) -> Result<Option<Named>> {
        Ok(None)
    }

    /// Command lines of engines, by name; `DIR` stands for the exported folder.
    ///
    /// # Errors
    /// - the draft is another method's
    fn commands(&self, profile: Profile, draft: &dyn Draft, served: Served<'_>) -> Result<Lines>;

    /// Whether GGUF files of an architecture are of the format.
    fn reads_gguf(&self, _architecture: &str) -> bool {
        false
    }

    /// Whether a folder for this profile with this `config.json` is of the format.
    fn recognises(&self, profile: Profile, config: &Value) -> bool;

    /// The profile of a folder with this `config.json`, if it is of the format.
    fn profile_of(&self, config: &Value) -> Option<Profile>;

    /// Lists what is wrong with a folder; whether there is a network that may be run.
    fn check(&self, checks: &mut Checks<'_>, path: &Path) -> bool;

    /// What the files compute on the fixed input; nothing where that cannot be known.
    ///
    /// # Errors
    /// - the network cannot be loaded or run
    fn outputs(&self, checks: &mut Checks<'_>) -> Result<Option<ParityVector>>;
}

/// The format of a draft.
///
/// # Errors
/// - no engine's files hold drafts of its method
pub fn format_of(draft: &dyn Draft) -> Result<&'static dyn Format> {
    let found = FORMATS.into_iter().find(|format| format.method() == draft.method());
    found.ok_or_else(|| ServingError::NoFormat(draft.method()))
}

/// Whether drafts of a method can be written for a profile and be served there.
pub fn serves(method: &str, profile: Profile) -> bool {
    FORMATS.into_iter().any(|format| format.method() == method && format.serves(profile))
}

/// A draft as one of a format's method.
fn typed<D: Draft>(draft: &dyn Draft) -> Result<&D> {
    draft.of_kind().ok_or_else(|| ServingError::NoFormat(draft.method()))
}

/// Tensors as written, unless some do not fit their type.
fn fitting(profile: Profile, tensors: Named, problems: Problems) -> Result<Named> {
    if problems.0.is_empty() {
        Ok(tensors)
    } else {
        Err(ServingError::NotRepresentable { profile, problems })
    }
}

/// The format that checks a folder.
pub(crate) fn recognised(profile: Profile, config: &Value) -> &'static dyn Format {
    let found = FORMATS.into_iter().find(|format| format.recognises(profile, config));
    found.unwrap_or(FORMATS[FORMATS.len() - 1])
}

/// The format that checks a GGUF file of an architecture; `method` is what its manifest says.
pub(crate) fn recognised_gguf(
    architecture: Option<&str>,
    method: Option<&str>,
) -> &'static dyn Format {
    let exported = FORMATS.into_iter().find(|format| Some(format.method()) == method);
    let read = |format: &&dyn Format| architecture.is_some_and(|name| format.reads_gguf(name));
    let found = exported.or_else(|| FORMATS.into_iter().find(read));
    found.unwrap_or(FORMATS[FORMATS.len() - 1])
}

/// What a folder without a manifest is for, by its keys.
pub(crate) fn profile_of(config: &Value) -> Profile {
    FORMATS.into_iter().find_map(|format| format.profile_of(config)).unwrap_or(Profile::Vllm)
}

/// What a command line names.
#[derive(Debug, Clone, Copy)]
pub struct Served<'a> {
    /// Name of the target.
    pub target: &'a str,
    /// Whether the target is a GGUF file.
    pub is_gguf: bool,
    /// Tokens per round.
    pub draft_len: usize,
    /// Name of the draft's GGUF file.
    pub gguf: &'a str,
}

/// Type of written weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 32 bits.
    F32,
}

impl WeightType {
    /// As the tensor library names it.
    pub fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

/// How to export.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// For which engine.
    pub profile: Profile,
    /// Type of the weights; `None`: f16 for longspec, else bf16.
    pub dtype: Option<WeightType>,
    /// Whether the target's embeddings go along, where the engine would read them.
    pub embedding: bool,
    /// Tokens per round that engines should draft by default.
    pub draft_len: usize,
    /// Where the draft comes from.
    pub provenance: Provenance,
}

/// Files of one export, before its manifest.
pub struct Rendered {
    /// Tensors as written.
    pub tensors: Named,
    /// Layers of the target whose outputs the draft reads.
    pub layers: Vec<usize>,
    /// Hash of the draft's vocabulary, if it is not the target's.
    pub map: Option<String>,
    /// What the written network computes.
    pub parity: ParityVector,
    /// Type of the weights.
    pub dtype: DType,
}

/// What stands in the way, and what depends on the engine's version.
#[derive(Debug, Default)]
pub struct Fit {
    /// Features that the engines compute otherwise or refuse.
    pub refusals: Problems,
    /// Features that only some versions compute.
    pub warnings: Vec<String>,
}

impl Fit {
    /// Refuses a draft that breaks a condition.
    pub(crate) fn refuse(&mut self, holds: bool, reason: &str) {
        if !holds {
            self.refusals.push(reason);
        }
    }

    /// What engines do not do for drafts of families that scale embeddings, and what they must do for those whose
    /// layers carry states; `scale` is what the draft multiplies embeddings by, if it does.
    pub(crate) fn check_parts(&mut self, parts: &Parts, scale: Option<f64>) {
        self.warn(
            parts.mixers.is_empty(),
            "the target has recurrent layers: an engine must keep their state for every token that it verifies, \
             which vLLM, SGLang and llama.cpp do in versions of 2026 only",
        );
        self.warn(
            parts.embedding_scale.is_none() || scale.is_some(),
            "the target scales its embeddings and the draft reads them unscaled: an engine that hands it \
             scaled ones runs another network without a message",
        );
    }

    /// Warns of a draft that breaks a condition.
    pub(crate) fn warn(&mut self, holds: bool, reason: &str) {
        if !holds {
            self.warnings.push(reason.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::draft::kinds::KINDS;

    use super::*;

    #[test]
    fn every_kind_of_drafts_has_a_format() {
        let sorted = |mut names: Vec<&'static str>| {
            names.sort_unstable();
            names
        };
        let formats = sorted(FORMATS.iter().map(|format| format.method()).collect());
        assert_eq!(formats, sorted(KINDS.iter().map(|kind| kind.name).collect()));
    }
}
