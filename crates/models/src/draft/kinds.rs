//! The kinds of drafts, by their files: the one place of this crate that lists them.

use std::path::Path;

use candle_core::Tensor;
use serde_json::Value;

use super::{Draft, block, eagle3, glide};
use crate::error::{ModelError, Result};
use crate::target_model::Target;
use crate::weights::WeightSource;

/// A draft of some kind.
type Opened = Result<Box<dyn Draft>>;
/// Writes what [`Draft::config_json`] says and tensors, for a target's fingerprint.
type Save = fn(&Path, &Value, &[(String, Tensor)], &str) -> Result<()>;
/// Tensors of a draft's GGUF file under the draft's own names.
type OpenGguf = fn(&Path) -> Result<Box<dyn WeightSource>>;

/// A draft method as its files show it.
pub struct DraftKind {
    /// Its name in configurations, checkpoints and manifests.
    pub name: &'static str,
    /// Its name in texts.
    pub title: &'static str,
    /// Whether a draft folder or file is of this kind.
    pub is_at: fn(&Path) -> bool,
    /// Opens a draft folder or file for a target.
    pub open: fn(&Path, &Target) -> Opened,
    /// Rebuilds a draft from what [`Draft::config_json`] said and its tensors.
    pub restore: fn(&Value, &dyn WeightSource, &Target) -> Opened,
    /// Writes such a draft into a folder, for the target of a fingerprint.
    pub save: Save,
    /// Opens a GGUF file's tensors under the draft's own names, if there are such files.
    pub open_gguf: Option<OpenGguf>,
    /// How the files of a published draft are read for a target, where that is not plain.
    pub reading: fn(&Path, &Target) -> Vec<String>,
}

/// Every kind. The first one that recognises a path opens it.
pub static KINDS: [DraftKind; 5] =
    [eagle3::KIND, block::PLAIN, block::EXTENDED, block::CHAINED, glide::KIND];

impl DraftKind {
    /// The kind of a name.
    ///
    /// # Errors
    /// - no kind has this name
    pub fn named(name: &str) -> Result<&'static Self> {
        KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
            let known: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
            let problem = format!("unknown draft method `{name}` ({})", known.join(", "));
            ModelError::invalid(Path::new("draft"), problem)
        })
    }

    /// The kind of a draft folder or file.
    ///
    /// # Errors
    /// - no kind recognises it
    pub fn at(path: &Path) -> Result<&'static Self> {
        KINDS
            .iter()
            .find(|kind| (kind.is_at)(path))
            .ok_or_else(|| ModelError::unrecognised(path, "no kind of draft knows these files"))
    }
}

/// Opens a draft folder or file of whichever kind it is.
///
/// # Errors
/// - the files are unreadable or do not fit the target
pub fn open_draft(path: &Path, target: &Target) -> Result<Box<dyn Draft>> {
    (DraftKind::at(path)?.open)(path, target)
}

/// The tensors of a draft's GGUF file.
pub(super) fn open_gguf(file: &Path) -> Result<Box<dyn WeightSource>> {
    let mut unread = None;
    for open in KINDS.iter().filter_map(|kind| kind.open_gguf) {
        match open(file) {
            Ok(source) => return Ok(source),
            // The first one says what is wrong with a file that none can read.
            Err(error) => unread = unread.or(Some(error)),
        }
    }
    let none = || ModelError::unrecognised(file, "no kind of draft lies in GGUF files");
    Err(unread.unwrap_or_else(none))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in &KINDS {
            let found = DraftKind::named(kind.name).expect("found");
            assert_eq!(found.title, kind.title);
        }
        let error = DraftKind::named("medusa").err().expect("refused").to_string();
        for kind in &KINDS {
            assert!(error.contains(kind.name), "{error}");
        }
    }

    #[test]
    fn a_folder_without_a_mark_of_its_own_has_exactly_one_kind() {
        let folder = tempfile::tempdir().expect("folder");
        assert!(DraftKind::at(folder.path()).is_ok());
    }
}
