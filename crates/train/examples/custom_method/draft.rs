//! The network and its files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Tensor, Var};
use longdraft_models::draft::files::save_draft;
use longdraft_models::draft::{Draft, DraftWeights, Parameter, VocabularyMap};
use longdraft_models::target_model::{Tap, Target};
use longdraft_models::weights::{TensorSpec, WeightSource};
use longdraft_models::{Result, TargetConfig};
use serde_json::{Value, json};

/// Tokens that are proposed.
pub(crate) const HEADS: usize = 2;

/// `W_1` and `W_2`, `[H, H]` each.
pub(crate) struct TwoHeads {
    weights: DraftWeights,
    hidden_size: usize,
}

/// Name and shape of every tensor.
pub(crate) fn tensor_specs(target: &TargetConfig) -> Vec<TensorSpec> {
    let size = target.hidden_size;
    (1..=HEADS).map(|head| TensorSpec::new(format!("head.{head}.weight"), &[size, size])).collect()
}

impl TwoHeads {
    fn build(target: &Target, value: impl Fn(&TensorSpec) -> Result<Tensor>) -> Result<Self> {
        let config = target.config();
        let parameter = |spec: &TensorSpec| {
            let var = Var::from_tensor(&value(spec)?.to_device(target.device())?)?;
            let (name, role) = (spec.name.clone(), spec.role);
            Ok(Parameter { name, var, role, decay: true, dead: false })
        };
        let parameters = tensor_specs(config).iter().map(parameter).collect::<Result<_>>()?;
        let weights = DraftWeights::new(parameters, config.rms_norm_eps);
        Ok(Self { weights, hidden_size: config.hidden_size })
    }

    /// Heads that say what the target says of the next token.
    pub(crate) fn initialise(target: &Target) -> Result<Self> {
        Self::build(target, |spec| {
            Ok(Tensor::zeros(spec.shape.as_slice(), DType::F32, target.device())?)
        })
    }

    /// As it was saved.
    pub(crate) fn from_source(source: &dyn WeightSource, target: &Target) -> Result<Self> {
        Self::build(target, |spec| source.load(&spec.name, DType::F32))
    }

    pub(crate) fn save(&self, folder: &Path, target_fingerprint: &str) -> Result<()> {
        let metadata = HashMap::from([("draft".to_owned(), self.method().to_owned())]);
        save_draft(folder, self.config_json(), metadata, &self.weights.named()?, target_fingerprint)
    }

    /// What the target's head reads for the token `head` after the next one, from 1.
    ///
    /// # Shapes
    /// - `hidden`: `[T, H]` → `[T, H]`
    pub(crate) fn states(&self, hidden: &Tensor, head: usize) -> Result<Tensor> {
        Ok((hidden + self.weights.project(hidden, &format!("head.{head}"))?)?)
    }
}

impl Draft for TwoHeads {
    fn method(&self) -> &'static str {
        "two-heads"
    }

    fn taps(&self) -> Vec<Tap> {
        vec![Tap::FinalHidden]
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        None
    }

    fn weights(&self) -> &DraftWeights {
        &self.weights
    }

    fn weights_mut(&mut self) -> &mut DraftWeights {
        &mut self.weights
    }

    fn config_json(&self) -> Value {
        json!({ "model_type": self.method(), "hidden_size": self.hidden_size })
    }
}
