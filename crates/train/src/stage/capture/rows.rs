//! The rows of a store and who reads them.

use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_data::batch::Draws;
use longdraft_features::store::{Estimate, Recipe, StoreWriter};
use longdraft_features::{FeatureError, Part};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::World;

use super::super::data_sets::data_sets;
use super::super::prepare::{counts, draws};
use super::super::{DataSet, Observer};
use super::recipe::{batch, kept_tokens, recipe};
use super::{Reader, no_place};
use crate::config::{CompletedDraft, TrainConfig};
use crate::error::Result;
use crate::method::Materials;
use crate::objective::Objective;

/// Rows of both parts, as training lays them out, and who reads them.
///
/// Each objective holds its draft until the capture ends.
pub(super) struct Rows {
    train: DataSet,
    held_out: DataSet,
    draws: Draws,
    objectives: Vec<Box<dyn Objective>>,
}

impl Rows {
    /// The rows of the first configuration, which are those of all, and the store that serves all.
    ///
    /// # Errors
    /// - unusable data or drafts
    /// - rows, positions or types that are not the same: everything that differs is named
    pub(super) fn of_all(
        readers: &[Reader<'_>],
        (target, tokenizer): (&Arc<Target>, &TextTokenizer),
        world: &World,
        observer: &mut dyn Observer,
    ) -> Result<(Self, Recipe)> {
        let mut all: Option<(Self, Recipe)> = None;
        for reader in readers {
            let rows = Self::of(reader.config, (target, tokenizer), world, observer)?;
            let recipe = rows.recipe(reader.config, (target, tokenizer));
            let Some((known, first)) = &mut all else {
                all = Some((rows, recipe));
                continue;
            };
            let differences = first.differences_beside(&recipe);
            if !differences.is_empty() {
                let place = readers[0].config.train.features.store().unwrap_or_default();
                let problem = format!(
                    "cannot serve both {} and {}: {}; capture them into two places, or make these the same",
                    readers[0].name,
                    reader.name,
                    differences.join("; ")
                );
                return Err(FeatureError::store(place, problem).into());
            }
            known.objectives.extend(rows.objectives);
        }
        let (rows, first) = all.ok_or_else(no_place)?;
        let recipe = match readers {
            [_] => first,
            _ => rows.recipe(readers[0].config, (target, tokenizer)),
        };
        Ok((rows, recipe))
    }

    fn of(
        config: &TrainConfig,
        (target, tokenizer): (&Arc<Target>, &TextTokenizer),
        world: &World,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let (train, held_out) = data_sets(config, target, tokenizer, world, observer)?;
        let CompletedDraft { start, method, .. } = config.draft.completed()?;
        let token_counts = counts(config, &train, target)?;
        let materials = Materials {
            teacher: config.teacher,
            seed: config.train.seed,
            target,
            tokenizer,
            documents: &train.documents,
            start: start.as_ref(),
            token_counts: &token_counts,
        };
        let objectives = vec![method.build(&materials, observer)?];
        Ok(Self { train, held_out, draws: draws(config, target), objectives })
    }

    /// The store that serves all of its objectives.
    fn recipe(&self, config: &TrainConfig, of: (&Target, &TextTokenizer)) -> Recipe {
        recipe(config, of, (&self.train, &self.held_out), &self.objectives(), &self.draws)
    }

    fn objectives(&self) -> Vec<&dyn Objective> {
        self.objectives.iter().map(AsRef::as_ref).collect()
    }

    /// Tokens of a batch at which the teacher is kept.
    pub(super) fn kept_tokens(&self, part: Part, batch: &Batch) -> Vec<u32> {
        kept_tokens(&self.objectives(), part, batch)
    }

    /// A row.
    pub(super) fn batch(&self, part: Part, row: usize) -> Batch {
        batch(part, row, (&self.train, &self.held_out), &self.draws)
    }

    /// What the store takes. It fails where the store cannot be read.
    pub(super) fn estimate(
        &self,
        recipe: &Recipe,
        store: &StoreWriter,
        target: &Target,
    ) -> Result<Estimate> {
        let (mut bytes, mut bytes_left) = (0, 0);
        for shard in store.shards() {
            let contents = &recipe.part(shard.part).contents;
            let of_row = |row| {
                let batch = self.batch(shard.part, row);
                let size = (batch.ids.len(), self.kept_tokens(shard.part, &batch).len());
                contents.row_bytes(target.config(), recipe.dtype, size)
            };
            let of_shard: u64 = shard.rows.clone().map(of_row).sum();
            bytes += of_shard;
            if !store.has_receipt(&shard)? {
                bytes_left += of_shard;
            }
        }
        let tokens = (recipe.train.tokens + recipe.held_out.tokens) as u64;
        Ok(Estimate { tokens, bytes, bytes_left, free: None })
    }
}
