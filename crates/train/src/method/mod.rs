//! Draft methods that can be trained: the one place of this crate that lists them.
//!
//! A method brings a draft (`longdraft_models::draft`) and a folder here: a [`DraftMethod`] that checks
//! the configuration, its [`Objective`] and its [`Footprint`]. Stages, checkpoints, plans, `capture` and
//! `extract` know methods only through these.

pub mod block;
pub mod dflash;
pub mod dflash2;
pub mod dspark;
pub mod eagle3;
pub mod glide;
pub mod recipe;
mod vocabulary;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use longdraft_data::Document;
use longdraft_data::batch::AnchorOffset;
use longdraft_features::FeatureMode;
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::draft::{Init, TokenCounts};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::{ModelError, TargetConfig};
use longdraft_rules::{Problem, Rules};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::{DeserializeOwned, Error};
use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::footprint::Footprint;
use crate::objective::{Objective, TeacherConfig};
use crate::observer::Observer;

pub use recipe::{Evidence, Passes, Recipe, Room, Round, Start, proposed};

/// The methods, the default one first.
static METHODS: [Method; 5] = [
    Method::of::<glide::Glide>(),
    Method::of::<eagle3::Eagle3>(),
    Method::of::<dflash::Dflash>(),
    Method::of::<dflash2::Dflash2>(),
    Method::of::<dspark::Dspark>(),
];

/// A way to train drafts, as a configuration sets it: its keys are the fields of the type.
pub trait DraftMethod: MethodKeys + fmt::Debug + Send + Sync {
    /// Its name in configurations and checkpoints, that of its `DraftKind`.
    fn name(&self) -> &'static str;

    /// What makes no sense, by dotted key.
    fn problems(&self, stage: &StageContext<'_>) -> Vec<Problem>;

    /// Whether it reproduces a published trainer, which takes one document a row.
    fn is_compat(&self) -> bool {
        false
    }

    /// Whether a token with the pad's id is never learned.
    fn masks_padding(&self) -> bool {
        false
    }

    /// Whether the draft's initial values are the target's last layer: as its key `init` says, if it has one.
    fn starts_from_last_layer(&self) -> bool {
        self.keys().get("init") == Some(&json!(Init::LastLayer))
    }

    /// The sizes of the draft that a configuration asks for.
    ///
    /// # Errors
    /// - they do not fit the target
    fn footprint(
        &self,
        teacher: &TeacherConfig,
        target: &TargetConfig,
    ) -> Result<Arc<dyn Footprint>>;

    /// Checks that a draft is one to start from; no tensor is read.
    ///
    /// # Errors
    /// - it is another network, or of another target
    fn check_start(&self, target: &TargetConfig, start: &SavedDraft) -> Result<()>;

    /// The keys of this method that make the network of a saved draft; none where nothing is said of it.
    ///
    /// # Errors
    /// - what is said of it is unusable
    fn keys_of(&self, _start: &SavedDraft) -> Result<Map<String, Value>> {
        Ok(Map::new())
    }

    /// How it is set up for a target and a budget where nothing else is given; `None` where it does not fit
    /// the target, or nobody has said how.
    fn recipe(&self, _room: &Room<'_>) -> Option<Recipe> {
        None
    }

    /// Keys that, left out, are those of the draft to start from, in groups: where one key of a group is given,
    /// the group stays as it is.
    fn open_keys(&self) -> &'static [&'static [&'static str]] {
        &[]
    }

    /// The same method for a saved draft as it is, to measure it: the keys of its network stand in place of the
    /// configured ones.
    ///
    /// # Errors
    /// - what is said of the draft is unusable
    fn as_saved(&self, draft: &SavedDraft) -> Result<Box<dyn DraftMethod>> {
        self.with(self.keys_of(draft)?)
    }

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

/// What the keys of a method must fit to, of the stage that they stand in.
#[derive(Debug, Clone, Copy)]
pub struct StageContext<'a> {
    /// What is learned of the target's distribution.
    pub teacher: &'a TeacherConfig,
    /// Where features come from.
    pub features: &'a FeatureMode,
    /// Anchor-offset positions.
    pub anchor: &'a AnchorOffset,
    /// Ranks that share a row.
    pub sequence: usize,
    /// Whether another draft is there to start from.
    pub has_start: bool,
}

/// What a draft is built from.
pub struct Materials<'a> {
    /// What is learned of the target's distribution.
    pub teacher: TeacherConfig,
    /// Run key: every random draw follows from it.
    pub seed: u64,
    /// The frozen target.
    pub target: &'a Arc<Target>,
    /// The target's tokenizer.
    pub tokenizer: &'a TextTokenizer,
    /// Training documents.
    pub documents: &'a [Document],
    /// The draft to start from, if it is not a fresh one.
    pub start: Option<&'a SavedDraft>,
    /// How often each token was learned: in these documents, and in those of the draft to start from.
    pub token_counts: &'a TokenCounts,
}

