//! Which tokens slots take for right: the text's, or those that the target finds most likely.

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, untapped};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::bent_top_k;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::blocks::{Slots, distinct};
use super::teacher::teacher_tokens;
use crate::error::Result;

/// Which tokens slots learn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SlotLabels {
    /// Those of the text.
    #[default]
    Text,
    /// What the target finds most likely after the text before a slot.
    Target,
}

impl Slots {
    /// The same slots, which learn the target's most likely tokens. What stands before them stays the text's.
    pub(super) fn with_likely_labels(
        self,
        (batch, features): (&Batch, &BatchFeatures),
        (head, bend): (&Matrix, Bend),
    ) -> Result<Self> {
        if self.learned.is_empty() {
            return Ok(self);
        }
        let tokens = distinct(self.teachers());
        let likely: Vec<Option<u32>> = match &features.teacher {
            TeacherFeatures::EveryToken { hidden } => {
                let hidden = select_rows(hidden, &features.state_rows(&tokens)?)?;
                let best = bent_top_k(&hidden, head, 1, bend)?;
                best.ids.into_iter().map(Some).collect()
            }
            TeacherFeatures::TopK { entries, k, .. } => {
                let rows = teacher_tokens(batch, self.of_a_block());
                let best =
                    |token: &u32| entries.ids.get(rows.binary_search(token).ok()? * k).copied();
                tokens.iter().map(best).collect()
            }
            _ => return Err(untapped("the teacher at every token").into()),
        };
        let of_token = |token: u32| -> Option<u32> { likely[tokens.binary_search(&token).ok()?] };
        let labels: Option<Vec<u32>> = self.teachers().into_iter().map(of_token).collect();
        let labels = labels.ok_or_else(|| untapped("the teacher at a learned slot"))?;
        Ok(Self { labels, ..self })
    }
}
