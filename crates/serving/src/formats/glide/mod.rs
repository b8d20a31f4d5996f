//! GLIDE layers as the published scripts read them.

mod compatibility;
mod longspec;
mod parity;
mod verify;

use std::path::Path;

use candle_core::DType;
use longdraft_models::draft::Draft;
use longdraft_models::draft::files::{PTH_FILE, open_weights};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{WeightSource, pth};
use serde_json::Value;

use super::files::{write_json, write_safetensors};
use super::{ExportOptions, Fit, Format, Lines, Rendered, Served, WeightType, typed};
use crate::Profile;
use crate::checks::Checks;
use crate::error::Result;
use crate::parity::ParityVector;
use crate::target::TargetFacts;

pub(super) struct Glide;

impl Format for Glide {
    fn method(&self) -> &'static str {
        "glide"
    }

    /// No engine runs such layers, but for the published scripts.
    fn serves(&self, profile: Profile) -> bool {
        profile == Profile::Longspec
    }

    fn fit(&self, profile: Profile, draft: &dyn Draft, target: &TargetFacts) -> Result<Fit> {
        Ok(compatibility::fit(profile, typed::<GlideDraft>(draft)?.config(), target.config()))
    }

    fn write(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        options: &ExportOptions,
        folder: &Path,
    ) -> Result<Rendered> {
        let draft: &GlideDraft = typed(draft)?;
        let dtype = options.dtype.unwrap_or(WeightType::F16).dtype();
        let written = longspec::tensors(options.profile, draft, dtype)?;
        write_safetensors(folder, &written)?;
        if options.profile == Profile::Longspec {
            pth::save(&folder.join(PTH_FILE), &written)?;
        }
        write_json(&folder.join("config.json"), &longspec::config(draft, target, dtype))?;
        Ok(Rendered {
            parity: vector(&MemorySource::new(written.iter().cloned()), target)?,
            tensors: written,
            layers: vec![target.config().num_hidden_layers - 1],
            map: None,
            dtype,
        })
    }

    fn rounded(
        &self,
        draft: &dyn Draft,
        target: &TargetFacts,
        dtype: DType,
    ) -> Result<ParityVector> {
        let written = longspec::tensors(Profile::Longspec, typed(draft)?, dtype)?;
        vector(&MemorySource::new(written), target)
    }

    /// No engine serves such drafts.
    fn commands(&self, _: Profile, _: &dyn Draft, _: Served<'_>) -> Result<Lines> {
        Ok(Lines::new())
    }

    fn recognises(&self, profile: Profile, config: &Value) -> bool {
        profile == Profile::Longspec || verify::is_layer(config)
    }

    fn profile_of(&self, config: &Value) -> Option<Profile> {
        verify::is_layer(config).then_some(Profile::Longspec)
    }

    fn check(&self, checks: &mut Checks<'_>, _: &Path) -> bool {
        verify::check(checks);
        true
    }

    fn outputs(&self, checks: &mut Checks<'_>) -> Result<Option<ParityVector>> {
        let source = open_weights(&checks.folder)?;
        let Some(target) = checks.target else {
            checks.no_reference("not computed without the target's rotary embedding", "--target");
            return Ok(None);
        };
        vector(source.as_ref(), target).map(Some)
    }
}

/// What the published layer of these tensors computes on the fixed input.
fn vector(source: &dyn WeightSource, target: &TargetFacts) -> Result<ParityVector> {
    let config = GlideConfig::for_target(target.config(), None);
    let draft = GlideDraft::from_source(source, &config, &target.target)?;
    parity::outputs(&draft, &target.target)
}
