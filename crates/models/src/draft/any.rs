//! A draft of whichever method its folder holds.

use std::path::Path;

use super::eagle3::{self, Eagle3Draft};
use super::glide::GlideDraft;
use crate::error::Result;
use crate::target::Target;

/// A draft of one of the methods.
pub enum AnyDraft {
    /// GLIDE.
    Glide(GlideDraft),
    /// EAGLE-3.
    Eagle3(Box<Eagle3Draft>),
}

impl AnyDraft {
    /// Opens a draft folder or file: EAGLE-3 if the `config.json` beside the weights names its
    /// architecture, GLIDE otherwise.
    ///
    /// # Errors
    /// - the files are unreadable or do not fit the target
    pub fn open(path: &Path, target: &Target) -> Result<Self> {
        if eagle3::is_at(path) {
            return Ok(Self::Eagle3(Box::new(Eagle3Draft::open(path, target)?)));
        }
        Ok(Self::Glide(GlideDraft::open(path, target)?))
    }

    /// From now on proposes with its matrices rounded to blocks of 8 bits.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn hold_as_blocks(&mut self) -> Result<()> {
        match self {
            Self::Glide(draft) => draft.hold_as_blocks(),
            Self::Eagle3(draft) => draft.hold_as_blocks(),
        }
    }

    /// Name of the method.
    pub fn method(&self) -> &'static str {
        match self {
            Self::Glide(_) => "glide",
            Self::Eagle3(_) => "eagle3",
        }
    }
}
