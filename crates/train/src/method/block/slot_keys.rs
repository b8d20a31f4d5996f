//! The keys that say what slots weigh, what their losses are divided by, and how LK losses mix.

use longdraft_rules::Rules;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::slot_loss::{SlotForm, SlotLoss};
use super::weights::{Divisor, SlotWeights};
use crate::limits;
use crate::objective::{SoftTargetKind, TeacherConfig};

/// Share of a slot's chance that does not depend on the draft, where none is given.
const ALPHA: f64 = 0.5;

/// What slots weigh, in keys that all block drafts share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SlotKeys {
    /// What a slot's loss is multiplied by.
    pub slot_weights: SlotWeights,
    /// Share α of the chance of a slot that does not depend on the draft, 0 to 1, for `dpace` and `dpard`
    /// (default: 0.5).
    pub dpace_alpha: Option<f64>,
    /// Divides the loss by the rows instead of by the weights, as the first trainers of `dpace` and `dpard` do.
    pub divide_by_rows: bool,
    /// Divides the loss by the learned slots, whatever they weigh, as the speculators library does.
    pub divide_by_slots: bool,
    /// Largest share κ of cross-entropy in `lk_lambda` and `lk_hybrid`, 0 to 1 (default: 1).
    pub kl_scale: Option<f64>,
    /// How fast that share falls with the chance α of acceptance: `κ = kl_scale · exp(−kl_decay · α)`
    /// (default: 1, of `lk_hybrid` 3).
    pub kl_decay: Option<f64>,
}

impl SlotKeys {
    /// α of the weights.
    pub(in crate::method) fn alpha(&self) -> f64 {
        self.dpace_alpha.unwrap_or(ALPHA)
    }

    /// What the losses of slots are divided by.
    pub(in crate::method) fn divisor(&self) -> Divisor {
        match (self.divide_by_rows, self.divide_by_slots) {
            (true, _) => Divisor::Rows,
            (false, true) => Divisor::Slots,
            (false, false) => Divisor::Weights,
        }
    }

    /// A loss with the numbers of its mix.
    pub(in crate::method) fn form(&self, loss: SlotLoss) -> SlotForm {
        SlotForm::new(loss, self.kl_scale, self.kl_decay)
    }

    /// What makes no sense beside a loss that stands at `loss_key`.
    pub(in crate::method) fn check(
        &self,
        rules: &mut Rules,
        (loss_key, loss): (&str, SlotLoss),
        teacher: &TeacherConfig,
    ) {
        rules.require(
            (0.0..=1.0).contains(&self.alpha()),
            "draft.dpace_alpha",
            "must be between 0 and 1",
        );
        rules.require_with(
            self.dpace_alpha.is_none() || self.slot_weights.look_at_the_draft(),
            "draft.dpace_alpha",
            &["draft.slot_weights"],
            "belongs to `draft.slot_weights: dpace`, its forms and `dpard`",
        );
        rules.require_with(
            !(self.divide_by_rows && self.divide_by_slots),
            "draft.divide_by_slots",
            &["draft.divide_by_rows"],
            "is a second divisor beside `draft.divide_by_rows`: give one of them",
        );
        rules.require(
            (0.0..=1.0).contains(&self.kl_scale.unwrap_or(1.0)),
            "draft.kl_scale",
            "must be between 0 and 1",
        );
        rules.require(
            self.kl_decay.is_none_or(|decay| decay >= 0.0 && limits::is_f32(decay)),
            "draft.kl_decay",
            "must be 0 or more, and a number of f32",
        );
        for (key, is_set) in [
            ("draft.kl_scale", self.kl_scale.is_some()),
            ("draft.kl_decay", self.kl_decay.is_some()),
        ] {
            rules.require_with(
                !is_set || loss.mixes(),
                key,
                &[loss_key],
                format!("belongs to `{loss_key}: lk_lambda` and `lk_hybrid`"),
            );
        }
        rules.require_with(
            !loss.compares_whole() || teacher.soft_targets == SoftTargetKind::Full,
            loss_key,
            &["teacher.soft_targets"],
            "compares all tokens of both distributions: set `teacher.soft_targets: full`",
        );
    }
}