impl Materials<'_> {
    /// How often each token is supervised in the documents.
    ///
    /// # Errors
    /// - a token lies outside the target's vocabulary
    pub fn counts_of_documents(&self) -> Result<TokenCounts> {
        token_counts(self.documents, self.target.config())
    }
}

/// How often each token of some documents is supervised.
///
/// # Errors
/// - a token lies outside the target's vocabulary
pub fn token_counts(documents: &[Document], target: &TargetConfig) -> Result<TokenCounts> {
    let mut counts = TokenCounts::new(target.vocab_size);
    for document in documents {
        counts.add(&document.ids, &document.loss_mask)?;
    }
    Ok(counts)
}

/// Rules of sizes: the key of each below `draft`, its value if there is one, and the least and largest that makes sense.
fn require_sizes(rules: &mut Rules, sizes: &[(&str, Option<usize>, usize, usize)]) {
    for (name, size, first, most) in sizes {
        rules.require(
            size.is_none_or(|size| (*first..=*most).contains(&size)),
            &format!("draft.{name}"),
            format!("must be in {first} to {most}"),
        );
    }
}

/// What a method's configuration can do by its derives.
pub trait MethodKeys {
    /// Every key with its value.
    fn keys(&self) -> Map<String, Value>;

    /// A copy with other values of some keys.
    ///
    /// # Errors
    /// - a value is of another type
    fn with(&self, changes: Map<String, Value>) -> Result<Box<dyn DraftMethod>>;

    /// A copy.
    fn boxed(&self) -> Box<dyn DraftMethod>;
}

impl<T: DraftMethod + Clone + Serialize + DeserializeOwned + 'static> MethodKeys for T {
    fn keys(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(keys)) => keys,
            _ => Map::new(),
        }
    }

    fn with(&self, changes: Map<String, Value>) -> Result<Box<dyn DraftMethod>> {
        let mut keys = self.keys();
        keys.extend(changes);
        let read = serde_json::from_value::<T>(keys.into()).map_err(|error| {
            ModelError::invalid(Path::new("draft configuration"), error.to_string())
        })?;
        Ok(Box::new(read))
    }

    fn boxed(&self) -> Box<dyn DraftMethod> {
        Box::new(self.clone())
    }
}

impl dyn DraftMethod {
    /// The keys of a draft to start from that this method leaves open; `known` are those of that draft, or of the
    /// method that trains it.
    pub fn left_open(&self, known: &Map<String, Value>) -> Map<String, Value> {
        let own = self.keys();
        let is_null = |key: &&str| own.get(*key).is_none_or(Value::is_null);
        let groups = self.open_keys().iter().filter(|group| group.iter().all(is_null));
        let of_key = |key: &&str| Some(((*key).to_owned(), known.get(*key)?.clone()));
        groups
            .flat_map(|group| group.iter().filter_map(of_key))
            .filter(|(_, v)| !v.is_null())
            .collect()
    }
}

