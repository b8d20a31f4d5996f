//! What each family's keys say about its layers. A family is a file: it fills in the table of parts, from
//! the keys of a `config.json` and from those of a GGUF header.

pub(super) mod by_length;
pub(super) mod deepseek;
mod gemma;
pub(super) mod gemma4;
pub(super) mod glm;
pub(super) mod gpt_oss;
mod granite;
mod hybrid;
pub(super) mod lfm;
pub(super) mod llama4;
mod mistral;
mod olmo;
mod phi3;
mod qwen;
mod smollm3;

use super::gguf::Keys as GgufKeys;
use super::json_keys::Keys as JsonKeys;
use super::{Architecture, ExpertsConfig, Parts, RopeParameters, limits};

/// What keys that are left out mean to a family's class; without a value a key is required.
#[derive(Debug, Clone, Copy)]
pub(super) struct Defaults {
    pub(super) vocab_size: Option<usize>,
    pub(super) num_attention_heads: Option<usize>,
    /// As many as query heads without it.
    pub(super) num_key_value_heads: Option<usize>,
    /// `H / N` without it.
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) tie_word_embeddings: bool,
    /// Without it a key is required.
    pub(super) intermediate_size: Option<usize>,
    /// The key of what is added under the root of norms, and its value.
    pub(super) norm_eps: (&'static str, f64),
    /// Base of the rotary embedding.
    pub(super) rope_theta: f64,
    /// The key of the activation, and the only one that is read.
    pub(super) activation: (&'static str, &'static str),
    /// The key of the MLP's width.
    pub(super) mlp_width: &'static str,
    pub(super) experts: ExpertDefaults,
    /// Whether the class has `mlp_bias`.
    pub(super) reads_mlp_bias: bool,
}

/// The same for sizes of experts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ExpertDefaults {
    pub(super) num_experts: Option<usize>,
    pub(super) num_experts_per_tok: Option<usize>,
    pub(super) width: Option<usize>,
    /// Of the expert that every token visits.
    pub(super) shared_width: Option<usize>,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            vocab_size: None,
            num_attention_heads: None,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            tie_word_embeddings: false,
            intermediate_size: None,
            norm_eps: ("rms_norm_eps", 1e-6),
            rope_theta: 10_000.0,
            activation: ("hidden_act", "silu"),
            mlp_width: "intermediate_size",
            experts: ExpertDefaults::default(),
            reads_mlp_bias: true,
        }
    }
}

impl Defaults {
    pub(super) fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Qwen2
            | Architecture::Qwen3
            | Architecture::Qwen2Moe
            | Architecture::Qwen3Moe => qwen::defaults(architecture),
            Architecture::Mistral | Architecture::Ministral3 | Architecture::Mixtral => {
                mistral::defaults(architecture)
            }
            Architecture::Gemma2 | Architecture::Gemma3 => gemma::defaults(architecture),
            Architecture::SmolLm3 => smollm3::defaults(),
            Architecture::Olmo2 | Architecture::Olmo3 => olmo::defaults(architecture),
            Architecture::Phi3 => phi3::defaults(),
            Architecture::Glm | Architecture::Glm4 | Architecture::Glm4Moe => {
                glm::defaults(architecture)
            }
            Architecture::GptOss => gpt_oss::defaults(),
            Architecture::Llama4 => llama4::defaults(),
            Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
                hybrid::defaults(architecture)
            }
            Architecture::Lfm2 => lfm::defaults(),
            Architecture::DeepseekV3 => deepseek::defaults(),
            Architecture::Gemma4 => gemma4::defaults(),
            _ => Self::default(),
        }
    }
}

/// Sizes that a family's parts depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) architecture: Architecture,
    pub(super) hidden_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) head_dim: usize,
    pub(super) max_position_embeddings: usize,
}

impl Sizes {
    /// As many layers as are ever read.
    fn layers(&self) -> usize {
        self.num_hidden_layers.min(limits::LAYERS)
    }

    /// One value a layer; a hostile number of layers lists no more than are ever read.
    fn each_layer<T>(&self, of: impl Fn(usize) -> T) -> Vec<T> {
        (0..self.layers()).map(of).collect()
    }
}

/// Rotary embedding and parts of a `config.json`.
pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let (rope, mut parts) = of_family(keys, sizes);
    by_length::add(keys, sizes, &mut parts);
    (rope, parts)
}

