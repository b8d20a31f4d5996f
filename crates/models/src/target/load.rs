//! Building a target from its files: every tensor checked before the first one is read.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::Matrix;

use super::layer::{DecoderLayer, LayerSizes, Projection};
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

/// Every tensor of a target, published names.
pub fn tensor_specs(config: &TargetConfig) -> Vec<TensorSpec> {
    specs_of(config, Layers::All)
}

/// Tensors of a target of which only some layers are loaded.
fn specs_of(config: &TargetConfig, loaded: Layers) -> Vec<TensorSpec> {
    let hidden = config.hidden_size;
    let mut specs = vec![
        TensorSpec::new("model.embed_tokens.weight", &[config.vocab_size, hidden]),
        TensorSpec::new("model.norm.weight", &[hidden]),
    ];
    if !config.tie_word_embeddings {
        specs.push(TensorSpec::new("lm_head.weight", &[config.vocab_size, hidden]));
    }
    for layer in loaded.of(config.num_hidden_layers) {
        let prefix = format!("model.layers.{layer}.");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            specs.push(TensorSpec::new(format!("{prefix}{norm}.weight"), &[hidden]));
        }
        if config.qk_norm() {
            for norm in ["q_norm", "k_norm"] {
                let name = format!("{prefix}self_attn.{norm}.weight");
                specs.push(TensorSpec::new(name, &[config.head_dim]));
            }
        }
        for (name, outputs, inputs, bias) in projections(config) {
            specs.push(TensorSpec::new(format!("{prefix}{name}.weight"), &[outputs, inputs]));
            if bias {
                specs.push(TensorSpec::new(format!("{prefix}{name}.bias"), &[outputs]));
            }
        }
    }
    specs
}

/// Name, outputs, inputs and bias of a layer's projections.
fn projections(config: &TargetConfig) -> [(&'static str, usize, usize, bool); 7] {
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    let (query, kv) = (config.query_size(), config.kv_size());
    [
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.attention_output_bias),
        ("mlp.gate_proj", width, hidden, config.mlp_bias),
        ("mlp.up_proj", width, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, width, config.mlp_bias),
    ]
}

/// Builds a target from any source that holds its tensors under their published names.
pub(crate) fn build(
    config: TargetConfig,
    source: &dyn WeightSource,
    options: &TargetOptions,
) -> Result<Target> {
    let specs = specs_of(&config, options.layers);
    check_specs(source, &specs).into_result(source.path())?;
    let matrix = |name: &str| -> Result<Matrix> {
        if options.quantised
            && matches!(options.device, Device::Cpu)
            && let Some(matrix) = source.load_quantised(name)?
        {
            return Ok(Matrix::Quantised(Arc::new(matrix)));
        }
        Ok(Matrix::Dense(source.load(name, options.dtype)?.to_device(&options.device)?))
    };
    let vector = |name: &str| -> Result<Tensor> {
        Ok(source.load(name, DType::F32)?.to_device(&options.device)?)
    };
    let embedding = matrix("model.embed_tokens.weight")?;
    let head = if config.tie_word_embeddings { None } else { Some(matrix("lm_head.weight")?) };
    let loaded = options.layers.of(config.num_hidden_layers);
    let mut layers = Vec::with_capacity(loaded.len());
    for layer in loaded {
        let prefix = format!("model.layers.{layer}.");
        let projection = |name: &str, bias: bool| -> Result<Projection> {
            let weight = matrix(&format!("{prefix}{name}.weight"))?;
            let bias = bias.then(|| vector(&format!("{prefix}{name}.bias"))).transpose()?;
            Ok(Projection { weight, bias })
        };
        let norm = |name: &str| vector(&format!("{prefix}{name}.weight"));
        let qk_norm = if config.qk_norm() {
            Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?))
        } else {
            None
        };
        layers.push(DecoderLayer {
            input_layernorm: norm("input_layernorm")?,
            q_proj: projection("self_attn.q_proj", config.qkv_bias)?,
            k_proj: projection("self_attn.k_proj", config.qkv_bias)?,
            v_proj: projection("self_attn.v_proj", config.qkv_bias)?,
            o_proj: projection("self_attn.o_proj", config.attention_output_bias)?,
            qk_norm,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            gate_proj: projection("mlp.gate_proj", config.mlp_bias)?,
            up_proj: projection("mlp.up_proj", config.mlp_bias)?,
            down_proj: projection("mlp.down_proj", config.mlp_bias)?,
            sizes: LayerSizes::new(&config),
        });
    }
    let final_norm = vector("model.norm.weight")?;
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
