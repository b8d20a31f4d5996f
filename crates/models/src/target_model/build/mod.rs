//! Decoder layers from named weights, wherever these come from.

mod feed_forward;
mod latent;
mod numbers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::{BlockFormat, Matrix, holds_blocks};
use longdraft_kernels::recurrence::Convolution;

use super::feed_forward::Projection;
use super::layer::{Attention, DecoderLayer, LayerSizes, Mixer};
use super::load::TargetOptions;
use super::names;
use super::per_layer::{InputGate, LayerEnd, PerLayerInputs};
use super::recurrent::{DeltaNet, Recurrent, Rule, ShortConvolution};
use super::tensor_parallel::LayerShare;
use crate::config::{self, DeltaNetConfig, LayerHeads, QkNorm, TargetConfig};
use crate::error::{Result, refused};
use crate::weights::WeightSource;

pub(super) use numbers::require_bounded;

/// What a target is built of, by published name.
pub(super) trait Weights {
    /// A weight of a projection or an embedding table.
    fn matrix(&self, name: &str) -> Result<Matrix>;

    /// What is held in f32 whatever the dtype: norms, biases, routers.
    fn vector(&self, name: &str) -> Result<Tensor>;

    /// What makes each head's keys and values of latent rows, `[r, plain]` and `[value, r]`, where the file
    /// holds every head apart (GGUF).
    fn latent_heads(&self, prefix: &str, heads: usize) -> Result<Option<Vec<(Matrix, Matrix)>>> {
        let _ = (prefix, heads);
        Ok(None)
    }
}

/// What makes the inputs that tokens bring to every layer, in families where they do.
pub(super) fn per_layer_inputs(
    config: &TargetConfig,
    weights: &dyn Weights,
) -> Result<Option<PerLayerInputs>> {
    if config.parts.per_layer_input == 0 {
        return Ok(None);
    }
    let [table, projection, of_norm] = names::PER_LAYER;
    Ok(Some(PerLayerInputs {
        table: weights.matrix(table)?,
        projection: weights.matrix(projection)?,
        norm: norm(config, weights, of_norm)?,
        eps: config.rms_norm_eps,
    }))
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
            (Some(quantised), _) if BlockFormat::named(quantised).is_some() => {
                let mut widened = self.widened.lock().unwrap_or_else(PoisonError::into_inner);
                widened.insert(quantised);
                *dtype
            }
            _ => *dtype,
        }
    }

    /// A table of a row for each token, whose values are numbers unless it is held as blocks.
    pub(super) fn table(&self, name: &str) -> Result<Matrix> {
        self.read(name, |table| numbers::require_finite(self.source.path(), name, table))
    }

    /// A matrix as it is to be held; one without blocks is looked at in main memory.
    fn read(&self, name: &str, look: impl FnOnce(&Tensor) -> Result<()>) -> Result<Matrix> {
        let TargetOptions { device, as_stored, .. } = self.options;
        if *as_stored
            && holds_blocks(device)
            && let Some(matrix) = self.source.load_quantised(name)?
        {
            self.has_blocks.store(true, Ordering::Relaxed);
            self.count(matrix.layout().0.name(), matrix.side_by_side().len());
            return Ok(Matrix::of_blocks(matrix, device)?);
        }
        let tensor = self.source.load(name, self.dense_type(name))?;
        let held = match tensor.dtype() {
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            _ => "F32",
        };
        look(&tensor)?;
        self.count(held, tensor.elem_count() * tensor.dtype().size_in_bytes());
        Ok(Matrix::Dense(tensor.to_device(device)?))
    }
}

