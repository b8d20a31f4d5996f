//! The header of a GGUF file.

use longdraft_kernels::rope::RopeScaling;

use super::rope::yarn_attention_factor;
use super::{Architecture, ExpertsConfig, RopeParameters, TargetConfig};
use crate::error::Problems;
use crate::weights::gguf::header::Header;

/// Keys of an architecture, collecting what is wrong.
struct Keys<'a> {
    header: &'a Header,
    prefix: &'a str,
    problems: Problems,
}

impl Keys<'_> {
    fn number(&self, key: &str) -> Option<f64> {
        self.header.number(&format!("{}.{key}", self.prefix))
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
        let listed = layers.min(self.header.tensors.len());
        let mlp_only_layers = (0..listed).filter(|layer| !routed(layer)).collect();
        let width = self.number("expert_feed_forward_length");
        let width = width.or_else(|| self.number("feed_forward_length"));
        let shared = self.header.tensors.iter().find_map(|(name, tensor)| {
            name.ends_with(".ffn_up_shexp.weight").then(|| tensor.shape[0])
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
        self.header.number(&format!("tokenizer.ggml.{key}")).map(|x| x as u32)
    }

    fn has(&self, tensor: &str) -> bool {
        self.header.tensors.contains_key(tensor)
    }

    fn rope(&mut self, context: usize) -> RopeParameters {
        let theta = self.number("rope.freq_base").unwrap_or(10_000.0);
        let factor = self.number("rope.scaling.factor").unwrap_or(1.0);
        let key = format!("{}.rope.scaling.type", self.prefix);
        let scaling = match self.header.text(&key) {
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

pub(super) fn read(header: &Header) -> Result<TargetConfig, Problems> {
    let mut problems = Problems::default();
    let Some(name) = header.text("general.architecture") else {
        problems.push("`general.architecture` is missing");
        return Err(problems);
    };
    let named = Architecture::parse(name, &Architecture::GGUF_NAMES, &mut problems);
    let mut keys = Keys { header, prefix: name, problems };
    let counted = keys.number("expert_count").is_some_and(|count| count > 0.0);
    let architecture =
        if named == Architecture::Llama && counted { Architecture::Mixtral } else { named };
    let hidden_size = keys.size("embedding_length");
    let num_attention_heads = keys.size("attention.head_count");
    let context = keys.size("context_length");
    let head_dim = keys
        .number("attention.key_length")
        .map_or(hidden_size / num_attention_heads.max(1), |x| x as usize);
    let vocab_size = match header.tensors.get("token_embd.weight") {
        Some(tensor) if tensor.shape.len() == 2 => tensor.shape[0],
        _ => {
            keys.problems.push("tensor `token_embd.weight` [V, H] is missing");
            1
        }
    };
    let config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size: keys.size("feed_forward_length"),
        num_hidden_layers: keys.size("block_count"),
        num_attention_heads,
        num_key_value_heads: keys
            .number("attention.head_count_kv")
            .map_or(num_attention_heads, |x| x as usize),
        head_dim,
        vocab_size,
        max_position_embeddings: context,
        rms_norm_eps: keys.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        rope: keys.rope(context),
        tie_word_embeddings: !keys.has("output.weight"),
        qkv_bias: keys.has("blk.0.attn_q.bias"),
        attention_output_bias: keys.has("blk.0.attn_output.bias"),
        mlp_bias: keys.has("blk.0.ffn_gate.bias"),
        experts: keys.experts(architecture),
        initializer_range: 0.02,
        bos_token_id: keys.token("bos_token_id"),
        eos_token_ids: keys
            .token("eos_token_id")
            .into_iter()
            .chain(keys.token("eot_token_id"))
            .collect(),
        pad_token_id: keys.token("padding_token_id"),
    };
    let mut problems = keys.problems;
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}
