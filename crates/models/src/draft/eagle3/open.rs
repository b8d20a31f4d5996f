//! Opening drafts: our own folders, published ones in every layout, GGUF files.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::Matrix;
use serde_json::Value;

use super::config::Eagle3Config;
use super::config_file::{self, ARCHITECTURES};
use super::gguf_file::GgufDraftSource;
use super::model::Eagle3Draft;
use super::recognise::names_eagle3;
use super::weights::{EMBEDDING, HEAD, OfTarget, checked_names, published_names, read_vocabulary};
use crate::config::TargetConfig;
use crate::draft::files::{
    SavedDraft, config_beside, folder_beside, gguf_of, open_weights, read_json,
};
use crate::draft::vocabulary::MAP;
use crate::error::{ModelError, Problems, Result};
use crate::target_model::{Ends, Target};
use crate::weights::WeightSource;

/// Layers of a target that a draft without ids could have: its other keys do not depend on it.
const STAND_IN: usize = 32;
/// Rows of two tables of embeddings that are compared.
const COMPARED: usize = 16;
/// By how much of their length rounding to blocks may change them: blocks of two bits do so by some 0.3, and tables that
/// have nothing in common differ by more than 1.
const ROUNDING: f32 = 0.5;

impl Eagle3Draft {
    /// Opens a draft folder, a weight file with its `config.json` beside it, or a GGUF file. A draft
    /// without a head of its own proposes through the target's, held as the target holds it, if it proposes every
    /// token.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the configuration is missing, unusable, another model's, or does
    ///   not fit the target
    pub fn open(path: &Path, target: &Target) -> Result<Self> {
        if let Some(file) = gguf_of(path) {
            let source = GgufDraftSource::open(&file)?;
            let config = source.config(Some(target.config())).map_err(ModelError::all_in(&file))?;
            config.problems_with(target.config()).into_result(&file)?;
            return Self::shared(&source, &config, target);
        }
        let file = folder_beside(path).join("config.json");
        let config = read_config(&file, Some(target.config().num_hidden_layers))?;
        config.problems_with(target.config()).into_result(&file)?;
        Self::shared(open_weights(path)?.as_ref(), &config, target)
    }

    /// Reads a draft that shares the target's table, and its head where it has none.
    fn shared(source: &dyn WeightSource, config: &Eagle3Config, target: &Target) -> Result<Self> {
        let ends = target.hold_ends()?;
        let head = head_of(&ends, source, config)?.map(OfTarget::Shared);
        Self::with_head(source, config, ends.embedding_matrix().clone(), head)
    }

    /// Reads the weights of a draft whose sizes are known but for its vocabulary, which is the
    /// file's own. A head that it lacks is a copy of the target's in f32, which trains.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the file has no head and does not propose every token; what is said of it
    ///   describes another network
    pub fn load(saved: &SavedDraft, config: &Eagle3Config, target: &Target) -> Result<Self> {
        let (source, rows) = with_rows(saved, config)?;
        let config = Eagle3Config { draft_vocab_size: rows, ..config.clone() };
        let (source, ends) = (source.as_ref(), target.hold_ends()?);
        let head = head_of(&ends, source, &config)?.map(OfTarget::Copied);
        Self::with_head(source, &config, ends.embedding_matrix().clone(), head)
    }

    /// Checks that [`Self::load`] finds this network over the target's tokens; of the tensors only the vocabulary's map is
    /// read.
    ///
    /// # Errors
    /// - the file cannot be opened, lacks a head that the target's does not replace, or is said to be another network
    /// - a list of every missing, unexpected and misshapen tensor
    /// - the draft proposes more tokens than the target has, or maps its own to others
    pub fn check_file(saved: &SavedDraft, config: &Eagle3Config) -> Result<()> {
        let (source, rows) = with_rows(saved, config)?;
        let config = Eagle3Config { draft_vocab_size: rows, ..config.clone() };
        config.problems().into_result(source.path())?;
        let has_head = !borrows_head(source.as_ref(), &config)?;
        let names = checked_names(source.as_ref(), &config, has_head)?;
        read_vocabulary(source.as_ref(), &names, &config).map(drop)
    }
}

/// The weights of a known network with the rows of their head.
fn with_rows(saved: &SavedDraft, config: &Eagle3Config) -> Result<(Box<dyn WeightSource>, usize)> {
    check_same_network(saved, config)?;
    let source = open_weights(&saved.path)?;
    let names = published_names(source.as_ref())?;
    let head = names.get(HEAD).and_then(|stored| source.shape(stored));
    let rows = head.and_then(|shape| shape.first().copied());
    // Without a map it proposes every token: the target's head serves it.
    let borrows = !names.contains_key(MAP[0]) && config.hidden_size == config.target_hidden_size;
    let rows = rows.or(borrows.then_some(config.vocab_size));
    let missing = || ModelError::invalid(source.path(), "tensor `lm_head.weight` is missing");
    let rows = rows.ok_or_else(missing)?;
    Ok((source, rows))
}

/// Whether a draft folder or file is of this kind, by its `config.json` or its GGUF header.
pub(super) fn is_at(path: &Path) -> bool {
    if let Some(file) = gguf_of(path) {
        return GgufDraftSource::open(&file).is_ok();
    }
    config_beside(path).is_some_and(|value| names_eagle3(&value))
}

