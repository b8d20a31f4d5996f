//! A case's files and what its `meta.json` says of draft, loss and optimizer.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::method::eagle3::{
    Eagle3Compat, Eagle3Loss, Eagle3Objective, Eagle3ObjectiveConfig, MaskRule, OovRows,
};
use longdraft_train::optim::AdamWConfig;
use serde_json::{Value, json};

use crate::error::Result;
use crate::training::{self, SINGLE, Tolerance};
use crate::{Place, malformed};

/// Prefix of what the weights file holds of the target.
const OF_TARGET: &str = "target.";

/// A case's files and settings.
pub(super) struct Case<'a> {
    pub(super) folder: &'a Path,
    pub(super) meta: &'a Value,
    pub(super) place: &'a Place,
    records: SafetensorsSource,
    pub(super) weights: SafetensorsSource,
    pub(super) lengths: Vec<usize>,
    pub(super) tolerance: Tolerance,
}

/// What a case may be off that is stored in 16 bits.
const WIDE: Tolerance = Tolerance { loss: 1e-2, grad: 5e-2, weight: 2e-2, rate: 5e-2, count: 5e-2 };

impl<'a> Case<'a> {
    pub(super) fn open(folder: &'a Path, meta: &'a Value, place: &'a Place) -> Result<Self> {
        let file = |name: &str| SafetensorsSource::open_file(&folder.join(name));
        let lengths = meta["record_lengths"].as_array().and_then(|lengths| {
            lengths.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<Vec<_>>>()
        });
        let lengths = lengths
            .filter(|lengths| !lengths.is_empty() && !lengths.contains(&0))
            .ok_or_else(|| malformed(folder, "meta.json: `record_lengths` is missing"))?;
        let is_wide = meta["dtype"].as_str().is_some_and(|dtype| dtype.ends_with("float16"));
        let own = if is_wide { &WIDE } else { &SINGLE };
        Ok(Self {
            folder,
            meta,
            place,
            records: file("records.safetensors")?,
            weights: file("weights.safetensors")?,
            lengths,
            tolerance: Tolerance::of(meta, place, own),
        })
    }

