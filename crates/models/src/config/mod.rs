//! A target's sizes and switches, validated, whatever file they came from.

pub(crate) mod cached;
pub(crate) mod end_tokens;
mod experts;
mod families;
pub(crate) mod gguf;
mod halves;
mod hugging_face;
pub(crate) mod json_keys;
pub(crate) mod latent;
pub(crate) mod limits;
pub(crate) mod mixers;
mod parts;
pub(crate) mod rope;
mod shared_keys;
mod sharing;

use std::path::Path;

use longdraft_kernels::bend::Bend;
use serde_json::Value;

use crate::error::{ModelError, Problems, Result};
use crate::side_files;

pub use experts::ExpertsConfig;
pub use latent::LatentConfig;
pub use mixers::{DeltaNetConfig, Mixer, ShortConvolutionConfig};
pub use parts::{Activation, LongRope, NormPlaces, Parts, QkNorm, QueryGrowth, Rotary, Router};
pub(crate) use rope::LAYER_KINDS;
pub use rope::RopeParameters;
pub use shared_keys::LayerHeads;

/// Decoder families that the loader knows. They share one layer with these switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `llama`
    Llama,
    /// `qwen2`: bias on q, k and v.
    Qwen2,
    /// `qwen3`: RMS norm on every head's query and key.
    Qwen3,
    /// `mixtral`: experts in every layer of a `llama`.
    Mixtral,
    /// `qwen2_moe`: experts, and one that every token visits, in layers of a `qwen2`.
    Qwen2Moe,
    /// `qwen3_moe`: experts in layers of a `qwen3`.
    Qwen3Moe,
    /// `mistral`: a `llama` whose layers see a window.
    Mistral,
    /// `ministral3`: a `mistral` whose queries grow with their position.
    Ministral3,
    /// `gemma2`: norms on both sides, soft-caps, windows in every second layer.
    Gemma2,
    /// `gemma3_text`: norms on both sides and on every head's query and key, windows with a rotary base of
    /// their own in most layers.
    Gemma3,
    /// `smollm3`: some layers without rotary embedding.
    SmolLm3,
    /// `granite`: four multipliers.
    Granite,
    /// `olmo2`: norms after attention and MLP alone, and over all of the queries and keys.
    Olmo2,
    /// `olmo3`: an `olmo2` with windows, and stretched full layers.
    Olmo3,
    /// `phi3`: fused projections, a part of the head turns, frequencies by length.
    Phi3,
    /// `glm`: neighbours of half the head turn, fused MLP.
    Glm,
    /// `glm4`: the same with norms on both sides.
    Glm4,
    /// `glm4_moe`: half the head turns; experts chosen by corrected sigmoid scores.
    Glm4Moe,
    /// `gpt_oss`: sinks, windows in every second layer, biases, experts with a clamped unit.
    GptOss,
    /// `llama4_text`: chunks, layers without rotary embedding, experts whose inputs are weighed.
    Llama4,
    /// `qwen3_next`: gated delta nets among layers with gated attention, experts.
    Qwen3Next,
    /// `qwen3_5_text`: the same with a plain MLP.
    Qwen35,
    /// `qwen3_5_moe_text`: the same with experts.
    Qwen35Moe,
    /// `lfm2`: short convolutions between gates among layers with attention.
    Lfm2,
    /// `deepseek_v3`: attention over latent rows, experts by groups of logistic scores.
    DeepseekV3,
    /// `gemma4_text`: as `gemma3_text` with wider heads in full layers, keys shared by late layers, tables of
    /// inputs for every layer.
    Gemma4,
}

