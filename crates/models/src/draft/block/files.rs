//! Block drafts by their files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use longdraft_kernels::matrix::Matrix;
use serde_json::Value;

use super::config::BlockConfig;
use super::config_file::name_of;
use super::gguf_file::GgufBlockSource;
use super::model::BlockDraft;
use super::own_head::OwnHead;
use super::speculators;
use super::weights::file_specs;
use crate::draft::files::{
    SavedDraft, config_beside, folder_beside, gguf_of, open_weights, read_json, save_draft,
};
use crate::draft::vocabulary::MAP;
use crate::draft::{Draft, DraftKind};
use crate::error::{ModelError, Problems, Result};
use crate::target_model::Target;
use crate::weights::{TensorSpec, WeightSource};

/// A block draft through the target's head alone.
pub(in crate::draft) const PLAIN: DraftKind = DraftKind {
    name: "dflash",
    title: "DFlash",
    is_at: |path| kind_at(path).is_some_and(|kind| kind.name == PLAIN.name),
    open: |path, target| Ok(Box::new(BlockDraft::open(path, target)?)),
    restore,
    save: |folder, config, tensors, target| save(folder, (&PLAIN, config), tensors, target),
    open_gguf: Some(|file| Ok(Box::new(GgufBlockSource::open(file)?))),
    reading: |_, _| Vec::new(),
};

/// One with convolutions and a selector.
pub(in crate::draft) const EXTENDED: DraftKind = DraftKind {
    name: "dflash2",
    title: "DFlash2",
    is_at: |path| kind_at(path).is_some_and(|kind| kind.name == EXTENDED.name),
    save: |folder, config, tensors, target| save(folder, (&EXTENDED, config), tensors, target),
    ..PLAIN
};

/// One whose slots see the tokens chosen before them.
pub(in crate::draft) const CHAINED: DraftKind = DraftKind {
    name: "dspark",
    title: "DSpark",
    is_at: |path| kind_at(path).is_some_and(|kind| kind.name == CHAINED.name),
    save: |folder, config, tensors, target| save(folder, (&CHAINED, config), tensors, target),
    ..PLAIN
};

/// The names of a kind's architecture: the one that engines know, then others that trainers write.
const DFLASH: [&str; 1] = ["DFlashDraftModel"];
const DFLASH2: [&str; 1] = ["DFlash2DraftModel"];
const CHAINS: [&str; 2] = ["Qwen3DSparkModel", "DSparkDraftModel"];

/// The kind of a network.
pub(super) fn kind_of(config: &BlockConfig) -> &'static DraftKind {
    match config {
        BlockConfig { chain: Some(_), .. } => &CHAINED,
        config if is_plain(config) => &PLAIN,
        _ => &EXTENDED,
    }
}

/// The architecture of a network.
pub(super) fn architecture_of(config: &BlockConfig) -> &'static str {
    architectures_of(config)[0]
}

fn architectures_of(config: &BlockConfig) -> &'static [&'static str] {
    match config {
        BlockConfig { chain: Some(_), .. } => &CHAINS,
        config if is_plain(config) => &DFLASH,
        _ => &DFLASH2,
    }
}

/// Whether a network is that of every block draft, without heads beside the one for tokens.
fn is_plain(config: &BlockConfig) -> bool {
    config.convolution.is_none() && config.selector.is_none() && config.chain.is_none()
}

/// The kind of a draft folder or file, by its `config.json` or its GGUF header.
fn kind_at(path: &Path) -> Option<&'static DraftKind> {
    match gguf_of(path) {
        Some(file) => GgufBlockSource::open(&file).ok().map(|source| source.kind()),
        None => kind_said(&config_beside(path)?),
    }
}

/// The kind that a `config.json` names.
fn kind_said(value: &Value) -> Option<&'static DraftKind> {
    let kinds = [(&DFLASH[..], &PLAIN), (&DFLASH2, &EXTENDED), (&CHAINS, &CHAINED)];
    let named = || kinds.into_iter().find(|(known, _)| names(value, known)).map(|(_, kind)| kind);
    speculators::kind_of(value).or_else(named)
}

fn restore(config: &Value, source: &dyn WeightSource, target: &Target) -> Result<Box<dyn Draft>> {
    let layers = Some(target.config().num_hidden_layers);
    let config = read_value(config, layers, Path::new("draft configuration"))?;
    config.problems_with(target.config()).into_result(source.path())?;
    let ends = target.hold_ends()?;
    Ok(Box::new(BlockDraft::from_source(source, &config, ends.embedding_matrix())?))
}

