//! Draft methods that can be trained: the one place that lists them.
//!
//! A method brings a draft (`longdraft_models::draft`), an [`Objective`] and a file of this folder,
//! which checks the configuration and builds both. Stages, checkpoints, `capture` and `extract` know
//! methods only through [`Method`] and [`Objective`].

mod eagle3;
mod glide;

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Document;
use longdraft_models::TargetConfig;
use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::glide::GlideConfig;
use longdraft_models::draft::{DraftKind, TokenCounts};
use longdraft_models::target::Target;
use longdraft_models::tokenizer::TextTokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::TrainConfig;
use crate::error::Result;
use crate::objective::Objective;
use crate::stage::Observer;

/// Which draft is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// One layer over the target's last-layer keys and values, trained at several delays.
    #[default]
    Glide,
    /// One layer over three of the target's layers and its own states, trained for several steps.
    Eagle3,
}

/// What a draft is built from.
pub(crate) struct Materials<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) target: &'a Arc<Target>,
    pub(crate) tokenizer: &'a TextTokenizer,
    /// Training documents.
    pub(crate) documents: &'a [Document],
}

impl Materials<'_> {
    /// How often each token is supervised.
    ///
    /// # Errors
    /// - a token lies outside the target's vocabulary
    pub(crate) fn token_counts(&self) -> Result<TokenCounts> {
        let mut counts = TokenCounts::new(self.target.config().vocab_size);
        for document in self.documents {
            counts.add(&document.ids, &document.loss_mask)?;
        }
        Ok(counts)
    }
}

/// A draft's sizes, known before it exists.
#[derive(Debug, Clone, PartialEq)]
pub enum DraftSizes {
    /// Of a GLIDE layer.
    Glide(GlideConfig),
    /// Of an EAGLE-3 draft.
    Eagle3(Box<Eagle3Config>),
}

impl Method {
    /// The sizes of the draft that a configuration asks for.
    ///
    /// # Errors
    /// - they do not fit the target
    pub fn sizes(self, config: &TrainConfig, target: &TargetConfig) -> Result<DraftSizes> {
        match self {
            Self::Glide => Ok(DraftSizes::Glide(glide::layer(config, target))),
            Self::Eagle3 => {
                let sizes = eagle3::sizes(&config.draft.eagle3, target)?;
                Ok(DraftSizes::Eagle3(Box::new(sizes)))
            }
        }
    }

    /// What of a configuration does not fit the method, by dotted key.
    pub(crate) fn problems(self, config: &TrainConfig) -> Vec<String> {
        match self {
            Self::Glide => glide::problems(config),
            Self::Eagle3 => eagle3::problems(config),
        }
    }

    /// Whether a configuration reproduces a published trainer, which takes one document a row.
    pub(crate) fn is_compat(self, config: &TrainConfig) -> bool {
        match self {
            Self::Glide => config.draft.compat.is_some(),
            Self::Eagle3 => config.objective.eagle3.compat.is_some(),
        }
    }

    /// Whether a token with the pad's id is never learned.
    pub(crate) fn masks_padding(self, config: &TrainConfig) -> bool {
        self == Self::Glide && config.draft.compat.is_some()
    }

    /// A draft with its objective, fresh or from `draft.from`.
    ///
    /// # Errors
    /// - the configuration does not fit the target, or the file to start from is unusable
    pub(crate) fn build(
        self,
        materials: &Materials<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Box<dyn Objective>> {
        match self {
            Self::Glide => glide::build(materials),
            Self::Eagle3 => eagle3::build(materials, observer),
        }
    }

    /// Its name in configurations and checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Glide => "glide",
            Self::Eagle3 => "eagle3",
        }
    }

    /// Writes a checkpoint's draft as a folder that engines and `draft.from` read.
    ///
    /// # Errors
    /// - the folder cannot be written, or `config` is not this method's
    pub fn write(
        self,
        folder: &Path,
        config: &Value,
        tensors: &[(String, Tensor)],
        target_fingerprint: &str,
    ) -> Result<()> {
        Ok((DraftKind::named(self.name())?.save)(folder, config, tensors, target_fingerprint)?)
    }
}
