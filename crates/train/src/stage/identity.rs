//! What a resumed run must share with the saved one.

use candle_core::{DType, Tensor};
use longdraft_data::Document;
use longdraft_data::packing::{Overlong, Packing};
use longdraft_features::FeatureSource;
use longdraft_models::draft::Draft;
use longdraft_models::target_model::Target;

use super::DataSet;
use super::data_sets::pieces_left_out;
use crate::checkpoint::{RunIdentity, STEPS, TARGET};
use crate::config::{DraftConfig, TrainConfig};
use crate::error::{Result, TrainError};

/// Everything that decides the weights, of a run of so many steps.
pub(super) fn identity(
    config: &TrainConfig,
    target: &Target,
    train: &DataSet,
    (start, features): (&dyn Draft, &FeatureSource),
    steps: u64,
) -> Result<RunIdentity> {
    let tokens = hashed(&train.documents).finalize().to_hex()[..16].to_owned();
    let json = |value: serde_json::Result<serde_json::Value>| {
        value
            .map(|value| value.to_string())
            .map_err(|error| TrainError::checkpoint(&config.output, error))
    };
    let run = &config.train;
    // A draft to start from counts by its values: its file may move.
    let draft = DraftConfig { from: None, ..config.draft.clone() };
    let started_from = match &config.draft.from {
        Some(_) => fingerprint(start)?,
        None => "initial values".to_owned(),
    };
    let mut identity = RunIdentity {
        values: vec![
            (TARGET.into(), target.fingerprint().to_owned()),
            ("data".into(), tokens),
            ("data.row_tokens".into(), row_layout(config, train)),
            ("data.anchor".into(), json(serde_json::to_value(config.data.anchor))?),
            ("draft".into(), json(serde_json::to_value(&draft))?),
            ("draft.from".into(), started_from),
            ("teacher".into(), json(serde_json::to_value(config.teacher))?),
            ("optimizer".into(), json(serde_json::to_value(&config.optimizer))?),
            ("schedule".into(), json(serde_json::to_value(&config.schedule))?),
            (STEPS.into(), steps.to_string()),
            ("train.rows_per_step".into(), run.rows_of_a_step(config.data.row_tokens).to_string()),
            ("train.seed".into(), run.seed.to_string()),
            ("train.features".into(), features_identity(features)),
            // Heads and embeddings are read in it, wherever features come from.
            ("precision".into(), precision(config, target)),
            ("products".into(), config.products.on(target.device()).to_owned()),
        ],
    };
    // What the trained tensors rest on, such as the draft's vocabulary.
    for (name, tensor) in start.binding_tensors()? {
        identity.values.push((format!("draft {name}"), tensor_hash(&tensor)?));
    }
    Ok(identity)
}

/// What ranks have to share: what decides the weights, and when ranks evaluate, save and exchange. Each machine may have
/// a configuration file of its own.
pub(super) fn among_ranks(
    identity: &RunIdentity,
    config: &TrainConfig,
    held_out: &DataSet,
) -> Result<RunIdentity> {
    let failed = |error| TrainError::checkpoint(&config.output, error);
    let mut run = serde_json::to_value(&config.train).map_err(failed)?;
    // Places of one store may have several names. The others are told above.
    for key in ["features", "steps", "seed"] {
        run.as_object_mut().map(|keys| keys.remove(key));
    }
    let parallel = serde_json::to_value(&config.parallel).map_err(failed)?;
    let mut all = identity.clone();
    all.values.extend([
        ("train".into(), run.to_string()),
        ("parallel".into(), parallel.to_string()),
        ("held-out rows".into(), format!("{:x}", rows_hash(held_out))),
    ]);
    Ok(all)
}

/// What the target's products take its weights as, which decides its features.
pub(super) fn precision(config: &TrainConfig, target: &Target) -> String {
    if target.holds_blocks() {
        return "stored".to_owned();
    }
    config.precision.frozen_type(!target.device().is_cpu()).as_str().to_owned()
}

fn hashed(documents: &[Document]) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    for document in documents {
        document.ids.iter().for_each(|id| {
            hasher.update(&id.to_le_bytes());
        });
        document.loss_mask.iter().for_each(|mask| {
            hasher.update(&[u8::from(*mask)]);
        });
    }
    hasher
}

/// Hash of rows, by their tokens and how these lie in them.
pub(super) fn rows_hash(set: &DataSet) -> u64 {
    let mut hasher = hashed(&set.documents);
    hasher.update(format!("{:?}", set.rows).as_bytes());
    let hash = hasher.finalize();
    hash.as_bytes()[..8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// A tensor's values as a short hash.
pub(super) fn tensor_hash(tensor: &Tensor) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let values: Vec<f64> = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
    values.iter().for_each(|value| {
        hasher.update(&value.to_le_bytes());
    });
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// A draft's values as a short hash.
fn fingerprint(draft: &dyn Draft) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    for parameter in draft.parameters() {
        hasher.update(parameter.name.as_bytes());
        let values: Vec<f32> = parameter.var.flatten_all()?.to_vec1()?;
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// Tokens of a row, how documents become rows where that is not the default, and how many pieces stand in none.
fn row_layout(config: &TrainConfig, train: &DataSet) -> String {
    let data = &config.data;
    let is_default = data.packing == Packing::default() && data.overlong == Overlong::default();
    let layout = if is_default {
        data.row_tokens.to_string()
    } else {
        format!("{} ({:?}, {:?})", data.row_tokens, data.packing, data.overlong)
    };
    match pieces_left_out(config, train) {
        0 => layout,
        pieces => format!("{layout} without {pieces} pieces"),
    }
}

/// Tells features with other values apart.
fn features_identity(features: &FeatureSource) -> String {
    match features {
        FeatureSource::Online(_) => "online".to_owned(),
        FeatureSource::Memory(_) => "memory".to_owned(),
        FeatureSource::Stored(store) => format!("stored {}", store.identity()),
        FeatureSource::Records(records) => format!("records {}", records.identity()),
    }
}
