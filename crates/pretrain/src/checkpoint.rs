//! What a checkpoint of pretraining holds: a readable model (`config.json`, `model.safetensors`),
//! both optimizers' state, the averaged weights, and the small state.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use longdraft_data::token_stream::Position;
use longdraft_models::draft::Parameter;
use longdraft_models::language_model::{
    Group, LanguageModel, LanguageModelConfig, group_of, save as save_model,
};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use longdraft_parallel::{DataParallel, Run};
use longdraft_train::checkpoint::optimizer_shards::{self, Moment, Moments};
use longdraft_train::checkpoint::{RunIdentity, read_json};
use longdraft_train::{Result, TrainError};
use serde::{Deserialize, Serialize};

use crate::muon::{MuonState, TensorState};

const STATE: &str = "state.json";
const MODEL: &str = "model.safetensors";
const AVERAGE: &str = "average.safetensors";

/// How far the run is.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) step: u64,
    pub(crate) tokens: u64,
    /// Training alone.
    pub(crate) elapsed_ms: f64,
    pub(crate) position: Position,
    pub(crate) clipped_steps: u64,
    pub(crate) ended: bool,
}

/// The small part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PretrainState {
    pub(crate) progress: Progress,
    pub(crate) metrics_bytes: u64,
    pub(crate) identity: RunIdentity,
}

/// What is saved.
pub(crate) struct Files<'a> {
    pub(crate) state: &'a PretrainState,
    pub(crate) config: &'a LanguageModelConfig,
    pub(crate) tokenizer_hash: &'a str,
    pub(crate) parameters: &'a [Parameter],
    /// This rank's state.
    pub(crate) optimizer: &'a MuonState,
    /// Which state that is.
    pub(crate) parallel: &'a DataParallel,
    pub(crate) average: Option<&'a Average>,
}

/// What was read.
pub(crate) struct Loaded {
    path: PathBuf,
    pub(crate) state: PretrainState,
    moments: Moments,
    weights: HashMap<String, Tensor>,
    average: Option<(HashMap<String, Tensor>, u64)>,
}

pub(crate) fn named(parameters: &[Parameter]) -> Vec<(String, Tensor)> {
    parameters.iter().map(|p| (p.name.clone(), p.var.as_tensor().clone())).collect()
}

impl Files<'_> {
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let mut moments = Vec::new();
        for (run, state) in self.parallel.runs().iter().zip(&self.optimizer.tensors) {
            let name = &self.parameters[run.parameter].name;
            let mut put = |kind: &str, values| {
                moments.push(Moment::held(format!("{kind}.{name}"), run.start, values));
            };
            match state {
                TensorState::Muon(sum) => put("momentum", sum),
                TensorState::Adam(first, second) => {
                    put("first", first);
                    put("second", second);
                }
            }
        }
        optimizer_shards::write(folder, self.parallel, moments, self.optimizer.step)?;
        if self.parallel.world().is_first() { self.write_common(folder) } else { Ok(()) }
    }

    /// What every rank holds, and the averages.
    fn write_common(&self, folder: &Path) -> Result<()> {
        let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
        save_model(folder, self.config, self.tokenizer_hash, &named(self.parameters))?;
        if let Some(average) = self.average {
            let tensors = average.tensors(self.parameters)?;
            let updates = HashMap::from([("step".to_owned(), average.updates.to_string())]);
            save(&folder.join(AVERAGE), &tensors, updates)?;
        }
        let text = serde_json::to_string_pretty(self.state).map_err(|error| fail(&error))?;
        std::fs::write(folder.join(STATE), text).map_err(|error| fail(&error))
    }
}

/// Reads the small part of a checkpoint.
pub(crate) fn read_state(folder: &Path) -> Result<PretrainState> {
    read_json(&folder.join(STATE))
}

/// Reads a checkpoint whose manifest holds.
pub(crate) fn load(folder: &Path) -> Result<Loaded> {
    let state = read_state(folder)?;
    let weights = tensors(&folder.join(MODEL))?;
    let moments = Moments::read(folder)?;
    let average = folder.join(AVERAGE);
    let average = if average.is_file() {
        let source = SafetensorsSource::open_file(&average)?;
        Some((tensors(&average)?, step_of(&source, folder)?))
    } else {
        None
    };
    Ok(Loaded { path: folder.to_path_buf(), state, moments, weights, average })
}

fn step_of(source: &SafetensorsSource, folder: &Path) -> Result<u64> {
    let step = source.metadata().get("step").and_then(|step| step.parse().ok());
    step.ok_or_else(|| TrainError::checkpoint(folder, "a file without a step"))
}

fn tensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    let source = SafetensorsSource::open_file(path)?;
    let names = source.names().into_iter();
    names.map(|name| Ok((name.clone(), source.load(&name, DType::F32)?))).collect()
}

impl Loaded {
    /// The state of what a rank updates, whatever number of ranks saved it. It fails where the file is damaged.
    pub(crate) fn optimizer(
        &self,
        parallel: &DataParallel,
        parameters: &[Parameter],
    ) -> Result<MuonState> {
        let of_run = |run: &Run| -> Result<TensorState> {
            let name = &parameters[run.parameter].name;
            let values = |kind: &str| self.moments.part(&format!("{kind}.{name}"), run);
            Ok(match group_of(name) {
                Group::Matrix => TensorState::Muon(values("momentum")?),
                _ => TensorState::Adam(values("first")?, values("second")?),
            })
        };
        let tensors = parallel.runs().iter().map(of_run).collect::<Result<_>>()?;
        Ok(MuonState { tensors, step: self.moments.step })
    }

    /// Writes weights and averages into those of the run.
    pub(crate) fn restore(
        &self,
        parameters: &[Parameter],
        average: &mut Option<Average>,
    ) -> Result<()> {
        let missing =
            |name: &str| TrainError::checkpoint(&self.path, format!("no tensor `{name}`"));
        for parameter in parameters {
            let name = &parameter.name;
            let tensor = self.weights.get(name).ok_or_else(|| missing(name))?;
            if tensor.dims() != parameter.var.dims() {
                let problem = format!("tensor `{name}` has shape {:?}", tensor.dims());
                return Err(TrainError::checkpoint(&self.path, problem));
            }
            parameter.var.set(&tensor.to_device(parameter.var.device())?)?;
        }
        let Some(average) = average else { return Ok(()) };
        // Where nothing was averaged before, it begins with these weights.
        *average = Average::new(parameters)?;
        if let Some((tensors, updates)) = &self.average {
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
pub(crate) struct Average {
    values: Vec<Vec<f32>>,
    updates: u64,
}

impl Average {
    pub(crate) fn new(parameters: &[Parameter]) -> Result<Self> {
        let values = parameters.iter().map(|p| Ok(p.var.flatten_all()?.to_vec1()?));
        Ok(Self { values: values.collect::<Result<_>>()?, updates: 0 })
    }

    /// Adds the weights as they stand; `horizon` is in steps.
    pub(crate) fn add(&mut self, parameters: &[Parameter], horizon: f64) -> Result<()> {
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
    pub(crate) fn model(&self, of: &LanguageModel) -> Result<LanguageModel> {
        let source = MemorySource::new(self.tensors(of.parameters())?);
        let model = LanguageModel::from_source(of.config(), &source)?;
        Ok(model.to_device(of.device())?.frozen()?)
    }
}
