//! Block drafts as engines read them: folders under the keys of a Qwen3 model, the same for most, and
//! GGUF files.

mod compatibility;
mod config;
mod gguf;
mod parity;
mod recording;
mod verify;

use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_models::draft::block::gguf_file::ARCHITECTURE;
use longdraft_models::draft::block::{BlockConfig, BlockDraft};
use longdraft_models::draft::files::{SavedDraft, open_weights};
use longdraft_models::draft::{Draft, DraftKind};
use longdraft_models::error::Problems;
use longdraft_models::target_model::Target;
use longdraft_models::weights::memory::MemorySource;
use serde_json::Value;

use super::files::{narrowed, write_json, write_safetensors};
use super::gguf as shared;
use super::{
    ExportOptions, Fit, Format, Lines, Named, Rendered, Served, WeightType, commands, fitting,
    typed, vocabulary,
};
use crate::Profile;
use crate::checks::Checks;
use crate::error::Result;
use crate::parity::{ParityVector, stand_in_embedding};
use crate::target::TargetFacts;

/// The format of one kind of block drafts.
pub(super) struct Block {
    pub(super) method: &'static str,
    /// The names of its architecture, the one that is written first.
    pub(super) architectures: &'static [&'static str],
    /// What vLLM, SGLang and llama.cpp call the method.
    pub(super) engines: [&'static str; 3],
    /// The class that folders of speculators name.
    pub(super) speculators: &'static str,
}

impl Format for Block {
    fn method(&self) -> &'static str {
        self.method
    }

    fn fit(&self, profile: Profile, draft: &dyn Draft, target: &TargetFacts) -> Result<Fit> {
        Ok(compatibility::fit(profile, typed::<BlockDraft>(draft)?.config(), target))
    }

    fn write(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        options: &ExportOptions,
        folder: &Path,
    ) -> Result<Rendered> {
        let draft: &BlockDraft = typed(draft)?;
        let dtype = options.dtype.unwrap_or(WeightType::Bf16).dtype();
        let published = tensors(options.profile, draft, dtype)?;
        let parity = parity::outputs(&network(draft, &published)?)?;
        // The target decides what becomes of logits, whatever the draft's own file says.
        let config = &BlockConfig { bend: target.config().bend(), ..draft.config().clone() };
        let written = if options.profile == Profile::Llamacpp {
            let written = gguf::tensors(&published)?;
            let tokenizer = shared::tokenizer(target)?;
            let name = shared::name(target, DraftKind::named(self.method)?.title);
            let metadata = gguf::metadata(config, &name, dtype, &tokenizer);
            shared::write(folder, dtype, &metadata, &written)?;
            written
        } else {
            write_safetensors(folder, &published)?;
            let value = config::render(options.profile, (self, config), target, dtype);
            write_json(&folder.join("config.json"), &value)?;
            published
        };
        Ok(Rendered {
            layers: draft.config().target_layers.iter().map(|layer| layer.0).collect(),
            map: draft.vocabulary().map(vocabulary::hash),
            parity,
            tensors: written,
            dtype,
        })
    }

    fn rounded(&self, draft: &dyn Draft, _: &TargetFacts, dtype: DType) -> Result<ParityVector> {
        let draft: &BlockDraft = typed(draft)?;
        parity::outputs(&network(draft, &tensors(Profile::Hf, draft, dtype)?)?)
    }

    fn commands(&self, profile: Profile, draft: &dyn Draft, served: Served<'_>) -> Result<Lines> {
        let config = typed::<BlockDraft>(draft)?.config();
        // SGLang counts the known token beside the proposals. Without a confidence there is nothing that could end a
        // chain early.
        let is_whole = config.chain.is_some_and(|chain| chain.confidence.is_none());
        let own = commands::Own {
            names: self.engines,
            proposals: config.proposals(),
            sglang: &format!("--speculative-num-draft-tokens {}", config.proposals() + 1),
            llamacpp: if is_whole { " --spec-draft-p-min 0" } else { "" },
        };
        let mut lines = commands::lines(profile, served, &own);
        // SGLang leaves such a head out without a message.
        lines.retain(|engine, _| engine != "sglang" || !config.has_own_head());
        Ok(lines)
    }

    fn recording(&self, draft: &dyn Draft, target: &Target, ids: &[u32]) -> Result<Option<Named>> {
        recording::record(typed(draft)?, target, ids).map(Some)
    }

    fn recognises(&self, _: Profile, config: &Value) -> bool {
        self.is_named(config)
    }

    fn reads_gguf(&self, architecture: &str) -> bool {
        architecture == ARCHITECTURE
    }

    fn profile_of(&self, config: &Value) -> Option<Profile> {
        let is_nested = config.get("speculators_model_type").is_some();
        let profile = if is_nested { Profile::Speculators } else { Profile::Hf };
        self.is_named(config).then_some(profile)
    }

    fn check(&self, checks: &mut Checks<'_>, path: &Path) -> bool {
        verify::check(checks, self.method, path)
    }

    fn outputs(&self, checks: &mut Checks<'_>) -> Result<Option<ParityVector>> {
        let Some(config) = checks.sizes::<BlockConfig>() else { return Ok(None) };
        let source = open_weights(&checks.folder)?;
        let draft = BlockDraft::from_source(source.as_ref(), &config, &stand_in(&config)?)?;
        Ok(Some(parity::outputs(&draft)?))
    }
}

impl Block {
    fn is_named(&self, config: &Value) -> bool {
        if let Some(kind) = config["speculators_model_type"].as_str() {
            return kind == self.method;
        }
        let is_one =
            |name: &Value| name.as_str().is_some_and(|name| self.architectures.contains(&name));
        config["architectures"].as_array().is_some_and(|names| names.iter().any(is_one))
    }
}

/// Every tensor under its published name, in `dtype`, and the map of a head of the draft's own.
fn tensors(profile: Profile, draft: &BlockDraft, dtype: DType) -> Result<Named> {
    let mut problems = Problems::default();
    let all = draft.weights().named()?.into_iter().chain(draft.fixed_tensors()?);
    let written = all.map(|(name, tensor)| {
        if !tensor.dtype().is_float() {
            return Ok((name, tensor));
        }
        let written = narrowed(&name, &tensor.detach(), dtype, &mut problems)?;
        Ok((name, written))
    });
    let all = written.collect::<Result<Vec<_>>>()?;
    fitting(profile, all, problems)
}

/// The network that was written, with its weights as they are in the file.
fn network(draft: &BlockDraft, written: &[(String, Tensor)]) -> Result<BlockDraft> {
    let source = MemorySource::new(written.iter().cloned());
    let config = draft.config();
    Ok(BlockDraft::from_source(&source, config, &stand_in(config)?)?)
}

/// The stand-in embeddings, with those of the mask token.
fn stand_in(config: &BlockConfig) -> Result<Tensor> {
    stand_in_embedding(config.vocab_size, config.hidden_size, config.mask_token_id)
}

/// The network that a folder's keys describe; `None` if they are those of another kind of model.
fn described(checks: &Checks<'_>) -> longdraft_models::error::Result<Option<BlockConfig>> {
    let path = checks.folder.join("config.json");
    BlockConfig::of_saved(&SavedDraft { path, config: Some(checks.config.clone()) })
}