/// The target's frozen tensors, which some files repeat.
pub const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

impl BlockConfig {
    /// What is said of a saved block draft; `None` if nothing is.
    ///
    /// # Errors
    /// - it is unusable
    pub fn of_saved(saved: &SavedDraft) -> Result<Option<Self>> {
        if let Some(file) = gguf_of(&saved.path) {
            let Ok(source) = GgufBlockSource::open(&file) else { return Ok(None) };
            return source.config(None).map(Some).map_err(ModelError::all_in(&file));
        }
        let said = saved.config.as_ref().filter(|value| kind_said(value).is_some());
        said.map(|value| read_value(value, None, &saved.path)).transpose()
    }

    /// Where the network of a draft computes something else with tensors of the same shapes.
    fn differences(&self, found: &Self) -> Problems {
        let mut problems = Problems::default();
        if found.has_own_head() && found.draft_vocab_size != self.draft_vocab_size {
            problems.push(format!(
                "the draft has a head of its own over {} tokens, `draft_vocab_size` = {} is configured: leave it out",
                found.draft_vocab_size, self.draft_vocab_size
            ));
        }
        let mut same = |key: &str, found: String, wanted: String| {
            if found != wanted {
                problems.push(format!("the draft has `{key}` = {found}, {wanted} is configured"));
            }
        };
        let ids = |config: &BlockConfig| {
            format!("{:?}", config.target_layers.iter().map(|layer| layer.0).collect::<Vec<_>>())
        };
        same("target_layers", ids(found), ids(self));
        let heads = |config: &BlockConfig| config.num_key_value_heads.to_string();
        same("num_key_value_heads", heads(found), heads(self));
        same("mask_token_id", found.mask_token_id.to_string(), self.mask_token_id.to_string());
        // A window changes what a layer sees, and no tensor: training may give or take it.
        let causal = |config: &BlockConfig| {
            config.layers.iter().map(|kind| config.is_causal_in(*kind)).collect::<Vec<_>>()
        };
        let (learned, now) = (causal(found), causal(self));
        same("layers", learned.len().to_string(), now.len().to_string());
        if learned.len() == now.len() {
            same("causal (of every layer)", format!("{learned:?}"), format!("{now:?}"));
        }
        if !is_plain(found) {
            type Told = fn(&BlockConfig) -> Option<String>;
            let added: [(&str, Told); 7] = [
                ("selector_top_k", |config| Some(config.selector?.top_k.to_string())),
                ("conv_kernel_size", |config| Some(config.convolution?.kernel_size.to_string())),
                ("conv_group_size", |config| Some(config.convolution?.group_size.to_string())),
                ("markov_rank", |config| Some(config.chain?.rank.to_string())),
                ("markov_head", |config| name_of(config.chain?.kind).map(str::to_owned)),
                ("confidence", |config| Some(config.chain?.confidence.is_some().to_string())),
                ("confidence_reads_token", |config| Some(config.chain?.confidence?.to_string())),
            ];
            let none = || "none".to_owned();
            for (key, of) in added {
                same(key, of(found).unwrap_or_else(none), of(self).unwrap_or_else(none));
            }
        }
        problems
    }
}

impl BlockDraft {
    /// Opens a draft folder, a weight file with its `config.json` beside it, or a GGUF file.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the configuration is missing, unusable, another model's, or does
    ///   not fit the target
    pub fn open(path: &Path, target: &Target) -> Result<Self> {
        if let Some(file) = gguf_of(path) {
            let source = GgufBlockSource::open(&file)?;
            let config = source.config(Some(target.config())).map_err(ModelError::all_in(&file))?;
            config.problems_with(target.config()).into_result(&file)?;
            return Self::from_source(&source, &config, target.hold_ends()?.embedding_matrix());
        }
        let file = folder_beside(path).join("config.json");
        let config = read_config(&file, Some(target.config().num_hidden_layers))?;
        config.problems_with(target.config()).into_result(&file)?;
        let (source, ends) = (open_weights(path)?, target.hold_ends()?);
        Self::from_source(source.as_ref(), &config, ends.embedding_matrix())
    }