impl Weights for FileWeights<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        self.read(name, |_| Ok(()))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        Ok(self.source.load(name, DType::F32)?.to_device(&self.options.device)?)
    }

    fn latent_heads(&self, prefix: &str, heads: usize) -> Result<Option<Vec<(Matrix, Matrix)>>> {
        let [keys, values] = names::OF_A_LATENT_HEAD;
        let of = |matrix: &str, head: usize| names::of_latent_head(prefix, matrix, head);
        if self.source.shape(&of(keys, 0)).is_none() {
            return Ok(None);
        }
        let pair = |head| Ok((self.matrix(&of(keys, head))?, self.matrix(&of(values, head))?));
        (0..heads).map(pair).collect::<Result<_>>().map(Some)
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
    let mixer = match config.mixer_of(index) {
        config::Mixer::Attention => match config.parts.latent {
            Some(latent) => Mixer::Latent(Box::new(parts.latent(config, latent, &prefix)?)),
            None => Mixer::Attention(parts.attention(config, index, &prefix)?),
        },
        config::Mixer::DeltaNet | config::Mixer::Convolution => {
            let Some(rule) = rule(config, weights, index)? else {
                return Err(refused("a recurrent layer without sizes"));
            };
            let net = config.parts.delta_net.filter(|_| rule.delta.is_some());
            let recurrent = if let Some(sizes) = net {
                let name = format!("{prefix}{}", names::DELTA_NET);
                Recurrent::Delta(Box::new(parts.delta_net(&name, sizes, config.rms_norm_eps)?))
            } else {
                let bias = config.parts.convolution.is_some_and(|own| own.bias);
                let own = |name: &str| format!("{prefix}{}.{name}", names::CONVOLUTION);
                Recurrent::Convolution(Box::new(ShortConvolution {
                    input: parts.outputs(&own("in_proj"), bias)?,
                    out: parts.inputs(&own("out_proj"), bias)?,
                }))
            };
            Mixer::Recurrent(recurrent, rule)
        }
    };
    Ok(DecoderLayer {
        norms: names::norms(config.parts.norms).try_map(|name| norm(name))?,
        norm_places: config.parts.norms,
        mixer,
        feed_forward: parts.feed_forward(config, index)?,
        end: parts.end(config, &prefix)?,
        sizes: LayerSizes::new(config, index, share),
        share: share.clone(),
    })
}

/// How the state of layer `index` steps, if it has one.
pub(super) fn rule(
    config: &TargetConfig,
    weights: &dyn Weights,
    index: usize,
) -> Result<Option<Arc<Rule>>> {
    let values =
        |name: String| -> Result<Vec<f32>> { Ok(weights.vector(&name)?.flatten_all()?.to_vec1()?) };
    let prefix = names::layer(index);
    let rule = match (config.mixer_of(index), config.parts.delta_net, config.parts.convolution) {
        (config::Mixer::DeltaNet, Some(net), _) => {
            let taps = values(format!("{prefix}{}.conv1d.weight", names::DELTA_NET))?;
            let convolution = Convolution::new(&taps, None, net.sizes.channels(), true)?;
            Rule { convolution, delta: Some(net.sizes) }
        }
        (config::Mixer::Convolution, _, Some(own)) => {
            let name = format!("{prefix}{}.conv", names::CONVOLUTION);
            let taps = values(format!("{name}.weight"))?;
            let bias = own.bias.then(|| values(format!("{name}.bias"))).transpose()?;
            let convolution = Convolution::new(&taps, bias, config.hidden_size, false)?;
            Rule { convolution, delta: None }
        }
        _ => return Ok(None),
    };
    Ok(Some(Arc::new(rule)))
}

/// A layer's matrices, cut to this rank's share.
struct Parts<'a> {
    weights: &'a dyn Weights,
    share: &'a LayerShare,
}

