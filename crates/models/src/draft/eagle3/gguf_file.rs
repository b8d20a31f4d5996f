//! EAGLE-3 drafts as GGUF files of architecture `eagle3`, as llama.cpp reads them.
//!
//! Against the published names: rows of q and k are interleaved, `d2t` holds absolute target ids,
//! layers count as states that enter one ([`crate::ids::EnteredLayerId`]).

use super::config::{Eagle3Config, TAPPED_LAYERS};
use crate::config::{RopeParameters, TargetConfig};
use crate::draft::gguf::{DraftGguf, Naming};
use crate::error::Problems;
use crate::ids::LayerId;

/// `general.architecture` of such files.
pub const ARCHITECTURE: &str = "eagle3";

/// GGUF name and published name of every tensor but `d2t`.
pub const TENSOR_NAMES: [(&str, &str); 16] = [
    ("fc.weight", "fc.weight"),
    ("blk.0.attn_norm.weight", "midlayer.input_layernorm.weight"),
    ("blk.0.attn_norm_2.weight", "midlayer.hidden_norm.weight"),
    ("blk.0.attn_q.weight", "midlayer.self_attn.q_proj.weight"),
    ("blk.0.attn_k.weight", "midlayer.self_attn.k_proj.weight"),
    ("blk.0.attn_v.weight", "midlayer.self_attn.v_proj.weight"),
    ("blk.0.attn_output.weight", "midlayer.self_attn.o_proj.weight"),
    ("blk.0.ffn_norm.weight", "midlayer.post_attention_layernorm.weight"),
    ("blk.0.ffn_gate.weight", "midlayer.mlp.gate_proj.weight"),
    ("blk.0.ffn_up.weight", "midlayer.mlp.up_proj.weight"),
    ("blk.0.ffn_down.weight", "midlayer.mlp.down_proj.weight"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("token_embd.weight", "embed_tokens.weight"),
    ("d2t", "d2t"),
    ("rope_freqs.weight", "rope_freqs.weight"),
];

/// Keys of the layers, the newer one first.
pub const LAYER_KEYS: [&str; 2] = ["eagle3.target_layers", "eagle3.extract_layers"];

/// Names of EAGLE-3 drafts' tensors: [`TENSOR_NAMES`].
pub struct Eagle3Names;

impl Naming for Eagle3Names {
    const ARCHITECTURE: &'static str = ARCHITECTURE;
    const TITLE: &'static str = "EAGLE-3";
    const IS_INTERLEAVED: bool = true;

    fn stored_name(published: &str) -> Option<String> {
        let found = TENSOR_NAMES.iter().find(|(_, name)| *name == published);
        found.map(|(stored, _)| (*stored).to_owned())
    }

    fn published_name(stored: &str) -> Option<String> {
        let found = TENSOR_NAMES.iter().find(|(name, _)| *name == stored);
        found.map(|(_, published)| (*published).to_owned())
    }
}

/// An EAGLE-3 draft's GGUF file.
pub type GgufDraftSource = DraftGguf<Eagle3Names>;

impl GgufDraftSource {
    /// Sizes and switches. What files leave to the target is taken from it.
    ///
    /// # Errors
    /// - a list of every missing or unusable key
    pub fn config(&self, target: Option<&TargetConfig>) -> Result<Eagle3Config, Problems> {
        let mut problems = Problems::default();
        let mut size = |name: &str, default| self.size(name, default, &mut problems);
        let hidden_size = size("embedding_length", None);
        let num_attention_heads = size("attention.head_count", None);
        let head_dim =
            size("attention.key_length", Some((hidden_size / num_attention_heads.max(1)).max(1)));
        let known = target.map(|t| t.vocab_size).or(self.rows("token_embd.weight"));
        let vocab_size = size("vocab_size", known);
        let context = size("context_length", target.map(|t| t.max_position_embeddings));
        let mut config = Eagle3Config {
            hidden_size,
            target_hidden_size: size("target_hidden_size", Some(hidden_size)),
            intermediate_size: size("feed_forward_length", None),
            num_attention_heads,
            num_key_value_heads: size("attention.head_count_kv", Some(num_attention_heads)),
            head_dim,
            vocab_size,
            draft_vocab_size: self.rows("d2t").unwrap_or(vocab_size),
            rms_norm_eps: self.rms_norm_eps(),
            rope: RopeParameters::plain(10_000.0),
            dynamic_ntk: None,
            max_position_embeddings: context,
            target_layers: [LayerId(0); TAPPED_LAYERS],
            fc_norm: false,
            norm_output: false,
            norm_before_residual: self.flag("norm_before_residual").unwrap_or(false),
            embed_proj: false,
            attention_window: None,
            initializer_range: 0.02,
        };
        if size("block_count", Some(1)) != 1 {
            problems.push("drafts of more than one layer are not supported");
        }
        if self.flag("norm_before_fc").unwrap_or(false) {
            problems.push("`eagle3.norm_before_fc` = true is not supported");
        }
        config.rope = self.rope(context, &mut problems);
        match self.tapped_layers(target) {
            Ok(layers) => config.target_layers = layers,
            Err(problem) => problems.push(problem),
        }
        config.checked(problems)
    }

    fn tapped_layers(
        &self,
        target: Option<&TargetConfig>,
    ) -> Result<[LayerId; TAPPED_LAYERS], String> {
        let keys = &self.header().metadata;
        let Some(key) = LAYER_KEYS.iter().find(|key| keys.contains_key(**key)) else {
            let layers = target.ok_or_else(|| format!("`{}` is missing", LAYER_KEYS[0]))?;
            return Eagle3Config::published_layers(layers.num_hidden_layers)
                .map_err(|problems| problems.to_string());
        };
        let three = self.layers(key).and_then(|layers| layers.try_into().ok());
        three.ok_or_else(|| {
            let ids = self.header().integers(key).unwrap_or_default();
            format!("`{key}` = {ids:?} are not three layers")
        })
    }
}
