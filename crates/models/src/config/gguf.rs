//! The header of a GGUF file.

use candle_core::quantized::gguf_file::{Content, Value};
use longdraft_kernels::rope::RopeScaling;

use super::rope::yarn_attention_factor;
use super::{Architecture, ExpertsConfig, RopeParameters, TargetConfig};
use crate::error::Problems;

/// A GGUF number of any width as f64.
pub(crate) fn number(value: &Value) -> Option<f64> {
    Some(match value {
        Value::U8(v) => f64::from(*v),
        Value::I8(v) => f64::from(*v),
        Value::U16(v) => f64::from(*v),
        Value::I16(v) => f64::from(*v),
        Value::U32(v) => f64::from(*v),
        Value::I32(v) => f64::from(*v),
        Value::U64(v) => *v as f64,
        Value::I64(v) => *v as f64,
        Value::F32(v) => f64::from(*v),
        Value::F64(v) => *v,
        _ => return None,
    })
}

struct Header<'a> {
    content: &'a Content,
    prefix: &'a str,
    problems: Problems,
}

impl Header<'_> {
    fn number(&self, key: &str) -> Option<f64> {
        self.content.metadata.get(&format!("{}.{key}", self.prefix)).and_then(number)
    }

    fn size(&mut self, key: &str) -> usize {
        self.number(key).filter(|x| *x >= 0.0).map_or_else(
            || {
                self.problems.push(format!("`{}.{key}` is missing or no number", self.prefix));
                1
            },
            |x| x as usize,
        )
    }

    /// Experts, if the header counts any. Every layer without a router has a plain MLP; whether
    /// weights are normalised is the architecture's, as the format's reader has it.
    fn experts(&mut self, architecture: Architecture) -> Option<ExpertsConfig> {
        if !architecture.is_mixture() {
            return None;
        }
        let layers = self.number("block_count").unwrap_or(0.0) as usize;
        let routed = |layer: &usize| self.has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        // Bounded by what the file holds, whatever the header says.
        let listed = layers.min(self.content.tensor_infos.len());
        let mlp_only_layers = (0..listed).filter(|layer| !routed(layer)).collect();
        let width = self.number("expert_feed_forward_length");
        let width = width.or_else(|| self.number("feed_forward_length"));
        let shared = self.content.tensor_infos.iter().find_map(|(name, info)| {
            name.ends_with(".ffn_up_shexp.weight").then(|| info.shape.dims()[0])
        });
        Some(ExpertsConfig {
            num_experts: self.size("expert_count"),
            num_experts_per_tok: self.size("expert_used_count"),
            moe_intermediate_size: width.unwrap_or(0.0) as usize,
            shared_expert_intermediate_size: shared,
            norm_topk_prob: architecture != Architecture::Qwen2Moe,
            decoder_sparse_step: 1,
            mlp_only_layers,
        })
    }

    fn token(&self, key: &str) -> Option<u32> {
        let value = self.content.metadata.get(&format!("tokenizer.ggml.{key}"))?;
        number(value).map(|x| x as u32)
    }

    fn has(&self, tensor: &str) -> bool {
        self.content.tensor_infos.contains_key(tensor)
    }

    fn rope(&mut self, context: usize) -> RopeParameters {
        let theta = self.number("rope.freq_base").unwrap_or(10_000.0);
        let factor = self.number("rope.scaling.factor").unwrap_or(1.0);
        let key = format!("{}.rope.scaling.type", self.prefix);
        let kind = self.content.metadata.get(&key).and_then(|v| v.to_string().ok());
        let scaling = match kind.map(String::as_str) {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor },
            Some("yarn") => RopeScaling::Yarn {
                factor,
                beta_fast: self.number("rope.scaling.yarn_beta_fast").unwrap_or(32.0),
                beta_slow: self.number("rope.scaling.yarn_beta_slow").unwrap_or(1.0),
                original_context: self
                    .number("rope.scaling.original_context_length")
                    .unwrap_or(context as f64),
                attention_factor: yarn_attention_factor(
                    factor,
                    self.number("rope.scaling.attn_factor"),
                    None,
                    None,
                ),
                truncate: true,
            },
            Some(other) => {
                let message = format!("unknown rope scaling `{other}` (known: none, linear, yarn)");
                self.problems.push(message);
                RopeScaling::None
            }
        };
        RopeParameters { theta, scaling, divisors: None }
    }
}

pub(super) fn read(content: &Content) -> Result<TargetConfig, Problems> {
    let mut problems = Problems::default();
    let name = content.metadata.get("general.architecture").and_then(|v| v.to_string().ok());
    let Some(name) = name else {
        problems.push("`general.architecture` is missing");
        return Err(problems);
    };
    let named = Architecture::parse(name, &Architecture::GGUF_NAMES, &mut problems);
    let mut header = Header { content, prefix: name, problems };
    let counted = header.number("expert_count").is_some_and(|count| count > 0.0);
    let architecture =
        if named == Architecture::Llama && counted { Architecture::Mixtral } else { named };
    let hidden_size = header.size("embedding_length");
    let num_attention_heads = header.size("attention.head_count");
    let context = header.size("context_length");
    let head_dim = header
        .number("attention.key_length")
        .map_or(hidden_size / num_attention_heads.max(1), |x| x as usize);
    let vocab_size = match content.tensor_infos.get("token_embd.weight") {
        Some(info) if info.shape.rank() == 2 => info.shape.dims()[0],
        _ => {
            header.problems.push("tensor `token_embd.weight` [V, H] is missing");
            1
        }
    };
    let config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size: header.size("feed_forward_length"),
        num_hidden_layers: header.size("block_count"),
        num_attention_heads,
        num_key_value_heads: header
            .number("attention.head_count_kv")
            .map_or(num_attention_heads, |x| x as usize),
        head_dim,
        vocab_size,
        max_position_embeddings: context,
        rms_norm_eps: header.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        rope: header.rope(context),
        tie_word_embeddings: !header.has("output.weight"),
        qkv_bias: header.has("blk.0.attn_q.bias"),
        attention_output_bias: header.has("blk.0.attn_output.bias"),
        mlp_bias: header.has("blk.0.ffn_gate.bias"),
        experts: header.experts(architecture),
        initializer_range: 0.02,
        bos_token_id: header.token("bos_token_id"),
        eos_token_ids: header
            .token("eos_token_id")
            .into_iter()
            .chain(header.token("eot_token_id"))
            .collect(),
        pad_token_id: header.token("padding_token_id"),
    };
    let mut problems = header.problems;
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}
