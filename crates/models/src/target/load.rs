//! Building a target from its files: every tensor checked before the first one is read.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::experts::Expert;
use longdraft_kernels::matrix::Matrix;

use super::feed_forward::{FeedForward, GatedMlp, Mixture, Projection, SharedExpert};
use super::layer::{DecoderLayer, LayerSizes};
use super::names;
use super::{Table, Target};
use crate::config::TargetConfig;
use crate::error::{ModelError, Result};
use crate::tokenizer::TextTokenizer;
use crate::weights::gguf::{GgufSource, gguf_files};
use crate::weights::safetensors::SafetensorsSource;
use crate::weights::{TensorSpec, WeightSource, check_specs};

/// How to hold a target.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// f32, bf16 or f16; norms and biases are always f32.
    pub dtype: DType,
    /// Where to hold it.
    pub device: Device,
    /// Whether matrices that a file holds quantised stay so, where the products read their blocks.
    pub quantised: bool,
    /// Which layers are loaded.
    pub layers: Layers,
}

/// Which layers of a target are loaded. Embeddings, final norm and head always are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layers {
    /// All: the target can run.
    #[default]
    All,
    /// The last one alone, to start a draft from.
    Last,
    /// None; the files need not hold them.
    None,
}

impl Layers {
    fn of(self, layers: usize) -> std::ops::Range<usize> {
        match self {
            Self::All => 0..layers,
            Self::Last => layers.saturating_sub(1)..layers,
            Self::None => 0..0,
        }
    }

    /// Names and shapes of the tensors that are loaded.
    pub fn tensor_specs(self, config: &TargetConfig) -> Vec<TensorSpec> {
        names::specs_of(config, self.of(config.num_hidden_layers))
    }
}

impl Default for TargetOptions {
    fn default() -> Self {
        Self { dtype: DType::F32, device: Device::Cpu, quantised: false, layers: Layers::All }
    }
}

/// What a path turned out to be.
enum Files {
    Folder(Box<TargetConfig>, Box<SafetensorsSource>),
    Gguf(Box<GgufSource>),
}

fn files(path: &Path) -> Result<Files> {
    if path.is_file() {
        return match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors") => files(path.parent().unwrap_or(Path::new("."))),
            _ => Ok(Files::Gguf(Box::new(GgufSource::open(path)?))),
        };
    }
    if path.join("config.json").is_file() {
        let config = TargetConfig::from_file(&path.join("config.json"))?;
        let source = SafetensorsSource::open_folder(path)?;
        return Ok(Files::Folder(Box::new(config), Box::new(source)));
    }
    match gguf_files(path).as_slice() {
        [one] => Ok(Files::Gguf(Box::new(GgufSource::open(one)?))),
        [] => Err(no_target(path)),
        several => Err(ModelError::invalid(
            path,
            format!("{} .gguf files: name the one to load", several.len()),
        )),
    }
}

/// What a folder without any model is told.
fn no_target(path: &Path) -> ModelError {
    ModelError::invalid(
        path,
        "neither config.json nor a .gguf file is there: a target is a Hugging Face folder, \
         a GGUF file, or a hub model `org/name`",
    )
}

pub(super) fn open_tokenizer(path: &Path) -> Result<TextTokenizer> {
    let gguf = if path.is_file() && path.extension().is_none_or(|e| e != "safetensors") {
        Some(path.to_path_buf())
    } else if path.join("tokenizer.json").is_file() {
        None
    } else {
        gguf_files(path).into_iter().next()
    };
    match gguf {
        None if path.is_dir()
            && !path.join("config.json").is_file()
            && !path.join("tokenizer.json").is_file() =>
        {
            Err(no_target(path))
        }
        Some(gguf) => TextTokenizer::from_gguf(&GgufSource::open(&gguf)?),
        None if path.is_file() => {
            TextTokenizer::from_folder(path.parent().unwrap_or(Path::new(".")))
        }
        None => TextTokenizer::from_folder(path),
    }
}

/// The configuration alone; a folder needs no weights for it.
pub(super) fn open_config(path: &Path) -> Result<TargetConfig> {
    if path.join("config.json").is_file() {
        return TargetConfig::from_file(&path.join("config.json"));
    }
    Ok(match files(path)? {
        Files::Folder(config, _) => *config,
        Files::Gguf(source) => source.config().clone(),
    })
}

pub(super) fn open(path: &Path, options: &TargetOptions) -> Result<Target> {
    match files(path)? {
        Files::Folder(config, source) => build(*config, source.as_ref(), options),
        Files::Gguf(source) => build(source.config().clone(), source.as_ref(), options),
    }
}

