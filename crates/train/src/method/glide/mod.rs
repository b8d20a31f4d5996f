//! GLIDE: one layer over the target's last-layer keys and values, trained at several delays.

mod delays;
mod footprint;
mod objective;

use std::path::Path;
use std::sync::Arc;

use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::{FinalNorm, GlideConfig, GlideDraft, Init};
use longdraft_rules::{Problem, Rules};

use super::{DraftMethod, Materials};
use crate::config::{DraftConfig, FeatureMode, ObjectiveConfig, TrainConfig};
use crate::error::Result;
use crate::features::TeacherKind;
use crate::footprint::Footprint;
use crate::limits;
use crate::objective::{Objective, SoftTargetKind};
use crate::observer::Observer;
use footprint::GlideFootprint;

pub use delays::DelayDraws;
pub use objective::{GlideObjective, GlideObjectiveConfig};

/// The method.
pub(super) struct Glide;

impl DraftMethod for Glide {
    fn name(&self) -> &'static str {
        "glide"
    }

    fn about(&self) -> &'static str {
        "One layer over the target's last-layer keys and values, trained at several delays."
    }

    fn problems(&self, config: &TrainConfig) -> Vec<Problem> {
        problems(config)
    }

    fn own_keys_set(&self, config: &TrainConfig) -> Vec<&'static str> {
        let (draft, plain) = (&config.draft, DraftConfig::default());
        let soft_weight = ObjectiveConfig::default().soft_weight;
        let keys = [
            ("draft.compat", draft.compat.is_some()),
            ("draft.final_norm", draft.final_norm != plain.final_norm),
            ("draft.init", draft.init != plain.init),
            ("draft.gamma", draft.gamma.is_some()),
            ("draft.delay_weights", draft.delay_weights.is_some()),
            (
                "objective.soft_weight",
                config.objective.soft_weight.to_bits() != soft_weight.to_bits(),
            ),
        ];
        keys.into_iter().filter_map(|(key, is_set)| is_set.then_some(key)).collect()
    }

    fn is_compat(&self, config: &TrainConfig) -> bool {
        config.draft.compat.is_some()
    }

    fn masks_padding(&self, config: &TrainConfig) -> bool {
        self.is_compat(config)
    }

    fn starts_from_last_layer(&self, config: &TrainConfig) -> bool {
        config.draft.init == Init::LastLayer && config.draft.from.is_none()
    }

    fn footprint(&self, config: &TrainConfig, target: &TargetConfig) -> Result<Arc<dyn Footprint>> {
        let objective = &config.objective;
        let teacher = match objective.soft_targets {
            _ if objective.soft_weight == 0.0 => TeacherKind::None,
            SoftTargetKind::TopK => TeacherKind::TopK(objective.top_k),
            SoftTargetKind::Full => TeacherKind::Full,
        };
        Ok(Arc::new(GlideFootprint { sizes: layer(config, target), teacher }))
    }

    fn check_start(&self, config: &TrainConfig, target: &TargetConfig, path: &Path) -> Result<()> {
        let glide = layer(config, target);
        glide.problems_with(target).into_result(path)?;
        Ok(GlideDraft::check_file(path, &glide)?)
    }

    fn build(&self, materials: &Materials<'_>, _: &mut dyn Observer) -> Result<Box<dyn Objective>> {
        let Materials { config, target, .. } = materials;
        let glide = layer(config, target.config());
        let draft = match materials.start {
            Some(path) => GlideDraft::load(path, &glide, target)?,
            None => GlideDraft::initialise(&glide, target, config.draft.init, config.train.seed)?,
        };
        let weights = config.draft.delay_weights.clone();
        let draws = DelayDraws {
            seed: config.train.seed,
            weights: weights.unwrap_or_else(|| vec![1.0; glide.gamma]),
            shared: config.draft.compat.is_some(),
        };
        let objective = GlideObjective::new(Arc::clone(target), draft, config.objective.glide());
        Ok(Box::new(objective.with_delays(draws)))
    }
}

fn problems(config: &TrainConfig) -> Vec<Problem> {
    let mut rules = Rules::default();
    let objective = &config.objective;
    let unit = 0.0..=1.0;
    rules.require(
        unit.contains(&objective.soft_weight),
        "objective.soft_weight",
        "must be between 0 and 1",
    );
    rules.require(
        (1..=limits::TOP_K).contains(&objective.top_k),
        "objective.top_k",
        "must be in 1 to 65536: `objective.soft_targets: full` takes them all",
    );
    let draft = &config.draft;
    if let Some(weights) = &draft.delay_weights {
        rules.require(
            weights.iter().all(|w| *w >= 0.0 && limits::is_f32(*w))
                && weights.iter().sum::<f64>() > 0.0,
            "draft.delay_weights",
            "must be non-negative with a positive sum",
        );
        rules.require(
            draft.gamma.is_none_or(|gamma| gamma == weights.len()),
            "draft.delay_weights",
            "needs one weight for each delay 1..gamma",
        );
    }
    let length = 1..=limits::DRAFT_LENGTH;
    rules.require(
        draft.gamma.is_none_or(|gamma| length.contains(&gamma)),
        "draft.gamma",
        "must be in 1 to 64: longer chains are never accepted whole",
    );
    rules.require(
        draft.delay_weights.as_ref().is_none_or(|weights| length.contains(&weights.len())),
        "draft.delay_weights",
        "holds 1 to 64 weights, one a delay",
    );
    if draft.compat.is_some() {
        rules.require(
            config.parallel.sequence == 1,
            "draft.compat",
            "is `longspec`, which divides every row by its own tokens, of which a rank with a \
             part of it knows its own: set `parallel.sequence: 1`",
        );
        rules.require(
            draft.final_norm == FinalNorm::None,
            "draft.compat",
            "is `longspec`, which has no final norm: set `draft.final_norm: none`",
        );
        rules.require(
            objective.soft_weight == 0.0,
            "draft.compat",
            "is `longspec`, which learns hard labels: set `objective.soft_weight: 0`",
        );
        rules.require(
            config.train.features == FeatureMode::Online || !config.data.anchor.redraw,
            "draft.compat", "is `longspec`, which draws new positions every step: set `train.features: online`, or keep the first \
             ones with `data.anchor.redraw: false`",
        );
    }
    rules.require(
        config.train.features != FeatureMode::Memory
            || objective.soft_weight == 0.0
            || objective.soft_targets == SoftTargetKind::TopK,
        "train.features",
        "is `memory`, which keeps no full teacher: set `objective.soft_targets: top_k`",
    );
    rules.into_problems()
}

/// The layer that a configuration asks for.
fn layer(config: &TrainConfig, target: &TargetConfig) -> GlideConfig {
    let mut glide = GlideConfig::for_target(target, config.draft.compat);
    glide.final_norm = config.draft.final_norm;
    let weights = config.draft.delay_weights.as_ref().map(Vec::len);
    glide.gamma = config.draft.gamma.or(weights).unwrap_or(glide.gamma);
    glide
}
