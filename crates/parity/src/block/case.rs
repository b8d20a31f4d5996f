//! A case's tensors and what its `meta.json` says of network and loss.

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::draft::block::{BlockConfig, BlockDraft, tensor_specs};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockLoss, BlockObjective, Divisor, SelectorLoss, SlotWeights,
};
use longdraft_train::method::dspark::{ChainLoss, ChainObjective};
use longdraft_train::objective::Objective;
use serde_json::{Value, json};

use crate::error::{ParityError, Result};
use crate::training::{SINGLE, Tolerance};
use crate::{Place, malformed, stored};

/// Where a published network's reach ends; no case gets there.
const CONTEXT: usize = 1 << 20;

/// The target's frozen tensors. One that is tied has no head of its own.
const TABLE: &str = "in.embed";
const HEAD: &str = "in.head";

/// What a case may say of its loss.
const LOSSES: &str =
    "dflash, dpace, dpace-cumulative-confidence-only and dpace-continuation-value-only";
const DIVISORS: &str = "weights and rows";
const SELECTOR_DIVISORS: &str = "over_base_weights and over_hit_weights";

/// A case's file and settings.
pub(super) struct Case<'a> {
    folder: &'a Path,
    meta: &'a Value,
    pub(super) place: &'a Place,
    file: SafetensorsSource,
    pub(super) config: BlockConfig,
    pub(super) rows: Vec<Row>,
    pub(super) tolerance: Tolerance,
}

/// A row of tokens with its blocks that count.
#[derive(Clone)]
pub(super) struct Row {
    pub(super) batch: Batch,
    /// Where the blocks begin.
    pub(super) anchors: Vec<usize>,
    /// The same blocks among those of all rows.
    pub(super) places: Vec<usize>,
    /// Blocks of the row, whether they count or not.
    blocks: usize,
}

impl<'a> Case<'a> {
    pub(super) fn open(folder: &'a Path, meta: &'a Value, place: &'a Place) -> Result<Self> {
        let file = SafetensorsSource::open_file(&folder.join("case.safetensors"))?;
        let config = config(folder, meta, &file)?;
        let tolerance = Tolerance::of(&Value::Null, place, &SINGLE);
        let rows = rows(folder, &file)?;
        check_shapes(folder, &file, (&config, &rows))?;
        Ok(Self { folder, meta, place, file, config, rows, tolerance })
    }

    pub(super) fn malformed(&self, problem: impl std::fmt::Display) -> ParityError {
        malformed(self.folder, problem)
    }

