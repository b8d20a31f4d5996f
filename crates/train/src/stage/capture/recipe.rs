//! What a store is made of that serves some objectives.

use longdraft_data::Batch;
use longdraft_data::batch::{DrawEpochs, Draws};
use longdraft_features::Part;
use longdraft_features::store::{Contents, PartRecipe, Recipe, StoredTeacher};
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;

use super::super::DataSet;
use super::super::evaluate::held_out_batch;
use super::super::identity::precision;
use crate::config::TrainConfig;
use crate::objective::Objective;

/// A row as it is captured.
pub(super) fn batch(part: Part, row: usize, data: (&DataSet, &DataSet), draws: &Draws) -> Batch {
    let epochs = DrawEpochs { positions: 0, batch: 0 };
    match part {
        Part::Train => Batch::from_row(row, &data.0.rows[row], &data.0.documents, draws, epochs),
        Part::HeldOut => held_out_batch(row, data.1, draws),
    }
}

/// The store that a configuration would capture for its objective, or for those of several.
pub(in super::super) fn recipe(
    config: &TrainConfig,
    (target, tokenizer): (&Target, &TextTokenizer),
    data: (&DataSet, &DataSet),
    objectives: &[&dyn Objective],
    draws: &Draws,
) -> Recipe {
    let of_part = |part| part_recipe(config, target, data, objectives, draws, part);
    Recipe {
        format: Recipe::FORMAT.to_owned(),
        target: target.fingerprint().to_owned(),
        // A tokenizer without JSON form is equal to no other.
        tokenizer: tokenizer.fingerprint().unwrap_or_default(),
        dtype: config.capture.dtype,
        compression: config.capture.compression,
        seed: draws.position_seed,
        anchor: draws.anchor,
        precision: Some(precision(config, target)),
        products: Some(config.products.on(target.device()).to_owned()),
        records: None,
        train: of_part(Part::Train),
        held_out: of_part(Part::HeldOut),
    }
}

fn part_recipe(
    config: &TrainConfig,
    target: &Target,
    data: (&DataSet, &DataSet),
    objectives: &[&dyn Objective],
    draws: &Draws,
    part: Part,
) -> PartRecipe {
    let rows = match part {
        Part::Train => data.0.rows.len(),
        Part::HeldOut => data.1.rows.len(),
    };
    let of_each = objectives.iter().map(|objective| contents(*objective, part));
    let contents = of_each.fold(Contents::default(), |all, own| all.and(&own));
    let (mut text, mut teacher) = (blake3::Hasher::new(), blake3::Hasher::new());
    let (mut tokens, mut shards, mut filled) = (0, Vec::new(), u64::MAX);
    for row in 0..rows {
        let batch = batch(part, row, data, draws);
        let teacher_tokens = kept_tokens(objectives, part, &batch);
        hash_text(&mut text, &batch);
        hash_u32(&mut teacher, &teacher_tokens);
        tokens += batch.ids.len();
        let size = (batch.ids.len(), teacher_tokens.len());
        let bytes = contents.row_bytes(target.config(), config.capture.dtype, size);
        if filled.saturating_add(bytes) > config.capture.shard_mib << 20 {
            shards.push(row);
            filled = 0;
        }
        filled += bytes;
    }
    let short = |hasher: &blake3::Hasher| hasher.finalize().to_hex()[..16].to_owned();
    let (text, teacher_tokens) = (short(&text), short(&teacher));
    PartRecipe { contents, text, teacher_tokens, rows, tokens, shards }
}

/// What an objective reads of a part.
fn contents(objective: &dyn Objective, part: Part) -> Contents {
    Contents::of(&match part {
        Part::Train => objective.needs(),
        Part::HeldOut => objective.held_out_needs(),
    })
}

/// Tokens at which the teacher is kept: those at which any objective reads it.
pub(super) fn kept_tokens(objectives: &[&dyn Objective], part: Part, batch: &Batch) -> Vec<u32> {
    let reads = objectives
        .iter()
        .filter(|objective| contents(**objective, part).teacher != StoredTeacher::None);
    let mut tokens: Vec<u32> =
        reads.flat_map(|objective| objective.teacher_tokens(batch)).collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

fn hash_u32(hasher: &mut blake3::Hasher, values: &[u32]) {
    hasher.update(&(values.len() as u64).to_le_bytes());
    values.iter().for_each(|value| {
        hasher.update(&value.to_le_bytes());
    });
}

/// Tokens, documents and masks; not the positions, which are drawn.
fn hash_text(hasher: &mut blake3::Hasher, batch: &Batch) {
    hash_u32(hasher, &batch.ids);
    for (document, learned) in batch.document_ids.iter().zip(&batch.loss_mask) {
        hasher.update(&document.to_le_bytes());
        hasher.update(&[u8::from(*learned)]);
    }
}