fn of_family(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    match sizes.architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => gemma::of_json(keys, sizes),
        Architecture::Mistral | Architecture::Ministral3 | Architecture::Mixtral => {
            mistral::of_json(keys, sizes)
        }
        Architecture::Llama => (keys.rope(sizes), llama(keys)),
        Architecture::SmolLm3 => (keys.rope(sizes), smollm3::of_json(keys, sizes)),
        Architecture::Granite => (keys.rope(sizes), granite::of_json(keys)),
        Architecture::Olmo2 | Architecture::Olmo3 => olmo::of_json(keys, sizes),
        Architecture::Phi3 => phi3::of_json(keys, sizes),
        Architecture::Glm | Architecture::Glm4 | Architecture::Glm4Moe => {
            (keys.rope(sizes), glm::of_json(keys, sizes))
        }
        Architecture::GptOss => gpt_oss::of_json(keys, sizes),
        Architecture::Llama4 => (keys.rope(sizes), llama4::of_json(keys, sizes)),
        Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
            (keys.rope(sizes), hybrid::of_json(keys, sizes))
        }
        Architecture::Lfm2 => (keys.rope(sizes), lfm::of_json(keys, sizes)),
        Architecture::Gemma4 => gemma4::of_json(keys, sizes),
        Architecture::DeepseekV3 => (keys.rope(sizes), deepseek::of_json(keys, sizes)),
        _ => (keys.rope(sizes), qwen::of_json(keys, sizes)),
    }
}

/// A Llama has no windows.
fn llama(keys: &mut JsonKeys<'_>) -> Parts {
    if keys.flag("use_sliding_window", false) {
        keys.problems.push("`use_sliding_window` = true is not supported for `llama`");
    }
    Parts::default()
}

/// Parts of a GGUF header. Files of other families are read as their own reader does, without windows.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    match sizes.architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => gemma::of_gguf(keys, sizes),
        Architecture::Ministral3 => mistral::of_gguf(keys, sizes),
        Architecture::SmolLm3 => smollm3::of_gguf(sizes),
        Architecture::Granite => granite::of_gguf(keys),
        Architecture::Olmo2 | Architecture::Olmo3 => olmo::of_gguf(keys, sizes),
        Architecture::Phi3 => phi3::of_gguf(keys, sizes),
        Architecture::Glm | Architecture::Glm4 | Architecture::Glm4Moe => glm::of_gguf(keys, sizes),
        Architecture::GptOss => gpt_oss::of_gguf(keys, sizes),
        Architecture::Llama4 => llama4::of_gguf(keys, sizes),
        Architecture::Qwen3Next | Architecture::Qwen35 | Architecture::Qwen35Moe => {
            hybrid::of_gguf(keys, sizes)
        }
        Architecture::Lfm2 => lfm::of_gguf(keys, sizes),
        Architecture::DeepseekV3 => deepseek::of_gguf(keys, sizes),
        Architecture::Gemma4 => gemma4::of_gguf(keys, sizes),
        _ => Parts::default(),
    }
}

/// Sizes that a family's GGUF files tell by other keys than most.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OwnSizes {
    pub(super) head_dim: Option<usize>,
    pub(super) kv_heads: Option<usize>,
    pub(super) intermediate_size: Option<f64>,
}

/// Those of a header with `heads` query heads.
pub(super) fn own_sizes(keys: &GgufKeys<'_>, architecture: Architecture, heads: usize) -> OwnSizes {
    match architecture {
        Architecture::DeepseekV3 => deepseek::own_sizes(keys, heads),
        Architecture::Gemma4 => gemma4::own_sizes(keys),
        _ => OwnSizes::default(),
    }
}

/// Which layers of a GGUF file slide: as listed, else all but every so manieth. `absent` is that number where the
/// file has none.
fn sliding_of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes, absent: usize) -> Vec<bool> {
    const KEY: &str = "attention.sliding_window_pattern";
    if let Some(listed) = keys.flags(KEY) {
        let (count, layers) = (listed.len(), sizes.num_hidden_layers);
        if count != layers {
            keys.problems.push(format!("`{KEY}` lists {count} of {layers} layers"));
        }
        return listed;
    }
    if keys.is_there(KEY) && keys.number(KEY).is_none() {
        keys.problems.push(format!("`{KEY}` is neither a number nor a list of flags"));
    }
    let interval = keys.whole(KEY).unwrap_or(absent);
    every(sizes, interval).into_iter().map(|full| !full).collect()
}

/// Whether files of a family of mixtures may be without experts.
pub(super) fn may_be_dense(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::DeepseekV3 | Architecture::Gemma4)
}

