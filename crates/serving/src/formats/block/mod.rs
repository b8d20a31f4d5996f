//! Block drafts as engines read them: the same folder for all, under the keys of a Qwen3 model.

mod commands;
mod compatibility;
mod parity;
mod verify;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::{BlockConfig, BlockDraft};
use longdraft_models::draft::files::{SavedDraft, open_weights};
use longdraft_models::error::Problems;
use longdraft_models::weights::memory::MemorySource;
use serde_json::Value;

use super::files::{narrowed, set_special_tokens, torch_dtype, write_json, write_safetensors};
use super::{ExportOptions, Fit, Format, Rendered, Served, WeightType, no_format};
use crate::Profile;
use crate::checks::Checks;
use crate::error::{Result, ServingError};
use crate::parity::{ParityVector, stand_in_embedding};
use crate::target::TargetFacts;

/// The format of one kind of block drafts.
pub(super) struct Block {
    /// Name of the method.
    pub(super) method: &'static str,
    /// The names of its architecture, the one that is written first.
    pub(super) architectures: &'static [&'static str],
    /// What vLLM and SGLang call the method.
    pub(super) engines: [&'static str; 2],
}

impl Format for Block {
    fn method(&self) -> &'static str {
        self.method
    }

    fn fit(&self, profile: Profile, draft: &dyn Draft, target: &TargetFacts) -> Result<Fit> {
        Ok(compatibility::fit(profile, typed(draft)?.config(), target))
    }

    fn write(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        options: &ExportOptions,
        folder: &Path,
    ) -> Result<Rendered> {
        write(typed(draft)?, target, options, folder)
    }

    fn rounded(&self, draft: &dyn Draft, _: &TargetFacts, dtype: DType) -> Result<ParityVector> {
        let draft = typed(draft)?;
        parity::outputs(&network(draft, &tensors(Profile::Hf, draft, dtype)?)?)
    }

    fn commands(
        &self,
        profile: Profile,
        draft: &dyn Draft,
        served: Served<'_>,
    ) -> Result<BTreeMap<String, String>> {
        Ok(commands::for_profile(profile, self.engines, typed(draft)?.config(), served))
    }

    fn recognises(&self, _: Profile, config: &Value) -> bool {
        self.is_named(config)
    }

    fn profile_of(&self, config: &Value) -> Option<Profile> {
        self.is_named(config).then_some(Profile::Hf)
    }

    fn check(&self, checks: &mut Checks<'_>, _: &Path) -> bool {
        verify::check(checks);
        true
    }

    fn outputs(&self, checks: &mut Checks<'_>) -> Result<Option<ParityVector>> {
        let Some(config) = checks.sizes::<BlockConfig>() else { return Ok(None) };
        let source = open_weights(&checks.folder)?;
        let embedding = stand_in_embedding(config.vocab_size, config.hidden_size)?;
        let draft = BlockDraft::from_source(source.as_ref(), &config, &embedding)?;
        Ok(Some(parity::outputs(&draft)?))
    }
}

impl Block {
    fn is_named(&self, config: &Value) -> bool {
        let is_one =
            |name: &Value| name.as_str().is_some_and(|name| self.architectures.contains(&name));
        config["architectures"].as_array().is_some_and(|names| names.iter().any(is_one))
    }
}

fn typed(draft: &dyn Draft) -> Result<&BlockDraft> {
    draft.of_kind().ok_or_else(|| no_format(draft))
}

fn write(
    draft: &BlockDraft,
    target: &TargetFacts,
    options: &ExportOptions,
    folder: &Path,
) -> Result<Rendered> {
    let dtype = options.dtype.unwrap_or(WeightType::Bf16).dtype();
    let written = tensors(options.profile, draft, dtype)?;
    write_safetensors(folder, &written)?;
    write_json(&folder.join("config.json"), &config(draft, target, dtype))?;
    Ok(Rendered {
        layers: draft.config().target_layers.iter().map(|layer| layer.0).collect(),
        map: None,
        parity: parity::outputs(&network(draft, &written)?)?,
        tensors: written,
        dtype,
    })
}

/// Every trained tensor under its published name, in `dtype`.
fn tensors(profile: Profile, draft: &BlockDraft, dtype: DType) -> Result<Vec<(String, Tensor)>> {
    let mut problems = Problems::default();
    let named = draft.weights().named().into_iter().map(|(name, tensor)| {
        let written = narrowed(&name, &tensor.detach(), dtype, &mut problems)?;
        Ok((name, written))
    });
    let all = named.collect::<Result<Vec<_>>>()?;
    if problems.0.is_empty() {
        Ok(all)
    } else {
        Err(ServingError::NotRepresentable { profile, problems })
    }
}

/// The network that was written, with its weights as they are in the file.
fn network(draft: &BlockDraft, written: &[(String, Tensor)]) -> Result<BlockDraft> {
    let source = MemorySource::new(written.iter().cloned());
    let config = draft.config();
    let embedding = stand_in_embedding(config.vocab_size, config.hidden_size)?;
    Ok(BlockDraft::from_source(&source, config, &embedding)?)
}

/// The keys of our own `config.json`, with those that engines take from the target.
fn config(draft: &BlockDraft, target: &TargetFacts, dtype: DType) -> Value {
    let mut value = draft.config_json();
    value["torch_dtype"] = torch_dtype(dtype).into();
    set_special_tokens(&mut value, target.config());
    value
}

/// The network that a folder's keys describe; `None` if they are those of another kind of model.
fn described(checks: &Checks<'_>) -> longdraft_models::error::Result<Option<BlockConfig>> {
    let path = checks.folder.join("config.json");
    BlockConfig::of_saved(&SavedDraft { path, config: Some(checks.config.clone()) })
}
