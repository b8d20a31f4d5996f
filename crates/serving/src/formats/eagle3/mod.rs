//! EAGLE-3 drafts as engines read them.

mod compatibility;
mod config;
pub(crate) mod engine;
pub mod gguf;
mod parity;
mod tensors;
mod verify;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_models::draft::Draft;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft, LAYER_IDS};
use longdraft_models::draft::files::open_weights;
use longdraft_models::target_model::{PackedSequence, Taps, Target};
use longdraft_models::weights::memory::MemorySource;
use serde_json::Value;

use super::files::{write_json, write_safetensors};
use super::gguf as shared;
use super::{
    ExportOptions, Fit, Format, Lines, Named, Rendered, Served, WeightType, commands, typed,
    vocabulary,
};
use crate::Profile;
use crate::checks::Checks;
use crate::error::Result;
use crate::parity::{ParityVector, stand_in_embedding};
use crate::target::TargetFacts;

pub(super) struct Eagle3;

impl Format for Eagle3 {
    fn method(&self) -> &'static str {
        "eagle3"
    }

    fn fit(&self, profile: Profile, draft: &dyn Draft, target: &TargetFacts) -> Result<Fit> {
        Ok(compatibility::fit(profile, typed::<Eagle3Draft>(draft)?.config(), target))
    }

    fn write(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        options: &ExportOptions,
        folder: &Path,
    ) -> Result<Rendered> {
        let draft: &Eagle3Draft = typed(draft)?;
        let profile = options.profile;
        let dtype = options.dtype.unwrap_or(WeightType::Bf16).dtype();
        let plain = tensors::tensors(profile, draft, target, dtype, options.embedding)?;
        let sizes = tensors::published_config(draft.config());
        let written = if profile == Profile::Llamacpp {
            let written = gguf::tensors(&sizes, &plain)?;
            let name = shared::name(target, "EAGLE-3");
            let metadata = gguf::metadata(&sizes, &name, dtype, &shared::tokenizer(target)?);
            shared::write(folder, dtype, &metadata, &written)?;
            written
        } else {
            let written = tensors::renamed(profile, &plain);
            write_safetensors(folder, &written)?;
            let value = config::render(profile, &sizes, target, dtype, options.draft_len);
            write_json(&folder.join("config.json"), &value)?;
            written
        };
        let map = draft.vocabulary();
        Ok(Rendered {
            tensors: written,
            layers: config::output_ids(&sizes).to_vec(),
            map: (!map.is_identity()).then(|| vocabulary::hash(map)),
            parity: parity::outputs(&written_network(&sizes, &plain)?)?,
            dtype,
        })
    }

    fn rounded(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        dtype: DType,
    ) -> Result<ParityVector> {
        let draft: &Eagle3Draft = typed(draft)?;
        let plain = tensors::tensors(Profile::Hf, draft, target, dtype, false)?;
        parity::outputs(&written_network(&tensors::published_config(draft.config()), &plain)?)
    }

    fn recording(&self, draft: &dyn Draft, target: &Target, ids: &[u32]) -> Result<Option<Named>> {
        record(typed(draft)?, target, ids).map(Some)
    }

    fn commands(&self, profile: Profile, _: &dyn Draft, served: Served<'_>) -> Result<Lines> {
        let proposals = served.draft_len;
        let sglang = format!(
            "--speculative-num-steps {proposals} --speculative-eagle-topk 1 \
             --speculative-num-draft-tokens {}",
            proposals + 1
        );
        let names = ["eagle3", "EAGLE3", "draft-eagle3"];
        let own = commands::Own { names, proposals, sglang: &sglang, llamacpp: "" };
        Ok(commands::lines(profile, served, &own))
    }

    /// What no other format claims: engines know no mark that all such drafts carry.
    fn recognises(&self, _: Profile, _: &Value) -> bool {
        true
    }

    fn profile_of(&self, config: &Value) -> Option<Profile> {
        if config.get("speculators_model_type").is_some() {
            return Some(Profile::Speculators);
        }
        let top = config.get(LAYER_IDS).is_some();
        let nested = config["eagle_config"].get(LAYER_IDS).is_some();
        match (top, nested) {
            (true, true) => Some(Profile::Hf),
            (false, true) => Some(Profile::Sglang),
            (true, false) => Some(Profile::Vllm),
            (false, false) => None,
        }
    }

    fn check(&self, checks: &mut Checks<'_>, path: &Path) -> bool {
        verify::check(checks, path)
    }

    fn outputs(&self, checks: &mut Checks<'_>) -> Result<Option<ParityVector>> {
        let source = open_weights(&checks.folder)?;
        let Some(config) = checks.sizes::<Eagle3Config>() else { return Ok(None) };
        if checks.config["norm_before_fc"] == true {
            checks.no_reference("not computed: longdraft does not run `norm_before_fc`", "");
            return Ok(None);
        }
        let lacks_head = !source.names().iter().any(|name| name.ends_with("lm_head.weight"));
        if lacks_head {
            checks.no_reference("not computed: the head is the target's", "");
            return Ok(None);
        }
        let draft = Eagle3Draft::from_source(source.as_ref(), &config, &stand_in(&config)?)?;
        Ok(Some(parity::outputs(&draft)?))
    }
}

/// The network that was written, weights rounded as in the file, on the stand-in embeddings.
fn written_network(config: &Eagle3Config, plain: &[(String, Tensor)]) -> Result<Eagle3Draft> {
    let source = MemorySource::new(plain.iter().cloned());
    Ok(Eagle3Draft::from_source(&source, config, &stand_in(config)?)?)
}

/// The stand-in embeddings, with those of token 0, which is read after a document's end.
fn stand_in(config: &Eagle3Config) -> Result<Tensor> {
    stand_in_embedding(config.vocab_size, config.target_hidden_size, 0)
}

/// Ids, features and logits of the first steps on a text.
fn record(draft: &Eagle3Draft, target: &Target, ids: &[u32]) -> Result<Named> {
    let features = target.forward(&PackedSequence::single(ids), &Taps::of(&draft.taps()))?;
    let aux = features.hidden_of(&draft.config().target_layers)?;
    let logits = parity::logits_of_steps(draft, ids, &aux)?;
    let ids: Vec<i64> = ids.iter().copied().map(i64::from).collect();
    let mut tensors =
        vec![("input_ids".to_owned(), Tensor::new(ids, &Device::Cpu)?), ("aux".to_owned(), aux)];
    for (step, logits) in logits.into_iter().enumerate() {
        tensors.push((format!("logits.{step}"), logits));
    }
    Ok(tensors)
}