    /// A number of `meta.json`, if it is there.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.meta[key].as_f64()
    }

    /// A tensor in f32, on the host.
    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        Ok(self.file.load(name, DType::F32)?)
    }

    /// The same, if the case holds it.
    pub(super) fn optional(&self, name: &str) -> Result<Option<Tensor>> {
        stored(&self.file, name)
    }

    pub(super) fn integers(&self, name: &str) -> Result<Vec<i64>> {
        Ok(self.file.load_integers(name)?)
    }

    /// Ids of the target's vocabulary.
    pub(super) fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let id = |value: i64| {
            let id = u32::try_from(value).ok().filter(|id| (*id as usize) < self.config.vocab_size);
            id.ok_or_else(|| self.malformed(format!("`{name}`: {value} is not a token")))
        };
        self.integers(name)?.into_iter().map(id).collect()
    }

    fn frozen(&self, name: &str) -> Result<Tensor> {
        Ok(self.file.load(name, self.place.frozen)?.to_device(&self.place.device)?)
    }

    /// The target's head, `[V, H]`: its table where the case holds no other.
    pub(super) fn head(&self) -> Result<Tensor> {
        let name = if self.file.shape(HEAD).is_some() { HEAD } else { TABLE };
        self.frozen(name)
    }

    /// Blocks of all rows, those that are not kept included.
    pub(super) fn blocks(&self) -> usize {
        self.rows.iter().map(|row| row.blocks).sum()
    }

    /// The tapped layers of a row, `[T, A·H]`.
    pub(super) fn features(&self, row: usize) -> Result<Tensor> {
        Ok(self.tensor("in.features")?.get(row)?.to_device(&self.place.device)?)
    }

    /// The target's final states of a row, `[T, H]`.
    fn last_hidden(&self, row: usize) -> Result<Tensor> {
        Ok(self.tensor("in.last_hidden")?.get(row)?.to_device(&self.place.device)?)
    }

    pub(super) fn batch_features(&self, row: usize) -> Result<BatchFeatures> {
        Ok(BatchFeatures {
            part: None,
            last_kv: None,
            aux_hidden: Some(self.features(row)?),
            teacher: match self.config.chain {
                Some(_) => TeacherFeatures::EveryToken { hidden: self.last_hidden(row)? },
                None => TeacherFeatures::None,
            },
        })
    }

    /// The draft with its loss, over the case's blocks.
    pub(super) fn objective(&self) -> Result<Box<dyn Objective>> {
        let tensors = tensor_specs(&self.config).into_iter().map(|spec| {
            let value = self.tensor(&format!("w.{}", spec.name))?;
            Ok((spec.name, value))
        });
        let source = MemorySource::new(tensors.collect::<Result<Vec<_>>>()?);
        let draft = BlockDraft::from_source(&source, &self.config, &self.frozen(TABLE)?)?;
        let starts: Vec<Vec<usize>> = self.rows.iter().map(|row| row.anchors.clone()).collect();
        let starts = move |batch: &Batch| starts[batch.row].clone();
        let (head, draws) = (self.head()?, BlockDraws { seed: 0, budget: BlockBudget::PerRow(1) });
        if self.config.chain.is_some() {
            let objective = ChainObjective::new(draft, &head, self.chain_loss(), draws);
            return Ok(Box::new(objective.with_starts(starts)));
        }
        let objective = BlockObjective::new(draft, &head, self.loss()?, draws);
        Ok(Box::new(objective.with_starts(starts)))
    }

    fn chain_loss(&self) -> ChainLoss {
        let weight = |key: &str| self.meta["loss_weights"][key].as_f64().unwrap_or_default();
        let gamma = self.number("gamma");
        ChainLoss {
            weights: if gamma.is_some() { SlotWeights::Decay } else { SlotWeights::Uniform },
            decay: gamma.unwrap_or(1.0),
            hard: weight("ce"),
            distance: weight("l1"),
            confidence: weight("confidence"),
            ..ChainLoss::default()
        }
    }

    /// A word of `meta.json`, if it is there, of those that are `known`.
    fn said(&self, key: &'static str, known: &'static str) -> Result<Option<&str>> {
        let value = &self.meta[key];
        let word = value.as_str();
        if word.is_none() && !value.is_null() {
            return Err(self.unknown(key, known));
        }
        Ok(word)
    }

    fn unknown(&self, key: &'static str, known: &'static str) -> ParityError {
        let (folder, value) = (self.folder.to_path_buf(), self.meta[key].to_string());
        ParityError::UnknownValue { folder, key, value, known }
    }

    fn loss(&self) -> Result<BlockLoss> {
        let gamma = self.number("gamma");
        let weights = match self.said("loss_type", LOSSES)? {
            None | Some("dflash") if gamma.is_none() => SlotWeights::Uniform,
            None | Some("dflash") => SlotWeights::Decay,
            Some("dpace") => SlotWeights::Dpace,
            Some("dpace-cumulative-confidence-only") => SlotWeights::DpaceConfidence,
            Some("dpace-continuation-value-only") => SlotWeights::DpaceContinuation,
            Some(_) => return Err(self.unknown("loss_type", LOSSES)),
        };
        let divide_by = match self.said("divisor", DIVISORS)? {
            None | Some("weights") => Divisor::Weights,
            Some("rows") => Divisor::Rows,
            Some(_) => return Err(self.unknown("divisor", DIVISORS)),
        };
        let over_hits = match self.said("selector_divisor", SELECTOR_DIVISORS)? {
            None | Some("over_base_weights") => false,
            Some("over_hit_weights") => true,
            Some(_) => return Err(self.unknown("selector_divisor", SELECTOR_DIVISORS)),
        };
        let selector = self.number("selector_loss_weight").map(|weight| SelectorLoss {
            weight,
            over_hits,
            keeps_labels: false,
            stops_gradient: false,
        });
        Ok(BlockLoss {
            weights,
            decay: gamma.unwrap_or(1.0),
            alpha: self.number("alpha").unwrap_or(0.5),
            divide_by,
            selector,
            ..BlockLoss::default()
        })
    }
}

/// What a case says of the network, checked as the `config.json` of a draft is.
fn config(folder: &Path, meta: &Value, file: &SafetensorsSource) -> Result<BlockConfig> {
    let size = |name: &str, dimension: usize| {
        let shape = file.shape(name).filter(|shape| shape.len() == 2);
        let missing = || malformed(folder, format!("`{name}` is not a matrix"));
        shape.map(|shape| shape[dimension]).ok_or_else(missing)
    };
    let is_layer =
        |name: &&String| name.starts_with("w.layers.") && name.ends_with(".input_layernorm.weight");
    let mut value = json!({
        "hidden_size": size(TABLE, 1)?,
        "vocab_size": size(TABLE, 0)?,
        "intermediate_size": size("w.layers.0.mlp.up_proj.weight", 0)?,
        "num_hidden_layers": file.names().iter().filter(is_layer).count(),
        "num_attention_heads": meta["heads"],
        "num_key_value_heads": meta["kv_heads"],
        "rms_norm_eps": meta["eps"],
        "max_position_embeddings": CONTEXT,
        "selector_top_k": meta["top_k"],
        "enable_confidence_head": file.shape("w.confidence_head.proj.weight").is_some(),
    });
    for key in [
        "num_target_layers",
        "head_dim",
        "rope_theta",
        "attention_bias",
        "layer_types",
        "sliding_window",
        "is_causal",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "markov_rank",
        "markov_head_type",
        "confidence_head_with_markov",
        "input_embedding_scale",
    ] {
        value[key] = meta[key].clone();
    }
    // A case that names no rank has a chain without a table.
    if meta["kind"] == "dspark" && value["markov_rank"].is_null() {
        value["markov_rank"] = json!(0);
    }
    count_embeddings(&mut value);
    BlockConfig::from_json(&value, None)
        .map_err(|problems| malformed(folder, format!("meta.json: {problems}")))
}