impl Architecture {
    /// Names as `model_type`.
    pub const NAMES: [(&'static str, Self); 27] = [
        ("llama", Self::Llama),
        ("qwen2", Self::Qwen2),
        ("qwen3", Self::Qwen3),
        ("mixtral", Self::Mixtral),
        ("qwen2_moe", Self::Qwen2Moe),
        ("qwen3_moe", Self::Qwen3Moe),
        ("mistral", Self::Mistral),
        ("ministral3", Self::Ministral3),
        ("gemma2", Self::Gemma2),
        ("gemma3_text", Self::Gemma3),
        ("smollm3", Self::SmolLm3),
        ("granite", Self::Granite),
        ("olmo2", Self::Olmo2),
        ("olmo3", Self::Olmo3),
        ("phi3", Self::Phi3),
        ("glm", Self::Glm),
        ("glm4", Self::Glm4),
        ("glm4_moe", Self::Glm4Moe),
        ("gpt_oss", Self::GptOss),
        ("llama4_text", Self::Llama4),
        ("qwen3_next", Self::Qwen3Next),
        ("qwen3_5_text", Self::Qwen35),
        ("qwen3_5_moe_text", Self::Qwen35Moe),
        ("lfm2", Self::Lfm2),
        ("deepseek_v3", Self::DeepseekV3),
        ("gemma4_text", Self::Gemma4),
        (families::gemma4::UNIFIED, Self::Gemma4),
    ];

    /// Names as GGUF architecture; a Mistral is a `llama` there, a Mixtral one with experts, an OLMo 3 an
    /// `olmo2` with windows, a GLM a `chatglm`, and a Kimi-K2 or GLM-4.7-Flash a `deepseek2`.
    pub const GGUF_NAMES: [(&'static str, Self); 23] = [
        ("llama", Self::Llama),
        ("qwen2", Self::Qwen2),
        ("qwen3", Self::Qwen3),
        ("qwen2moe", Self::Qwen2Moe),
        ("qwen3moe", Self::Qwen3Moe),
        ("mistral3", Self::Ministral3),
        ("gemma2", Self::Gemma2),
        ("gemma3", Self::Gemma3),
        ("smollm3", Self::SmolLm3),
        ("granite", Self::Granite),
        ("olmo2", Self::Olmo2),
        ("phi3", Self::Phi3),
        ("chatglm", Self::Glm),
        ("glm4", Self::Glm4),
        ("glm4moe", Self::Glm4Moe),
        ("gpt-oss", Self::GptOss),
        ("llama4", Self::Llama4),
        ("qwen3next", Self::Qwen3Next),
        ("qwen35", Self::Qwen35),
        ("qwen35moe", Self::Qwen35Moe),
        ("lfm2", Self::Lfm2),
        ("deepseek2", Self::DeepseekV3),
        ("gemma4", Self::Gemma4),
    ];

    /// Whether layers hold experts.
    pub fn is_mixture(self) -> bool {
        use Architecture::{
            DeepseekV3, Gemma4, Glm4Moe, GptOss, Llama4, Mixtral, Qwen2Moe, Qwen3Moe,
        };
        let plain = matches!(self, Mixtral | Qwen2Moe | Qwen3Moe | DeepseekV3 | Gemma4);
        plain || matches!(self, Glm4Moe | GptOss | Llama4) || self.has_shared_expert()
    }

    /// Whether every token also visits an expert of its own weight.
    pub(crate) fn has_shared_expert(self) -> bool {
        matches!(self, Self::Qwen2Moe | Self::Qwen3Next | Self::Qwen35Moe)
    }

    fn parse(name: &str, known: &[(&str, Self)], problems: &mut Problems) -> Self {
        if let Some((_, architecture)) = known.iter().find(|(known, _)| *known == name) {
            return *architecture;
        }
        let known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        problems.push(format!("unknown architecture `{name}` (known: {})", known.join(", ")));
        Self::Llama
    }
}

/// A validated target configuration; keys are the published ones.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches of the published format")]
pub struct TargetConfig {
    /// Family.
    pub architecture: Architecture,
    /// `H`
    pub hidden_size: usize,
    /// `I`
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// `N`
    pub num_attention_heads: usize,
    /// `K`
    pub num_key_value_heads: usize,
    /// `D`; `N·D` may differ from `H`.
    pub head_dim: usize,
    /// `V`
    pub vocab_size: usize,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Added under the root of every norm.
    pub rms_norm_eps: f64,
    /// Base and scaling of the rotary embedding.
    pub rope: RopeParameters,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Bias on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub attention_output_bias: bool,
    /// Bias on the three MLP projections.
    pub mlp_bias: bool,
    /// Experts in place of the MLP.
    pub experts: Option<ExpertsConfig>,
    /// Deviation of freshly drawn matrices.
    pub initializer_range: f64,
    /// Start of text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
    /// What its layers do otherwise than a plain Llama's.
    pub parts: Parts,
    /// Tokens beside `eos_token_ids` that end what the model generates.
    pub further_end_ids: Vec<u32>,
}

impl TargetConfig {
    /// Reads `config.json` of a Hugging Face folder, and the ends that `generation_config.json` beside it names.
    ///
    /// # Errors
    /// - a file is unreadable or no JSON, or a list of every missing or unusable key
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = side_files::read_text(path)?;
        let value: Value = serde_json::from_str(&text)
            .map_err(|error| ModelError::invalid(path, format!("not JSON: {error}")))?;
        let mut config = Self::from_json(&value).map_err(ModelError::all_in(path))?;
        config.add_ends(end_tokens::beside(path)?);
        Ok(config)
    }

    /// Reads the keys of a `config.json`.
    ///
    /// # Errors
    /// - a list of every missing or unusable key
    pub fn from_json(value: &Value) -> std::result::Result<Self, Problems> {
        hugging_face::read(value)
    }

    /// Reads a GGUF header.
    ///
    /// # Errors
    /// - a list of every missing or unusable key
    pub fn from_gguf(
        header: &crate::weights::gguf::header::Header,
    ) -> std::result::Result<Self, Problems> {
        gguf::read(header)
    }

    /// How queries and keys are normalised.
    pub fn qk_norm(&self) -> QkNorm {
        use Architecture::{Gemma3, Gemma4, Lfm2, Qwen3, Qwen3Moe, Qwen3Next, Qwen35, Qwen35Moe};
        match self.architecture {
            Qwen3 | Qwen3Moe | Gemma3 | Gemma4 | Qwen3Next | Qwen35 | Qwen35Moe | Lfm2 => {
                QkNorm::PerHead
            }
            _ => self.parts.qk_norm,
        }
    }

    /// What mixes the tokens of layer `index`.
    pub fn mixer_of(&self, index: usize) -> Mixer {
        self.parts.mixer_of(index)
    }

    /// Whether layers carry a state from token to token in place of keys.
    pub fn is_recurrent(&self) -> bool {
        self.parts.mixers.iter().any(|mixer| *mixer != Mixer::Attention)
    }

    /// Values of the recurrent states of one sequence, those of the convolutions' windows among them.
    pub fn state_values(&self) -> usize {
        (0..self.num_hidden_layers).map(|layer| self.state_values_of(layer)).sum()
    }

    /// The same of layer `index`.
    pub fn state_values_of(&self, index: usize) -> usize {
        match self.mixer_of(index) {
            Mixer::Attention => 0,
            Mixer::DeltaNet => self.parts.delta_net.map_or(0, |net| {
                net.sizes.state() + net.kernel.saturating_sub(1) * net.sizes.channels()
            }),
            Mixer::Convolution => self
                .parts
                .convolution
                .map_or(0, |own| own.kernel.saturating_sub(1) * self.hidden_size),
        }
    }

    /// Layers with keys and values of their own.
    pub fn attention_layers(&self) -> usize {
        let attends = |layer: &usize| self.mixer_of(*layer) == Mixer::Attention;
        (0..self.num_hidden_layers).filter(attends).count()
    }

    /// Tokens that layer `index` sees at most, the token itself among them, if it has a window.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        self.parts.window_of(index)
    }