    /// Steps of the case: public trainer's or, without `compat`, the default mode's.
    pub(super) fn steps(&self) -> Result<&'a Vec<Value>> {
        training::steps(self.folder, self.meta)
    }

    pub(super) fn record_tensor(&self, record: usize, name: &str) -> Result<Tensor> {
        let stored = format!("record.{record}.{name}");
        let tensor = self.records.load(&stored, DType::F32)?;
        match *tensor.dims() {
            [1, rows, width] if rows == self.lengths[record] => Ok(tensor.reshape((rows, width))?),
            _ => {
                let problem = format!("`{stored}` {:?} does not fit its record", tensor.dims());
                Err(malformed(self.folder, problem))
            }
        }
    }

    fn record_integers(&self, record: usize, name: &str) -> Result<Vec<i64>> {
        let stored = format!("record.{record}.{name}");
        let values = self.records.load_i64(&stored)?;
        if values.len() != self.lengths[record] {
            let problem = format!("`{stored}` has {} values", values.len());
            return Err(malformed(self.folder, problem));
        }
        Ok(values)
    }

    /// All records as documents of one packed batch.
    pub(super) fn batch(&self) -> Result<Batch> {
        let mut batch = Batch::default();
        for (record, &length) in self.lengths.iter().enumerate() {
            let first = batch.ids.len() as u32;
            let ids = self.record_integers(record, "input_ids")?;
            let mask = self.record_integers(record, "loss_mask")?;
            for id in ids {
                let id = u32::try_from(id)
                    .map_err(|_| malformed(self.folder, format!("token {id} is not an id")))?;
                batch.ids.push(id);
            }
            batch.position_ids.extend(0..length as u32);
            batch.document_ids.extend(std::iter::repeat_n(record as i32, length));
            let learned = (1..length).filter(|&t| mask[t] != 0);
            batch.learned.extend(learned.map(|t| first + t as u32 - 1));
            batch.loss_mask.extend(mask.iter().map(|bit| *bit != 0));
        }
        Ok(batch)
    }

    /// The records' features, document after document.
    pub(super) fn features(&self) -> Result<BatchFeatures> {
        let all = |name: &str| -> Result<Tensor> {
            let records = 0..self.lengths.len();
            let tensors = records.map(|record| self.record_tensor(record, name));
            Ok(Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)?
                .to_device(&self.place.device)?)
        };
        Ok(BatchFeatures {
            part: None,
            last_kv: None,
            aux_hidden: Some(all("aux_hidden_state")?),
            teacher: TeacherFeatures::EveryToken { hidden: all("hidden_state")? },
        })
    }

    /// The target's head, in the type that the case computes its logits in.
    pub(super) fn target_head(&self) -> Result<Tensor> {
        let dtype = match self.meta["dtype"].as_str() {
            Some("bfloat16") => DType::BF16,
            Some("float16") => DType::F16,
            _ => self.place.frozen,
        };
        let head = self.weights.load(&format!("{OF_TARGET}lm_head.weight"), dtype)?;
        Ok(head.to_device(&self.place.device)?)
    }

    /// The draft and the loss of the case's steps, or of one of its default modes.
    pub(super) fn objective(&self, mode: Option<&Value>) -> Result<Eagle3Objective> {
        let mut tensors = Vec::new();
        for name in self.weights.names() {
            if name.starts_with(OF_TARGET) {
                continue;
            }
            let tensor = if ["d2t", "t2d"].contains(&name.as_str()) {
                let values = self.weights.load_i64(&name)?;
                Tensor::from_slice(&values, values.len(), &Device::Cpu)?
            } else {
                self.weights.load(&name, DType::F32)?
            };
            tensors.push((name, tensor));
        }
        let embedding = self.weights.load("embed_tokens.weight", self.place.frozen)?;
        let embedding = embedding.to_device(&self.place.device)?;
        let config = self.draft_config(mode)?;
        let draft = Eagle3Draft::from_source(&MemorySource::new(tensors), &config, &embedding)?;
        Ok(Eagle3Objective::new(draft, &self.target_head()?, self.objective_config(mode)?)?)
    }

    fn draft_config(&self, mode: Option<&Value>) -> Result<Eagle3Config> {
        let objective = &self.meta["objective"];
        let mut config = self.meta["draft_config"].clone();
        if !config.is_object() {
            return Err(malformed(self.folder, "meta.json: `draft_config` is missing"));
        }
        if config["target_hidden_size"].is_null() {
            config["target_hidden_size"] = self.meta["target_config"]["hidden_size"].clone();
        }
        if !self.meta["capture_layers"].is_null() {
            let ids = self.meta["capture_layers"].clone();
            config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": ids});
        }
        if let Some(fc_norm) = objective["fc_norm"].as_bool() {
            config["fc_norm"] = fc_norm.into();
        }
        let norm_output = match mode {
            Some(mode) => &mode["norm_output"],
            None => &objective["norm_output_next_step"],
        };
        if let Some(norm_output) = norm_output.as_bool() {
            config["norm_output"] = norm_output.into();
        }
        let layers = self.meta["target_config"]["num_hidden_layers"].as_u64();
        Eagle3Config::from_json(&config, layers.map(|layers| layers as usize))
            .map_err(|problems| malformed(self.folder, format!("draft_config: {problems}")))
    }

    fn objective_config(&self, mode: Option<&Value>) -> Result<Eagle3ObjectiveConfig> {
        let of_steps = &self.meta["objective"];
        let own = mode.unwrap_or(&Value::Null);
        // A mode may override what the steps say.
        let find = |key: &str| if own[key].is_null() { &of_steps[key] } else { &own[key] };
        let unknown = |key: &str| malformed(self.folder, format!("meta.json: `{key}` is unknown"));
        let compat =
            (mode.is_none() && !self.meta["compat"].is_null()).then_some(Eagle3Compat::Specforge);
        let defaults = Eagle3ObjectiveConfig::default();
        let number = |key: &str, default: f64| find(key).as_f64().unwrap_or(default);
        if compat.is_some() && of_steps["loss_mask_shift"].as_u64().unwrap_or(0) != 0 {
            return Err(unknown("loss_mask_shift"));
        }
        let choice =
            |key: &str| -> &Value { if compat.is_some() { &Value::Null } else { find(key) } };
        Ok(Eagle3ObjectiveConfig {
            compat,
            ttt_steps: find("ttt_length")
                .as_u64()
                .map_or(defaults.ttt_steps, |steps| steps as usize),
            step_decay: number("step_decay", defaults.step_decay),
            step_weights: find("step_weights")
                .as_array()
                .map(|weights| weights.iter().filter_map(Value::as_f64).collect()),
            loss: match find("lk_type").as_str() {
                None => Eagle3Loss::Ce,
                Some("alpha") => Eagle3Loss::LkAlpha,
                Some("lambda") => Eagle3Loss::LkLambda,
                Some(_) => return Err(unknown("lk_type")),
            },
            kl_scale: number("lk_kl_scale", defaults.kl_scale),
            kl_decay: number("lk_kl_decay", defaults.kl_decay),
            mask_rule: match choice("mask_rule").as_str() {
                None | Some("contiguous") => MaskRule::Contiguous,
                Some("input") => MaskRule::Input,
                Some(_) => return Err(unknown("mask_rule")),
            },
            oov_rows: match choice("oov_rows").as_str() {
                None | Some("skip") => OovRows::Skip,
                Some("keep") => OovRows::Keep,
                Some(_) => return Err(unknown("oov_rows")),
            },
        })
    }

    pub(super) fn optimizer(&self) -> AdamWConfig {
        let defaults = AdamWConfig {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            clip_norm: 0.5,
            ..AdamWConfig::default()
        };
        training::optimizer(self.meta, &defaults)
    }
}
