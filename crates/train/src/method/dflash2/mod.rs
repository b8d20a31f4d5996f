//! DFlash2: DFlash with convolutions along the slots and a selector among each slot's candidates.

mod config;

use std::sync::Arc;

use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{BlockConfig, ConvolutionSizes, SelectorSizes};
use longdraft_models::draft::files::SavedDraft;
use longdraft_rules::{Problem, Rules};
use serde_json::{Map, Value, json};

use super::block::{self, BlockFootprint, BlockLoss, SelectorLoss};
use super::recipe::keys;
use super::{DraftMethod, Evidence, Materials, Recipe, Room, StageContext, dflash, require_sizes};
use crate::error::Result;
use crate::footprint::Footprint;
use crate::limits;
use crate::objective::{Objective, TeacherConfig};
use crate::observer::Observer;

pub use config::Dflash2;

/// Slots of a block, and proposals of a round, where nothing else is given.
const SLOTS: usize = 6;
const PROPOSALS: usize = 5;
/// Nothing was measured.
const EVIDENCE: [Evidence; 0] = [];

impl DraftMethod for Dflash2 {
    fn name(&self) -> &'static str {
        "dflash2"
    }

    fn problems(&self, stage: &StageContext<'_>) -> Vec<Problem> {
        let mut rules = Rules::default();
        let sizes = [
            ("selector_rank", Some(self.selector_rank), 1, limits::SELECTOR_RANK),
            ("selector_top_k", Some(self.selector_top_k), 1, limits::TOP_K),
            ("conv_kernel_size", Some(self.conv_kernel_size), 1, limits::DRAFT_LENGTH),
            ("conv_group_size", Some(self.conv_group_size), 1, limits::SELECTOR_RANK),
        ];
        require_sizes(&mut rules, &sizes);
        rules.require(
            self.selector_weight >= 0.0 && limits::is_f32(self.selector_weight),
            "draft.selector_weight",
            "must not be negative",
        );
        rules.require(
            (0.0..=1.0).contains(&self.selector_ramp),
            "draft.selector_ramp",
            "must be between 0 and 1",
        );
        rules.require(
            self.block.shared.draft_vocab_size.is_none(),
            "draft.draft_vocab_size",
            "stands beside a selector, which knows all of the target's tokens: leave it out",
        );
        let mut problems = dflash::problems(&self.block);
        problems.extend(dflash::loss_problems(&self.block, stage));
        problems.extend(rules.into_problems());
        problems
    }

    fn footprint(
        &self,
        teacher: &TeacherConfig,
        target: &TargetConfig,
    ) -> Result<Arc<dyn Footprint>> {
        let sizes = self.network(target, self.block.shared.any_mask_token());
        let blocks = self.block.shared.budget();
        let loss = self.loss(teacher);
        let footprint = BlockFootprint::new(sizes, loss.waits(), blocks, target)?;
        Ok(Arc::new(footprint.with_soft(loss.reads()).with_loss(loss.form.loss)))
    }

    fn recipe(&self, room: &Room<'_>) -> Option<Recipe> {
        let own = json!({ "selector_rank": 64 });
        block::recipe(room, (SLOTS, PROPOSALS), 2e-3, own, &EVIDENCE)
    }

    fn check_start(&self, target: &TargetConfig, start: &SavedDraft) -> Result<()> {
        let sizes = self.network(target, self.block.shared.any_mask_token());
        block::check_start(&sizes, self.block.loss, target, start)
    }

    fn open_keys(&self) -> &'static [&'static [&'static str]] {
        &block::OPEN_KEYS
    }

    fn keys_of(&self, start: &SavedDraft) -> Result<Map<String, Value>> {
        let Some((found, mut known)) = block::keys_of(start)? else { return Ok(Map::new()) };
        if let (Some(convolution), Some(selector)) = (found.convolution, found.selector) {
            known.extend(keys(json!({
                "conv_kernel_size": convolution.kernel_size,
                "conv_group_size": convolution.group_size,
                "selector_rank": selector.rank, "selector_top_k": selector.top_k,
            })));
        }
        Ok(known)
    }

    fn build(
        &self,
        materials: &Materials<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Box<dyn Objective>> {
        let sizes = |mask| self.network(materials.target.config(), mask);
        let of = (&self.block.shared, self.loss(&materials.teacher));
        Ok(Box::new(block::objective(materials, sizes, of, observer)?))
    }
}

impl Dflash2 {
    fn loss(&self, teacher: &TeacherConfig) -> BlockLoss {
        let selector = SelectorLoss {
            weight: self.selector_weight,
            over_hits: self.selector_over_hits,
            keeps_labels: self.selector_keeps_labels,
            stops_gradient: self.selector_stops_gradient,
        };
        BlockLoss { selector_ramp: self.selector_ramp, ..self.block.loss(Some(selector), teacher) }
    }

    fn network(&self, target: &TargetConfig, mask_token_id: u32) -> BlockConfig {
        BlockConfig {
            convolution: Some(ConvolutionSizes {
                kernel_size: self.conv_kernel_size,
                group_size: self.conv_group_size,
            }),
            selector: Some(SelectorSizes {
                rank: self.selector_rank,
                top_k: self.selector_top_k.min(target.vocab_size),
            }),
            ..self.block.network(target, mask_token_id)
        }
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::super::tests;
    use super::*;

    /// Whatever the network of a saved draft is, its keys make it again.
    #[test]
    fn a_saved_draft_says_the_keys_of_its_network() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let draft = Dflash2 {
            block: dflash::Dflash { layers: 1, block_size: 3, ..dflash::Dflash::default() },
            conv_kernel_size: 3,
            conv_group_size: 32,
            selector_rank: 9,
            selector_top_k: 5,
            ..Dflash2::default()
        };
        let config = draft.network(&target, 7).to_json("DFlash2DraftModel");
        let again: Dflash2 = tests::again(config);
        assert_eq!(again.network(&target, 7), draft.network(&target, 7));
    }
}
