//! Decoder layers from named weights, wherever these come from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::experts::Expert;
use longdraft_kernels::matrix::{BlockFormat, Matrix};

use super::feed_forward::{FeedForward, GatedMlp, Mixture, Projection, Router, SharedExpert};
use super::layer::{DecoderLayer, LayerSizes};
use super::load::TargetOptions;
use super::names;
use super::tensor::LayerShare;
use crate::config::{Activation, QkNorm, Router as Choice, TargetConfig};
use crate::error::Result;
use crate::weights::WeightSource;

/// What a target is built of, by published name.
pub(super) trait Weights {
    /// A weight of a projection or an embedding table.
    fn matrix(&self, name: &str) -> Result<Matrix>;

    /// What is held in f32 whatever the dtype: norms, biases, routers.
    fn vector(&self, name: &str) -> Result<Tensor>;
}

/// Tensors that were checked before, in the form that is asked for.
pub(super) struct FileWeights<'a> {
    pub(super) source: &'a dyn WeightSource,
    pub(super) options: &'a TargetOptions,
    /// Whether a matrix was held as quantised blocks.
    pub(super) has_blocks: AtomicBool,
    /// Quantised types that were wanted as stored, and are held as floats.
    pub(super) widened: Mutex<BTreeSet<&'static str>>,
    /// Bytes of matrices by the type in which they are held.
    pub(super) held: Mutex<BTreeMap<&'static str, u64>>,
}

impl<'a> FileWeights<'a> {
    pub(super) fn new(source: &'a dyn WeightSource, options: &'a TargetOptions) -> Self {
        Self {
            source,
            options,
            has_blocks: AtomicBool::new(false),
            widened: Mutex::default(),
            held: Mutex::default(),
        }
    }

    fn count(&self, name: &'static str, bytes: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held.entry(name).or_default() += bytes as u64;
    }

    /// The type in which a matrix without blocks is held: 16-bit floats of the file stay such where
    /// products read them without a copy, with the bits of their f32 values.
    fn dense_type(&self, name: &str) -> DType {
        let TargetOptions { dtype, device, as_stored, .. } = self.options;
        let stored = self.source.stored_type(name).filter(|_| *as_stored);
        match (stored, device) {
            (Some("BF16"), Device::Cpu | Device::Cuda(_)) => DType::BF16,
            (Some("F16"), Device::Cpu) => DType::F16,
            (Some(quantised), _) if BlockFormat::ALL.iter().any(|f| f.name() == quantised) => {
                let mut widened = self.widened.lock().unwrap_or_else(PoisonError::into_inner);
                widened.insert(quantised);
                *dtype
            }
            _ => *dtype,
        }
    }
}

impl Weights for FileWeights<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let TargetOptions { device, as_stored, .. } = self.options;
        if *as_stored
            && matches!(device, Device::Cpu)
            && let Some(matrix) = self.source.load_quantised(name)?
        {
            self.has_blocks.store(true, Ordering::Relaxed);
            self.count(matrix.layout().0.name(), matrix.side_by_side().len());
            return Ok(Matrix::Quantised(Arc::new(matrix)));
        }
        let tensor = self.source.load(name, self.dense_type(name))?;
        let held = match tensor.dtype() {
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            _ => "F32",
        };
        self.count(held, tensor.elem_count() * tensor.dtype().size_in_bytes());
        Ok(Matrix::Dense(tensor.to_device(device)?))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        Ok(self.source.load(name, DType::F32)?.to_device(&self.options.device)?)
    }
}

/// The weight of a norm, as it multiplies.
pub(super) fn norm(config: &TargetConfig, weights: &dyn Weights, name: &str) -> Result<Tensor> {
    let stored = weights.vector(name)?;
    Ok(if config.parts.norms_less_one { (stored + 1.0)? } else { stored })
}

/// Builds layer `index`, or this rank's share of it.
pub(super) fn layer(
    config: &TargetConfig,
    weights: &dyn Weights,
    index: usize,
    share: &LayerShare,
) -> Result<DecoderLayer> {
    let prefix = names::layer(index);
    let parts = Parts { weights, share };
    let norm = |name: &str| norm(config, weights, &format!("{prefix}{name}"));
    let outputs = |name: &str| parts.outputs(&format!("{prefix}{name}"), config.qkv_bias);
    let [q_norm, k_norm] = names::QK_NORMS;
    let qk_norm = match config.qk_norm() {
        QkNorm::PerHead | QkNorm::Whole => Some((norm(q_norm)?, norm(k_norm)?)),
        QkNorm::Unweighted | QkNorm::None => None,
    };
    let sinks = format!("{prefix}{}", names::SINKS);
    let sinks = config.parts.sinks.then(|| share.output_bias(&weights.vector(&sinks)?));
    let o_proj = format!("{prefix}self_attn.o_proj");
    Ok(DecoderLayer {
        norms: names::norms(config.parts.norms).try_map(|name| norm(name))?,
        norm_places: config.parts.norms,
        q_proj: outputs("self_attn.q_proj")?,
        k_proj: outputs("self_attn.k_proj")?,
        v_proj: outputs("self_attn.v_proj")?,
        o_proj: parts.inputs(&o_proj, config.attention_output_bias)?,
        qk_norm,
        sinks: sinks.transpose()?,
        feed_forward: parts.feed_forward(config, index)?,
        sizes: LayerSizes::new(config, index, share),
        share: share.clone(),
    })
}