/// Checks the tensors whose shapes follow from the network and the rows; the draft's own are checked as it is built.
fn check_shapes(
    folder: &Path,
    file: &SafetensorsSource,
    (config, rows): (&BlockConfig, &[Row]),
) -> Result<()> {
    let (hidden, vocabulary) = (config.hidden_size, config.vocab_size);
    let tokens = rows.first().map_or(0, |row| row.batch.ids.len());
    let slots = rows.first().map_or(0, |row| row.blocks * config.block_size);
    let features = config.target_layers.len() * hidden;
    for (tensor, expected) in [
        ("in.features", vec![rows.len(), tokens, features]),
        ("in.last_hidden", vec![rows.len(), tokens, hidden]),
        (HEAD, vec![vocabulary, hidden]),
        ("out.hidden", vec![rows.len(), slots, hidden]),
    ] {
        let Some(found) = file.shape(tensor).filter(|found| *found != expected) else { continue };
        let (folder, tensor) = (folder.to_path_buf(), tensor.to_owned());
        return Err(ParityError::Shape { folder, tensor, found, expected });
    }
    Ok(())
}

/// Layer −1 is the output of the embeddings, as some trainers count. A case brings its features like any layer's, so
/// all layers may count from it.
fn count_embeddings(value: &mut Value) {
    let listed = value["target_layer_ids"].as_array();
    let ids: Option<Vec<i64>> = listed.and_then(|ids| ids.iter().map(Value::as_i64).collect());
    let Some(ids) = ids.filter(|ids| ids.first() == Some(&-1)) else { return };
    let layers = value["num_target_layers"].as_u64().map(|layers| layers.saturating_add(1));
    value["target_layer_ids"] = ids.iter().map(|id| id.saturating_add(1)).collect();
    value["num_target_layers"] = json!(layers);
}

fn rows(folder: &Path, file: &SafetensorsSource) -> Result<Vec<Row>> {
    let rows = |name: &str| -> Result<[usize; 2]> {
        let shape = file.shape(name).and_then(|shape| shape.try_into().ok());
        shape.ok_or_else(|| malformed(folder, format!("`{name}` is not a matrix")))
    };
    let ([count, tokens], [other, blocks]) = (rows("in.input_ids")?, rows("in.anchors")?);
    let same = count == other && rows("in.loss_mask")? == [count, tokens];
    let features = file.shape("in.features");
    let same = same && features.is_none_or(|shape| shape.starts_with(&[count, tokens]));
    if !same || rows("in.keep")? != [count, blocks] || count == 0 {
        return Err(malformed(folder, "ids, masks, anchors and features are of different rows"));
    }
    let (ids, anchors) = (file.load_integers("in.input_ids")?, file.load_integers("in.anchors")?);
    let flags = |name: &str| -> Result<Vec<bool>> {
        let values = file.load_as_stored(name)?.to_dtype(DType::F32)?.flatten_all()?;
        Ok(values.to_vec1::<f32>()?.into_iter().map(|flag| flag > 0.0).collect())
    };
    let (keep, mask) = (flags("in.keep")?, flags("in.loss_mask")?);
    let index = |value: i64, most: usize| {
        let fits = usize::try_from(value).ok().filter(|value| *value < most);
        fits.ok_or_else(|| malformed(folder, format!("{value} is not an id or anchor")))
    };
    let row = |row: usize| -> Result<Row> {
        let of_tokens: Range<usize> = row * tokens..(row + 1) * tokens;
        let places: Vec<usize> =
            (row * blocks..(row + 1) * blocks).filter(|place| keep[*place]).collect();
        let of_blocks = places.iter().map(|place| index(anchors[*place], tokens));
        let of_ids = ids[of_tokens.clone()].iter().map(|id| Ok(index(*id, 1 << 31)? as u32));
        let (of_ids, loss_mask) = (of_ids.collect::<Result<Vec<u32>>>()?, mask[of_tokens].to_vec());
        let batch = Batch { loss_mask, row, ..Batch::of_document(of_ids) };
        Ok(Row { batch, anchors: of_blocks.collect::<Result<_>>()?, places, blocks })
    };
    (0..count).map(row).collect()
}
