//! What trains the heads: hard labels, each head its own row of them.

use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherFeatures, TeacherKind};
use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy};
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetConfig;
use longdraft_models::draft::Draft;
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::target_model::{Tap, Target};
use longdraft_models::weights::TensorSpec;
use longdraft_train::footprint::{Footprint, Operations, Row, RowMemory};
use longdraft_train::method::{DraftMethod, Materials, StageContext};
use longdraft_train::metrics::{DraftMetrics, LossPart, Quantities};
use longdraft_train::objective::{Objective, Prepared, TeacherConfig};
use longdraft_train::stage::Observer;
use longdraft_train::{Result, Share, TrainError};

use serde::{Deserialize, Serialize};

use crate::draft::{HEADS, TwoHeads, tensor_specs};

/// The method; a key of its own would be a field.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TwoHeadsMethod {}

impl DraftMethod for TwoHeadsMethod {
    fn name(&self) -> &'static str {
        "two-heads"
    }

    fn problems(&self, _: &StageContext<'_>) -> Vec<longdraft_rules::Problem> {
        Vec::new()
    }

    fn footprint(&self, _: &TeacherConfig, target: &TargetConfig) -> Result<Arc<dyn Footprint>> {
        Ok(Arc::new(TwoHeadsFootprint { target: target.clone() }))
    }

    fn check_start(&self, _: &TargetConfig, _: &SavedDraft) -> Result<()> {
        Ok(())
    }

    fn build(&self, materials: &Materials<'_>, _: &mut dyn Observer) -> Result<Box<dyn Objective>> {
        let target = Arc::clone(materials.target);
        let draft = match materials.start {
            None => TwoHeads::initialise(&target)?,
            Some(start) => {
                let source = longdraft_models::draft::files::open_weights(&start.path)?;
                TwoHeads::from_source(source.as_ref(), &target)?
            }
        };
        Ok(Box::new(TwoHeadsObjective { draft, target }))
    }
}

/// What plans know of it.
#[derive(Debug)]
struct TwoHeadsFootprint {
    target: TargetConfig,
}

impl Footprint for TwoHeadsFootprint {
    fn specs(&self) -> Vec<TensorSpec> {
        tensor_specs(&self.target)
    }

    fn taps(&self) -> Vec<Tap> {
        vec![Tap::FinalHidden]
    }

    fn teacher(&self) -> TeacherKind {
        TeacherKind::EveryToken
    }

    /// Each head keeps three states of a token; its rows of the loss are cut into chunks.
    fn row_memory(&self, row: &Row) -> RowMemory {
        let (heads, size) = (HEADS as u64, self.target.hidden_size as u64);
        let vocabulary = self.target.vocab_size as u64;
        let state = 4 * row.tokens * size;
        RowMemory {
            activations: 3 * heads * state,
            chunks: 4 * row.chunk(vocabulary) * vocabulary,
            backward: 2 * state,
            left: heads * 4 * size * size,
            results: heads * 100 * row.learned,
            packed: 0,
            weight_gradients: heads * 4 * size * size,
        }
    }

    /// A matrix forward and back, `6` for every value; the target's head forward and for the gradient of its input.
    fn operations(&self, row: &Row, _: u64) -> Operations {
        let (heads, size) = (HEADS as f64, self.target.hidden_size as f64);
        let vocabulary = self.target.vocab_size as f64;
        Operations {
            forward: 2.0 * heads * size * size,
            backward: 4.0 * heads * size * size,
            loss: 4.0 * heads * size * vocabulary,
            logits: heads * vocabulary,
            chunk: row.chunk(self.target.vocab_size as u64),
            passes: 1.0,
            ..Operations::default()
        }
    }
}

/// `Σ_i Σ_t ℓ_hard / D_i`.
struct TwoHeadsObjective {
    draft: TwoHeads,
    target: Arc<Target>,
}

/// Rows that each head learns: where the token that it proposes is supervised, in the same document.
fn rows_of_heads(batch: &Batch) -> Vec<Vec<u32>> {
    let of_head = |head: usize| {
        let ahead = head + 1;
        let learns = |t: &usize| {
            batch.owns(*t)
                && batch.document_ids[*t] >= 0
                && batch.document_ids[*t] == batch.document_ids[t + ahead]
                && batch.loss_mask[t + ahead]
        };
        let last = batch.ids.len().saturating_sub(ahead);
        (0..last).filter(learns).map(|t| t as u32).collect()
    };
    (1..=HEADS).map(of_head).collect()
}

fn counts(rows: &[Vec<u32>]) -> Vec<f64> {
    rows.iter().map(|rows| rows.len() as f64).collect()
}

impl TwoHeadsObjective {
    fn loss(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        rows: &[Vec<u32>],
        (denominators, train): (&[f64], bool),
    ) -> Result<Share> {
        let TeacherFeatures::EveryToken { hidden } = &features.teacher else {
            return Err(TrainError::Unsupported { problem: "no states of the target".into() });
        };
        let head_table = self.target.hold_ends()?.head()?;
        let mut share = Share { loss: None, metrics: DraftMetrics::default() };
        for (head, rows) in (1..).zip(rows).filter(|(_, rows)| !rows.is_empty()) {
            let places = features.state_rows(rows)?;
            let states = self.draft.states(&select_rows(hidden, &places)?, head)?;
            let states = if train { states } else { states.detach() };
            let labels: Vec<u32> = rows.iter().map(|t| batch.ids[*t as usize + 1 + head]).collect();
            let output = linear_cross_entropy(
                &Inputs::of_labels(&states, &head_table, &labels).bent(self.target.bend()),
            )?;
            share.metrics.add_rows(std::iter::repeat_n(head as u32, rows.len()), &output.rows);
            let sum = output.rows.hard.iter().sum();
            let part = LossPart { weight: 1.0, sum, denominator: rows.len() as f64 };
            share.metrics.parts.push(part);
            let loss = (output.loss_sum / denominators[head - 1].max(1.0))?;
            share.loss = Some(match share.loss {
                Some(before) => (before + loss)?,
                None => loss,
            });
        }
        Ok(share)
    }
}

impl Objective for TwoHeadsObjective {
    fn draft(&self) -> &dyn Draft {
        &self.draft
    }

    fn draft_mut(&mut self) -> &mut dyn Draft {
        &mut self.draft
    }

    fn needs(&self) -> FeatureNeeds {
        FeatureNeeds { taps: Vec::new(), teacher: TeacherKind::EveryToken, ahead: 0 }
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        Some(counts(&rows_of_heads(batch)))
    }

    fn prepare(&self, batch: &Batch, _: &BatchFeatures) -> Result<Prepared> {
        let rows = rows_of_heads(batch);
        Ok(Prepared::new(counts(&rows), rows))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let rows: &Vec<Vec<u32>> = prepared.plan()?;
        self.loss(batch, features, rows, (denominators, train))
    }

    fn quantities(&self, _: TeacherKind) -> Quantities {
        let text = || Quantities::TEXT.to_owned();
        Quantities { loss: text(), hard_loss: text(), agreement: text(), acceptance: text() }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let rows = rows_of_heads(batch);
        Ok(self.loss(batch, features, &rows, (&counts(&rows), false))?.metrics)
    }

    fn draft_len(&self) -> usize {
        HEADS
    }

    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32> {
        let mut rows: Vec<u32> = rows_of_heads(batch).concat();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}