/// A layer's matrices, cut to this rank's share.
struct Parts<'a> {
    weights: &'a dyn Weights,
    share: &'a LayerShare,
}

impl Parts<'_> {
    /// A projection of which the ranks hold some outputs each.
    fn outputs(&self, name: &str, bias: bool) -> Result<Projection> {
        let weight = self.output_rows(&format!("{name}.weight"))?;
        let bias = bias.then(|| self.weights.vector(&format!("{name}.bias"))).transpose()?;
        let bias = bias.map(|bias| self.share.output_bias(&bias)).transpose()?;
        Ok(Projection { weight, bias })
    }

    /// A projection of which the ranks hold some inputs each.
    fn inputs(&self, name: &str, bias: bool) -> Result<Projection> {
        let weight = self.input_columns(&format!("{name}.weight"))?;
        let bias = bias.then(|| self.weights.vector(&format!("{name}.bias"))).transpose()?;
        let bias = bias.map(|bias| self.share.start(&bias)).transpose()?;
        Ok(Projection { weight, bias })
    }

    fn output_rows(&self, name: &str) -> Result<Matrix> {
        self.share.outputs(self.weights.matrix(name)?)
    }

    fn input_columns(&self, name: &str) -> Result<Matrix> {
        self.share.inputs(name, self.weights.matrix(name)?)
    }

    fn feed_forward(&self, config: &TargetConfig, index: usize) -> Result<FeedForward> {
        let Some(experts) = config.experts_in(index) else {
            let prefix = names::mlp(config.architecture, index);
            let mlp = self.gated_mlp(&prefix, config.mlp_bias, config.parts.activation)?;
            return Ok(FeedForward::Dense(mlp));
        };
        let names = names::experts(config.architecture, index);
        let shared = match experts.shared_expert_intermediate_size {
            Some(_) => Some(SharedExpert {
                gate: config
                    .parts
                    .router
                    .gates_shared_expert()
                    .then(|| self.weights.vector(&format!("{}_gate.weight", names.shared())))
                    .transpose()?,
                mlp: self.gated_mlp(&names.shared(), false, Activation::Silu)?,
            }),
            None => None,
        };
        let expert = |expert: usize| -> Result<Expert> {
            let [gate, up, down] = names.of(expert);
            Ok(Expert {
                gate: self.output_rows(&gate)?,
                up: self.output_rows(&up)?,
                down: self.input_columns(&down)?,
                biases: config
                    .parts
                    .expert_biases
                    .then(|| self.expert_biases(names.biases_of(expert)))
                    .transpose()?,
                clamped: config.parts.clamped,
            })
        };
        let of_router = &config.parts.router;
        let bias =
            names.router_bias(of_router).map(|name| self.weights.vector(&name)).transpose()?;
        Ok(FeedForward::Experts(Mixture {
            router: match (of_router, bias) {
                (Choice::SigmoidOnInput, _) => Router::SigmoidOnInput,
                (Choice::Sigmoid { .. }, Some(bias)) => of_router
                    .sigmoid(bias.to_vec1()?)
                    .map_or(Router::Softmax(None), Router::Sigmoid),
                (_, bias) => Router::Softmax(bias),
            },
            router_weight: self.weights.vector(&names.router())?,
            experts: (0..experts.num_experts).map(expert).collect::<Result<_>>()?,
            experts_per_token: experts.num_experts_per_tok,
            normalise: experts.norm_topk_prob,
            shared,
        }))
    }

    /// Biases of an expert's matrices: the ranks hold some inner states each, and the first adds the last one.
    fn expert_biases(&self, names: [String; 3]) -> Result<[Tensor; 3]> {
        let [gate, up, down] = names;
        let inner = |name: &str| self.share.output_bias(&self.weights.vector(name)?);
        Ok([inner(&gate)?, inner(&up)?, self.share.start(&self.weights.vector(&down)?)?])
    }

    fn gated_mlp(&self, prefix: &str, bias: bool, activation: Activation) -> Result<GatedMlp> {
        Ok(GatedMlp {
            activation,
            gate: self.outputs(&format!("{prefix}.gate_proj"), bias)?,
            up: self.outputs(&format!("{prefix}.up_proj"), bias)?,
            down: self.inputs(&format!("{prefix}.down_proj"), bias)?,
        })
    }
}
