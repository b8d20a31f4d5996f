//! What an export says about its target.

use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value as GgufValue;
use candle_core::{DType, Tensor};
use longdraft_models::TargetConfig;
use longdraft_models::config::Architecture;
use longdraft_models::paths::folder_of;
use longdraft_models::target_model::gguf::GgufSource;
use longdraft_models::target_model::{Layers, Target, TargetOptions, locate};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::gguf_files;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::Value;

use crate::error::Result;
use crate::tokenizer;

/// A target without its layers, and what stands beside its weights.
pub struct TargetFacts {
    /// As the user named it: engines load the verifier by it.
    pub name: String,
    /// Embeddings, head, configuration.
    pub target: Target,
    /// Embeddings in the dtype of the target's own file, `[V, Ht]`; `None` if they are quantised.
    pub stored_embedding: Option<Tensor>,
    /// Its tokenizer.
    pub tokenizer: TextTokenizer,
    /// Whether it is a GGUF file.
    pub is_gguf: bool,
    /// `architectures` of its `config.json`.
    pub architectures: Vec<String>,
    /// The `tokenizer.*` keys of its GGUF file, or those made from its `tokenizer.json`.
    pub gguf_tokenizer: std::result::Result<Vec<(String, GgufValue)>, String>,
}

impl TargetFacts {
    /// Opens a target: a Hugging Face folder, a GGUF file or a hub model `org/name`. Its layers are
    /// not read.
    ///
    /// # Errors
    /// - it cannot be found or read
    pub fn open(name: &str) -> Result<Self> {
        let path = locate(name)?;
        let options = TargetOptions { layers: Layers::None, ..TargetOptions::default() };
        let target = Target::open_path(&path, &options)?;
        let tokenizer = Target::open_tokenizer(&path.to_string_lossy())?;
        let config = read_json(&path.join("config.json"));
        let architectures = config["architectures"].as_array().map_or_else(
            || vec![architecture(target.config()).to_owned()],
            |names| names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
        );
        let gguf = gguf_file(&path);
        let gguf_tokenizer = match &gguf {
            Some(file) => GgufSource::open(file).map(|source| tokenizer::copied(source.header())),
            None => Ok(tokenizer::from_folder(&path, target.config())),
        }?;
        let stored_embedding = stored_embedding(&path, gguf.is_some(), &target)?;
        Ok(Self {
            name: name.to_owned(),
            target,
            stored_embedding,
            tokenizer,
            is_gguf: gguf.is_some(),
            architectures,
            gguf_tokenizer,
        })
    }

    /// Sizes and switches.
    pub fn config(&self) -> &TargetConfig {
        self.target.config()
    }
}

/// The class that a target of a GGUF file has in a `config.json`.
fn architecture(config: &TargetConfig) -> &'static str {
    match config.architecture {
        Architecture::Llama => "LlamaForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
        Architecture::Mixtral => "MixtralForCausalLM",
        Architecture::Qwen2Moe => "Qwen2MoeForCausalLM",
        Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
        Architecture::Mistral => "MistralForCausalLM",
        Architecture::Ministral3 => "Ministral3ForCausalLM",
        Architecture::Gemma2 => "Gemma2ForCausalLM",
        Architecture::Gemma3 => "Gemma3ForCausalLM",
        Architecture::SmolLm3 => "SmolLM3ForCausalLM",
        Architecture::Granite => "GraniteForCausalLM",
        Architecture::Olmo2 => "Olmo2ForCausalLM",
        Architecture::Olmo3 => "Olmo3ForCausalLM",
        Architecture::Phi3 => "Phi3ForCausalLM",
        Architecture::Glm => "GlmForCausalLM",
        Architecture::Glm4 => "Glm4ForCausalLM",
        Architecture::Glm4Moe => "Glm4MoeForCausalLM",
        Architecture::GptOss => "GptOssForCausalLM",
        Architecture::Llama4 => "Llama4ForCausalLM",
        Architecture::Qwen3Next => "Qwen3NextForCausalLM",
        Architecture::Qwen35 => "Qwen3_5ForCausalLM",
        Architecture::Qwen35Moe => "Qwen3_5MoeForCausalLM",
        Architecture::Lfm2 => "Lfm2ForCausalLM",
        Architecture::DeepseekV3 => "DeepseekV3ForCausalLM",
        Architecture::Gemma4 => "Gemma4ForCausalLM",
    }
}

fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn gguf_file(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
        return is_gguf.then(|| path.to_path_buf());
    }
    if path.join("config.json").is_file() {
        return None;
    }
    gguf_files(path).into_iter().next()
}

/// The embeddings bit for bit: engines share them with the target's where they are equal.
fn stored_embedding(path: &Path, gguf: bool, target: &Target) -> Result<Option<Tensor>> {
    if gguf {
        return Ok(None);
    }
    let source = SafetensorsSource::open_folder(folder_of(path))?;
    let dtype = match source.stored_type("model.embed_tokens.weight") {
        Some("BF16") => DType::BF16,
        Some("F16") => DType::F16,
        Some("F32") => DType::F32,
        _ => return Ok(None),
    };
    Ok(Some(target.hold_ends()?.embedding()?.to_dtype(dtype)?))
}
