//! What a checkpoint of pretraining holds: a readable model (`config.json`, `model.safetensors`),
//! both optimizers' state, the averaged weights, and the small state.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_models::draft::Parameter;
use longdraft_models::language_model::{
    Group, LanguageModel, LanguageModelConfig, group_of, save as save_model,
};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use serde::{Deserialize, Serialize};

use super::Progress;
use crate::checkpoint::{RunIdentity, seal};
use crate::error::{Result, TrainError};
use crate::optim::{MuonState, TensorState};

const STATE: &str = "state.json";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const AVERAGE: &str = "average.safetensors";

/// The small part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PretrainState {
    pub(super) progress: Progress,
    pub(super) metrics_bytes: u64,
    pub(super) identity: RunIdentity,
}

/// What is saved.
pub(super) struct Files<'a> {
    pub(super) state: &'a PretrainState,
    pub(super) config: &'a LanguageModelConfig,
    pub(super) tokenizer_hash: &'a str,
    pub(super) parameters: &'a [Parameter],
    pub(super) optimizer: &'a MuonState,
    pub(super) average: Option<&'a Average>,
}

/// What was read.
pub(super) struct Loaded {
    pub(super) state: PretrainState,
    pub(super) optimizer: MuonState,
    weights: HashMap<String, Tensor>,
    average: Option<(HashMap<String, Tensor>, u64)>,
}

fn named(parameters: &[Parameter]) -> Vec<(String, Tensor)> {
    parameters.iter().map(|p| (p.name.clone(), p.var.as_tensor().clone())).collect()
}

impl Files<'_> {
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
        save_model(folder, self.config, self.tokenizer_hash, &named(self.parameters))?;
        let mut tensors = Vec::new();
        let mut put = |prefix: &str, name: &str, values: &[f32]| -> Result<()> {
            let tensor = Tensor::from_slice(values, values.len(), &Device::Cpu)?;
            tensors.push((format!("{prefix}.{name}"), tensor));
            Ok(())
        };
        for (parameter, state) in self.parameters.iter().zip(&self.optimizer.tensors) {
            match state {
                TensorState::Muon(sum) => put("momentum", &parameter.name, sum)?,
                TensorState::Adam(first, second) => {
                    put("first", &parameter.name, first)?;
                    put("second", &parameter.name, second)?;
                }
            }
        }
        let steps = |steps: u64| HashMap::from([("step".to_owned(), steps.to_string())]);
        save(&folder.join(OPTIMIZER), &tensors, steps(self.optimizer.step))?;
        if let Some(average) = self.average {
            let tensors = average.tensors(self.parameters)?;
            save(&folder.join(AVERAGE), &tensors, steps(average.updates))?;
        }
        let text = serde_json::to_string_pretty(self.state).map_err(|error| fail(&error))?;
        std::fs::write(folder.join(STATE), text).map_err(|error| fail(&error))?;
        seal(folder)
    }
}

/// Reads a checkpoint whose manifest holds.
pub(super) fn load(folder: &Path) -> Result<Loaded> {
    let path = folder.join(STATE);
    let text =
        std::fs::read_to_string(&path).map_err(|error| TrainError::checkpoint(&path, error))?;
    let state: PretrainState =
        serde_json::from_str(&text).map_err(|error| TrainError::checkpoint(&path, error))?;
    let (weights, names) = tensors(&folder.join(MODEL))?;
    let source = SafetensorsSource::open_file(&folder.join(OPTIMIZER))?;
    let values = |prefix: &str, name: &str| -> Result<Vec<f32>> {
        let tensor = source.load(&format!("{prefix}.{name}"), DType::F32)?;
        Ok(tensor.flatten_all()?.to_vec1()?)
    };
    let mut states = HashMap::new();
    for name in &names {
        let state = match group_of(name) {
            Group::Matrix => TensorState::Muon(values("momentum", name)?),
            _ => TensorState::Adam(values("first", name)?, values("second", name)?),
        };
        states.insert(name.clone(), state);
    }
    let order = model_order(folder)?;
    let tensors_in_order = order.iter().filter_map(|name| states.remove(name)).collect();
    let optimizer = MuonState { tensors: tensors_in_order, step: step_of(&source, folder)? };
    let average = folder.join(AVERAGE);
    let average = if average.is_file() {
        let source = SafetensorsSource::open_file(&average)?;
        Some((tensors(&average)?.0, step_of(&source, folder)?))
    } else {
        None
    };
    Ok(Loaded { state, optimizer, weights, average })
}