    /// Reads the weights of a network whose sizes are known; a plain draft is extended with fresh tensors
    /// where `config` wants more. A draft that proposes through the target's head gets `own` where `config` wants one
    /// of its own.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the draft is said to be another network
    pub fn load(
        saved: &SavedDraft,
        config: &BlockConfig,
        embedding: impl Into<Matrix>,
        (own, seed): (Option<OwnHead>, u64),
    ) -> Result<Self> {
        let source = open_weights(&saved.path)?;
        let there = network_there(saved, config)?;
        Self::begun(source.as_ref(), (config, &there), embedding.into(), (own, seed))
    }

    /// Checks that [`Self::load`] finds this network; no tensor is read.
    ///
    /// # Errors
    /// - as [`Self::load`]
    pub fn check_file(saved: &SavedDraft, config: &BlockConfig) -> Result<()> {
        let there = network_there(saved, config)?;
        check_tensors(open_weights(&saved.path)?.as_ref(), &there)
    }

    /// Writes the tensors as safetensors and `.pth`, with `config.json`, into a folder.
    ///
    /// # Errors
    /// - the folder cannot be written, or the draft is held for proposing alone
    pub fn save(&self, folder: &Path, target_fingerprint: &str) -> Result<()> {
        let config = self.config.to_json(architecture_of(&self.config));
        let kind = kind_of(&self.config);
        let mut tensors = self.weights.named()?;
        tensors.extend(self.fixed_tensors()?);
        save(folder, (kind, &config), &tensors, target_fingerprint)
    }
}

/// Checks that a source holds every tensor of the network in its shape, and no other.
pub(super) fn check_tensors(source: &dyn WeightSource, config: &BlockConfig) -> Result<()> {
    let mut specs = file_specs(config);
    if config.has_own_head() {
        specs.push(TensorSpec::new(MAP[0], &[config.draft_vocab_size]));
    }
    let mut problems = crate::weights::check_specs(source, &specs);
    let known = |name: &String| {
        let may_be_there =
            FROZEN.contains(&name.as_str()) || (config.has_own_head() && name == MAP[1]);
        may_be_there || specs.iter().any(|spec| spec.name == *name)
    };
    for name in source.names().iter().filter(|name| !known(name)) {
        problems.push(format!("unexpected tensor `{name}`"));
    }
    problems.into_result(source.path())
}

fn save(
    folder: &Path,
    (kind, config): (&DraftKind, &Value),
    tensors: &[(String, Tensor)],
    target: &str,
) -> Result<()> {
    let metadata = HashMap::from([("draft".to_owned(), kind.name.to_owned())]);
    save_draft(folder, config.clone(), metadata, tensors, target)
}

fn names(value: &Value, architectures: &[&str]) -> bool {
    let is_one = |name: &Value| name.as_str().is_some_and(|name| architectures.contains(&name));
    value["architectures"].as_array().is_some_and(|listed| listed.iter().any(is_one))
}

fn read_config(file: &Path, target_layers: Option<usize>) -> Result<BlockConfig> {
    read_value(&read_json(file)?, target_layers, file)
}

/// A configuration whose architecture is that of its keys; `file` stands in errors.
fn read_value(value: &Value, target_layers: Option<usize>, file: &Path) -> Result<BlockConfig> {
    let Some(kind) = kind_said(value) else {
        let known = [DFLASH[0], DFLASH2[0], CHAINS[0]].join(" or ");
        let problem = format!("`architectures` does not name {known}");
        return Err(ModelError::invalid(file, problem));
    };
    let config = BlockConfig::from_json(value, target_layers).map_err(ModelError::all_in(file))?;
    if kind.name != kind_of(&config).name {
        let architecture = architecture_of(&config);
        let problem = format!("`architectures` does not name {architecture}, whose keys are there");
        return Err(ModelError::invalid(file, problem));
    }
    Ok(config)
}

/// Weights fit networks that compute something else: what is said of them must hold. Returns the network whose
/// tensors are there: that of a plain draft, or of one through the target's head, where more is wanted.
fn network_there(saved: &SavedDraft, wanted: &BlockConfig) -> Result<BlockConfig> {
    let Some(found) = BlockConfig::of_saved(saved)? else { return Ok(wanted.clone()) };
    wanted.differences(&found).into_result(&saved.path)?;
    let there = if is_plain(&found) { wanted.plain() } else { wanted.clone() };
    let draft_vocab_size =
        if found.has_own_head() { found.draft_vocab_size } else { wanted.vocab_size };
    Ok(BlockConfig { draft_vocab_size, ..there })
}