/// Builds a target from any source that holds its tensors under their published names.
pub(crate) fn build(
    config: TargetConfig,
    source: &dyn WeightSource,
    options: &TargetOptions,
) -> Result<Target> {
    let specs = names::specs_of(&config, options.layers.of(config.num_hidden_layers));
    check_specs(source, &specs).into_result(source.path())?;
    let reader = Reader { config: &config, source, options };
    let embedding = reader.matrix("model.embed_tokens.weight")?;
    let head =
        if config.tie_word_embeddings { None } else { Some(reader.matrix("lm_head.weight")?) };
    let loaded = options.layers.of(config.num_hidden_layers);
    let layers = loaded.map(|layer| reader.layer(layer)).collect::<Result<_>>()?;
    let final_norm = reader.vector("model.norm.weight")?;
    Ok(Target {
        fingerprint: fingerprint(&config, &embedding, &final_norm)?,
        rope: config.rope.build(config.head_dim)?,
        embedding: Table::new(embedding),
        layers,
        final_norm,
        head: head.map(Table::new),
        device: options.device.clone(),
        config,
    })
}

/// Reads tensors that were checked before, in the form that is asked for.
struct Reader<'a> {
    config: &'a TargetConfig,
    source: &'a dyn WeightSource,
    options: &'a TargetOptions,
}

impl Reader<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let TargetOptions { dtype, device, quantised, .. } = self.options;
        if *quantised
            && matches!(device, Device::Cpu)
            && let Some(matrix) = self.source.load_quantised(name)?
        {
            return Ok(Matrix::Quantised(Arc::new(matrix)));
        }
        Ok(Matrix::Dense(self.source.load(name, *dtype)?.to_device(device)?))
    }

    /// What is held in f32 whatever the dtype.
    fn vector(&self, name: &str) -> Result<Tensor> {
        Ok(self.source.load(name, DType::F32)?.to_device(&self.options.device)?)
    }

    fn projection(&self, name: &str, bias: bool) -> Result<Projection> {
        let weight = self.matrix(&format!("{name}.weight"))?;
        let bias = bias.then(|| self.vector(&format!("{name}.bias"))).transpose()?;
        Ok(Projection { weight, bias })
    }

    fn layer(&self, index: usize) -> Result<DecoderLayer> {
        let config = self.config;
        let prefix = names::layer(index);
        let norm = |name: &str| self.vector(&format!("{prefix}{name}.weight"));
        let projection = |name: &str, bias| self.projection(&format!("{prefix}{name}"), bias);
        let qk_norm = if config.qk_norm() {
            Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?))
        } else {
            None
        };
        Ok(DecoderLayer {
            input_layernorm: norm("input_layernorm")?,
            q_proj: projection("self_attn.q_proj", config.qkv_bias)?,
            k_proj: projection("self_attn.k_proj", config.qkv_bias)?,
            v_proj: projection("self_attn.v_proj", config.qkv_bias)?,
            o_proj: projection("self_attn.o_proj", config.attention_output_bias)?,
            qk_norm,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            feed_forward: self.feed_forward(index)?,
            sizes: LayerSizes::new(config),
        })
    }

    fn feed_forward(&self, index: usize) -> Result<FeedForward> {
        let Some(experts) = self.config.experts_in(index) else {
            let prefix = format!("{}mlp", names::layer(index));
            return Ok(FeedForward::Dense(self.gated_mlp(&prefix, self.config.mlp_bias)?));
        };
        let names = names::experts(self.config.architecture, index);
        let shared = match experts.shared_expert_intermediate_size {
            Some(_) => Some(SharedExpert {
                gate: self.vector(&format!("{}_gate.weight", names.shared()))?,
                mlp: self.gated_mlp(&names.shared(), false)?,
            }),
            None => None,
        };
        let expert = |expert: usize| -> Result<Expert> {
            let [gate, up, down] = names.of(expert);
            Ok(Expert {
                gate: self.matrix(&gate)?,
                up: self.matrix(&up)?,
                down: self.matrix(&down)?,
            })
        };
        Ok(FeedForward::Experts(Mixture {
            router: self.vector(&names.router())?,
            experts: (0..experts.num_experts).map(expert).collect::<Result<_>>()?,
            experts_per_token: experts.num_experts_per_tok,
            normalise: experts.norm_topk_prob,
            shared,
        }))
    }

    fn gated_mlp(&self, prefix: &str, bias: bool) -> Result<GatedMlp> {
        Ok(GatedMlp {
            gate: self.projection(&format!("{prefix}.gate_proj"), bias)?,
            up: self.projection(&format!("{prefix}.up_proj"), bias)?,
            down: self.projection(&format!("{prefix}.down_proj"), bias)?,
        })
    }
}

/// Hash of the configuration, the final norm and a sample of embedding rows, all rounded to
/// bf16, so that the same weights held in another dtype have the same name.
fn fingerprint(config: &TargetConfig, embedding: &Matrix, final_norm: &Tensor) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{config:?}").as_bytes());
    let rows = config.vocab_size.min(64) as u32;
    let step = (config.vocab_size as u32 / rows).max(1);
    let sample: Vec<u32> = (0..rows).map(|row| row * step).collect();
    for tensor in [&embedding.rows(&sample)?, final_norm] {
        let values = tensor.flatten_all()?.to_dtype(DType::BF16)?.to_vec1::<half::bf16>()?;
        for value in values {
            hasher.update(&value.to_le_bytes());
        }
    }
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}
