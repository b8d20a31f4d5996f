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
        let mut keys = self.keys();
        let hidden_size = keys.size("embedding_length");
        let num_attention_heads = keys.size("attention.head_count");
        let default_head_dim = (hidden_size / num_attention_heads.max(1)).max(1);
        let head_dim = keys.size_or("attention.key_length", Some(default_head_dim));
        let known = target.map(|t| t.vocab_size).or(self.rows("token_embd.weight"));
        let vocab_size = keys.size_or("vocab_size", known);
        let context = keys.size_or("context_length", target.map(|t| t.max_position_embeddings));
        let mut config = Eagle3Config {
            hidden_size,
            target_hidden_size: keys.size_or("target_hidden_size", Some(hidden_size)),
            intermediate_size: keys.size("feed_forward_length"),
            num_attention_heads,
            num_key_value_heads: keys.size_or("attention.head_count_kv", Some(num_attention_heads)),
            head_dim,
            vocab_size,
            draft_vocab_size: self.rows("d2t").unwrap_or(vocab_size),
            rms_norm_eps: Self::rms_norm_eps(&keys),
            rope: RopeParameters::plain(10_000.0),
            dynamic_ntk: None,
            max_position_embeddings: context,
            target_layers: [LayerId(0); TAPPED_LAYERS],
            fc_norm: false,
            norm_output: false,
            norm_before_residual: keys.flag("norm_before_residual").unwrap_or(false),
            embed_proj: false,
            attention_window: None,
            initializer_range: 0.02,
        };
        if keys.size_or("block_count", Some(1)) != 1 {
            keys.problems.push("drafts of more than one layer are not supported");
        }
        if keys.flag("norm_before_fc").unwrap_or(false) {
            keys.problems.push("`eagle3.norm_before_fc` = true is not supported");
        }
        config.rope = self.rope(&mut keys, context);
        match self.tapped_layers(target) {
            Ok(layers) => config.target_layers = layers,
            Err(problem) => keys.problems.push(problem),
        }
        config.checked(keys.into_problems())
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::quantized::gguf_file::Value;
    use serde_json::json;

    use super::*;
    use crate::draft::files::SavedDraft;
    use crate::test_support::assert_refused;
    use crate::weights::gguf::write::save;

    /// Writes a file of sizes, layers and one more key.
    fn write(path: &Path, key: &str, value: Value) {
        let sizes = [
            ("embedding_length", 16),
            ("attention.head_count", 2),
            ("feed_forward_length", 24),
            ("context_length", 64),
        ];
        let mut keys: Vec<(String, Value)> = sizes
            .map(|(key, size)| (format!("{ARCHITECTURE}.{key}"), Value::U32(size)))
            .into_iter()
            .chain([(format!("{ARCHITECTURE}.{key}"), value)])
            .collect();
        keys.push(("general.architecture".into(), Value::String(ARCHITECTURE.into())));
        let layers = Value::Array([2, 4, 5].map(Value::I32).to_vec());
        keys.push((LAYER_KEYS[0].into(), layers));
        save(path, &keys, &[]).expect("written");
    }

    #[test]
    fn values_of_another_kind_are_named_and_not_taken_for_left_out_ones() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("draft.gguf");
        let target = TargetConfig::from_json(&json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 40,
            "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2
        }))
        .expect("configuration");
        let read = |key: &str, value: Value| {
            write(&path, key, value);
            GgufDraftSource::open(&path).expect("opened").config(Some(&target))
        };
        let flag = "norm_before_residual";
        assert!(read(flag, Value::Bool(true)).expect("valid").norm_before_residual);
        for (key, value, wrong) in [
            ("norm_before_fc", Value::U32(1), "is not a flag"),
            ("attention.layer_norm_rms_epsilon", Value::String("1e-5".into()), "is not a number"),
            ("rope.scaling.type", Value::U32(1), "is not a text"),
            ("target_hidden_size", Value::Bool(true), "is missing or not a number"),
            (flag, Value::U32(1), "is not a flag"),
        ] {
            assert_refused(read(key, value), &[&format!("`{ARCHITECTURE}.{key}` {wrong}")]);
        }
        // The last one does not count as a draft of which nothing is said.
        let saved = SavedDraft::at(&path);
        assert_refused(Eagle3Config::of_saved(&saved, Some(&target)), &["is not a flag"]);
        // Without a target its tokens are not known.
        assert_eq!(Eagle3Config::of_saved(&saved, None).expect("not read"), None);
    }
}