impl Clone for Box<dyn DraftMethod> {
    fn clone(&self) -> Self {
        (**self).boxed()
    }
}

impl PartialEq for dyn DraftMethod {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name() && self.keys() == other.keys()
    }
}

/// A method of the table: the type that reads its keys.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    fresh: fn() -> Box<dyn DraftMethod>,
    read: fn(Value) -> serde_json::Result<Box<dyn DraftMethod>>,
    schema: fn(&mut SchemaGenerator) -> Schema,
}

impl Method {
    const fn of<T: DraftMethod + Default + DeserializeOwned + JsonSchema + 'static>() -> Self {
        Self {
            fresh: || Box::new(T::default()),
            read: |keys| Ok(Box::new(serde_json::from_value::<T>(keys)?)),
            schema: T::json_schema,
        }
    }

    /// Every method, the default one first.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        METHODS.iter()
    }

    /// The default method.
    pub fn first() -> &'static Self {
        &METHODS[0]
    }

    /// The method of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().find(|method| method.name() == name)
    }

    /// Its name in configurations and checkpoints.
    pub fn name(&self) -> &'static str {
        self.fresh().name()
    }

    /// Its defaults.
    pub fn fresh(&self) -> Box<dyn DraftMethod> {
        (self.fresh)()
    }

    /// Whether it has a key.
    pub fn knows(&self, key: &str) -> bool {
        self.fresh().keys().contains_key(key)
    }

    /// Reads its keys; what is not given has its default.
    ///
    /// # Errors
    /// - a key that it does not have, or a value of another type
    pub fn read(&self, keys: Map<String, Value>) -> serde_json::Result<Box<dyn DraftMethod>> {
        if let Some(key) = keys.keys().find(|key| !self.knows(key)) {
            let name = self.name();
            return Err(serde_json::Error::custom(format!("`method: {name}` has no key `{key}`")));
        }
        (self.read)(keys.into())
    }

    /// The JSON schema of its keys.
    pub fn schema(&self, generator: &mut SchemaGenerator) -> Schema {
        (self.schema)(generator)
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::draft::DraftKind;
    use longdraft_models::draft::eagle3::Eagle3Config;
    use longdraft_models::draft::kinds::KINDS;
    use longdraft_models::published::published_config;
    use longdraft_models::weights::TensorRole;
    use longdraft_rules::Check;

    use super::*;
    use crate::config::TrainConfig;

    /// A configuration with these sections `draft` and `teacher`.
    pub(super) fn configured(draft: &Value, teacher: &Value) -> TrainConfig {
        let config = json!({
            "target": "t", "output": "o", "data": { "train": [{ "path": "p" }] },
            "draft": draft, "teacher": teacher,
        });
        serde_json::from_value(config).expect("known keys")
    }

    /// Its problems.
    pub(super) fn told(draft: &Value, teacher: &Value) -> Vec<String> {
        configured(draft, teacher).problems().iter().map(ToString::to_string).collect()
    }

    /// A method with the keys that a saved draft says of its network.
    pub(super) fn again<M: DraftMethod + Default + DeserializeOwned>(config: Value) -> M {
        let start = SavedDraft { path: "draft".into(), config: Some(config) };
        let known = M::default().keys_of(&start).expect("keys");
        serde_json::from_value(known.into()).expect("read")
    }

    /// A method more needs a line in every table: the tables name the same methods.
    #[test]
    fn every_method_is_a_kind_of_draft_and_every_kind_is_trained() {
        assert_eq!(Method::all().count(), KINDS.len());
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        for method in Method::all() {
            assert!(DraftKind::named(method.name()).is_ok(), "{}", method.name());
            let config = configured(&json!({ "method": method.name() }), &json!({}));
            assert!(config.problems().is_empty(), "{:?}", config.problems());
            let read = serde_json::from_value::<TrainConfig>(config.record()).expect("read back");
            assert_eq!(read, config);
            let method = &config.draft.method;
            assert!(!method.is_compat(), "{method:?} trains its own way by default");
            let footprint = method.footprint(&config.teacher, &target).expect("sizes that fit");
            assert!(!footprint.specs().is_empty() && !footprint.taps().is_empty(), "{method:?}");
        }
        for draft in [r#"{"method": "medusa"}"#, r#"{"gama": 3}"#, r#"{"ttt_steps": 3}"#] {
            assert!(serde_json::from_str::<crate::config::DraftConfig>(draft).is_err(), "{draft}");
        }
    }

    #[test]
    fn a_draft_to_start_from_tells_what_is_left_open_and_nothing_else() {
        let keys = |value: Value| value.as_object().cloned().expect("keys");
        let known = keys(serde_json::json!({
            "num_key_value_heads": 4, "draft_vocab_size": null, "sliding_window": 8, "layers": 2,
            "mask_token_id": 7,
        }));
        let taken = |own: Value| {
            let method = Method::named("dflash").expect("a method").read(keys(own)).expect("keys");
            Value::from(method.left_open(&known))
        };
        let all = serde_json::json!({
            "num_key_value_heads": 4, "mask_token_id": 7, "sliding_window": 8,
        });
        assert_eq!(taken(serde_json::json!({})), all);
        let own =
            serde_json::json!({ "num_key_value_heads": 2, "layer_types": ["full_attention"] });
        assert_eq!(taken(own), serde_json::json!({ "mask_token_id": 7 }));
        for method in Method::all() {
            let fresh = method.fresh();
            let open = fresh.open_keys().iter().flat_map(|group| *group);
            open.for_each(|key| assert!(method.knows(key), "{}: {key}", method.name()));
            if method.knows("init") {
                let of = |init: &str| method.read(keys(json!({ "init": init }))).expect("keys");
                let begins = ["random", "last_layer"].map(|init| of(init).starts_from_last_layer());
                assert_eq!(begins, [false, true], "{}", method.name());
            }
        }
    }

    /// Optimizers tell tables over a vocabulary from matrices of layers by what the tensors say.
    #[test]
    fn every_table_over_a_vocabulary_says_that_it_is_one() {
        use TensorRole::{Embedding, Head, Layer};
        let of_methods: [(&str, &[(&str, TensorRole)]); 5] = [
            ("glide", &[]),
            ("eagle3", &[("lm_head.weight", Head)]),
            ("dflash", &[]),
            (
                "dflash2",
                &[
                    ("candidate_selector.predecessor_codebook", Embedding),
                    ("candidate_selector.successor_codebook", Head),
                ],
            ),
            (
                "dspark",
                &[
                    ("markov_head.markov_w1.weight", Embedding),
                    ("markov_head.markov_w2.weight", Head),
                ],
            ),
        ];
        let names: Vec<_> = Method::all().map(Method::name).collect();
        assert_eq!(names, of_methods.map(|(name, _)| name));
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let vocabularies = [target.vocab_size, Eagle3Config::DRAFT_VOCABULARY];
        for (name, want) in of_methods {
            let method = Method::named(name).expect("a method").fresh();
            let footprint = method.footprint(&TeacherConfig::default(), &target);
            let specs = footprint.expect("sizes that fit").specs();
            let tables = specs.iter().filter(|spec| spec.role != Layer);
            let tables: Vec<_> = tables.map(|spec| (spec.name.as_str(), spec.role)).collect();
            assert_eq!(tables, want, "{name}");
            for spec in specs.iter().filter(|spec| spec.shape.len() == 2) {
                let is_table = vocabularies.contains(&spec.shape[0]);
                assert_eq!(spec.role != Layer, is_table, "{name}: {spec:?}");
            }
        }
    }
}