/// Names in the order of the model's parameters.
fn model_order(folder: &Path) -> Result<Vec<String>> {
    let (model, _) = longdraft_models::language_model::open(folder)?;
    Ok(model.parameters().iter().map(|parameter| parameter.name.clone()).collect())
}

fn step_of(source: &SafetensorsSource, folder: &Path) -> Result<u64> {
    let step = source.metadata().get("step").and_then(|step| step.parse().ok());
    step.ok_or_else(|| TrainError::checkpoint(folder, "a file without a step"))
}

fn tensors(path: &Path) -> Result<(HashMap<String, Tensor>, Vec<String>)> {
    let source = SafetensorsSource::open_file(path)?;
    let names = source.names();
    let mut tensors = HashMap::new();
    for name in &names {
        tensors.insert(name.clone(), source.load(name, DType::F32)?);
    }
    Ok((tensors, names))
}

impl Loaded {
    /// Writes weights and averages into those of the run.
    pub(super) fn restore(
        &self,
        parameters: &[Parameter],
        average: &mut Option<Average>,
    ) -> Result<()> {
        let missing =
            |name: &str| TrainError::checkpoint("checkpoint", format!("no tensor `{name}`"));
        for parameter in parameters {
            let name = &parameter.name;
            let tensor = self.weights.get(name).ok_or_else(|| missing(name))?;
            if tensor.dims() != parameter.var.dims() {
                let problem = format!("tensor `{name}` has shape {:?}", tensor.dims());
                return Err(TrainError::checkpoint("checkpoint", problem));
            }
            parameter.var.set(tensor)?;
        }
        if let (Some(average), Some((tensors, updates))) = (average, &self.average) {
            average.updates = *updates;
            for (values, parameter) in average.values.iter_mut().zip(parameters) {
                let name = &parameter.name;
                let tensor = tensors.get(name).ok_or_else(|| missing(name))?;
                *values = tensor.flatten_all()?.to_vec1()?;
            }
        }
        Ok(())
    }
}

/// Averaged weights: a running mean until `horizon` steps, exponential from there.
#[derive(Debug, Clone)]
pub(super) struct Average {
    values: Vec<Vec<f32>>,
    updates: u64,
}

impl Average {
    pub(super) fn new(parameters: &[Parameter]) -> Result<Self> {
        let values = parameters.iter().map(|p| Ok(p.var.flatten_all()?.to_vec1()?));
        Ok(Self { values: values.collect::<Result<_>>()?, updates: 0 })
    }

    /// Adds the weights as they stand; `horizon` is in steps.
    pub(super) fn add(&mut self, parameters: &[Parameter], horizon: f64) -> Result<()> {
        self.updates += 1;
        let share = (1.0 / (self.updates as f64).min(horizon.max(1.0))) as f32;
        for (values, parameter) in self.values.iter_mut().zip(parameters) {
            let current: Vec<f32> = parameter.var.flatten_all()?.to_vec1()?;
            for (value, current) in values.iter_mut().zip(current) {
                *value += share * (current - *value);
            }
        }
        Ok(())
    }

    fn tensors(&self, parameters: &[Parameter]) -> Result<Vec<(String, Tensor)>> {
        let pairs = self.values.iter().zip(parameters);
        pairs
            .map(|(values, parameter)| {
                let shape = parameter.var.shape();
                let tensor = Tensor::from_slice(values, shape, &Device::Cpu)?;
                Ok((parameter.name.clone(), tensor))
            })
            .collect()
    }

    /// A model of the averages.
    pub(super) fn model(&self, of: &LanguageModel) -> Result<LanguageModel> {
        let source = MemorySource::new(self.tensors(of.parameters())?);
        Ok(LanguageModel::from_source(of.config(), &source)?.frozen()?)
    }
}