    /// What becomes of the head's products before they are logits.
    pub fn bend(&self) -> Bend {
        let Parts { logits_divisor, logits_softcap, .. } = self.parts;
        Bend { divisor: logits_divisor.unwrap_or(1.0), softcap: logits_softcap }
    }

    /// The experts of layer `index`, if it holds any.
    pub fn experts_in(&self, index: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.in_layer(index))
    }

    /// `N·D`, width of the query projection; where layers differ, of the widest one.
    pub fn query_size(&self) -> usize {
        let widest = self.parts.heads.iter().map(|heads| heads.head_dim).max();
        self.num_attention_heads * widest.unwrap_or(self.head_dim)
    }

    /// `K·D`, width of the key and value projections; where layers differ, of the last one that has some.
    pub fn kv_size(&self) -> usize {
        let LayerHeads { kv_heads, head_dim } = self.last_heads();
        kv_heads * head_dim
    }

    /// Values that a layer with a state holds of a token while it runs, at most: inputs of the state before and
    /// after the convolution, gates, outputs by head and in order, their norm.
    pub fn recurrent_values(&self) -> usize {
        let has = |mixer| self.parts.mixers.contains(&mixer);
        let delta_net = self.parts.delta_net.filter(|_| has(Mixer::DeltaNet));
        let of_delta_net =
            delta_net.map_or(0, |net| 3 * net.sizes.channels() + 5 * net.sizes.values());
        let of_convolution = if has(Mixer::Convolution) { 6 * self.hidden_size } else { 0 };
        of_delta_net.max(of_convolution)
    }

    fn validate(&self, problems: &mut Problems) {
        limits::check(
            problems,
            &[
                ("hidden_size", self.hidden_size, limits::HIDDEN),
                ("intermediate_size", self.intermediate_size, limits::INNER),
                ("num_hidden_layers", self.num_hidden_layers, limits::LAYERS),
                ("num_attention_heads", self.num_attention_heads, limits::HEADS),
                ("num_key_value_heads", self.num_key_value_heads, limits::HEADS),
                ("head_dim", self.head_dim, limits::HEAD_DIM),
                ("vocab_size", self.vocab_size, limits::VOCABULARY),
                ("max_position_embeddings", self.max_position_embeddings, limits::CONTEXT),
            ],
        );
        limits::heads(
            problems,
            (self.num_attention_heads, self.num_key_value_heads),
            self.head_dim,
        );
        if let Some(experts) = &self.experts {
            experts.validate(self.num_hidden_layers, problems);
        }
        self.rope.check(problems);
        self.parts.check(self.experts.as_ref(), problems);
        let Parts { mixers, delta_net, convolution, latent, rotary, .. } = &self.parts;
        if let Some(latent) = latent {
            latent.validate(problems);
        }
        self.check_heads(problems);
        if self.parts.per_layer_input > 0 {
            limits::check(
                problems,
                &[
                    ("hidden_size_per_layer_input", self.parts.per_layer_input, limits::HIDDEN),
                    (
                        "vocab_size_per_layer_input",
                        self.parts.per_layer_vocabulary,
                        limits::VOCABULARY,
                    ),
                ],
            );
            if self.parts.per_layer_vocabulary < self.vocab_size {
                let (own, all) = (self.parts.per_layer_vocabulary, self.vocab_size);
                problems.push(format!(
                    "`vocab_size_per_layer_input` = {own}, below `vocab_size` = {all}"
                ));
            }
        }
        mixers::validate(mixers, delta_net.as_ref(), convolution.as_ref(), problems);
        if let Some(turned) = rotary.dimensions
            && !(turned > 0 && turned.is_multiple_of(2) && turned <= self.head_dim)
        {
            let head_dim = self.head_dim;
            problems.push(format!(
                "{turned} values of a head of {head_dim} are turned: an even part of it is expected \
                 (`partial_rotary_factor`)"
            ));
        }
        limits::norm_eps(problems, self.rms_norm_eps);
    }
}