/// What is to be known of how a draft's files are read.
pub(super) fn reading(path: &Path, target: &Target) -> Vec<String> {
    let of_table = has_other_embeddings(path, target).unwrap_or(false).then_some(
        "its `embed_tokens.weight` is not read: the target's table takes its place, which differs, \
         so acceptance may be low",
    );
    config_file::reading(path).into_iter().chain(of_table).map(str::to_owned).collect()
}

/// Whether the files hold embeddings `[V, Ht]` that are not the target's.
fn has_other_embeddings(path: &Path, target: &Target) -> Result<bool> {
    let (source, config) = (open_weights(path)?, target.config());
    let names = published_names(source.as_ref())?;
    let shape = vec![config.vocab_size, config.hidden_size];
    let Some(stored) = names.get(EMBEDDING).filter(|own| source.shape(own) == Some(shape)) else {
        return Ok(false);
    };
    // Not at the start, where tokens may stand that no text has.
    let first = config.vocab_size / 8;
    let rows = first..(first + COMPARED).min(config.vocab_size);
    let ids: Vec<u32> = rows.clone().map(|id| id as u32).collect();
    let wanted = target.hold_ends()?.embed(&ids)?.to_device(&Device::Cpu)?;
    let scale = config.parts.embedding_scale.unwrap_or(1.0);
    let own = (source.load_rows(stored, rows, DType::F32)? * scale)?;
    let length = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    Ok(length(&(own - &wanted)?)? > ROUNDING * length(&wanted)?)
}

/// Reads the `config.json` of a draft of this kind.
fn read_config(file: &Path, target_layers: Option<usize>) -> Result<Eagle3Config> {
    let value = read_json(file)?;
    if !names_eagle3(&value) {
        let problem = format!("`architectures` names no EAGLE-3 draft ({})", ARCHITECTURES[0]);
        return Err(ModelError::invalid(file, problem));
    }
    Eagle3Config::from_json(&value, target_layers).map_err(ModelError::all_in(file))
}

impl Eagle3Config {
    /// What is said of a saved draft; `None` if nothing is, or if it is a GGUF file that cannot be read without a target
    /// that is not given. Without ids of layers those stand for any: see [`Self::says_layers`].
    ///
    /// # Errors
    /// - it is unusable
    pub fn of_saved(saved: &SavedDraft, target: Option<&TargetConfig>) -> Result<Option<Self>> {
        if let Some(file) = gguf_of(&saved.path) {
            let read = GgufDraftSource::open(&file)?.config(target).map(Some);
            let read = read.map_err(ModelError::all_in(&file));
            return if target.is_some() { read } else { Ok(read.unwrap_or_default()) };
        }
        let said = saved.config.as_ref().filter(|value| names_eagle3(value));
        let read = |value: &Value| Self::from_json(value, Some(STAND_IN));
        said.map(read).transpose().map_err(ModelError::all_in(&saved.path))
    }

    /// Whether a saved draft that [`Self::of_saved`] reads says which layers it taps.
    pub fn says_layers(saved: &SavedDraft) -> bool {
        // A GGUF file without them is not read.
        let said = saved.config.as_ref().filter(|_| gguf_of(&saved.path).is_none());
        said.is_none_or(|value| Self::from_json(value, None).is_ok())
    }
}

/// Weights fit networks that compute something else: what is said of them must hold.
fn check_same_network(saved: &SavedDraft, wanted: &Eagle3Config) -> Result<()> {
    // There may be nothing to compare with.
    let Some(config) = Eagle3Config::of_saved(saved, None)? else { return Ok(()) };
    let mut problems = Problems::default();
    let [found, own] = [config.vocab_size, wanted.vocab_size];
    if found != own {
        problems.push(format!(
            "the draft is of a target of {found} tokens, this one has {own}: give a draft of this target"
        ));
    }
    for (name, found, wanted) in [
        ("norm_before_residual", config.norm_before_residual, wanted.norm_before_residual),
        ("fc_norm", config.fc_norm, wanted.fc_norm),
        ("norm_output", config.norm_output, wanted.norm_output),
    ] {
        if found != wanted {
            problems.push(format!("the draft has `{name}` = {found}: set `draft.{name}: {found}`"));
        }
    }
    if Eagle3Config::says_layers(saved) && config.target_layers != wanted.target_layers {
        let ids = config.target_layers.map(|layer| layer.0);
        problems.push(format!(
            "the draft reads the outputs of layers {ids:?}: set `draft.target_layers: {ids:?}`"
        ));
    }
    problems.into_result(&saved.path)
}

/// The target's head, for a draft whose files have none and that proposes every token.
fn head_of(
    ends: &Ends<'_>,
    source: &dyn WeightSource,
    config: &Eagle3Config,
) -> Result<Option<Matrix>> {
    Ok(borrows_head(source, config)?.then(|| ends.head_matrix().clone()))
}

/// Whether a draft proposes through the target's head.
fn borrows_head(source: &dyn WeightSource, config: &Eagle3Config) -> Result<bool> {
    let lacks = !published_names(source)?.contains_key(HEAD);
    let fits = config.draft_vocab_size == config.vocab_size
        && config.hidden_size == config.target_hidden_size;
    Ok(lacks && fits)
}