impl Parts<'_> {
    fn attention(&self, config: &TargetConfig, index: usize, prefix: &str) -> Result<Attention> {
        let LayerHeads { head_dim, .. } = config.heads_of(index);
        let has_keys = config.keys_owner(index).is_none();
        let has_values = has_keys && names::has_values(config, index);
        let outputs =
            |name: &str| self.outputs(&format!("{prefix}self_attn.{name}"), config.qkv_bias);
        let norm = |name: &str| norm(config, self.weights, &format!("{prefix}self_attn.{name}"));
        let qk_norm = match config.qk_norm() {
            QkNorm::PerHead | QkNorm::Whole => {
                let of_keys = has_keys.then(|| norm("k_norm.weight")).transpose()?;
                Some((norm("q_norm.weight")?, of_keys))
            }
            QkNorm::Unweighted | QkNorm::None => None,
        };
        // Values are only divided by their size: their norm's weight is one.
        let ones = qk_norm.as_ref().filter(|_| config.parts.value_norm);
        let v_norm = ones.map(|(norm, _): &(Tensor, _)| norm.ones_like()).transpose()?;
        let mut q_proj = outputs("q_proj")?;
        let mut gate = None;
        if config.parts.output_gate {
            // Of every head, rows of the query stand before as many of the gate.
            let rows = |half: usize| -> Vec<u32> {
                let of_head =
                    |head: usize| (2 * head + half) * head_dim..(2 * head + half + 1) * head_dim;
                (0..config.num_attention_heads).flat_map(of_head).map(|row| row as u32).collect()
            };
            gate = Some(q_proj.select(&rows(1))?);
            q_proj = q_proj.select(&rows(0))?;
        }
        let sinks = format!("{prefix}{}", names::SINKS);
        let sinks =
            config.parts.sinks.then(|| self.share.output_bias(&self.weights.vector(&sinks)?));
        let o_proj = format!("{prefix}self_attn.o_proj");
        Ok(Attention {
            sinks: sinks.transpose()?,
            q_proj,
            k_proj: has_keys.then(|| outputs("k_proj")).transpose()?,
            v_proj: has_values.then(|| outputs("v_proj")).transpose()?,
            v_norm,
            o_proj: self.inputs(&o_proj, config.attention_output_bias)?,
            gate,
            qk_norm,
        })
    }

    /// A gated delta net; rows that files hold by key head are put in the order of the heads.
    fn delta_net(&self, name: &str, net: DeltaNetConfig, eps: f64) -> Result<DeltaNet> {
        let vector = |tensor: &str| self.weights.vector(&format!("{name}.{tensor}"));
        let doubles = |tensor: Tensor| -> Result<Vec<f64>> {
            Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect())
        };
        let (qkv, gate) = if net.grouped_inputs {
            let all = self.outputs(&format!("{name}.in_proj_qkvz"), false)?;
            let (qkv, gate) = names::rows_by_key_head(net);
            (all.select(&qkv)?, all.select(&gate)?)
        } else {
            let outputs = |tensor: &str| self.outputs(&format!("{name}.{tensor}"), false);
            (outputs("in_proj_qkv")?, outputs("in_proj_z")?)
        };
        let (b, a) = if net.grouped_gates {
            let all = vector("in_proj_ba.weight")?;
            let of_head = net.sizes.value_heads / net.sizes.key_heads;
            let rows = |half: usize| -> Result<Tensor> {
                let of_key =
                    |key: usize| (2 * key + half) * of_head..(2 * key + half + 1) * of_head;
                let rows = (0..net.sizes.key_heads).flat_map(of_key).map(|row| row as u32);
                let rows = Tensor::new(rows.collect::<Vec<_>>(), all.device())?;
                Ok(all.index_select(&rows, 0)?)
            };
            (rows(0)?, rows(1)?)
        } else {
            (vector("in_proj_b.weight")?, vector("in_proj_a.weight")?)
        };
        let rates = if net.negated_rates {
            doubles(vector("A")?)?
        } else {
            doubles(vector("A_log")?)?.into_iter().map(|log| -log.exp()).collect()
        };
        Ok(DeltaNet {
            qkv,
            gate,
            b,
            a,
            rates,
            dt: doubles(vector("dt_bias")?)?,
            norm: vector("norm.weight")?,
            eps,
            out: self.inputs(&format!("{name}.out_proj"), false)?,
        })
    }

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

    /// What a layer does at its end.
    fn end(&self, config: &TargetConfig, prefix: &str) -> Result<LayerEnd> {
        let parts = &config.parts;
        let inputs = match parts.per_layer_input {
            0 => None,
            _ => Some(InputGate {
                gate: self.outputs(&format!("{prefix}per_layer_input_gate"), false)?,
                projection: self.outputs(&format!("{prefix}per_layer_projection"), false)?,
                norm: norm(
                    config,
                    self.weights,
                    &format!("{prefix}post_per_layer_input_norm.weight"),
                )?,
                eps: config.rms_norm_eps,
            }),
        };
        let scalar = |name: String| -> Result<Option<f64>> {
            let values = self.weights.vector(&name)?.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.first().copied().map(f64::from))
        };
        let scalar =
            if parts.layer_scalars { scalar(format!("{prefix}layer_scalar"))? } else { None };
        Ok(LayerEnd { inputs, scalar })
    }
}
