//! DFlash: blocks of slots over several layers of the target, trained on the text at drawn places.

mod blocks;
mod config;
mod footprint;
mod objective;
mod weights;

use std::path::Path;
use std::sync::Arc;

use longdraft_models::draft::block::{BlockConfig, BlockDraft};
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::{ModelError, TargetConfig};
use longdraft_rules::{Problem, Rules};

use super::{DraftMethod, Materials};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::footprint::Footprint;
use crate::limits;
use crate::objective::Objective;
use crate::observer::Observer;
use footprint::DflashFootprint;

pub use blocks::BlockDraws;
pub use config::Dflash;
pub use objective::{BlockLoss, BlockObjective};
pub use weights::SlotWeights;

impl DraftMethod for Dflash {
    fn name(&self) -> &'static str {
        "dflash"
    }

    fn problems(&self, config: &TrainConfig) -> Vec<Problem> {
        problems(self, config)
    }

    fn is_compat(&self) -> bool {
        false
    }

    fn footprint(&self, _: &TrainConfig, target: &TargetConfig) -> Result<Arc<dyn Footprint>> {
        // A token more or less in the table changes no size.
        let sizes = self.network(target, self.mask_token_id.unwrap_or_default());
        sizes.problems_with(target).into_result(Path::new("draft configuration"))?;
        Ok(Arc::new(DflashFootprint {
            sizes,
            blocks_per_row: self.blocks_per_row,
            holds_step: self.slot_weights.look_at_the_draft() && !self.divide_by_rows,
        }))
    }

    fn check_start(
        &self,
        _: &TrainConfig,
        target: &TargetConfig,
        start: &SavedDraft,
    ) -> Result<()> {
        let mask = self.known_mask_token(Some(start))?;
        let sizes = self.network(target, mask.unwrap_or_default());
        Ok(BlockDraft::check_file(start, &sizes)?)
    }

    fn build(&self, materials: &Materials<'_>, _: &mut dyn Observer) -> Result<Box<dyn Objective>> {
        let Materials { config, target, .. } = materials;
        let sizes = self.network(target.config(), self.mask_token(materials)?);
        sizes.problems_with(target.config()).into_result(Path::new("draft configuration"))?;
        // The draft keeps the table, its objective the head.
        let _ends = target.hold_ends()?;
        let (embedding, seed) = (target.embedding()?, config.train.seed);
        let draft = match materials.start {
            Some(start) => BlockDraft::load(start, &sizes, &embedding)?,
            None => BlockDraft::initialise(&sizes, &embedding, seed)?,
        };
        let loss = BlockLoss {
            weights: self.slot_weights,
            decay: self.decay(),
            alpha: self.dpace_alpha.unwrap_or(0.5),
            divide_by_rows: self.divide_by_rows,
        };
        let draws = BlockDraws { seed, blocks_per_row: self.blocks_per_row };
        Ok(Box::new(BlockObjective::new(draft, &target.head()?, loss, draws)))
    }
}

impl Dflash {
    /// The token of unknown slots that is set, or that of the draft to start from.
    fn known_mask_token(&self, start: Option<&SavedDraft>) -> Result<Option<u32>> {
        let Some(start) = start.filter(|_| self.mask_token_id.is_none()) else {
            return Ok(self.mask_token_id);
        };
        Ok(BlockConfig::of_saved(start)?.map(|found| found.mask_token_id))
    }

    /// The token of unknown slots: the one that is set, or that of the draft to start from, or the
    /// first that neither the tokenizer nor a document uses.
    fn mask_token(&self, materials: &Materials<'_>) -> Result<u32> {
        if let Some(token) = self.known_mask_token(materials.start)? {
            return Ok(token);
        }
        let counts = materials.documents.iter().flat_map(|document| &document.ids);
        let used: std::collections::HashSet<u32> = counts.copied().collect();
        let tokenizer = materials.tokenizer;
        let rows = materials.target.config().vocab_size as u32;
        let unused = |id: &u32| !used.contains(id);
        let spare = (0..rows).filter(unused).find(|id| tokenizer.token(*id).is_none());
        // A full table still has special tokens that no document holds.
        let mut special = tokenizer.special_ids();
        special.sort_unstable();
        let special = || special.into_iter().rev().find(|id| *id < rows && unused(id));
        spare.or_else(special).ok_or_else(|| {
            let problem = "every token of the target is used: set `draft.mask_token_id` to one that \
                           texts do not hold";
            ModelError::invalid(Path::new("draft configuration"), problem).into()
        })
    }
}

fn problems(draft: &Dflash, config: &TrainConfig) -> Vec<Problem> {
    let mut rules = Rules::default();
    for (name, size, first, most) in [
        ("layers", draft.layers, 1, limits::DRAFT_LAYERS),
        ("block_size", draft.block_size, 2, limits::DRAFT_LENGTH),
        ("blocks_per_row", draft.blocks_per_row, 1, limits::ROW_TOKENS),
        ("sliding_window", draft.sliding_window.unwrap_or(1), 1, limits::ROW_TOKENS),
    ] {
        rules.require(
            (first..=most).contains(&size),
            &format!("draft.{name}"),
            format!("must be in {first} to {most}"),
        );
    }
    if let Some(ids) = &draft.target_layers {
        rules.require(
            !ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]),
            "draft.target_layers",
            "must name layers in ascending order",
        );
    }
    rules.require(
        draft.slot_decay.is_none_or(|decay| decay > 0.0 && limits::is_f32(decay)),
        "draft.slot_decay",
        "must be positive",
    );
    rules.require(
        draft.dpace_alpha.is_none_or(|alpha| (0.0..=1.0).contains(&alpha)),
        "draft.dpace_alpha",
        "must be between 0 and 1",
    );
    let weights = draft.slot_weights;
    rules.require(
        draft.slot_decay.is_none() || weights == SlotWeights::Decay,
        "draft.slot_decay",
        "belongs to `draft.slot_weights: decay`",
    );
    for (key, changed) in
        [("dpace_alpha", draft.dpace_alpha.is_some()), ("divide_by_rows", draft.divide_by_rows)]
    {
        rules.require(
            !changed || weights.look_at_the_draft(),
            &format!("draft.{key}"),
            "belongs to `draft.slot_weights: dpace` and its forms",
        );
    }
    rules.require(
        config.parallel.sequence == 1,
        "draft.method",
        "is `dflash`, whose blocks see the whole row: set `parallel.sequence: 1`",
    );
    rules.into_problems()
}
