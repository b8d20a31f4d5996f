//! Features of packed rows in memory, captured once and read in every epoch.

use std::collections::HashMap;

use longdraft_data::Batch;
use longdraft_models::target_model::{RowPart, Target};

use super::{BatchFeatures, FeatureNeeds, TeacherFeatures, key, run_target};
use crate::error::{FeatureError, Result};

/// Features in memory, keyed by packed row. Training reuses the positions of the capture.
#[derive(Default)]
pub struct MemoryFeatures {
    rows: HashMap<usize, (String, BatchFeatures)>,
}

impl MemoryFeatures {
    /// Runs the target on a batch, or on this rank's part of it, and keeps the result.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn capture(
        &mut self,
        target: &Target,
        batch: &Batch,
        part: Option<&RowPart>,
        needs: &FeatureNeeds,
    ) -> Result<()> {
        let features = run_target(target, batch, part, needs)?;
        self.rows.insert(batch.row, (key(batch), features));
        Ok(())
    }

    /// Whether a row was captured.
    pub fn holds(&self, row: usize) -> bool {
        self.rows.contains_key(&row)
    }

    /// Rows captured.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether nothing was captured.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let one = |features: &BatchFeatures| {
            let kv = features.last_kv.as_ref().map_or(0, |kv| 2 * kv.k.elem_count() * 4);
            let aux = features.aux_hidden.as_ref().map_or(0, |aux| aux.elem_count() * 4);
            kv + aux
                + match &features.teacher {
                    TeacherFeatures::None => 0,
                    TeacherFeatures::Full { hidden } | TeacherFeatures::EveryToken { hidden } => {
                        hidden.elem_count() * 4
                    }
                    TeacherFeatures::TopK { entries, .. } => entries.ids.len() * 8,
                }
        };
        self.rows.values().map(|(_, features)| one(features)).sum()
    }

    pub(super) fn features(&self, batch: &Batch) -> Result<BatchFeatures> {
        let problem = match self.rows.get(&batch.row) {
            Some((captured, features)) if *captured == key(batch) => return Ok(features.clone()),
            Some(_) => "was captured with other tokens or positions",
            None => "was not captured",
        };
        Err(FeatureError::store("features in memory", format!("row {} {problem}", batch.row)))
    }
}
