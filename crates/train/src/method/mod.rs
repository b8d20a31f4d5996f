//! Draft methods that can be trained: the one place of this crate that lists them.
//!
//! A method brings a draft (`longdraft_models::draft`) and a folder here: a [`DraftMethod`] that checks
//! the configuration, its [`Objective`] and its [`Footprint`]. Stages, checkpoints, plans, `capture` and
//! `extract` know methods only through these.

pub mod eagle3;
pub mod glide;

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use longdraft_data::Document;
use longdraft_models::TargetConfig;
use longdraft_models::draft::{DraftKind, TokenCounts};
use longdraft_models::target::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_rules::Problem;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::TrainConfig;
use crate::error::Result;
use crate::footprint::Footprint;
use crate::objective::Objective;
use crate::observer::Observer;

/// The methods, the default one first.
static METHODS: [&dyn DraftMethod; 2] = [&glide::Glide, &eagle3::Eagle3];

/// The names of [`METHODS`].
static NAMES: [&str; 2] = ["glide", "eagle3"];

/// A way to train drafts.
pub trait DraftMethod: Sync {
    /// Its name in configurations and checkpoints, that of its `DraftKind`.
    fn name(&self) -> &'static str;

    /// What it trains, for the reference of configurations.
    fn about(&self) -> &'static str;

    /// What of a configuration does not fit the method, by dotted key.
    fn problems(&self, config: &TrainConfig) -> Vec<Problem>;

    /// Keys that only this method reads and that a configuration sets.
    fn own_keys_set(&self, config: &TrainConfig) -> Vec<&'static str>;

    /// What to do in place of setting a key that only another method reads.
    fn instead_of(&self, _key: &str) -> Option<&'static str> {
        None
    }

    /// Whether a configuration reproduces a published trainer, which takes one document a row.
    fn is_compat(&self, config: &TrainConfig) -> bool;

    /// Whether a token with the pad's id is never learned.
    fn masks_padding(&self, _config: &TrainConfig) -> bool {
        false
    }

    /// Whether the draft's initial values are the target's last layer.
    fn starts_from_last_layer(&self, _config: &TrainConfig) -> bool {
        false
    }

    /// The sizes of the draft that a configuration asks for.
    ///
    /// # Errors
    /// - they do not fit the target
    fn footprint(&self, config: &TrainConfig, target: &TargetConfig) -> Result<Arc<dyn Footprint>>;

    /// Checks that the draft in the file or folder `path` is one to start from; no tensor is read.
    ///
    /// # Errors
    /// - it is another network, or of another target
    fn check_start(&self, config: &TrainConfig, target: &TargetConfig, path: &Path) -> Result<()>;

    /// Takes back what would change a trained draft before it is measured.
    fn keep_as_trained(&self, _config: &mut TrainConfig) {}

    /// A draft with its objective, fresh or from [`Materials::start`].
    ///
    /// # Errors
    /// - the configuration does not fit the target, or the file to start from is unusable
    fn build(
        &self,
        materials: &Materials<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Box<dyn Objective>>;
}

/// What a draft is built from.
pub struct Materials<'a> {
    /// What is asked for.
    pub config: &'a TrainConfig,
    /// The frozen target.
    pub target: &'a Arc<Target>,
    /// The target's tokenizer.
    pub tokenizer: &'a TextTokenizer,
    /// Training documents.
    pub documents: &'a [Document],
    /// File or folder of the draft to start from, if it is not a fresh one.
    pub start: Option<&'a Path>,
}

impl Materials<'_> {
    /// How often each token is supervised.
    ///
    /// # Errors
    /// - a token lies outside the target's vocabulary
    pub fn token_counts(&self) -> Result<TokenCounts> {
        let mut counts = TokenCounts::new(self.target.config().vocab_size);
        for document in self.documents {
            counts.add(&document.ids, &document.loss_mask)?;
        }
        Ok(counts)
    }
}

/// Which draft is trained.
#[derive(Clone, Copy)]
pub struct Method(&'static dyn DraftMethod);

impl Method {
    /// Every method, the default one first.
    pub fn all() -> impl Iterator<Item = Self> {
        METHODS.into_iter().map(Self)
    }

    /// A method that is not in the table: for configurations that a program makes.
    pub fn of(method: &'static dyn DraftMethod) -> Self {
        Self(method)
    }

    /// The method of a name in the table.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|method| method.name() == name)
    }
}

/// Keys that a configuration sets for a method which is not its own.
pub(crate) fn foreign_keys(config: &TrainConfig) -> Vec<Problem> {
    let chosen = config.draft.method;
    let of_other = |other: Method| {
        let title = DraftKind::named(other.name()).map_or(other.name(), |kind| kind.title);
        let told = move |key| {
            let way_out = chosen.instead_of(key).map_or_else(
                || format!("set `draft.method: {}`, or leave it out", other.name()),
                ToString::to_string,
            );
            Problem::new(key, format!("is {title}'s: {way_out}"))
        };
        other.own_keys_set(config).into_iter().map(told)
    };
    Method::all().filter(|other| *other != chosen).flat_map(of_other).collect()
}

impl Deref for Method {
    type Target = dyn DraftMethod;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl Default for Method {
    fn default() -> Self {
        Self(METHODS[0])
    }
}

impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Method {}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Method {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Method {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| serde::de::Error::unknown_variant(&name, &NAMES))
    }
}

impl JsonSchema for Method {
    fn schema_name() -> Cow<'static, str> {
        "Method".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let option = |method: Self| {
            serde_json::json!({
                "type": "string", "const": method.name(), "description": method.about()
            })
        };
        json_schema!({
            "description": "Which draft is trained.",
            "oneOf": Self::all().map(option).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::draft::kinds::KINDS;
    use longdraft_models::published::published_config;

    use super::*;

    /// A third method needs a line in every table: the tables name the same methods.
    #[test]
    fn every_method_is_a_kind_of_draft_and_every_kind_is_trained() {
        let names: Vec<&str> = Method::all().map(|method| method.name()).collect();
        assert_eq!(names, NAMES);
        assert_eq!(names.len(), KINDS.len());
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        for method in Method::all() {
            assert!(DraftKind::named(method.name()).is_ok(), "{method:?}");
            let text = serde_json::to_string(&method).expect("a name");
            assert_eq!(serde_json::from_str::<Method>(&text).expect("read back"), method);
            let config = serde_json::json!({
                "target": "t", "output": "o", "data": { "train": [{ "path": "p" }] },
                "draft": { "method": method },
            });
            let config: TrainConfig = serde_json::from_value(config).expect("a configuration");
            assert!(config.problems().is_empty(), "{method:?}: {:?}", config.problems());
            assert!(!method.is_compat(&config), "{method:?} trains its own way by default");
            let footprint = method.footprint(&config, &target).expect("sizes that fit");
            assert!(!footprint.specs().is_empty() && !footprint.taps().is_empty(), "{method:?}");
        }
        assert!(serde_json::from_str::<Method>("\"medusa\"").is_err());
    }
}