/// Experts of all layers but the first ones, with one or several as one that every token visits. What a file leaves
/// out is the class's: how many there are, their width, and the number of layers without them.
fn routed_experts(keys: &mut JsonKeys<'_>, [count, width, first]: [usize; 3]) -> ExpertsConfig {
    let layers = keys.size("num_hidden_layers").unwrap_or(1).min(limits::LAYERS);
    let first = keys.size("first_k_dense_replace").unwrap_or(first).min(layers);
    let width = keys.size("moe_intermediate_size").unwrap_or(width);
    let shared = keys.size("n_shared_experts").unwrap_or(1);
    ExpertsConfig {
        num_experts: keys.size("n_routed_experts").unwrap_or(count),
        num_experts_per_tok: keys.size("num_experts_per_tok").unwrap_or(8),
        moe_intermediate_size: width,
        shared_expert_intermediate_size: (shared > 0).then(|| width.saturating_mul(shared)),
        norm_topk_prob: keys.flag("norm_topk_prob", true),
        decoder_sparse_step: 1,
        mlp_only_layers: (0..first).collect(),
    }
}

/// Whether the weights of a token's experts sum to one in a GGUF file.
pub(super) fn normalises(keys: &GgufKeys<'_>, architecture: Architecture) -> bool {
    match architecture {
        Architecture::Qwen2Moe | Architecture::Llama4 => false,
        Architecture::DeepseekV3 => keys.flag("expert_weights_norm").unwrap_or(false),
        Architecture::Glm4Moe => keys.flag("expert_weights_norm").unwrap_or(true),
        _ => true,
    }
}

/// GGUF tensors of divisors of rotary frequencies, those of short sequences and those of long ones.
pub(super) const FACTORS_BY_LENGTH: [&str; 2] =
    ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Refuses quantised folders but for the one kind that is read.
pub(super) fn check_quantisation(keys: &mut JsonKeys<'_>, architecture: Architecture) {
    let Some(method) = keys.object("quantization_config") else { return };
    let method = method.get("quant_method").and_then(|method| method.as_str()).unwrap_or("unnamed");
    if architecture != Architecture::GptOss || method != "mxfp4" {
        keys.problems.push(format!(
            "`quantization_config` = {method} is not read (of `gpt_oss`, mxfp4 is): take the unquantised \
             folder or a GGUF file"
        ));
    }
}

/// Refuses keys layer by layer but for the family whose layers may differ.
pub(super) fn check_layers(keys: &mut JsonKeys<'_>, architecture: Architecture) {
    let table = keys.object(BY_LAYER).and_then(|table| table.as_object());
    if architecture != Architecture::Gemma4 && table.is_some_and(|table| !table.is_empty()) {
        keys.problems.push(format!("`{BY_LAYER}` is not supported but for Gemma 4"));
    }
}

/// Refuses heads that turn in part but for families whose class reads the key. Other classes turn whole heads or fail,
/// and engines turn the part.
pub(super) fn check_turning(keys: &mut JsonKeys<'_>, architecture: Architecture) {
    use Architecture::{Gemma4, Glm, Glm4, Glm4Moe, Phi3, Qwen3Next, Qwen35, Qwen35Moe};
    let of_glm = matches!(architecture, Glm | Glm4 | Glm4Moe);
    if !of_glm && !matches!(architecture, Gemma4 | Phi3 | Qwen3Next | Qwen35 | Qwen35Moe) {
        keys.refuse_turning_in_part();
    }
}

/// The key of a table by layer of what stands otherwise at top level.
const BY_LAYER: &str = "per_layer_config";

/// Which layers turn nothing: as listed, else every `no_rope_layer_interval`-th.
fn still_layers(keys: &mut JsonKeys<'_>, sizes: Sizes, listed: Option<Vec<bool>>) -> Vec<bool> {
    let interval = keys.size_from_one("no_rope_layer_interval").unwrap_or(STILL_INTERVAL);
    match listed {
        Some(turning) => turning.into_iter().map(|turns| !turns).collect(),
        None => every(sizes, interval),
    }
}

/// Every so manieth layer.
fn every(sizes: Sizes, interval: usize) -> Vec<bool> {
    sizes.each_layer(|layer| (layer + 1).is_multiple_of(interval.max(1)))
}

/// Every so manieth layer is without rotary embedding in files that do not say.
const STILL_INTERVAL: usize = 4;

#[cfg(test)]
mod tests;
